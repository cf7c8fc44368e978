"""Grade a folder of notebooks: `python tools/grade.py SUBMISSIONS [--out FOLDER]`.

nbgrader does the grading, with a gradebook; what a student wrote runs elsewhere, one process for
each submission, in a box (see grade_box.py), and only its outputs come back here. The tables come
from the gradebook (grade_table.py): another folder adds to them. Without SUBMISSIONS they are
written anew, for instance after points were given by hand.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from threading import Lock

import assign
import grade_box
import grade_page
import grade_sandbox
import grade_table
import nbformat

ROOT = assign.ROOT
NO_DATA = "cannot be verified on this machine"  # as in assignments/leaderboard.py
BIG = 100*2**20  # bytes: larger files are not copied
MOST, LARGE = 2000, 5*2**20  # cells, bytes of a notebook that somebody has written
UNREADABLE = "nbgrader cannot read it: is it a notebook?"
UNGRADED = "not graded: {}. Look why, and grade it again"
ZERO = dict(cells=[], seconds=0., begun=False)
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
        flat = re.fullmatch(rf"(.+?)[-_ ]({known})(?:-\d+)?\.ipynb", parts[0])  # a1-2: again
        if len(parts) == 1 and flat:                                     # ada_a1.ipynb
            who, name = flat.groups()
        elif re.fullmatch(known, path.stem) and parts[1:-1] in ((), (path.stem,)) and parts[1:]:
            # ada/a1.ipynb, ada/a1/a1.ipynb
            who, name = parts[0], path.stem
        else:
            continue
        found[grade_table.as_id(who), name] = path
    return found


def of_roster(found, roster):
    "(student, assignment) -> notebook, by the roster; of several the last one that was written."
    known = {}
    for (who, name), path in sorted(found.items(), key=lambda pair: pair[1].stat().st_mtime):
        student = roster.student(who)
        if student:
            known[student, name] = path
    return known


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
        when = when_handed_in(path)
        collect(path, place, alone)
        mine = (place/path.name).rename(place/f"{name}.ipynb")
        tame(mine, course/"release"/name/f"{name}.ipynb")
        for file in assign.KIT.get(name, ("kit.py",)):  # ours: hers may say anything
            shutil.copyfile(assign.SOURCE/file, place/file)
        (place/"timestamp.txt").write_text(f"{when:%Y-%m-%d %H:%M:%S} UTC")
    except TooLarge as error:
        return f"{UNREADABLE} {error}"
    except Exception:
        return UNREADABLE
    return ""


def when_handed_in(path):
    "In UTC: the time of the file, or a later one that nbgrader has written beside it."
    when = grade_table.in_utc(datetime.fromtimestamp(path.stat().st_mtime))
    beside = path.with_name("timestamp.txt")
    if beside.is_file() and not beside.is_symlink():
        text = beside.read_text(errors="replace")[:40].replace(" UTC", "+00:00").strip()
        with suppress(ValueError):
            when = max(when, grade_table.in_utc(datetime.fromisoformat(text)))
    return when


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

    def run(self, folder, cells, fresh=False, imports=""):
        "Outputs of cells, run in turn in a copy of a folder; fresh: no cell is a student's."
        with self.lock:
            self.count += 1
            place = self.folder/str(self.count)
        shutil.copytree(folder, place/"work")
        for item in (place/"work").rglob("*"):
            item.chmod(0o755 if item.is_dir() else 0o644)
        result = place/"result.json"
        job = dict(folder=str(place/"work"), result=str(result), cells=cells, limits=self.limits,
                   boxed=self.boxed, fresh=fresh, imports=imports)
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


def told(cell):
    return cell.metadata.get("nbgrader", {})


def is_judged(cell):
    "Whether a check gives the points of a cell; those of a plot or a paragraph a person gives."
    return bool(told(cell).get("grade")) and not told(cell).get("solution")


class Questions:
    "What the grader knows of an assignment: the hidden checks, and the course's own answers."
    def __init__(self, name):
        cells = nbformat.read(assign.SOURCE/f"{name}.ipynb", 4).cells
        self.source = {told(cell)["grade_id"]: cell.source for cell in cells if told(cell)}
        self.fresh = assign.fresh_cells(name)
        self.imports = "\n".join(cell.source for cell in cells
                                 if cell.cell_type == "code" and not told(cell))
        self.answers = {}  # question -> (function, how it is written)
        for cell in cells:
            if told(cell).get("solution") and not told(cell).get("grade"):
                question, _, function = told(cell)["grade_id"].rpartition("-")
                self.answers[question] = function, cell.source

    def job(self, cell, theirs):
        "What the sandbox is told of a cell; theirs: what she has written for the question."
        question = told(cell).get("grade_id")
        source = self.source[question] if told(cell).get("locked") else cell.source
        task = dict(source=source, grade=is_judged(cell))
        if not task["grade"] or question not in self.answers:
            return task
        function, reference = self.answers[question]
        needs = self.called(reference + theirs) - {function}
        return {**task, "function": function, "reference": reference, "needs": sorted(needs),
                "points": float(told(cell).points)}

    def called(self, source):
        "Names of answers that some code calls, or that those call in their turn."
        found, words = set(), set(re.findall(r"\w+", source))
        while True:
            new = {name: text for name, text in self.answers.values() if name in words - found}
            if not new:
                return found
            found |= new.keys()
            words |= set(re.findall(r"\w+", "".join(new.values())))


def run_notebook(sandbox, path, questions):
    "cell index -> outputs and value, what went wrong, and whether her first cell was reached."
    cells = nbformat.read(path, 4).cells
    jobs, theirs = {}, ""
    for i, cell in enumerate(cells):
        if cell.cell_type == "code":
            theirs = cell.source if told(cell).get("solution") else theirs
            jobs[i] = questions.job(cell, theirs)
    apart = [i for i in jobs if told(cells[i]).get("grade_id") in questions.fresh]
    hers = [i for i in jobs if i not in apart]
    results, whys, seconds, begun = {}, [], 0., True
    for indices in [hers, apart] if apart else [hers]:
        found = sandbox.run(path.parent, [jobs[i] for i in indices], fresh=indices is apart,
                            imports=questions.imports)
        results |= dict(zip(indices, found["cells"]))
        whys += [found["why"]] if found["why"] else []
        begun = begun and found["begun"]
        if indices is apart and NO_DATA in json.dumps(found["cells"]):
            whys.append(f"{NO_DATA}: its data set is missing here")
            begun = False
        seconds += found["seconds"]
    return dict(results=results, why="; ".join(whys), seconds=seconds, begun=begun)


# --- nbgrader


def _preprocessor(run):
    "nbgrader's step of execution, with the outputs that came from the sandbox."
    from nbgrader.preprocessors import NbGraderPreprocessor

    class Outputs(NbGraderPreprocessor):
        def preprocess(self, nb, resources):
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
        if told(cell).get("solution"):
            blank = bool(re.search(STUB, cell.source))
        elif is_judged(cell) and blank:
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
    if not is_judged(cell):
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
    steps = [execute if step is Execute else step for step in usual]
    try:
        assign.convert(Autograde, config, autograde_preprocessors=steps)
    except RuntimeError:
        return UNREADABLE
    path = course/"autograded"/who/name/f"{name}.ipynb"
    return "" if path.exists() else UNREADABLE


def _book(course):
    from nbgrader.api import Gradebook
    return closing(Gradebook(f"sqlite:///{course}/gradebook.db"))


def _zero(course, who, name):
    "Write zero into the gradebook: what is not graded has no points, nor those of a former try."
    with _book(course) as book:
        book.update_or_create_student(who)
        submission = book.update_or_create_submission(name, who)
        for notebook in submission.notebooks:
            for grade in notebook.grades:
                grade.auto_score, grade.needs_manual_grade = 0, False
        book.db.commit()


def _set_due(course, due):
    "Write due dates into the gradebook, of assignments that are in it."
    with _book(course) as book:
        for assignment in book.assignments:
            if assignment.name in due:
                book.update_or_create_assignment(assignment.name, duedate=due[assignment.name])


def _note(course, who, name, why):
    "What to say of a submission: what went wrong, and how questions ended that earned nothing."
    cells = nbformat.read(course/"autograded"/who/name/f"{name}.ipynb", 4).cells
    given = {cell.source for cell in nbformat.read(course/"release"/name/f"{name}.ipynb", 4).cells}
    with _book(course) as book:
        asked = [grade.name for grade in book.find_submission_notebook(name, name, who).grades]
    looked = grade_table.suspicions(cells, given, name)
    return grade_table.note_of(cells, sorted(asked), why, looked)


def _feedback(course, who, name):
    "Write the page that the student gets back."
    cells = nbformat.read(course/"autograded"/who/name/f"{name}.ipynb", 4).cells
    given = nbformat.read(course/"release"/name/f"{name}.ipynb", 4).cells
    with _book(course) as book:
        notebook = book.find_submission_notebook(name, name, who)
        said = {comment.name: comment.comment or "" for comment in notebook.comments}
        grades = {grade.name: (grade.score or 0., grade.max_score, grade.needs_manual_grade,
                               said.get(grade.name, "")) for grade in notebook.grades}
    title = re.search(r"(?m)^# (.+)$", given[0].source)
    page = grade_page.page(f"{title[1] if title else name}", cells,
                           {cell.source for cell in given}, grades)
    place = course/"feedback"/who/name
    place.mkdir(parents=True, exist_ok=True)
    (place/f"{name}.html").write_text(page, encoding="utf-8", errors="replace")


def _clear(course, who, name):
    for made in ("submitted", "autograded"):
        folder = course/made/who/name
        if folder.exists():
            for item in folder.rglob("*"):
                item.chmod(0o755 if item.is_dir() else 0o644)
            shutil.rmtree(folder)


# --- all of it


class Bar:
    "How far the work has come, and how long the rest will take."
    def __init__(self, total, say):
        self.total, self.say, self.done, self.began = total, say, 0, time.monotonic()

    def step(self, what):
        self.done += 1
        self.say(f"{self.text(time.monotonic() - self.began)}  {what}")

    def text(self, seconds):
        "After so many seconds: ` 37 of 200 ███░░░░ about 12 min left`."
        full = 24*self.done//self.total
        left = seconds/self.done*(self.total - self.done)
        told = f"about {max(1, round(left/60))} min left" if self.done < self.total else "done"
        return f"{self.done:>4} of {self.total} {'█'*full}{'░'*(24 - full)} {told}"


def _file_of(name, folder, out):
    "roster.csv or due.csv of a class: the newest one is kept beside the tables."
    if folder and (folder/name).is_file():
        out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder/name, out/name)
    return out/name if (out/name).is_file() else None


def _ungraded(course, who, name):
    "Take a submission out of the gradebook: points that nobody has earned or lost are no zero."
    from nbgrader.api import MissingEntry
    with _book(course) as book, suppress(MissingEntry):
        book.remove_submission(name, who)


def enter(course, who, name, run, feedback):
    "Write what came of a submission into the gradebook; what the table says of it."
    if not run["begun"]:
        _ungraded(course, who, name)
        return UNGRADED.format(run["why"])
    _zero(course, who, name)
    said = _autograde(course, who, name, _preprocessor(run))
    if said:
        _zero(course, who, name)
        return said
    if feedback:
        _feedback(course, who, name)
    return _note(course, who, name, run["why"])


def grade(folder, out, jobs=2, limits={}, boxed=True, feedback=True, say=print):
    "Rows of the table, of the whole class: student, assignment, points of each question, note."
    folder, out = Path(folder), Path(out)
    everything = find(folder)
    roster = _file_of("roster.csv", folder, out)
    found = of_roster(everything, grade_table.Roster(roster)) if roster else everything
    asked = {name for _, name in found}
    course = assign.make_course(out/"course", only=asked)
    flat = {path.parent for path in found.values()} & {folder}
    notes = {key: take(course, *key, path, path.parent in flat) for key, path in found.items()}
    for key in [key for key in found if notes[key]]:
        _zero(course, *key)
    questions = {name: Questions(name) for name in asked}
    sandbox = Sandbox(limits, boxed)
    readable = [key for key in found if not notes[key]]
    bar = Bar(max(1, len(readable)), say)

    def work(key):
        who, name = key
        path = course/"submitted"/who/name/f"{name}.ipynb"
        return run_notebook(sandbox, path, questions[name])

    try:
        with ThreadPoolExecutor(jobs) as pool:
            running = {pool.submit(work, key): key for key in readable}
            for done in as_completed(running):
                key, run = running[done], done.result()
                notes[key] = enter(course, *key, run, feedback)
                bar.step(f"{' '.join(key)}: {run['seconds']:.0f} s {run['why']}")
    finally:
        sandbox.close()
        grade_table.add_notes(course, {"/".join(key): note for key, note in notes.items()})
    return write(folder, out, ignored(folder, found))


def write(folder, out, lost=()):
    "Write the tables of a class from its gradebook; their rows."
    course, roster = out/"course", _file_of("roster.csv", folder, out)
    due = _file_of("due.csv", folder, out)
    if due:
        _set_due(course, grade_table.due_dates(due))
    rows = grade_table.rows_of(course)
    lines = grade_table.standings(rows, course)
    same = grade_table.twins(lines)
    rows = [(who, name, grades, "; ".join(filter(None, (note, "suspected cheating: the same run as "
             + ", ".join(same[who]) if name == "a5" and who in same else ""))))
            for who, name, grades, note in rows]
    grade_table.write_leaderboard(lines, out)
    grade_table.write_tables(rows, out, lost, grade_table.Roster(roster).names if roster else {})
    return rows


def _show(text):
    "A line that the next one replaces, on a terminal; a line of its own in a file."
    width = shutil.get_terminal_size().columns - 1
    end = "\r" if sys.stderr.isatty() else "\n"
    print(grade_table._printable(text)[:width].ljust(width), end=end, file=sys.stderr, flush=True)


def _arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("submissions", nargs="?", default="",
                        help="ada/a1.ipynb, ada/a1/a1.ipynb or ada_a1.ipynb; roster.csv, due.csv; "
                             "without it the tables are written from the gradebook")
    parser.add_argument("--out", default="out/grades", help="gradebook, feedback and tables")
    parser.add_argument("--jobs", type=int, default=2, help="submissions at a time")
    parser.add_argument("--seconds", type=int, default=300, help="for one notebook")
    parser.add_argument("--memory", type=int, default=3000, help="MB beyond the libraries")
    parser.add_argument("--unprotected", action="store_true", help="run without the box")
    return parser.parse_args(argv)


def main(argv=None):
    args = _arguments(argv)
    out = Path(args.out).resolve()
    warnings.filterwarnings("ignore", module="nbgrader")  # of SQLAlchemy, about its queries
    if not args.submissions and (out/"course/gradebook.db").is_file():
        write(None, out)
        print((out/"grades.md").read_text())
        return
    if not Path(args.submissions).is_dir() or not args.submissions:
        return f"no folder {args.submissions!r}: make grade SUBMISSIONS=dir"
    if not find(args.submissions):
        return (f"{args.submissions} holds no notebook of {', '.join(assign.names())}: "
                "they are called ada/a1.ipynb, ada/a1/a1.ipynb or ada_a1.ipynb")
    lacks = grade_box.missing()
    if lacks and (not args.unprotected or os.getuid() == 0):
        return lacks
    began = time.monotonic()
    limits = dict(seconds=args.seconds, memory_mb=args.memory)
    rows = grade(Path(args.submissions).resolve(), out, args.jobs, limits, not args.unprotected,
                 say=_show)
    print((out/"grades.md").read_text())
    print(f"{len(rows)} hand-ins in the gradebook, {time.monotonic() - began:.0f} s. Tables: "
          f"{args.out}/students.csv, grades.csv, grades.md, leaderboard.md; gradebook and "
          f"feedback: {args.out}/course")


if __name__ == "__main__":
    try:
        import nbgrader  # noqa: F401
    except ImportError:
        sys.exit(assign.NEEDED)
    sys.exit(main())
