"The house itself: what is generated agrees, imports run one way, the code is written to be read."
import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

import dp_course

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
sys.path.insert(0, str(ROOT/"tools"))
import measure  # noqa: E402
import notebooks  # noqa: E402

LESSONS = sorted((ROOT/"nbs").glob("[0-9]*.ipynb"))
WORKSHOP = sorted((ROOT/"nbs/workshop").glob("*.ipynb"))
NOTEBOOKS = [*LESSONS, *WORKSHOP]
INDEX = ROOT/"nbs/index.ipynb"
MODULES = sorted(p for p in (ROOT/"dp_course").glob("*.py") if not p.name.startswith("_"))
RUNTIME = {"torch", "torchvision", "numpy", "scipy", "sklearn", "matplotlib", "tqdm", "PIL"}
DENSER = {"layers": 7.0, "engines": 7.0, "pld": 7.0}  # numerics and layer rules; the others: 6.0
SURFACE = """PrivacyPlan epsilon noise_multiplier Examples load
    Trainer FlatClip AdaptiveClip LayerClip EMA
    fast_grad_sum loop_grad_sum vmap_grad_sum
    hook_grad_sum ghost_grad_sum bookkeeping_grad_sum
    replay_sensitivity noise_audit one_run_audit sampler_audit MUTANTS""".split()
NAMES = {
    "core": "seed_all default_device near check figure",
    "definition": "randomized_response laplace_mechanism gaussian_mechanism hockey_stick "
                  "gaussian_delta gaussian_epsilon gaussian_sigma",
    "accounting": "rdp_gaussian rdp_sampled_gaussian rdp_to_epsilon RDPAccountant PLDAccountant "
                  "epsilon noise_multiplier PrivacyPlan",
    "sampling": "poisson_indices",
    "dpsgd": "FlatClip loop_grad_sum noisy_mean",
    "models": "WSConv2d resnet20 wrn16_4 wrn40_4 papernot_cnn allconv_cifar",
    "gradients": "hook_grad_sum vmap_grad_sum ghost_grad_sum bookkeeping_grad_sum fast_grad_sum",
    "clipping": "AdaptiveClip LayerClip ScheduledClip AutoClip split_sigma",
    "tricks": "views EMA DPAdam",
    "train": "PRESETS main",
    "audit": "replay_sensitivity noise_audit one_run_audit sampler_audit MUTANTS",
}
name_of = {"ids": lambda path: path.stem}


def cells(path, kind):
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == kind]


def module_of(path):
    "The module that a notebook exports to, or None."
    found = re.search(r"#\|\s*default_exp\s+(\S+)", "\n".join(measure.code_cells(path)))
    return found and found.group(1)


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


# --- what is generated agrees with what it is generated from


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "A copy of what the generators read and write, so that the checks leave the working tree alone."
    to = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__", ".*", "out", "student")
    for folder in ("nbs", "dp_course", "runs"):
        shutil.copytree(ROOT/folder, to/folder, ignore=ignored)
    for file in ("settings.ini", "setup.py", "README.md", "LICENSE", "LICENSE-PROSE"):
        shutil.copy(ROOT/file, to/file)
    return to


def test_export_leaves_no_diff(copy):
    for file in copy.glob("dp_course/*.py"):
        if file.name != "__init__.py":
            file.unlink()
    subprocess.run([BIN/"nbdev_export"], cwd=copy, check=True, capture_output=True)
    made = {p.name: p.read_text() for p in copy.glob("dp_course/*.py")}
    kept = {p.name: p.read_text() for p in ROOT.glob("dp_course/*.py")}
    assert made == kept, "run `make export` and commit dp_course/"


def test_clean_leaves_no_diff(copy):
    subprocess.run([BIN/"nbdev_clean"], cwd=copy, check=True, capture_output=True)
    for path in [INDEX, *NOTEBOOKS]:
        cleaned = copy/path.relative_to(ROOT)
        assert cleaned.read_text() == path.read_text(), f"run nbdev_clean and commit {path.name}"


def test_readme_is_the_index():
    written = (ROOT/"README.md").read_text()
    assert notebooks.readme() == written, "run `make readme` and commit README.md"


def test_readme_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT/"README.md").read_text())
    assert links
    assert not [link for link in links if not (ROOT/link).exists()]


# --- imports run one way


def imported(path):
    "(level of the statement, module, names) of every import in a file."
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            module = f"dp_course.{node.module}" if node.level else node.module
            yield node, module, [alias.name for alias in node.names]


def arrows():
    "module -> modules of ours that it imports."
    found = {}
    for path in MODULES:
        names = [module.split(".") for _, module, _ in imported(path)]
        found[path.stem] = {n[1] for n in names if n[0] == "dp_course" and len(n) > 1}
    return found


