"The house itself: floors, addresses, what is generated, and code that is written to be read."
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

import dp_course

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
sys.path.insert(0, str(ROOT/"tools"))
import export  # noqa: E402
import floors  # noqa: E402
import notebooks  # noqa: E402

LESSONS = notebooks.lessons()
WORKSHOP = notebooks.rooms()
NOTEBOOKS = [*LESSONS, *WORKSHOP]
INDEX = ROOT/"nbs/index.ipynb"
LIBRARY = ROOT/"dp_course"
ROOMS = sorted([*LIBRARY.glob("[a-z]*.py"), *LIBRARY.glob("*/[a-z]*.py")])
RUNTIME = {"torch", "torchvision", "numpy", "scipy", "sklearn", "matplotlib", "tqdm", "PIL"}
SURFACE = """PrivacyPlan epsilon noise_multiplier Search Examples load
    Trainer ProcessTrainer join FlatClip AdaptiveClip LayerClip EMA Schedule Plateau NoisyAccuracy
    DPAdam accuracy binary_accuracy squared_error save_release load_release fix
    fast_grad_sum loop_grad_sum vmap_grad_sum hook_grad_sum ghost_grad_sum bookkeeping_grad_sum
    replay_sensitivity noise_audit one_run_audit sampler_audit replay_release MUTANTS""".split()


@lru_cache(None)  # the tests read, and change nothing
def opened(path):
    return nbformat.read(path, 4)


def cells(path, kind):
    return [cell for cell in opened(path).cells if cell.cell_type == kind]


def code_of(path):
    return [cell.source for cell in cells(path, "code")]


@lru_cache(None)
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path):
    "What messages call a file."
    return path.relative_to(ROOT).as_posix()


def complaints(check, paths):
    "What a check says of files: {name: complaint}, without those that it is content with."
    return {name_of(path): said for path in paths if (said := check(path))}


# --- what is generated agrees with what it is generated from


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "A copy of what the generators read and write, so that the checks leave the working tree alone."
    to = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__", ".*", "out", "student")
    for folder in ("nbs", "dp_course", "runs", "tools"):
        shutil.copytree(ROOT/folder, to/folder, ignore=ignored)
    for file in ("settings.ini", "setup.py", "README.md", "LICENSE", "LICENSE-PROSE"):
        shutil.copy(ROOT/file, to/file)
    return to


def generated(library):
    "name -> text of everything that `make export` writes, and of what is not generated at all."
    kinds = ("*.py", "*.pyi", "*.json")
    return {path.relative_to(library).as_posix(): path.read_text()
            for kind in kinds for path in library.rglob(kind)}


def test_export_leaves_no_diff(copy):
    for path in (copy/"dp_course").rglob("*.py*"):
        if path.parent.name != "dp_course" or path.name not in ("__init__.py", "py.typed"):
            path.unlink()
    subprocess.run([sys.executable, copy/"tools/export.py"], check=True, capture_output=True)
    made, kept = generated(copy/"dp_course"), generated(LIBRARY)
    assert not {name for name in made.keys() | kept.keys() if made.get(name) != kept.get(name)}, (
        "run `make export` and commit dp_course/")


def test_clean_leaves_no_diff(copy):
    subprocess.run([BIN/"nbdev_clean"], cwd=copy, check=True, capture_output=True)
    changed = [name_of(path) for path in [INDEX, *NOTEBOOKS]
               if (copy/path.relative_to(ROOT)).read_text() != path.read_text()]
    assert not changed, "run nbdev_clean and commit"


PAGES = [ROOT/"README.md", *sorted((ROOT/"docs").glob("*.md"))]


def test_readme_and_pages_are_their_notebooks():
    again = "run `make readme` and commit"
    assert notebooks.readme() == (ROOT/"README.md").read_text(), again
    for source, page in notebooks.PAGES.items():
        assert notebooks.page(source) == page.read_text(), again
    for place, source in notebooks.PICTURES.items():
        assert notebooks.picture(source) == (ROOT/place).read_bytes(), again


