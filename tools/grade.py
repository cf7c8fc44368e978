"""Grade a folder of notebooks: `python tools/grade.py SUBMISSIONS [--out FOLDER]`.

nbgrader does the grading, with a gradebook; what a student wrote runs elsewhere, one process for
each submission, in a box (see grade_box.py), and only its outputs come back here.
"""
import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import assign
import grade_box
import grade_sandbox
import nbformat

ROOT = assign.ROOT
NO_DATA = "cannot be verified on this machine"  # as in assignments/leaderboard.py
BIG = 100*2**20  # bytes: larger files are not copied
MOST, LARGE = 2000, 5*2**20  # cells, bytes of a notebook that somebody has written
UNREADABLE = "nbgrader cannot read it: is it a notebook?"
ZERO = dict(cells=[], seconds=0.)
STUB = r"# YOUR CODE HERE\n\s*\.\.\.\s*$"  # what stands in an answer that nobody has written


# --- what was handed in


def find(folder):
    "(student, assignment) -> her notebook, for the layouts that people have."
    found, known = {}, "|".join(assign.names())
    shallow_last = sorted(Path(folder).rglob("*.ipynb"), key=lambda p: (-len(p.parts), p))
    for path in shallow_last:  # the last one counts: a backup lies deeper
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") for part in parts) or path.is_symlink() or not path.is_file():
            continue
        flat = re.fullmatch(rf"(.+?)[-_ ]({known})\.ipynb", parts[0])
        if len(parts) == 1 and flat:                                     # ada_a1.ipynb
            who, name = flat.groups()
        elif re.fullmatch(known, path.stem) and parts[1:-1] in ((), (path.stem,)) and parts[1:]:
            # ada/a1.ipynb, ada/a1/a1.ipynb
            who, name = parts[0], path.stem
        else:
            continue
        found[re.sub(r"[^\w.@-]", "_", who).strip("."), name] = path
    return found


def ignored(folder, found):
    "Notebooks that are graded under nobody's name."
    paths = {path.relative_to(folder) for path in Path(folder).rglob("*.ipynb")}
    paths -= {path.relative_to(folder) for path in found.values()}
    return sorted(str(path) for path in paths if not any(p.startswith(".") for p in path.parts))


def collect(path, to, alone):
    "Copy a notebook and what lies beside it; links and what is very large stay behind."
    to.mkdir(parents=True, exist_ok=True)
    folder = path.parent
    for item in [path] if alone else sorted(folder.rglob("*")):
        place = to/item.relative_to(folder) if item != path else to/path.name
        linked = any(p.is_symlink() for p in (item, *item.parents) if p.is_relative_to(folder))
        other = item.suffix == ".ipynb" and item != path
        if item.is_file() and not linked and not other and item.stat().st_size <= BIG:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(item, place)