def reaches(graph, start):
    "Everything that a module needs, directly or not."
    todo, seen = [start], set()
    while todo:
        for after in graph[todo.pop()] - seen:
            seen.add(after)
            todo.append(after)
    return seen


def broken_arrows(graph, lessons, workshop):
    "Imports that point up or in a circle, in words."
    position = {name: i for i, name in enumerate(lessons)}
    for name in workshop:  # a workshop room stands right before the first lesson that needs it
        users = [position[lesson] for lesson in lessons if name in reaches(graph, lesson)]
        position[name] = min(users, default=len(lessons)) - .5
    found = [f"{name} needs itself" for name in graph if name in reaches(graph, name)]
    for name, needs in graph.items():
        for other in needs & set(lessons):
            if not position[other] < position[name]:
                found.append(f"{name} imports {other}, which comes later")
    return found


def test_imports_run_one_way():
    lessons, workshop = [[module_of(p) for p in group] for group in (LESSONS, WORKSHOP)]
    names = [*lessons, *workshop]
    assert len(names) == len(set(names))
    assert {p.stem for p in MODULES} == set(names), "every module has one notebook, and only one"
    assert not broken_arrows(arrows(), lessons, workshop)


def test_a_broken_arrow_is_found():
    lessons = ["a", "b", "c"]
    assert not broken_arrows({"a": set(), "b": {"w"}, "c": {"b"}, "w": {"a"}}, lessons, ["w"])
    assert broken_arrows({"a": {"b"}, "b": set(), "c": set()}, lessons, [])
    assert broken_arrows({"a": set(), "b": {"w"}, "c": set(), "w": {"c"}}, lessons, ["w"])
    assert broken_arrows({"a": set(), "b": {"w"}, "c": set(), "w": {"b"}}, lessons, ["w"])


@pytest.mark.parametrize("path", MODULES, **name_of)
def test_imports_are_visible(path):
    "No star, no import inside a function or a string, and nothing that users need not have."
    functions = [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef)]
    hidden = {n.lineno for f in functions for n in ast.walk(f)
              if isinstance(n, (ast.Import, ast.ImportFrom))}
    for node, module, names in imported(path):
        assert "*" not in names, f"{path.name} imports * from {module}"
        assert node.lineno not in hidden, f"line {node.lineno}: {module} is hidden in a function"
        root = module.split(".")[0]
        assert root in RUNTIME | {"dp_course"} | set(sys.stdlib_module_names), f"imports {root}"
        assert root != "importlib" or module == "importlib.metadata", f"{path.name}: {module}"
    assert "__import__" not in path.read_text()


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
    return "\n\n".join(s for s in measure.code_cells(path) if measure.is_exported(s))


@pytest.mark.parametrize("path", NOTEBOOKS, **name_of)
def test_ruff_is_content_with_exported_cells(path):
    rules = ["--select", "E501,E701,E702,F811,F821,F841", "--stdin-filename", f"{path.stem}.py"]
    assert not shown(ruff(*rules, "-", input=exported_code(path) + "\n"))


def test_ruff_notices():
    bad = "if x: y = 1; z = 2\nz = 1  # " + "word "*20 + "\n"
    found = ruff("--stdin-filename", "a.py", "-", input=bad)
    assert {"E501", "E701", "E702", "F821"} <= {f["code"] for f in found}


@pytest.mark.parametrize("path", [INDEX, *NOTEBOOKS], **name_of)
def test_cells_are_short_and_narrow(path):
    assert not measure.long_cells(path)
    assert not measure.long_lines(measure.code_cells(path))


@pytest.mark.parametrize("path", NOTEBOOKS, **name_of)
def test_lines_are_not_dense(path):
    most = DENSER.get(module_of(path), 6.0)
    assert measure.nodes_per_line(exported_code(path)) <= most


def test_measures_notice():
    assert measure.nodes_per_line("x = [f(a*b) + c for a, b in zip(p, q) if a > b]") > 6
    assert measure.cell_length("#| export\na\nb\n\nc\n") == 4
    assert measure.long_lines(["a"*101, "b"*100]) == ["a"*101]