def test_the_floor_plan_is_drawn_from_the_imports():
    plan, house = ROOT/"docs/static/floors.svg", ROOT/"docs/house.md"
    assert floors.plan() == plan.read_text(), "run `make readme` and commit"
    assert floors.house(house.read_text()) == house.read_text(), "run `make readme` and commit"


def test_links_of_pages_lead_somewhere():
    def lost(page):
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        return [link for link in links if not (page.parent/link).exists()]
    assert not complaints(lost, PAGES)


def test_the_first_page_is_short():
    text = (ROOT/"README.md").read_text()
    prose = re.sub(r"(?s)```.*?```|<!--.*?-->", "", text)
    prose = re.sub(r"(?m)^\*\*Part \d.*", "", prose)  # the map grows with the lessons
    assert len(prose.split()) <= 825


def test_help_says_what_to_use_for_what():
    "Every row of `help(dp_course)` is shown at work on the page, which `nbdev_test` runs."
    rows = [row.split("  ", 1) for row in dp_course.__doc__.splitlines() if row.startswith("to ")]
    shown = "\n".join(code_of(ROOT/"nbs/pages/i_want.ipynb"))
    assert len(rows) >= 15
    page = (ROOT/"docs/i_want.md").read_text()
    for want, use in rows:
        assert f"| {want.removeprefix('to ')} | `{use.strip()}` |" in page, "run the page again"
        words = re.findall(r"\w+(?==|\()", use)
        assert words and not [w for w in words if not re.search(rf"\b{w}\b", shown)], want
    front = (ROOT/"README.md").read_text()
    assert "docs/i_want.md" in front and "docs/from_opacus.md" in front


