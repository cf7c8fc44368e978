"Code on the pages that people read first: it runs as it stands, and a type checker accepts it."
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
# Our own stubs and rooms are read, torch's million lines are not: they take a quarter of a minute.
MYPY = """[mypy]
follow_imports = silent
[mypy-torch.*,torchvision.*,numpy.*,scipy.*,sklearn.*,matplotlib.*,tqdm.*]
follow_imports = skip
ignore_missing_imports = True
"""
WRONG = """
trainer.relaese("model.pt")
plan.noise
PrivacyPlan(n=9, batch_size=3, steps=1, epsilon=3, delta=1e-5)
Trainer(model, data)
"""


def blocks(page):
    "The Python code of a page, block by block."
    return re.findall(r"(?s)```python\n(.*?)```", page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def first():
    "README's block of code."
    [block] = blocks(ROOT/"README.md")
    return block


def test_the_code_of_the_first_page_runs_as_it_stands(first, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(first, "README.md", "exec"), {})
    assert "test accuracy 9" in capsys.readouterr().out and (tmp_path/"model.pt").exists()


def test_lightning_takes_the_steps_of_opacus_loop(tmp_path, monkeypatch):
    "The lines for Lightning in the place of the loop: the engine's steps and ε are the page's."
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    page = json.loads((ROOT/"nbs/pages/from_opacus.ipynb").read_text(encoding="utf-8"))["cells"]
    start, run = [c for c in page if c["cell_type"] == "code"][:2]
    [lines] = re.findall(r"(?s)```python\n(.*?)```", "".join(page[-1]["source"]))
    body = ast.parse("".join(run["source"])).body
    [loop] = [i for i, node in enumerate(body) if isinstance(node, ast.For)]
    body[loop:loop + 1] = ast.parse(lines).body
    names = {"np": np}
    exec("".join(start["source"]), names)
    exec(compile(ast.Module(body, []), "from_opacus", "exec"), names)
    plan, eps = eval("".join(run["outputs"][0]["data"]["text/plain"]), names)
    assert names["engine"].accountant.history == [tuple(plan[k] for k in ("sigma", "q", "steps"))]
    assert names["engine"].get_epsilon(1e-5) == pytest.approx(eps, abs=1e-6)


@pytest.mark.slow
def test_a_type_checker_accepts_the_first_page_and_nothing_wrong(first, tmp_path):
    "It sees the methods of a trainer through the doors of the package, which are lazy."
    (tmp_path/"right.py").write_text(first)
    (tmp_path/"wrong.py").write_text(first + WRONG)
    (tmp_path/"mypy.ini").write_text(MYPY)
    done = subprocess.run([sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "right.py",
                           "wrong.py"], cwd=tmp_path, capture_output=True, text=True,
                          env={"MYPYPATH": str(ROOT), "PATH": ""})
    assert not re.search(r"(?m)^right.py.*error", done.stdout)
    for line, said in enumerate(["relaese", "noise", "epsilon", "plan"], first.count("\n") + 2):
        assert re.search(rf'(?m)^wrong.py:{line}: error: .*"{said}"', done.stdout), done.stdout
