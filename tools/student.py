"""Make the student's own copy of the course: `python tools/student.py [FOLDER]`.

Made once from nbs/, by default in student/: a notebook that is there already is never touched, one
that is missing is added. Solutions move to FOLDER/solutions/, folded; progress is kept in FOLDER.
Lessons ask for a guess before a cell is run, so the copy keeps no saved output but that of a cell
which is slow, or is not run (folded where a guess was asked for), or only draws a diagram (its code
is folded). Below a guess, the code of a figure is folded too, since its title gives the answer. The
lines that make a package of the notebooks stay out of the copy.

Four tags of a cell say what else the copy changes:

    build     a function that the student writes: its signature, `...`, the check, the model answer
              (folded), and a line that chooses between her function and the course's
    answer    gives a guess away: folded until the reader has guessed
    plumbing  code of the package that nobody needs to read for the lesson: folded
    outside   for readers who do not have a copy yet: left out

Every notebook of the copy is signed, so that JupyterLab trusts it and shows saved diagrams.
"""
import argparse
import ast
import copy
import platform
import re
import textwrap
from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary

ROOT = Path(__file__).resolve().parent.parent
PROGRESS = ".progress.json"  # as in dp_course.exercises.cards, which takes seconds to import
SIDE = "_Solution: folded in [solutions/{name}]({up}solutions/{name})._"
HEAD = ("# Solutions\n\n> Of [{stem}](../{path}), folded: click on the dots of a cell. "
        "Try first; three failed tries bring three hints.")


ANSWER = "<details><summary>Open this when you have made your guess</summary>\n\n{}\n\n</details>"
MODEL = ("<details><summary>Model answer: try first</summary>\n\n```python\n{}\n```\n\n"
         "</details>")
FOLDED = "# Folded code{}: run it, or click on the dots to read it.\n"
# What a kernel reports: without it JupyterLab counts an untouched notebook as changed.
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {
    "name": "python", "version": platform.python_version(), "mimetype": "text/x-python",
    "codemirror_mode": {"name": "ipython", "version": 3}, "file_extension": ".py",
    "nbconvert_exporter": "python", "pygments_lexer": "ipython3"}


def has_tag(cell, tag):
    return tag in cell.metadata.get("tags", [])


def is_solution(cell):
    return cell.cell_type == "code" and has_tag(cell, "solution")


def tree_of(cell):
    "The parsed cell; IPython's own lines are left out."
    return ast.parse(re.sub(r"(?m)^\s*[%!].*$", "", cell.source))