def as_typed(text):
    "Markdown that shows what somebody has typed, and does nothing that it says."
    fence = "`"*(3 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


class TooLarge(Exception):
    "A notebook that nobody can have written."


def refuse_large(path):
    if path.stat().st_size > LARGE:
        raise TooLarge(f"It is larger than {LARGE >> 10:,} kB: without outputs it would be small.")


def tame(
    path,   # notebook, handed in: it is rewritten
    given,  # notebook, as it was handed out
):
    "Keep a notebook's cells and nothing else; prose that is not ours is shown as it was typed."
    # whatever is raised: it is no notebook
    cells = nbformat.reads(path.read_text(encoding="utf-8-sig"), 4).cells
    if len(cells) > MOST:
        raise TooLarge(f"It has {len(cells):,} cells, and may have {MOST:,}.")
    ours = nbformat.read(given, 4).cells
    prose = {cell.source for cell in ours if cell.cell_type == "markdown"}
    known = {cell.metadata.nbgrader.grade_id: cell.metadata.nbgrader for cell in ours
             if "nbgrader" in cell.metadata}
    last = {cell.metadata.get("nbgrader", {}).get("grade_id"): cell for cell in cells}  # of copies
    kept = []
    for cell in cells:
        told = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "code":
            kept.append(nbformat.v4.new_code_cell(cell.source))
        else:
            text = cell.source if cell.source in prose else as_typed(cell.source)
            kept.append(nbformat.v4.new_markdown_cell(text))
        if told.get("grade_id") in known and last[told.grade_id] is cell:
            kept[-1].metadata = {"nbgrader": known[told.grade_id]}  # ours: hers may say anything
    kernel = dict(name="python3", display_name="Python 3", language="python")
    book = nbformat.v4.new_notebook(cells=kept, metadata={"kernelspec": kernel})
    path.write_text(nbformat.writes(book), encoding="utf-8")


def take(course, who, name, path, alone):
    "Copy a submission into the course; what is wrong with it, empty if nothing."
    _clear(course, who, name)
    place = course/"submitted"/who/name
    try:
        refuse_large(path)
        collect(path, place, alone)
        mine = (place/path.name).rename(place/f"{name}.ipynb")
        tame(mine, course/"release"/name/f"{name}.ipynb")
    except TooLarge as error:
        return f"{UNREADABLE} {error}"
    except Exception:
        return UNREADABLE
    return _autograde(course, who, name, None)


# --- the sandbox


class Sandbox:
    "Runs jobs in a process that has imported the course."
    def __init__(self, limits, boxed=True):
        self.limits, self.boxed = {**grade_sandbox.LIMITS, **limits}, boxed
        self.folder = Path(tempfile.mkdtemp(prefix="grade-"))
        self.count, self.lock = 0, Lock()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        env.pop("PYTHONSTARTUP", None)
        self.log = open(self.folder/"log", "w")
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT/"tools/grade_sandbox.py")], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log, text=True, env=env, cwd=self.folder)
        if self.process.stdout.readline() != "ready\n":
            said = (self.folder/"log").read_text()[-2000:]
            raise RuntimeError(f"the sandbox did not start:\n{said}")

    def run(self, folder, cells, fresh=False):
        "Outputs of cells, run in turn in a copy of a folder; fresh: no cell is a student's."
        with self.lock:
            self.count += 1
            place = self.folder/str(self.count)
        shutil.copytree(folder, place/"work")
        for item in (place/"work").rglob("*"):
            item.chmod(0o755 if item.is_dir() else 0o644)
        result = place/"result.json"
        job = dict(folder=str(place/"work"), result=str(result), cells=cells, limits=self.limits,
                   boxed=self.boxed, fresh=fresh)
        with self.lock:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        deadline = time.monotonic() + self.limits["seconds"] + 20
        while not result.exists() and time.monotonic() < deadline:
            time.sleep(.02)
        found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {
            **ZERO, "why": "its supervisor was killed"}
        shutil.rmtree(place, ignore_errors=True)
        return found

    def close(self, patience=30):  # seconds
        "End the process; on a busy machine by force, for the results are in."
        self.process.stdin.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def is_graded(cell):
    return bool(cell.metadata.get("nbgrader", {}).get("grade"))


def run_notebook(sandbox, path, fresh):
    "cell index -> outputs and value, and what went wrong."
    cells = nbformat.read(path, 4).cells
    code = [i for i, cell in enumerate(cells) if cell.cell_type == "code"]
    apart = [i for i in code if cells[i].metadata.get("nbgrader", {}).get("grade_id") in fresh]
    hers = [i for i in code if i not in apart]
    results, whys, seconds = {}, [], 0.
    for indices in [hers, apart] if apart else [hers]:
        job = [dict(source=cells[i].source, grade=is_graded(cells[i])) for i in indices]
        found = sandbox.run(path.parent, job, fresh=indices is apart)
        results |= dict(zip(indices, found["cells"]))
        whys += [found["why"]] if found["why"] else []
        if indices is apart and NO_DATA in json.dumps(found["cells"]):
            whys.append(f"{NO_DATA}: its data set is missing here")
        seconds += found["seconds"]
    return dict(results=results, why="; ".join(whys), seconds=seconds)


# --- nbgrader


def _preprocessor(runs):
    "nbgrader's step of execution, with the outputs that came from the sandbox."
    from nbgrader.preprocessors import NbGraderPreprocessor

    class Outputs(NbGraderPreprocessor):
        def preprocess(self, nb, resources):
            told = resources["nbgrader"]
            run = runs[told["student"], told["assignment"]]
            blank = not_attempted(nb.cells)
            for i, cell in enumerate(nb.cells):
                if cell.cell_type == "code":
                    outputs = graded(cell, run["results"].get(i), run["why"], i in blank)
                    cell.outputs = [nbformat.from_dict(output) for output in outputs]
            return nb, resources

    return Outputs


def not_attempted(cells):
    "Indices of graded cells whose answer is as it was handed out."
    found, blank = set(), False
    for i, cell in enumerate(cells):
        if cell.metadata.get("nbgrader", {}).get("solution"):
            blank = bool(re.search(STUB, cell.source))
        elif is_graded(cell) and blank:
            found.add(i)
            blank = False
    return found


