"""Build the site: `python tools/pages.py [FOLDER]`, by default in out/site: html/index.html.

Sphinx gets FOLDER/source: the notebooks with their saved outputs, a start page made of README's
parts, and a page for every module that says what `help()` says.
Nothing is executed, nothing is fetched.
"""
import ast
import base64
import importlib
import importlib.util
import inspect
import io
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import nbformat
import notebooks
import numpy as np
import student
from PIL import Image

from dp_course import _document

ROOT = Path(__file__).resolve().parent.parent
DOWNLOAD = """

<a class="download" href="{}notebooks/{}" download>Download this notebook</a>
"""
NEEDED = "Sphinx is not installed: make docs installs and runs it"
WAYS = """{.button}
[Read lesson 00](00_start.ipynb)

{.ways}
- **Learn.** Lessons from [00](00_start.ipynb) on, each with exercises that answer. `make lab` opens your own copy, to run and to change.
- **Use.** Train your own model: [I want ...](i_want.md), [From Opacus](from_opacus.md), [all commands](commands.md), and what every function takes: [modules](api/index.md).
- **Teach.** Assignments with hidden checks, plans for six weeks or two days: [teaching](teaching.md)."""  # noqa: E501


def installed():
    return all(map(importlib.util.find_spec, ("sphinx", "myst_nb", "furo", "sphinx_copybutton")))


# --- notebooks


def caption(cell):
    "First sentence of the prose under a figure: it says what is to be seen."
    found = re.search(r"^\*(?:Figure|Diagram|Film)[:.,] (.+?)(?:\. |\.?\*)", cell.source, re.M)
    return found[1] if found else ""


def has_figure(cell):
    return any(kind.startswith("image/") for output in cell.get("outputs", ())
               for kind in output.get("data", ()))


def is_drawn(cell):
    "Is most of its picture white paper? Then it may have another colour in dark mode."
    found = [output.data for output in cell.get("outputs", ()) if "data" in output]
    pngs = [base64.b64decode(data["image/png"]) for data in found if "image/png" in data]
    grey = [np.asarray(Image.open(io.BytesIO(png)).convert("L").resize((96, 96))) for png in pngs]
    return all((pixels > 245).mean() > .55 for pixels in grey)


def with_prose(cells):
    "Every cell with the next prose cell; the last ones with an empty one."
    prose, pairs = nbformat.v4.new_markdown_cell(), []
    for cell in reversed(cells):
        pairs.append((cell, prose))
        prose = cell if cell.cell_type == "markdown" else prose
    return pairs[::-1]


def folded(cell, tag, prompt=None):
    "Let the site show a part of a cell only when it is asked for."
    cell.metadata["tags"] = [*cell.metadata.get("tags", ()), tag]
    if prompt:
        said = {"code_prompt_show": f"Show {prompt}", "code_prompt_hide": f"Hide {prompt}"}
        cell.metadata["mystnb"] = cell.metadata.get("mystnb", {}) | said


def only_imports(cell):
    lines = student.tree_of(cell).body
    return all(isinstance(line, (ast.Import, ast.ImportFrom)) for line in lines)


def fold(cell, asked):
    "Fold what is no part of the story, and what would give a guess or an exercise away."
    if notebooks.has_tag(cell, "solution"):
        folded(cell, "hide-cell")
    elif notebooks.has_tag(cell, "build"):
        folded(cell, "hide-input", "the model answer")
    elif student.is_diagram(cell):
        folded(cell, "hide-input", "how it is drawn")
    elif only_imports(cell):
        folded(cell, "hide-input", "the imports")
    elif notebooks.has_tag(cell, "plumbing"):
        folded(cell, "hide-input", "code that you need not read")
    elif asked and cell.get("outputs"):
        folded(cell, "hide-output", "what it gives")


