"""A student's course: every lesson runs with the installed wheel, in a folder of her own.

The wheel is built from a copy of what git tracks, and installed beside nothing else of ours; her
copy of the lessons lies elsewhere, her home is empty, and the network is not needed. `make test`
builds the wheel and looks into it, `make test-path` walks through all lessons (DP_COURSE_SLOW).
"""
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
LESSONS = [path.name for path in sorted(ROOT.glob("nbs/[0-9]*.ipynb"))]
LATER = pytest.mark.skipif("DP_COURSE_SLOW" not in os.environ, reason="make test-path runs it")


def run(command, **where):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **where)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    "A copy of what git tracks."
    folder = tmp_path_factory.mktemp("clone")
    for name in run(["git", "ls-files"], cwd=ROOT).splitlines():
        if (ROOT/name).is_file():
            (folder/name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT/name, folder/name)
    return folder


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, clone])
    path, = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel):
    "A folder with the installed wheel."
    folder = wheel.parent/"site"
    run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target",
         folder, wheel])
    return folder


@pytest.fixture(scope="module")
def home(clone, tmp_path_factory):
    "An empty home, with the student's copy in it."
    folder = tmp_path_factory.mktemp("home")
    run([sys.executable, clone/"tools/student.py", folder/"student"])
    return folder


def test_the_wheel_holds_the_command_the_records_and_the_encoder(wheel, clone):
    with zipfile.ZipFile(wheel) as archive:
        listed = archive.namelist()
        entry = next(name for name in listed if name.endswith("entry_points.txt"))
        scripts = archive.read(entry).decode().replace(" ", "")
    assert "dp-train=dp_course.cli.main:main" in scripts
    records = {name for name in listed if name.startswith("dp_course/runs/")}
    assert len(records) == len([p for p in (clone/"runs").iterdir() if "json" in p.suffix])
    assert "dp_course/starts/resnet20-synthetic.pt" in listed


ALONE = """
import sys
import {modules}
assert {site!r} in dp_course.__file__
foreign = {{"nbdev", "opacus", "IPython", "fastcore"}}
assert not foreign & set(sys.modules)
from dp_course.cli.main import main
assert main(["digits-eps3-fast", "--seed", "0", "--out", "out"]) == 0
"""


@LATER
def test_the_wheel_imports_and_trains_alone(installed, clone, tmp_path):
    "Every module is in it, and imports nothing but what it says it needs."
    rooms = [path.relative_to(clone).with_suffix("").parts
             for path in (clone/"dp_course").rglob("[a-z]*.py")]
    code = ALONE.format(site=str(installed), modules=", ".join(map(".".join, rooms)))
    own = {"PYTHONPATH": str(installed), "PATH": "", "HOME": str(tmp_path)}
    run([sys.executable, "-c", code], cwd=tmp_path, env=own)
    assert len(rooms) > 40 and list((tmp_path/"out").glob("*.release.pt"))


@LATER
@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_runs_with_the_wheel(name, installed, home):
    notebook = nbformat.read(home/"student"/name, 4)
    notebook.cells.append(nbformat.v4.new_code_cell("import dp_course\ndp_course.__file__"))
    own = {k: v for k, v in os.environ.items() if not k.startswith(("DP_COURSE", "PYTHON"))}
    own |= {"HOME": str(home), "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    where = {"metadata": {"path": str(home/"student")}}
    began = time.monotonic()
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where)
    client.execute(env=own)
    print(f"{name}: {time.monotonic() - began:.0f} s")
    assert str(installed) in notebook.cells[-1].outputs[0].data["text/plain"]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    cards = [output.data["text/plain"] for cell in code for output in cell.outputs
             if "not attempted yet" in output.get("data", {}).get("text/plain", "")]
    assert cards, "the exercises are still hers to solve"
    assert (home/"student/.progress.json").exists()