@pytest.mark.slow
def test_the_snippet_for_several_processes_runs_in_two(tmp_path):
    "The page runs it alone; torchrun runs the same lines in two processes."
    cells = code_of(ROOT/"nbs/pages/i_want.ipynb")
    wanted = [next(cell for cell in cells if word in cell)
              for word in ("import tempfile", "open_memmap", "ProcessTrainer(")]
    assert [line for line in wanted[1].splitlines() if line.startswith("Trainer")]
    wanted[1] = wanted[1].rsplit("\n", 1)[0]  # without the run of one process
    (tmp_path/"train.py").write_text("\n\n".join(wanted).replace("\nProcess", "\nt = Process")
                                     + "\nprint('steps', t)")
    run = subprocess.run([BIN/"torchrun", "--nproc-per-node", "2",
                          tmp_path/"train.py"], capture_output=True, text=True,
                         env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert run.stdout.count("steps 10") == 2, run.stderr[-2000:]


# --- floors and addresses


def package_of(path):
    "The package of a room; basics and diagrams are their own."
    return path.stem if path.parent == LIBRARY else path.parent.name


def arrows(rooms):
    "(room, package that it imports from) of every import of ours."
    for path in rooms:
        for _, module, _ in floors.imported(path):
            words = module.split(".")
            if words[0] == "dp_course" and len(words) > 1:
                yield path, words[1]


def upward(package, other):
    "Whether an arrow leads up, or to a neighbour on the same floor."
    floor = {name: i for i, floor in enumerate(floors.FLOORS) for name in floor}
    if {package, other} == {"basics", "diagrams"}:
        return package == "basics"
    return package != other and floor[other] >= floor[package]


def test_imports_between_packages_run_downwards():
    assert not [f"{name_of(path)} imports from {other}" for path, other in arrows(ROOMS)
                if upward(package_of(path), other)]


def test_an_arrow_that_leads_up_is_noticed():
    assert upward("privacy", "training") and upward("cli", "audit") and upward("basics", "diagrams")
    assert not upward("training", "privacy") and not upward("cli", "cli")


def circles(graph):
    "Nodes that lead back to themselves."
    def reached(start):
        todo, seen = [start], set()
        while todo:
            for after in graph.get(todo.pop(), set()) - seen:
                seen.add(after)
                todo.append(after)
        return seen
    return [node for node in graph if node in reached(node)]


def siblings(folder):
    "room -> rooms of the same package that it imports."
    return {path.stem: {module.rsplit(".", 1)[1] for _, module, _ in floors.imported(path)
                        if module.startswith(f"dp_course.{folder.name}.")}
            for path in folder.glob("[a-z]*.py")}


def test_no_circle_inside_a_package():
    assert not {package: found for package in floors.PACKAGES
                if (found := circles(siblings(LIBRARY/package)))}
    assert circles({"a": {"b"}, "b": {"a"}}) and not circles({"a": {"b"}})


def test_between_packages_one_imports_from_the_package():
    "Not from a sibling's file; a name that is called like a room has only that address."
    around = []
    for path in ROOMS:
        for _, module, names in floors.imported(path):
            words = module.split(".")
            if words[0] == "dp_course" and len(words) == 3 and words[1] != package_of(path):
                rooms = {p.stem for p in (LIBRARY/words[1]).glob("*.py")}
                around += [f"{name_of(path)}: {module}.{name}" for name in names
                           if name not in rooms | {"main"}]
    assert not around


def test_a_public_name_has_one_home():
    homes = {}
    for path in ROOMS:
        for name in export.public_names(path):
            homes.setdefault(name, []).append(name_of(path))
    homes.pop("main")  # what a command calls
    assert not {name: found for name, found in homes.items() if len(found) > 1}
    assert not [path for path in ROOMS if re.search(r"(?m)^_all_\b", path.read_text())]


def test_every_room_has_one_notebook_at_its_path():
    made = [notebooks.module_of(path) for path in NOTEBOOKS]
    made = [module for module in made if module]
    assert len(made) == len(set(made))
    assert {module.replace(".", "/") for module in made} == {
        path.relative_to(LIBRARY).with_suffix("").as_posix() for path in ROOMS}
    for path in (ROOT/"nbs/workshop").rglob("*.ipynb"):
        place = path.relative_to(ROOT/"nbs/workshop").with_suffix("").as_posix()
        assert notebooks.module_of(path) in (None, place.replace("/", "."))  # None: an appendix


def test_imports_are_visible():
    "No star, no import inside a function or a string, and nothing that users need not have."
    for path in ROOMS:
        functions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef)]
        hidden = {n.lineno for f in functions for n in ast.walk(f)
                  if isinstance(n, (ast.Import, ast.ImportFrom))}
        for node, module, names in floors.imported(path):
            assert "*" not in names, f"{name_of(path)} imports * from {module}"
            root = module.split(".")[0]
            late = node.lineno in hidden and root == "dp_course"
            assert not late, f"{name_of(path)}: {module} is hidden in a function"
            known = RUNTIME | {"dp_course"} | set(sys.stdlib_module_names)
            assert root in known, f"{name_of(path)} imports {root}"
            assert root != "importlib" or module == "importlib.metadata", f"{name_of(path)}"
        assert "__import__" not in path.read_text()


def loaded(line, after="pass"):
    "Packages, and parts of SciPy, that a line of code loads after another one."
    code = (f"import sys\n{after}\nbefore = {{*sys.modules}}\n"
            f"{line}\nprint(*{{*sys.modules}} - before)")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    words = [name.split(".") for name in done.stdout.split()]
    return {name[0] for name in words} | {".".join(n[:2]) for n in words if n[0] == "scipy"}


def test_the_package_is_loaded_only_when_it_is_used():
    assert not loaded("import dp_course") & (RUNTIME | {"torch"})


def test_what_draws_or_reads_files_is_loaded_where_it_is_used():
    "It takes seconds; what remains is scipy.special, which the first plan needs."
    more = loaded("from dp_course import Trainer, noise_audit, sampler_audit\n"
                  "from dp_course.cli.main import main", after="import torch")
    assert {"dp_course", "scipy.special"} <= more
    assert not more & {"matplotlib", "torchvision", "sklearn", "PIL", "triton", "IPython", "pandas",
                       "scipy.stats", "scipy.fft", "scipy.signal", "scipy.optimize"}


# --- code that reads by itself