def graded(cell, found, why, blank=False):
    "The outputs of a cell as nbgrader reads them: a graded one ends in its points or in an error."
    if blank and not (found and found["value"]):
        return [grade_sandbox._error("NotAttempted", "not attempted: this question's answer is as "
                                     "it was handed out")]
    if found is None:
        return [grade_sandbox._error("NotRun", why or "the cell did not run")]
    outputs, value = found["outputs"], found["value"]
    if not is_graded(cell):
        return outputs
    most = float(cell.metadata.nbgrader.points)
    if any(output["output_type"] == "error" for output in outputs):
        return outputs
    if type(value) is not float or not 0 <= value <= most:
        return [*outputs, grade_sandbox._error("NoPoints", f"{value!r} is no number of points")]
    points = dict(output_type="execute_result", metadata={}, execution_count=1,
                  data={"text/plain": repr(value)})
    return [*outputs, points]


def _autograde(course, who, name, execute):
    "Let nbgrader grade one submission; what it says if it cannot."
    from nbgrader.converters import Autograde
    from nbgrader.preprocessors import Execute
    config = assign.settings(course, name, who)
    usual = Autograde.autograde_preprocessors.default_args[0]
    steps = [execute if step is Execute else step for step in usual] if execute else []
    try:
        assign.convert(Autograde, config, autograde_preprocessors=steps)
    except RuntimeError:
        return UNREADABLE
    path = course/"autograded"/who/name/f"{name}.ipynb"
    return "" if path.exists() else UNREADABLE


def _zero(course, who, name):
    "Write zero into the gradebook: what is not graded has no points, nor those of a former try."
    from nbgrader.api import Gradebook
    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        book.update_or_create_student(who)
        submission = book.update_or_create_submission(name, who)
        for notebook in submission.notebooks:
            for grade in notebook.grades:
                grade.auto_score, grade.needs_manual_grade = 0, False
        book.db.commit()


def scores(course, who, name):
    "(grade id, points, most) of each question of a submission, from the gradebook."
    from nbgrader.api import Gradebook
    with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
        notebook = book.find_submission_notebook(name, name, who)
        grades = [(g.name, g.score or 0., g.max_score) for g in notebook.grades]
    return sorted(grades)


def _note(course, who, name, why):
    "What to say of a submission: what went wrong, and which questions ended in no points, and why."
    cells = nbformat.read(course/"autograded"/who/name/f"{name}.ipynb", 4).cells
    ended = {question: "its cell is missing" for question, *_ in scores(course, who, name)}
    for cell in filter(is_graded, cells):
        errors = [o.ename if o.ename.isidentifier() else "an error" for o in cell.outputs
                  if o.output_type == "error"]  # she may call a class whatever she likes
        ended[cell.metadata.nbgrader.grade_id] = errors[0] if errors else ""
    found = {}
    for question, said in ended.items():
        said = {"NotAttempted": "not attempted", "NotRun": ""}.get(said, said)
        found.setdefault(said, []).append(question.split("-")[-1])
    said = [f"{said}: {', '.join(asked)}" for said, asked in found.items() if said]
    return "; ".join(filter(None, (why, *said)))


def _feedback(course, who, name):
    "Write the page that the student gets back; grades do not hang on it. What went wrong."
    from nbgrader.converters import GenerateFeedback
    try:
        assign.convert(GenerateFeedback, assign.settings(course, name, who))
    except RuntimeError as error:
        return f"no feedback page: {str(error).splitlines()[0][:200]}"
    return ""


def _clear(course, who, name):
    for made in ("submitted", "autograded"):
        folder = course/made/who/name
        if folder.exists():
            for item in folder.rglob("*"):
                item.chmod(0o755 if item.is_dir() else 0o644)
            shutil.rmtree(folder)


# --- all of it


def grade(folder, out, jobs=2, limits={}, boxed=True, feedback=True, say=print):
    "Rows of the table: student, assignment, score, most, points of each question, note."
    found = find(folder)
    asked = {name for _, name in found}
    course = assign.make_course(Path(out)/"course", only=asked)
    flat = {path.parent for path in found.values()} & {Path(folder)}
    notes, runs = {}, {}
    for key, path in found.items():
        notes[key] = take(course, *key, path, path.parent in flat)
    readable = [key for key in found if not notes[key]]
    fresh = {name: assign.fresh_cells(name) for name in asked}
    sandbox = Sandbox(limits, boxed)

    def work(key):
        who, name = key
        path = course/"autograded"/who/name/f"{name}.ipynb"
        runs[key] = run_notebook(sandbox, path, fresh[name])
        say(f"  {who} {name}: {runs[key]['seconds']:.1f} s {runs[key]['why']}")

    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(work, readable))
    finally:
        sandbox.close()
    execute = _preprocessor(runs)
    rows = []
    for key in found:
        _zero(course, *key)
        if key in runs:
            notes[key] = _autograde(course, *key, execute) or _note(course, *key, runs[key]["why"])
        if key not in runs or notes[key].startswith("nbgrader"):
            _zero(course, *key)
        elif feedback:
            notes[key] = "; ".join(filter(None, (notes[key], _feedback(course, *key))))
        rows.append((*key, scores(course, *key), notes[key]))
    write_tables(rows, Path(out), ignored(folder, found))
    return rows


