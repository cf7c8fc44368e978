"""What the student builds: stub, check, model answer and choice, in her copy of a lesson.

Every lesson with builds is run twice as she would run it: with every model answer in its place, and
with nothing written at all.
"""
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.sign import NotebookNotary

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT/"tools"))
import student  # noqa: E402

LESSONS = sorted(ROOT.glob("nbs/[0-9]*.ipynb"))


def cells(path, tag=""):
    return [c for c in nbformat.read(path, 4).cells if not tag or student.has_tag(c, tag)]


BUILT = [path for path in LESSONS if cells(path, "build")]
FOLDED = [path for path in LESSONS if cells(path, "answer")]

CELLS = [
    ("markdown", "# A lesson\n\nGuess before you run the cell.", []),
    ("code", "1 + 1", []),
    ("markdown", "It is two.", ["answer"]),
    ("code", "#| export\ndef double(\n    x,  # a number\n):      # twice as much\n"
             '    "Double a number."\n    return 2*x', ["build"]),
    ("code", "#| export\ndef quadruple(x):\n    return double(double(x))", ["plumbing"]),
    ("markdown", "How to install it.", ["outside"])]


@pytest.fixture
def made(tmp_path, monkeypatch):
    "The copy of a small lesson."
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path/"jupyter"))
    new = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    notebook = nbformat.v4.new_notebook(cells=[
        new[kind](source, id=f"cell{i}", metadata={"tags": tags} if tags else {})
        for i, (kind, source, tags) in enumerate(CELLS)])
    notebook.cells[1].outputs = [nbformat.v4.new_output("execute_result", {"text/plain": "2"})]
    (tmp_path/"nbs").mkdir()
    nbformat.write(notebook, tmp_path/"nbs/03_lesson.ipynb")
    student.make(tmp_path/"student", tmp_path/"nbs")
    return tmp_path/"student/03_lesson.ipynb"


def test_a_build_becomes_a_stub_a_check_a_model_answer_and_a_choice(made):
    stub, check, model, choice = nbformat.read(made, 4).cells[3:7]
    assert stub.source == ('def double(\n    x,  # a number\n):      # twice as much\n'
                           '    "Double a number."\n    ...')
    assert check.source.split("\n")[-1] == "check_double(double)"
    assert "import check_double, mine" in check.source
    assert "<details>" in model.source and "    return 2*x\n" in model.source
    assert choice.source == "double = mine(double)"


def test_answers_and_plumbing_are_folded_and_some_cells_stay_outside(made):
    copied = nbformat.read(made, 4).cells
    assert copied[1].outputs == []
    assert copied[2].source.startswith("<details>") and "It is two." in copied[2].source
    assert copied[-1].metadata.jupyter.source_hidden
    assert copied[-1].source.startswith("# Folded code (quadruple): run it")
    assert not any("install" in cell.source for cell in copied)


@pytest.mark.parametrize("kind", ["image/svg+xml", "image/png"])
def test_a_picture_below_a_guess_shows_neither_itself_nor_its_title(kind):
    "Whatever code lies between them; the next prose ends the guess."
    drawn = nbformat.v4.new_output("display_data", {kind: "..."})
    pictures = [nbformat.v4.new_code_cell('Diagram("A gains")', outputs=[drawn]) for _ in range(2)]
    guess, told = map(nbformat.v4.new_markdown_cell, ("Which one gains? Guess.", "A gains."))
    told.metadata.tags = ["answer"]
    cells = [guess, nbformat.v4.new_code_cell("a = 1"), pictures[0], told, pictures[1]]
    student.for_guessing(nbformat.v4.new_notebook(cells=cells))
    assert not pictures[0].outputs and pictures[0].metadata.jupyter.source_hidden
    assert bool(pictures[1].outputs) == (kind == "image/svg+xml")


def test_the_copy_is_trusted_and_complete(made):
    "Saved diagrams are shown, and a notebook that nobody touched asks nothing when it is closed."
    notebook = nbformat.read(made, 4)
    assert NotebookNotary().check_signature(notebook)
    assert notebook.metadata.language_info.name == "python"


def test_the_answers_of_the_checks_are_not_in_the_copy(made, tmp_path):
    for place in ("exercises", "workshop/exercises"):
        (tmp_path/"nbs"/place).mkdir(parents=True)
        nbformat.write(nbformat.v4.new_notebook(), tmp_path/"nbs"/place/"truths.ipynb")
    assert student.make(tmp_path/"student", tmp_path/"nbs") == 0


def test_a_stub_has_no_more_than_the_signature():
    cell = nbformat.v4.new_code_cell("def f(x):  # a comment\n    y = x\n    return y")
    assert student.stub(cell) == "def f(x):  # a comment\n    ..."


# --- the lessons


def fill(path, source):
    "Write every model answer into its stub."
    answers = {cell.id: cell.source for cell in cells(source, "build")}
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        cell.source = answers.get(cell.id, cell.source)
    nbformat.write(notebook, path)


def passed(folder):
    "Names of the checks that were passed in a student's folder."
    kept = json.loads((folder/student.PROGRESS).read_text() or "{}")
    return {name for name, entry in kept.items() if entry["passed"]}


@pytest.mark.skipif(not BUILT, reason="no lesson has builds")
def test_a_lesson_runs_on_the_students_functions_and_without_them(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path/"jupyter"))
    for path in BUILT:
        for kind in ("filled", "empty"):
            student.make(tmp_path/kind/path.stem, only=[path])
        fill(tmp_path/"filled"/path.stem/path.name, path)
    done = subprocess.run([sys.executable, ROOT/"tests/run_notebooks.py", tmp_path], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in BUILT:
        built = {f"check_{student.built(cell).name}" for cell in cells(path, "build")}
        assert passed(tmp_path/"filled"/path.stem) >= built, path.stem
        assert not passed(tmp_path/"empty"/path.stem) & built, path.stem


@pytest.mark.parametrize("path", FOLDED, ids=lambda path: path.stem)
def test_the_prose_after_a_guess_is_folded(path):
    "The first prose below the cell that answers a guess, or the cell itself where it is prose."
    asked = False
    for cell in cells(path):
        if asked and cell.cell_type == "markdown":
            heading = cell.source.startswith("#")
            assert heading or student.has_tag(cell, "answer"), cell.source[:200]
            assert not re.search(r"(?m)^#", cell.source) or heading, "a heading is not folded"
            asked = False
        if student.asks(cell) and not student.has_tag(cell, "answer"):
            asked = True