def public(body):
    "Functions and classes that have no underscore, without the methods that `patch_to` adds."
    nodes = [n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    methods = [n for n in nodes if any("patch_to" in names_in(d) for d in n.decorator_list)]
    return [n for n in nodes if n not in methods and not n.name.startswith("_")]


@pytest.mark.parametrize("path", MODULES, **name_of)
def test_public_names_have_a_docstring_of_one_line(path):
    for node in public(tree(path).body):
        words = ast.get_docstring(node)
        assert words, f"{node.name} has no docstring"
        assert "\n" not in words, f"the docstring of {node.name} is longer than a line"


@pytest.mark.parametrize("module", NAMES)
def test_names_that_lessons_and_assignments_rely_on(module):
    text = (ROOT/f"dp_course/{module}.py").read_text()
    offered = ast.literal_eval(re.search(r"(?s)^__all__ = (\[.*?\])", text, re.M).group(1))
    for _, _, names in imported(ROOT/f"dp_course/{module}.py"):
        offered += names
    assert not set(NAMES[module].split()) - set(offered)


def test_public_surface():
    "They are names of the package, not modules that somebody has imported."
    missing = [name for name in SURFACE if not hasattr(dp_course, name)]
    assert not missing
    assert not [name for name in SURFACE if isinstance(getattr(dp_course, name), ModuleType)]


# --- notebooks that can be read


@pytest.mark.parametrize("path", NOTEBOOKS, **name_of)
def test_notebook_is_whole(path):
    notebook = nbformat.read(path, 4)
    code = cells(path, "code")
    outputs = [output for cell in code for output in cell.outputs]
    assert notebook.nbformat_minor >= 5
    assert len({cell["id"] for cell in notebook.cells}) == len(notebook.cells)
    assert not [output for output in outputs if output.output_type == "error"]
    assert outputs, "no saved outputs: run `make notebooks`"
    assert all(cell.source.strip() for cell in notebook.cells), "an empty cell"
    assert len(cells(path, "markdown")) >= len(notebook.cells)/3, "less than a third prose"
    source = "".join(cell.source for cell in code)
    assert not re.search(r"#\|\s*eval:\s*false", source), "code that nobody ever tests"
    texts = [str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", "")) for o in outputs]
    paths = [text for text in texts if re.search(r"/(root|home|work|tmp|Users)/", text)]
    assert not paths, "a saved output names a path of a machine"
    assert not list(filter(notebooks.is_widget, outputs)), "a saved slider is dead: run it again"


@pytest.mark.parametrize("path", LESSONS, **name_of)
def test_lesson_has_figures_and_exercises(path):
    code = cells(path, "code")
    figures = [o for c in code for o in c.outputs if "image/png" in o.get("data", {})]
    exercises = [c for c in cells(path, "markdown") if "### Exercise" in c.source]
    solutions = [c for c in code if "solution" in c.metadata.get("tags", [])]
    assert len(figures) >= 2, "too few figures"
    assert len(exercises) >= 3, "too few exercises"
    assert len(solutions) >= len(exercises) - 1
    assert all(c.metadata.jupyter.source_hidden for c in solutions), "solutions must be folded"


@pytest.mark.parametrize("path", [INDEX, *NOTEBOOKS], **name_of)
def test_notebook_links_lead_somewhere(path):
    prose = "\n".join(cell.source for cell in cells(path, "markdown"))
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", prose)
    assert not [link for link in links if not (path.parent/link).exists()]


# --- every export has a check that can fail


CHECKERS = re.compile(r"near|check|check_\w+|test_\w+|assert_\w+")


def names_in(node):
    "Names and attributes that an expression mentions."
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


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


def statements(sources):
    return [n for s in sources for n in ast.walk(ast.parse(s)) if isinstance(n, ast.stmt)]


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
    sources = measure.code_cells(path)
    exported = [ast.parse(s).body for s in sources if measure.is_exported(s)]
    exports = [node.name for body in exported for node in public(body)]
    plain = [re.sub(r"(?m)^\s*[%!].*$", "", s) for s in sources if not measure.is_exported(s)]
    # a lesson checks what it exports; a part of a workshop room may be checked through another
    through = [s for s in sources if measure.is_exported(s)] if path in WORKSHOP else []
    return set(exports) - checked_names(plain, through)


@pytest.mark.parametrize("path", NOTEBOOKS, **name_of)
def test_every_export_has_a_check(path):
    assert not unchecked_exports(path)


def test_a_cell_without_an_assertion_checks_nothing():
    assert "f" in checked_names(["y = f(1)", "near(y, 2)"])
    assert "f" in checked_names(["def g(x): return f(x)", "assert g(1) == 2"])
    assert "f" in checked_names(["said = []", "f(said)", "assert said == [1]"])
    assert "f" in checked_names(["assert g(1) == 2"], through=["def g(x): return f(x)"])
    assert "f" not in checked_names(["g(1)"], through=["def g(x): assert f(x)"])
    assert "f" not in checked_names(["test_x = f(1)", "check = f", "f(2)"])