def _number(x):
    return f"{x:.2f}".rstrip("0").rstrip(".")


def _printable(text):
    "Text in one line: without control characters, and without halves of characters."
    return "".join(c if c.isprintable() else "?" for c in str(text))


def _in_csv(text):
    "Text that no program takes for a formula."
    return "'"*str(text).startswith(("=", "+", "-", "@")) + _printable(text)


def _write_csv(path, lines):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([map(_in_csv, line) for line in lines])


def _as_text(text):
    "Text that Markdown shows as it is, in one cell."
    return _printable(text).replace("<", "&lt;").replace("|", "/")


def _in_markdown(head, lines):
    rows = [head, ["---"]*len(head), *lines]
    return ["| " + " | ".join(map(_as_text, row)) + " |" for row in rows]


def by_student(rows):
    "A line per student: points of each assignment, their sum, what it is out of, what is missing."
    names = sorted({name for _, name, _, _ in rows})
    most = {name: sum(grade[2] for grade in grades) for _, name, grades, _ in rows}
    found = {(who, name): (sum(grade[1] for grade in grades), note)
             for who, name, grades, note in rows}
    yield ["student", *names, "total", "of", "missing"]
    for who in sorted({who for who, *_ in rows}):
        points = [found.get((who, name), (None, ""))[0] for name in names]
        missing = [f"{name} not handed in" if (who, name) not in found
                   else f"{name} {found[who, name][1]}" for name in names
                   if (who, name) not in found or found[who, name][1]]
        yield [who, *("" if p is None else _number(p) for p in points),
               _number(sum(p or 0 for p in points)), _number(sum(most.values())),
               "; ".join(missing)]


def write_tables(rows, out, ignored=()):
    "students.csv and grades.md, a line per student; grades.csv, a line per question."
    lines = [["student", "assignment", "question", "points", "of", "note"]]
    for who, name, grades, note in rows:
        lines += [[who, name, question, _number(points), _number(most), note]
                  for question, points, most in grades]
    _write_csv(out/"grades.csv", lines)
    students = list(by_student(rows))
    _write_csv(out/"students.csv", students)
    questions = [[who, name, ", ".join(f"{question.split('-')[-1]}: {_number(points)}"
                                       for question, points, _ in grades), note]
                 for who, name, grades, note in rows]
    text = [*_in_markdown(students[0], students[1:]), "",
            *_in_markdown(["student", "assignment", "points by question", "note"], questions)]
    if ignored:
        text += ["", "Not graded: no name says whose they are, or another has the same.", "",
                 *(f"- {_as_text(path)}" for path in ignored)]
    (out/"grades.md").write_text("\n".join(text) + "\n", encoding="utf-8")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("submissions", help="ada/a1.ipynb, ada/a1/a1.ipynb or ada_a1.ipynb")
    parser.add_argument("--out", default="out/grades", help="gradebook, feedback and tables")
    parser.add_argument("--jobs", type=int, default=2, help="submissions at a time")
    parser.add_argument("--seconds", type=int, default=300, help="for one notebook")
    parser.add_argument("--memory", type=int, default=3000, help="MB beyond the libraries")
    parser.add_argument("--unprotected", action="store_true", help="run without the box")
    args = parser.parse_args(argv)
    if not Path(args.submissions).is_dir():
        return f"no folder {args.submissions!r}: make grade SUBMISSIONS=dir"
    if not find(args.submissions):
        return (f"{args.submissions} holds no notebook of {', '.join(assign.names())}: "
                "they are called ada/a1.ipynb, ada/a1/a1.ipynb or ada_a1.ipynb")
    lacks = grade_box.missing()
    if lacks and (not args.unprotected or os.getuid() == 0):
        return lacks
    warnings.filterwarnings("ignore", module="nbgrader")  # of SQLAlchemy, about its queries
    began = time.monotonic()
    out = Path(args.out).resolve()
    limits = dict(seconds=args.seconds, memory_mb=args.memory)
    rows = grade(Path(args.submissions).resolve(), out, args.jobs, limits, not args.unprotected)
    print((out/"grades.md").read_text())
    print(f"{len(rows)} submissions in {time.monotonic() - began:.0f} s. Tables: {args.out}/"
          f"students.csv, grades.csv, grades.md; gradebook and feedback: {args.out}/course")


if __name__ == "__main__":
    try:
        import nbgrader  # noqa: F401
    except ImportError:
        sys.exit(assign.NEEDED)
    sys.exit(main())
