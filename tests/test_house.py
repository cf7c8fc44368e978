"The house itself: notebooks, package and README agree; every notebook can be read; every public name is documented and checked."
import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
NOTEBOOKS = sorted((ROOT/"nbs").glob("[0-9i]*.ipynb"))
MODULES = sorted(p for p in (ROOT/"dp_course").glob("*.py") if not p.name.startswith("_"))
RUNTIME = {"torch", "torchvision", "numpy", "scipy", "sklearn", "matplotlib", "tqdm", "dp_course"}
by_name = pytest.mark.parametrize
APPENDICES = {"06_each_layer", "10_processes", "10_records"}  # they carry machinery that 06 and 10 use: fewer exercises, fewer figures
SURFACE = {
    "core": "seed_all default_device near check figure",
    "definition": "randomized_response laplace_mechanism gaussian_mechanism hockey_stick gaussian_delta "
                  "gaussian_epsilon gaussian_sigma",
    "accounting": "rdp_gaussian rdp_sampled_gaussian rdp_to_epsilon RDPAccountant PLDAccountant epsilon "
                  "noise_multiplier PrivacyPlan",
    "data": "load poisson_indices Images",
    "dpsgd": "FlatClip loop_grad_sum noisy_mean Trainer",
    "models": "WSConv2d resnet20 wrn16_4 wrn40_4 papernot_cnn allconv_cifar",
    "gradients": "hook_grad_sum vmap_grad_sum ghost_grad_sum bookkeeping_grad_sum fast_grad_sum",
    "clipping": "AdaptiveClip LayerClip ScheduledClip AutoClip split_sigma",
    "tricks": "views EMA DPAdam",
    "train": "PRESETS main",
}


def cells(path, kind): return [c for c in nbformat.read(path, 4).cells if c.cell_type == kind]
def exported(source): return re.search(r"(?m)^#\|\s*export", source)
def tree(path): return ast.parse(path.read_text(encoding="utf-8"))
def order():
    "Module names in the reading order of their notebooks."
    found = (re.search(r"#\|\s*default_exp\s+(\S+)", c.source) for p in NOTEBOOKS for c in cells(p, "code"))
    return [m.group(1) for m in found if m]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "A copy of what the generators read and write, so that the checks leave the working tree alone."
    to = tmp_path_factory.mktemp("copy")
    for d in ("nbs", "dp_course"): shutil.copytree(ROOT/d, to/d, ignore=shutil.ignore_patterns("__pycache__", ".*", "out"))
    for f in ("settings.ini", "setup.py", "README.md", "LICENSE"): shutil.copy(ROOT/f, to/f)
    return to


def test_export_leaves_no_diff(copy):
    for f in copy.glob("dp_course/*.py"): f.unlink()
    shutil.copy(ROOT/"dp_course/__init__.py", copy/"dp_course/__init__.py")
    subprocess.run([BIN/"nbdev_export"], cwd=copy, check=True, capture_output=True)
    made = {p.name: p.read_text() for p in copy.glob("dp_course/*.py")}
    assert made == {p.name: p.read_text() for p in ROOT.glob("dp_course/*.py")}, "run `make export` and commit dp_course/"


def test_clean_leaves_no_diff(copy):
    subprocess.run([BIN/"nbdev_clean"], cwd=copy, check=True, capture_output=True)
    dirty = [p.name for p in NOTEBOOKS if (copy/"nbs"/p.name).read_text() != p.read_text()]
    assert not dirty, f"run nbdev_clean and commit: {dirty}"


def test_readme_is_the_index():
    made = subprocess.run([sys.executable, "-c", "import notebooks as n; print(n.readme(), end='')"], cwd=ROOT/"tools",
                          check=True, capture_output=True, text=True).stdout
    assert made == (ROOT/"README.md").read_text(), "run `make readme` and commit README.md"


def test_readme_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT/"README.md").read_text())
    assert links and not [l for l in links if not (ROOT/l).exists()]