def ruff(*args, **kwargs):
    "What ruff finds, as a list of dicts."
    command = [BIN/"ruff", "check", "--output-format", "json", "--no-cache", *args]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **kwargs)
    assert found.returncode in (0, 1), found.stderr
    return json.loads(found.stdout)


def shown(findings):
    return [f"{Path(f['filename']).name}:{f['location']['row']} {f['code']} {f['message']}"
            for f in findings]


def test_ruff_is_content():
    folders = [f for f in ("dp_course", "tests", "tools", "experiments", "benchmarks", "setup.py")
               if (ROOT/f).exists()]
    assert not shown(ruff(*folders))


def exported_code(path):
    return "\n\n".join(filter(notebooks.is_exported, code_of(path)))


def test_ruff_is_content_with_exported_cells(tmp_path):
    for i, path in enumerate(NOTEBOOKS):
        (tmp_path/f"{i:02}_{path.stem}.py").write_text(exported_code(path) + "\n")
    assert not shown(ruff("--isolated", "--line-length", "100",
                          "--select", "E501,E701,E702,F811,F821,F841", tmp_path))


def test_ruff_notices():
    bad = "if x: y = 1; z = 2\nz = 1  # " + "word "*20 + "\n"
    found = ruff("--stdin-filename", "a.py", "-", input=bad)
    assert {"E501", "E701", "E702", "F821"} <= {f["code"] for f in found}


def wide_lines(path):
    return [line for source in code_of(path) for line in source.splitlines()
            if len(line) > 100]


def test_a_test_module_marks_itself_once():
    "A second `pytestmark` would silently take the place of the first."
    for path in (ROOT/"tests").rglob("test_*.py"):
        marks = re.findall(r"^pytestmark\b", path.read_text(), re.M)
        assert len(marks) <= 1, f"{path.name} sets pytestmark {len(marks)} times: make it a list"


def test_lines_of_cells_are_narrow():
    assert not complaints(wide_lines, [INDEX, *NOTEBOOKS])