def prepared(notebook):
    "A notebook as the site shows it, without nbdev's lines."
    notebook.metadata.pop("widgets", None)  # sliders are dead without a kernel
    names = student.names_used(notebook.cells)
    kept, before = [], notebook.cells[0]
    for cell, after in with_prose(notebook.cells):
        if has_figure(cell):
            kind = "drawn" if is_drawn(cell) else "photograph"
            cell.metadata["mystnb"] = {"image": {"alt": caption(after), "classes": kind}}
        if cell.cell_type == "code":
            cell.source = re.sub(r"(?m)^#\|.*\n?", "",
                                 student.without_machinery(cell.source, names)).strip("\n")
            if not cell.source:
                continue
            fold(cell, student.asks(before))
        if cell.cell_type == "markdown" and notebooks.has_tag(cell, "answer"):
            cell.source = student.ANSWER.format(cell.source)
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\[([^\]]+)\]\((?:\.\./)*exercises/[^)]+\)", r"\1", cell.source)
            cell.source = cell.source.replace("index.ipynb)", "index.md)")
            cell.source = re.sub(r"\]\(((?:\.\./)*)pages/(\w+)\.ipynb\)", r"](\1\2.md)",
                                 cell.source)
        before = cell
        kept.append(cell)
    notebook.cells = kept
    return notebook


def rooms(nbs=ROOT/"nbs"):
    "The notebooks of the workshop; those of the checks hold the answers, and are no pages."
    return [path for path in notebooks.rooms(nbs) if path.parent != nbs/"exercises"]


def copy_notebooks(source, nbs=ROOT/"nbs"):
    "Copy lessons and workshop; (path, title, what it says it does) of each."
    found = []
    for path in [*notebooks.lessons(nbs), *rooms(nbs)]:
        place = path.relative_to(nbs)
        to = source/place
        to.parent.mkdir(parents=True, exist_ok=True)
        notebook = prepared(nbformat.read(path, 4))
        first = notebook.cells[0].source
        if (source/"extra/notebooks"/place).exists():
            notebook.cells[0].source += DOWNLOAD.format("../"*(len(place.parts) - 1), place)
        nbformat.write(notebook, to)
        title = re.search(r"(?m)^# (.+)$", first)[1]
        said = re.search(r"(?m)^> (.+)$", first)
        found.append((path.relative_to(nbs), title, said[1] if said else ""))
    return found


# --- the landing page


def kept_links(text, folder):
    "Text whose links to what is not in the site are words."
    def kept(found):
        return found[0] if (folder/found[2]).is_file() else found[1]
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)\)", kept, text)


def section(text, title):
    "What a page says under a heading."
    return re.search(rf"(?ms)^## {title}\n+(.*?)(?=^## |\Z)", text)[1].strip()


def landing():
    "The start page: what the course is, a button, three ways in, and what it reaches."
    text = (ROOT/"README.md").read_text(encoding="utf-8")
    text = re.sub(r"\A<!--.*?-->\s*", "", text).replace("](nbs/", "](").replace("](docs/", "](")
    opening = text.split("\n## ")[0]
    parts = ["Why", "What it reaches", "What you will build", "The limits of the guarantee"]
    return "\n\n".join([opening, WAYS, *(f"## {part}\n\n{section(text, part)}" for part in parts)])


def contents(caption, paths, depth=1):
    "A table of contents that only the sidebar shows."
    lines = [f":caption: {caption}"] if caption else []
    lines += [":hidden:", f":maxdepth: {depth}", "", *paths]
    return "\n".join(["```{toctree}", *lines, "```"])


def listing(title, intro, rows):
    "A page that lists pages: (link, title, description)."
    lines = [f"- [{name}]({link})" + (f": {said}" if said else "") for link, name, said in rows]
    stems = [link.rsplit(".", 1)[0] for link, _, _ in rows]
    return "\n\n".join([f"# {title}", intro, "\n".join(lines), contents("", stems)])


def grouped(title, intro, rows):
    "A page that lists modules under the name of their package."
    lines, packages = [], dict.fromkeys(name.split(".")[0] for _, name, _ in rows)
    for package in packages:
        inside = [row for row in rows if row[1].split(".")[0] == package]
        lines += [f"## {package}", "\n".join(f"- [{name}]({link}): {said}"
                                             for link, name, said in inside)]
    stems = [link.rsplit(".", 1)[0] for link, _, _ in rows]
    return "\n\n".join([f"# {title}", intro, *lines, contents("", stems)])


# --- what help() says