def test_modules_import_only_what_came_before():
    names = order()
    assert len(names) == len(set(names)) and {p.stem for p in MODULES} >= set(names)
    for p in MODULES:
        for node in ast.walk(tree(p)):
            if isinstance(node, ast.ImportFrom):
                assert not any(a.name == "*" for a in node.names), f"{p.name} imports *"
                roots = [(node.module or "").split(".")[0]] if not node.level else ["dp_course"]
                ours = node.module.split(".")[-1] if node.module and roots == ["dp_course"] else None
                assert ours is None or names.index(ours) < names.index(p.stem), f"{p.name} imports {ours}, which comes later"
            elif isinstance(node, ast.Import): roots = [a.name.split(".")[0] for a in node.names]
            else: continue
            bad = [r for r in roots if r not in RUNTIME and r not in sys.stdlib_module_names]
            assert not bad, f"{p.name} imports {bad}: the package runs without them"


@by_name("path", MODULES, ids=lambda p: p.stem)
def test_size_and_docstrings(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 350, f"{len(lines)} lines"
    head = next(i for i, l in enumerate(lines) if l.startswith("# %% ../nbs"))  # before it: the subtitle and __all__
    assert not [i for i, l in enumerate(lines, 1) if i > head and len(l) > 110], "lines longer than 110"
    for n in ast.walk(tree(path)):
        if isinstance(n, ast.FunctionDef): assert n.end_lineno - n.lineno < 40, f"{n.name} is longer than 40 lines"
    for n in tree(path).body:
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_"):
            assert ast.get_docstring(n), f"{n.name} has no docstring"


@by_name("module", SURFACE)
def test_public_surface(module):
    path = ROOT/f"dp_course/{module}.py"
    defined = {t.id for n in tree(path).body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    defined |= {n.name for n in tree(path).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    assert not set(SURFACE[module].split()) - defined


@by_name("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_whole(path):
    nb = nbformat.read(path, 4)
    code = cells(path, "code")
    outputs = [o for c in code for o in c.outputs]
    assert nb.nbformat_minor >= 5 and len({c["id"] for c in nb.cells}) == len(nb.cells)
    assert not [o for o in outputs if o.output_type == "error"]
    if path.stem == "index": return
    assert outputs, "no saved outputs: run `make notebooks`"
    assert len(cells(path, "markdown")) >= len(nb.cells)/3, "less than a third prose"
    few = path.stem in APPENDICES
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= (1 if few else 2), "too few figures"
    assert few or sum("### Exercise" in c.source for c in cells(path, "markdown")) >= 4
    solutions = [c for c in code if "solution" in c.metadata.get("tags", [])]
    assert (few or len(solutions) >= 4) and all(c.metadata.jupyter.source_hidden for c in solutions), "solutions must be folded"
    text = [str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", "")) for o in outputs]
    assert not [t for t in text if re.search(r"/(root|home|work|tmp|Users)/", t)], "a saved output names a path of a machine"
    assert not re.search(r"#\|\s*eval:\s*false", "".join(c.source for c in code)), "code that nobody ever tests"


@by_name("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_links_lead_somewhere(path):
    links = [l for c in cells(path, "markdown") for l in re.findall(r"\]\((?!https?:|#)([^)#]+)", c.source)]
    assert not [l for l in links if not (path.parent/l).exists()], "say the number of a notebook that is still to come, without a link"


@by_name("path", [p for p in NOTEBOOKS if p.stem != "index"], ids=lambda p: p.stem)
def test_every_export_has_a_check(path):
    code = [c.source for c in cells(path, "code")]
    public = {n.name for s in code if exported(s) for n in ast.parse(s).body
              if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")}
    checks = "\n".join(s for s in code if not exported(s) and re.search(r"\b(assert|near|test_\w+|check\w*)\b", s))
    assert not {n for n in public if not re.search(rf"\b{n}\b", checks)}


def test_wheel_installs_and_imports(copy, tmp_path):
    "The wheel holds every module, and each imports from it alone (its dependencies come from this environment)."
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(copy)]
    subprocess.run(build, check=True, capture_output=True)
    wheel, = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        z.extractall(tmp_path/"site")
        assert "dp-train=dp_course.train:main" in z.read(next(n for n in z.namelist() if n.endswith("entry_points.txt"))).decode().replace(" ", "")
    names = ", ".join(f"dp_course.{p.stem}" for p in MODULES)
    code = f"import {names}; import sys; assert {str(tmp_path)!r} in dp_course.__file__; " \
           "assert not {'nbdev', 'opacus', 'IPython', 'fastcore'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path/"site", check=True)