def public(body):
    "Functions and classes that have no underscore."
    nodes = [n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    return [n for n in nodes if not n.name.startswith("_")]


def without_docstring(path):
    words = {node.name: ast.get_docstring(node) for node in public(tree(path).body)}
    return [name for name, said in words.items() if not said or "\n" in said]


def test_public_names_have_a_docstring_of_one_line():
    assert not complaints(without_docstring, ROOMS)


def test_public_surface():
    "They are names of the package, not modules that somebody has imported."
    missing = [name for name in SURFACE if not hasattr(dp_course, name)]
    assert not missing
    assert not [name for name in SURFACE if isinstance(getattr(dp_course, name), ModuleType)]
    assert set(SURFACE) == set(dp_course.__all__)


# --- notebooks that can be read


def unwell(path):
    "What is wrong with a notebook as a whole, in words."
    notebook = opened(path)
    code = cells(path, "code")
    outputs = [output for cell in code for output in cell.outputs]
    source = "".join(cell.source for cell in code)
    texts = [str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", "")) for o in outputs]
    found = {
        "an old format": notebook.nbformat_minor < 5,
        "two cells with one id": len({c["id"] for c in notebook.cells}) < len(notebook.cells),
        "a saved error": any(output.output_type == "error" for output in outputs),
        "no saved outputs: run `make notebooks`": not outputs,
        "an empty cell": not all(cell.source.strip() for cell in notebook.cells),
        "code that nobody ever tests": re.search(r"#\|\s*eval:\s*false", source),
        "a path of a machine": re.search(r"/(root|home|work|tmp|Users)/", "".join(texts)),
        "a dead slider": any(map(notebooks.is_widget, outputs)),
    }
    return [words for words, holds in found.items() if holds]


def test_notebooks_are_whole():
    assert not complaints(unwell, NOTEBOOKS)


def lacking(path):
    "What a lesson lacks."
    code = cells(path, "code")
    figures = [o for c in code for o in c.outputs if "image/png" in o.get("data", {})]
    exercises = [c for c in cells(path, "markdown")
                 if re.search("### (Exercise|Build it)", c.source)]
    solutions, builds = ([c for c in code if tag in c.metadata.get("tags", [])]
                         for tag in ("solution", "build"))
    prose, cells_in_all = len(cells(path, "markdown")), len(opened(path).cells)
    found = {"prose": prose < cells_in_all/3, "figures": len(figures) < 2,
             "exercises": len(exercises) < 3,
             "solutions": len(solutions + builds) < len(exercises) - 1,
             "folds": not all(c.metadata.jupyter.source_hidden for c in solutions)}
    return [words for words, holds in found.items() if holds]


def test_lessons_have_figures_and_exercises():
    assert not complaints(lacking, LESSONS)


def dead_links(path):
    prose = "\n".join(cell.source for cell in cells(path, "markdown"))
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", prose)
    return [link for link in links if not (path.parent/link).exists()]


def test_links_lead_somewhere():
    assert not complaints(dead_links, [INDEX, *NOTEBOOKS])


# --- every export has a check that can fail


CHECKERS = re.compile(r"near|check|check_\w+|test_\w+|assert_\w+")


@lru_cache(None)
def names_in(node):
    "Names and attributes that an expression mentions."
    return {n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node)
            if isinstance(n, (ast.Name, ast.Attribute))}


def is_assertion(node):
    if isinstance(node, ast.Assert):
        return True
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    called = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    return bool(CHECKERS.fullmatch(called))


def defined_by(node):
    "(name, names that its value depends on) for what a statement defines."
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for name in names_in(target):
                yield name, names_in(node)
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name, names_in(node)
    elif isinstance(node, ast.Try):
        for handler in node.handlers:  # what a failure says depends on what failed
            yield handler.name, {name for part in node.body for name in names_in(part)}
    elif isinstance(node, ast.Expr) and not is_assertion(node):
        for name in names_in(node):  # a call may change what it gets
            yield name, names_in(node)
    elif isinstance(node, (ast.For, ast.With)):
        heads = [node.target] if isinstance(node, ast.For) else [
            item.optional_vars for item in node.items if item.optional_vars]
        for head in heads:
            for name in names_in(head):
                yield name, names_in(node)


@lru_cache(None)
def statements_of(source):
    return [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.stmt)]


def statements(sources):
    return [node for source in sources for node in statements_of(source)]


def checked_names(sources, through=()):
    "Every name on which some assertion of these cells depends, perhaps through other code."
    needs = {}
    for node in statements([*sources, *through]):
        for name, used in defined_by(node):
            needs.setdefault(name, set()).update(used)
    seeds = [node for node in statements(sources) if is_assertion(node)]
    todo = {name for node in seeds for name in names_in(node)}
    seen = set()
    while todo - seen:
        name = (todo - seen).pop()
        seen.add(name)
        todo |= needs.get(name, set())
    return seen


def unchecked_exports(path):
    sources = code_of(path)
    exported = [ast.parse(s).body for s in sources if notebooks.is_exported(s)]
    exports = [node.name for body in exported for node in public(body)]
    plain = [re.sub(r"(?m)^\s*[%!].*$", "", s) for s in sources if not notebooks.is_exported(s)]
    # a lesson checks what it exports; a part of a workshop room may be checked through another
    through = [s for s in sources if notebooks.is_exported(s)] if path in WORKSHOP else []
    return set(exports) - checked_names(plain, through)


def test_every_export_has_a_check():
    assert not complaints(unchecked_exports, NOTEBOOKS)


def test_a_cell_without_an_assertion_checks_nothing():
    assert "f" in checked_names(["y = f(1)", "near(y, 2)"])
    assert "f" in checked_names(["def g(x): return f(x)", "assert g(1) == 2"])
    assert "f" in checked_names(["said = []", "f(said)", "assert said == [1]"])
    assert "f" in checked_names(["assert g(1) == 2"], through=["def g(x): return f(x)"])
    assert "f" not in checked_names(["g(1)"], through=["def g(x): assert f(x)"])
    assert "f" not in checked_names(["test_x = f(1)", "check = f", "f(2)"])
