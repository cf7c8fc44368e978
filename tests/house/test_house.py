"What is generated agrees with its source, links lead somewhere, and nothing is loaded too early."
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
import floors  # noqa: E402
import notebooks  # noqa: E402

NOTEBOOKS = [ROOT/"nbs/index.ipynb", *notebooks.lessons(), *notebooks.rooms()]
PAGES = [ROOT/"README.md", *sorted((ROOT/"docs").glob("*.md"))]


@lru_cache(None)  # the tests change nothing
def cells(path):
    return nbformat.read(path, 4).cells


def name_of(path):
    "What messages call a file."
    return path.relative_to(ROOT).as_posix()


def complaints(check, paths):
    "What a check says of files: {name: complaint}, without those that it is content with."
    return {name_of(path): said for path in paths if (said := check(path))}


# --- what is generated


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "A copy of what the generators read and write, so that the checks leave the working tree alone."
    to = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__", ".*", "out", "student")
    for folder in ("nbs", "dp_course", "runs", "tools"):
        shutil.copytree(ROOT/folder, to/folder, ignore=ignored)
    for file in ("settings.ini", "setup.py", "README.md"):
        shutil.copy(ROOT/file, to/file)
    return to


def generated(library):
    "name -> text of everything that `make export` writes, and of what is not generated at all."
    return {path.relative_to(library).as_posix(): path.read_text()
            for kind in ("*.py", "*.pyi", "*.json") for path in library.rglob(kind)}


def test_export_leaves_no_diff(copy):
    for path in (copy/"dp_course").glob("*/*.py*"):
        path.unlink()
    subprocess.run([sys.executable, copy/"tools/export.py"], check=True, capture_output=True)
    made, kept = generated(copy/"dp_course"), generated(ROOT/"dp_course")
    assert not {name for name in made.keys() | kept.keys() if made.get(name) != kept.get(name)}, (
        "run `make export` and commit dp_course/")


def test_clean_leaves_no_diff(copy):
    subprocess.run([BIN/"nbdev_clean"], cwd=copy, check=True, capture_output=True)
    changed = [name_of(path) for path in NOTEBOOKS
               if (copy/path.relative_to(ROOT)).read_text() != path.read_text()]
    assert not changed, "run nbdev_clean and commit"


def test_readme_and_pages_are_their_notebooks():
    made = {ROOT/"README.md": notebooks.readme(), ROOT/"docs/static/floors.svg": floors.plan()}
    made |= {page: notebooks.page(source) for source, page in notebooks.PAGES.items()}
    house = ROOT/"docs/house.md"
    made[house] = floors.house(house.read_text())
    pictures = {ROOT/place: notebooks.picture(source)
                for place, source in notebooks.PICTURES.items()}
    old = [name_of(path) for path, text in made.items() if path.read_text() != text]
    old += [name_of(path) for path, picture in pictures.items() if path.read_bytes() != picture]
    assert not old, "run `make readme` and commit"


# --- what people read


def dead_links(path):
    "Links inside the tree that lead nowhere."
    if path.suffix == ".ipynb":
        text = "\n".join(cell.source for cell in cells(path) if cell.cell_type == "markdown")
    else:
        text = path.read_text()
    return [link for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
            if not (path.parent/link).exists()]


def test_links_lead_somewhere():
    assert not complaints(dead_links, [*NOTEBOOKS, *PAGES])


def unwell(path):
    "What is wrong with a notebook as a whole, in words."
    outputs = [output for cell in cells(path) for output in cell.get("outputs", ())]
    texts = [str(out.get("text", "")) + str(out.get("data", {}).get("text/plain", ""))
             for out in outputs]
    found = {
        "no saved outputs: run `make notebooks`": not outputs,
        "a saved error": any(output.output_type == "error" for output in outputs),
        "a path of a machine": re.search(r"/(root|home|work|tmp|Users)/", "".join(texts)),
        "a slider without its kernel": any(map(notebooks.is_widget, outputs)),
        "more than 1.5 MB": path.stat().st_size > 1.5*10**6,
    }
    return [words for words, holds in found.items() if holds]


def test_notebooks_can_be_published():
    assert not complaints(unwell, notebooks.lessons() + notebooks.rooms())


def test_help_says_what_to_use_for_what():
    "Every row of `help(dp_course)` is on a page, and what it calls is called there, too."
    rows = [row.split("  ", 1) for row in dp_course.__doc__.splitlines() if row.startswith("to ")]
    page = notebooks.page(ROOT/"nbs/pages/i_want.ipynb")
    called = set(re.findall(r"\w+(?=\()", page.partition("\n## ")[2]))
    assert len(rows) >= 15
    for want, use in rows:
        alone = set(re.findall(r"\w+(?=\()", use)) - called
        assert not alone, f"nbs/pages/i_want.ipynb has no snippet with {alone}"
        assert f"| {want.removeprefix('to ')} | `{use.strip()}` |" in page, (
            "run `make notebooks NB=nbs/pages/i_want.ipynb`")


@pytest.mark.slow
def test_the_snippet_for_several_processes_runs_in_two(tmp_path):
    "The page runs it alone; torchrun runs the same lines in two processes."
    code = [c.source for c in cells(ROOT/"nbs/pages/i_want.ipynb") if c.cell_type == "code"]
    imports, data, train = (next(cell for cell in code if word in cell)
                            for word in ("import tempfile", "open_memmap", "ProcessTrainer("))
    data = data.rsplit("\n", 1)[0]  # without the run of one process
    (tmp_path/"train.py").write_text("\n\n".join([imports, data, train]).replace(
        "\nProcess", "\nt = Process") + "\nprint('steps', t)")
    run = subprocess.run([BIN/"torchrun", "--nproc-per-node", "2", tmp_path/"train.py"],
                         capture_output=True, text=True,
                         env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert run.stdout.count("steps 10") == 2, run.stderr[-2000:]


# --- what an import loads


def loaded(line, after="pass"):
    "Packages, and parts of SciPy, that a line of code loads after another one."
    code = (f"import sys\n{after}\nbefore = {{*sys.modules}}\n"
            f"{line}\nprint(*{{*sys.modules}} - before)")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    words = [name.split(".") for name in done.stdout.split()]
    return {name[0] for name in words} | {".".join(n[:2]) for n in words if n[0] == "scipy"}


def test_the_package_is_loaded_only_when_it_is_used():
    assert not loaded("import dp_course") & {"torch", "torchvision", "numpy", "scipy", "sklearn",
                                             "matplotlib", "tqdm", "PIL"}


def test_what_draws_or_reads_files_is_loaded_where_it_is_used():
    "It takes seconds; what remains is scipy.special, which the first plan needs."
    more = loaded("from dp_course import Trainer, noise_audit, sampler_audit\n"
                  "from dp_course.cli.main import main", after="import torch")
    assert {"dp_course", "scipy.special"} <= more
    assert not more & {"matplotlib", "torchvision", "sklearn", "PIL", "triton", "IPython", "pandas",
                       "scipy.stats", "scipy.fft", "scipy.signal", "scipy.optimize"}


def test_the_names_that_most_people_need_are_there():
    "Names of the package, not modules that somebody has imported."
    found = [getattr(dp_course, name) for name in dp_course.__all__]
    assert found and not [thing for thing in found if isinstance(thing, ModuleType)]