def escaped(text):
    "Plain text for Markdown; what stands between backticks stays."
    if text.count("`") % 2:
        return re.sub(r"([\\`*_<>\[\]|$#])", r"\\\1", text)
    parts = text.split("`")
    parts[::2] = [re.sub(r"([\\*_<>\[\]|$#])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


class Name(str):
    "What stands in a signature as it is."
    __repr__ = str.__str__


def signature(thing, method=False):
    "Parameters with their defaults; a function is a default by its name, a long value by dots."
    try:
        said = inspect.signature(thing)
    except (TypeError, ValueError):
        return "()"
    parameters = list(said.parameters.values())[method:]
    for i, p in enumerate(parameters):
        if p.default is not p.empty:
            called = getattr(p.default, "__name__", "") or repr(p.default)
            short = len(called) < 60 and " at 0x" not in called and "\n" not in called
            parameters[i] = p.replace(default=Name(called if short else "..."))
    return str(said.replace(parameters=parameters))


@cache
def classes():
    "name -> whole name of every class that has a page."
    found = {}
    for module, _ in modules():
        own = importlib.import_module(f"dp_course.{module}")
        found |= {name: f"{own.__name__}.{name}" for name in own.__all__ if inspect.isclass(
            getattr(own, name)) and getattr(own, name).__module__ == own.__name__}
    return found


def linked(text):
    "Markdown whose types lead to their pages."
    def link(found):
        whole = classes().get(found[1])
        return f"{{py:class}}`{found[1]} <{whole}>`" if whole else found[0]
    return re.sub(r"`(\w+)`", link, text)


def described(text):
    "A docstring as `_help.json` completes it, in Markdown with fields."
    parts, fields = [], []
    for part in inspect.cleandoc(text or "").split("\n\n"):
        head, _, body = part.partition("\n")
        if head == "Parameters":
            for row in body.splitlines():
                name, _, comment = row.strip().partition(" ")
                fields.append(f":param {name}: {linked(escaped(comment.strip()))}")
        elif head == "Returns":
            fields.append(f":returns: {linked(escaped(body.strip()))}")
        else:
            parts.append("\\\n".join(map(escaped, part.splitlines())))
    return "\n\n".join([*parts[:1], "\n".join(fields), *parts[1:]]).strip()


def directive(kind, name, inside, ticks):
    fence = "`"*ticks  # the empty line: without one a leading field would be an option
    return f"{fence}{{py:{kind}}} {name}\n\n{inside}\n{fence}"


def methods(cls):
    "(name, entry) of public methods and properties that say what they do."
    for name, thing in vars(cls).items():
        kind = {classmethod: "classmethod", staticmethod: "staticmethod",
                property: "property"}.get(type(thing), "method")
        inner = getattr(thing, "__func__", thing)
        known = inspect.isfunction(inner) or kind == "property"
        if known and not name.startswith("_") and inner.__doc__:
            said = "" if kind == "property" else signature(inner, kind != "staticmethod")
            yield name, directive(kind, name + said, described(inner.__doc__), 4)


def all_methods(cls):
    "Entries of a class's methods, and of those of its bases: whole where the base has no page."
    known = set()
    for base in cls.__mro__:
        found = {n: said for n, said in methods(base) if n not in known}
        known |= set(vars(base))
        if base is cls or base.__module__ == cls.__module__ and base.__name__.startswith("_"):
            yield from found.values()
        elif found and base.__module__.startswith("dp_course."):
            whole = f"{base.__module__}.{base.__name__}"
            links = ", ".join(f"{{py:obj}}`{n} <{whole}.{n}>`" for n in found)
            yield f"From {{py:class}}`{base.__name__} <{whole}>`: {links}."


def entry(name, thing):
    if inspect.isclass(thing):
        inside = "\n\n".join([described(thing.__doc__), *all_methods(thing)])
        said = signature(thing).removesuffix(" -> None")
        return directive("class", name + said, inside, 5)
    if inspect.isfunction(thing):
        return directive("function", name + signature(thing), described(thing.__doc__), 5)
    shown = re.sub(r" at 0x[0-9a-f]+", "", repr(thing).replace("\n", " "))
    shown = shown if len(shown) <= 200 else f"{shown[:197]}..."
    return directive("data", name, f"`` {shown} ``", 5)


def defined(tree):
    "Names that a module itself binds, not those that it passes on."
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield from (n.id for n in ast.walk(node)
                        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def api_page(name, notebook):
    "(page, its first line) of a module; a name that comes from another module is listed."
    module = importlib.import_module(f"dp_course.{name}")
    _document(module.__name__)
    own = set(defined(ast.parse(inspect.getsource(module))))
    public = [n for n in dict.fromkeys(module.__all__) if not n.startswith("_")]
    kept = [entry(n, getattr(module, n)) for n in public if n in own]
    more = ", ".join(f"`{n}`" for n in public if n not in own)
    said = inspect.cleandoc(module.__doc__ or "").splitlines()[0]
    head = f"# dp_course.{name}\n\n{escaped(said)}\n\nMade in [{notebook.stem}](../{notebook})."
    module_line = directive("module", f"dp_course.{name}", "", 3)
    also = [f"Also importable from here: {more}."] if more else []
    return "\n\n".join([head, module_line, *kept, *also]), escaped(said)


def modules(nbs=ROOT/"nbs"):
    "module -> its notebook."
    for path in [*notebooks.lessons(nbs), *rooms(nbs)]:
        if notebooks.module_of(path):
            yield notebooks.module_of(path), path.relative_to(nbs)


# --- all of it


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def prepare(source):
    "Write everything that Sphinx reads."
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT/"docs", source)
    for licence in ("LICENSE", "LICENSE-PROSE"):
        shutil.copy(ROOT/licence, source)
    student.make(source/"extra/notebooks")
    pages = copy_notebooks(source)
    lessons = [f"{path.stem[:2]} {title} <{path.stem}>" for path, title, _ in pages
               if len(path.parts) == 1]
    rooms = [(f"../{path}", title, said) for path, title, said in pages if len(path.parts) > 1]
    write(source/"workshop/index.md", listing(
        "Workshop", "How the parts are made that a lesson takes for granted.", rooms))
    rows = []
    for name, notebook in sorted(modules()):
        page, said = api_page(name, notebook)
        write(source/f"api/{name}.md", page)
        rows.append((f"{name}.md", name, said))
    write(source/"api/index.md", grouped(
        "Modules", "What `help()` says: parameters with units and shapes, results, errors.", rows))
    teach = (ROOT/"assignments/README.md").read_text(encoding="utf-8").replace("](../nbs/", "](../")
    teach = teach.replace("](../docs/", "](../")
    write(source/"assignments/README.md", kept_links(teach, source/"assignments"))
    for page in source.glob("*.md"):
        text = re.sub(r"\]\(\.\./(nbs/)?", "](", page.read_text(encoding="utf-8"))
        write(page, kept_links(text, source))
    use, teaching = ["i_want", "from_opacus", "commands"], ["teaching"]
    others = sorted({page.stem for page in source.glob("*.md")} - {*use, *teaching})
    write(source/"index.md", "\n\n".join([
        kept_links(landing(), source), contents("Learn", lessons),
        contents("Use", [*use, "api/index"]),
        contents("Teach", [*teaching, "assignments/README"]),
        contents("Behind it", [*others, "workshop/index"])]))


def fresh(folder):
    "Whether the site in a folder is younger than everything that it is made from."
    built = Path(folder)/"html/index.html"
    inputs = ("docs", "nbs", "runs", "dp_course", "assignments", "README.md", __file__)
    parts = [ROOT/part for part in inputs]
    files = [file for part in parts for file in (part.rglob("*.*") if part.is_dir() else [part])
             if file.suffix != ".pyc"]
    return built.exists() and max(f.stat().st_mtime for f in files) < built.stat().st_mtime


def build(folder=ROOT/"out/site"):
    "Build FOLDER/html; what Sphinx warned of, a line each."
    sys.path.insert(0, str(ROOT))
    folder = Path(folder).resolve()
    source, warned = folder/"source", folder/"warnings.txt"
    prepare(source)
    shutil.rmtree(folder/"html", ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", folder/"doctrees",
               "-w", warned, source, folder/"html"]
    subprocess.run(command, check=True)
    return warned.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    if not installed():
        sys.exit(NEEDED)
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT/"out/site"
    warnings = build(where)
    print(f"{where}/html/index.html, with {len(warnings)} lines of warnings")