def defined(cell):
    "Names that a cell binds for the cells after it."
    for node in tree_of(cell).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        else:
            yield from (n.id for n in ast.walk(node)
                        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def used(cell):
    return {n.id for n in ast.walk(tree_of(cell)) if isinstance(n, ast.Name)}


def names_used(cells):
    "Names that the code of a notebook uses, solutions and all."
    return {name for cell in cells if cell.cell_type == "code" for name in used(cell)}


def is_needed(cells, i):
    "Whether the lesson goes on to use something that only this solution defines."
    lesson = [(j, c) for j, c in enumerate(cells) if c.cell_type == "code" and not is_solution(c)]
    known = {name for j, cell in lesson if j < i for name in defined(cell)}
    later = {name for j, cell in lesson if j > i for name in used(cell)}
    return bool((set(defined(cells[i])) - known) & later)


def imports(cells):
    "What a solution needs to run on its own: the lesson's imports, and its own module."
    lines = []
    for cell in cells:
        own = re.search(r"(?m)^#\|\s*default_exp\s+(\S+)", cell.source)
        if own:
            lines.append(f"from dp_course.{own[1]} import *")
        if cell.cell_type == "code" and not is_solution(cell):
            found = tree_of(cell).body
            lines += [ast.unparse(n) for n in found if isinstance(n, (ast.Import, ast.ImportFrom))]
    return "\n".join(dict.fromkeys(lines))


def question(cells, i):
    "The heading of the exercise that a solution answers: the first heading for the first one."
    before = sum(map(is_solution, cells[:i]))
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    found = re.findall(r"(?m)^### Exercise.*$", prose)
    return found[before] if before < len(found) else "### Exercise"


def is_picture(cell):
    "Whether a cell draws: its title, in the source, says what was found."
    kinds = {kind for output in cell.get("outputs", ()) for kind in output.get("data", {})}
    return bool(kinds & {"image/svg+xml", "image/png"})


def is_diagram(cell):
    "Whether a cell draws boxes and arrows: nothing is computed that a reader could guess."
    shown = any("image/svg+xml" in output.get("data", {}) for output in cell.get("outputs", ()))
    return shown and "Diagram(" in cell.source


def is_late(cell):
    "Whether the reader is shown a result without running the cell: it is slow, or not to be run."
    return bool(re.search(r"(?m)^#\|\s*(slow|eval:\s*false)\s*$", cell.source))


def asks(cell):
    "Whether prose asks for an answer that the next cell gives."
    return (cell.cell_type == "markdown" and not has_tag(cell, "answer")
            and re.search(r"(?i)\bguess\b|\bpredict\b|before you run", cell.source))


def imported(node):
    "The line, or lines below 100 columns, of an import of ours."
    line = ast.unparse(node)
    if len(line) <= 100:
        return [line]
    head, names = line.split(" import ")
    return [f"{head} import ("] + textwrap.wrap(names + ")", 96, initial_indent=" "*4,
                                                subsequent_indent=" "*4)


def without_machinery(
    source,
    used,    # names that the notebook goes on to use: these are imported, private or not
):           # the cell without nbdev's lines for the export, and without other private names
    "Take out of a cell what makes a package of the notebook."
    source = re.sub(r"(?m)^#\|\s*(export|exporti|exports|default_exp\b.*|hide)\s*\n?", "", source)
    source = re.sub(r"(?m)^_all_ = .*\n?", "", source)
    try:
        nodes = ast.parse(source).body
    except SyntaxError:  # a line of IPython's own
        return source
    lines = source.split("\n")
    for node in reversed(nodes):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dp_course"):
            kept = [name for name in node.names
                    if not name.name.startswith("_") or name.name in used]
            if len(kept) < len(node.names):
                new = imported(ast.ImportFrom(node.module, kept, node.level)) if kept else []
                lines[node.lineno - 1:node.end_lineno] = new
    return "\n".join(lines)


# --- what the student builds


def built(cell):
    "The function of a build cell, parsed."
    function, = [node for node in tree_of(cell).body if isinstance(node, ast.FunctionDef)]
    return function


def stub(cell):
    "The signature and docstring of a build cell's function, and `...`."
    function = built(cell)
    lines = cell.source.split("\n")
    if ast.get_docstring(function):
        head = lines[:function.body[0].end_lineno]
    else:
        head = lines[:function.body[0].lineno - 1]
    return "\n".join([*head, "    ..."])


def to_build(cell):
    "What the copy has in the place of a build cell: stub, check, model answer, choice."
    name = built(cell).name
    mine = copy.deepcopy(cell)
    mine.source, mine.outputs, mine.execution_count = stub(cell), [], None
    check = f"from dp_course.exercises import check_{name}, mine\n\ncheck_{name}({name})"
    return [mine,
            nbformat.v4.new_code_cell(check, id=f"{cell.id}-check"),
            nbformat.v4.new_markdown_cell(MODEL.format(cell.source), id=f"{cell.id}-model"),
            nbformat.v4.new_code_cell(f"{name} = mine({name})", id=f"{cell.id}-mine")]


# --- the notebook as a student opens it


def hide(cell, part):
    "Fold a code cell's source or outputs."
    cell.metadata["jupyter"] = cell.metadata.get("jupyter", {}) | {f"{part}_hidden": True}


def labelled(cell):
    "The code of a cell; if it is folded, below a line that says so: JupyterLab shows the first."
    folded = cell.metadata.get("jupyter", {}).get("source_hidden")
    if not folded or cell.source.startswith("#"):
        return cell.source
    kinds = (ast.FunctionDef, ast.ClassDef)
    public = [node.name for node in tree_of(cell).body
              if isinstance(node, kinds) and not node.name.startswith("_")]
    names = f" ({', '.join(public)})" if public and has_tag(cell, "plumbing") else ""
    return FOLDED.format(names) + cell.source


def for_guessing(notebook, first_page=False):
    "The notebook as a student opens it: nothing is computed yet, and nothing is exported."
    names = names_used(notebook.cells)
    kept, prose = [], notebook.cells[0]
    for cell in notebook.cells:
        if has_tag(cell, "outside"):
            continue
        if cell.cell_type == "markdown" and not cell.source.startswith("_Solution:"):
            prose = cell
        if cell.cell_type == "markdown":  # the notebooks of the checks are not copied
            cell.source = re.sub(r"\[([^\]]+)\]\((?:\.\./)*exercises/[^)]+\)", r"\1", cell.source)
        if cell.cell_type == "markdown" and has_tag(cell, "answer"):
            cell.source = ANSWER.format(cell.source)
        if cell.cell_type == "code":
            titled = is_picture(cell)
            if first_page and has_tag(cell, "picture"):
                hide(cell, "source")
            elif is_diagram(cell) and not asks(prose):
                hide(cell, "source")
            elif not is_late(cell):
                cell.outputs, cell.execution_count = [], None
            elif cell.outputs and asks(prose):  # a click on the dots shows it, and so does a run
                hide(cell, "outputs")
            tagged = has_tag(cell, "plumbing") or has_tag(cell, "answer")
            if tagged or titled and asks(prose):
                hide(cell, "source")
            machinery = cell.source
            cell.source = without_machinery(machinery, names).lstrip("\n")
            if machinery and not cell.source.strip():
                continue  # there was nothing else in it
            cell.source = labelled(cell)
        kept += to_build(cell) if has_tag(cell, "build") else [cell]
    notebook.cells = kept
    notebook.metadata |= {"kernelspec": KERNEL, "language_info": LANGUAGE}
    return notebook


def split(notebook, path):
    "The lesson without its solutions, and the solutions; its path is relative to the folder."
    solutions = nbformat.v4.new_notebook(metadata=notebook.metadata)
    head = nbformat.v4.new_markdown_cell(HEAD.format(stem=path.stem, path=path.as_posix()))
    side = SIDE.format(name=path.name, up="../"*(len(path.parts) - 1))
    code = nbformat.v4.new_code_cell(imports(notebook.cells))
    solutions.cells = [head, code]
    kept = []
    for i, cell in enumerate(notebook.cells):
        if is_solution(cell) and not is_needed(notebook.cells, i):
            asked = nbformat.v4.new_markdown_cell(question(notebook.cells, i))
            solutions.cells += [asked, cell]
            cell = nbformat.v4.new_markdown_cell(side)
        kept.append(cell)
    notebook.cells = kept
    return notebook, solutions if len(solutions.cells) > 2 else None


def write(notebook, path):
    "Write what is not there yet; whether it was written."
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    NotebookNotary().sign(nbformat.read(path, 4))
    return True


def make(
    folder=ROOT/"student",
    source=ROOT/"nbs",
    only=None,  # paths of the notebooks to copy; all of them
):              # how many notebooks were added
    "Add what is missing in the student's folder."
    folder.mkdir(parents=True, exist_ok=True)
    (folder/PROGRESS).touch()
    added = 0
    for path in sorted(only or source.rglob("*.ipynb")):
        if {".ipynb_checkpoints", "exercises"} & set(path.relative_to(source).parts):
            continue  # the notebooks of the checks hold the answers
        place = path.relative_to(source)
        to = folder/place
        if to.exists():
            continue
        lesson, solutions = split(nbformat.read(path, 4), place)
        added += write(for_guessing(lesson, first_page=path.stem == "index"), to)
        if solutions:
            write(for_guessing(solutions), folder/"solutions"/path.name)
    return added


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT/"student")
    where = parser.parse_args().folder
    print(f"{make(where)} notebooks added to {where.name}/; yours are as you left them.")
