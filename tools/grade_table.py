"""What a class has earned: the tables that come from the gradebook, and their words.

The gradebook holds points, times and due dates; notes.json beside it holds what the table says of a
hand-in. So a folder of late work adds to the class, and does not replace it.
"""
import ast
import csv
import json
import re
import unicodedata
from contextlib import closing
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path

import nbformat

WORDS = {  # what a question ended in -> what the table says of it
    "NotAttempted": "not attempted",
    "Missing": "the cell is missing",
    "TooMuch": "too slow, perhaps an endless loop, and stopped",
    "Ended": "crashed: the cell ended its process",
    "MemoryError": "out of memory",
    "SyntaxError": "syntax error",
    "IndentationError": "syntax error",
    "TabError": "syntax error",
    "NameError": "a name is not defined",
    "NoPoints": "no answer that can be judged",
    "NotRun": "did not run"}
FORGED = re.compile(r"(?:forged|re-seeded|the seed '[^']*' was given|"
                    r"[\w.]+, line \d+, is damaged, or was edited)[^;\n`]*")
STRANGE = {"checks", "gc", "ctypes", "inspect", "__main__", "grade_student", "sys._getframe"}
BORROWED = {"a3": {"dp_course.training", "dp_course.gradients", "opacus"}}


# --- who


def _words(text):
    "The words and numbers of a name, whatever its accents, capitals and separators are."
    plain = unicodedata.normalize("NFKD", str(text))
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    return re.findall(r"[^\W_]+", plain.casefold())


class Roster:
    "Who is in the class, and what the learning platforms call her."
    def __init__(self, path):
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
        if not rows or not {"name", "id"} <= rows[0].keys():
            raise ValueError(f"{path}: the first line names its columns, name and id among them")
        self.names = {as_id(row["id"]): row["name"] for row in rows}
        self.called = {as_id(row["id"]): [key for key in map(_words, row.values()) if key]
                       for row in rows}

    def student(self, who):
        "The id of the one student whose name or id is in the name of a file; None: nobody's."
        words = _words(who)
        hits = [student for student, keys in self.called.items()
                if any(_is_in(key, words) for key in keys)]
        return hits[0] if len(hits) == 1 else None


def as_id(text):
    "A name that nbgrader can use as one of a folder."
    return re.sub(r"[^\w.@-]", "_", text.strip()).strip(".")


def _is_in(key, words):
    "Whether a name is among some words: each of its parts, or all of them written together."
    turned = {"".join(key[i:] + key[:i]) for i in range(len(key))}  # Canvas: lovelaceada
    return set(key) <= set(words) or bool(turned & set(words))


def due_dates(path):
    "assignment -> when it is due, in UTC; from lines `a1,2026-12-01 18:00`."
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file) if len(row) == 2 and row[0] != "assignment"]
    return {name.strip(): in_utc(datetime.fromisoformat(when.strip())) for name, when in rows}


def in_utc(time):
    "A time without a zone, as nbgrader keeps it; one that has none is this machine's."
    return time.astimezone(timezone.utc).replace(tzinfo=None)


# --- what is said of a hand-in


def errors_in(cell):
    "Names of the errors that a cell ended in; she may call a class whatever she likes."
    return [output.ename if output.ename.isidentifier() else "an error"
            for output in cell.get("outputs", ()) if output.output_type == "error"]


def in_words(error):
    return WORDS.get(error, f"ended in an error ({error})" if error else "")


def _said(cell):
    return "\n".join(str(output.get("data", {}).get("text/plain", ""))
                     for output in cell.get("outputs", ()))


def endings(cells, questions):
    "question -> what it ended in, in words; empty where it has been judged."
    ended, cause = dict.fromkeys(questions, WORDS["Missing"]), ""
    for cell in cells:
        told = cell.metadata.get("nbgrader", {})
        errors = errors_in(cell)
        if told.get("solution"):
            cause = errors[0] if errors else ""
        if not told.get("grade"):
            continue
        said = _said(cell)
        forged = FORGED.search(said)
        errors = errors or ["TooMuch"]*("raised TooMuch" in said)
        first = cause if errors and errors[0] == "NameError" and cause else (errors or [""])[0]
        ended[told["grade_id"]] = f"suspected forgery ({forged[0]})" if forged else in_words(first)
        if told.get("solution"):
            ended[told["grade_id"]] = ""  # a person looks at it
        else:
            cause = ""
    return ended


def suspicions(cells, given, name):
    "What her cells reach for that no answer needs, in words."
    found = set()
    for cell in cells:
        if cell.cell_type == "code" and not cell.metadata.get("nbgrader", {}).get("locked"):
            if cell.source not in given:
                found |= _reached(cell.source)
    strange = sorted(found & STRANGE | {word for word in found if word.startswith("/")})
    borrowed = sorted(word for word in found for whole in BORROWED.get(name, ())
                      if word == whole or word.startswith(whole + "."))
    said = [f"suspected cheating, look at it: reaches for {', '.join(strange)}"] if strange else []
    return said + ([f"look at it: borrows from {', '.join(borrowed)}"] if borrowed else [])


def _reached(source):
    "Modules, and paths of the kernel, that a cell names."
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "__import__":
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
        elif isinstance(node, ast.Attribute) and node.attr == "_getframe":
            found.add("sys._getframe")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"/proc\b|/sys/fs\b", node.value))
    return {str(word) for word in found} | {str(word).split(".")[0] for word in found}


def note_of(cells, questions, why, looked):
    "What the table says of a hand-in."
    by_words = {}
    for question, said in endings(cells, questions).items():
        by_words.setdefault(said, []).append(question.split("-")[-1])
    said = [f"{words}: {', '.join(asked)}" for words, asked in by_words.items() if words]
    return "; ".join(filter(None, (why, *said, *looked)))


# --- what the gradebook holds


def lateness(seconds):
    "A time in words: `2 d 3 h`."
    minutes = max(1, round(seconds/60))
    parts = (minutes//1440, "d"), (minutes//60 % 24, "h"), (minutes % 60, "min")
    return " ".join([f"{count} {unit}" for count, unit in parts if count][:2])


def notes_of(course):
    path = Path(course)/"notes.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def add_notes(course, notes):
    "Keep what is said of hand-ins, beside what was said of others."
    kept = {**notes_of(course), **notes}
    (Path(course)/"notes.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False),
                                           encoding="utf-8")


def rows_of(course):
    "(student, assignment, [(question, points, most)], note) of every hand-in of the class."
    from nbgrader.api import Gradebook
    notes, rows = notes_of(course), {}
    with closing(Gradebook(f"sqlite:///{course}/gradebook.db")) as book:
        for assignment in book.assignments:
            for submission in assignment.submissions:
                key = submission.student.id, assignment.name
                rows[key] = (*key, *_graded(submission, notes.get("/".join(key), "")))
    for key, note in notes.items():  # was not graded, and so has no points
        who, name = key.split("/")
        rows.setdefault((who, name), (who, name, None, note))
    return [rows[key] for key in sorted(rows)]


def _graded(submission, note):
    "The points of a submission, and what is said of it."
    grades = [grade for notebook in submission.notebooks for grade in notebook.grades]
    by_hand = sorted(grade.name.split("-")[-1] for grade in grades if grade.needs_manual_grade)
    late = submission.total_seconds_late
    said = (f"late by {lateness(late)}" if late > 0 else "", note,
            f"by hand: {', '.join(by_hand)}" if by_hand else "")
    return (sorted((grade.name, grade.score or 0., grade.max_score) for grade in grades),
            "; ".join(filter(None, said)))


# --- tables


def number(x):
    return f"{x:.2f}".rstrip("0").rstrip(".")


def _printable(text):
    "Text in one line: without control characters, and without halves of characters."
    return "".join(c if c.isprintable() else "?" for c in str(text))


def _in_csv(text):
    "Text that no program takes for a formula."
    return "'"*str(text).startswith(("=", "+", "-", "@")) + _printable(text)


def write_csv(path, lines):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([map(_in_csv, line) for line in lines])


_MARKUP = {ord(c): f"&#{ord(c)};" for c in "&<>[]|`*\\~"}  # of links, pictures, cells and code


def as_text(text):
    "Text that Markdown shows as it is, in one cell."
    return _printable(text).translate(_MARKUP)


def in_markdown(head, lines):
    rows = [head, ["---"]*len(head), *lines]
    return ["| " + " | ".join(map(as_text, row)) + " |" for row in rows]


def by_student(
    rows,      # of `rows_of`
    names={},  # student -> name, of a roster: who has handed in nothing is in the table, too
):
    "A line per student: points of each assignment, their sum, what it is out of, what is missing."
    tasks = sorted({name for _, name, *_ in rows})
    most = {name: sum(grade[2] for grade in grades)
            for _, name, grades, _ in rows if grades is not None}
    found = {(who, name): (grades and sum(grade[1] for grade in grades), note)
             for who, name, grades, note in rows}
    yield ["student", *["name"]*bool(names), *tasks, "total", "of", "missing"]
    for who in sorted({who for who, *_ in rows} | names.keys()):
        points = [found.get((who, name), (None, ""))[0] for name in tasks]
        missing = [f"{name} not handed in" if (who, name) not in found
                   else f"{name} {found[who, name][1]}" for name in tasks
                   if (who, name) not in found or found[who, name][1]]
        yield [who, *[names.get(who, "not on the roster")]*bool(names),
               *("" if p is None else number(p) for p in points),
               number(sum(p or 0 for p in points)), number(sum(most.values())), " · ".join(missing)]


def standings(rows, course):
    "A line per model of the leaderboard, the best first."
    found = []
    for who, name, _, note in rows:
        path = Path(course)/f"autograded/{who}/{name}/{name}.ipynb"
        if name == "a5" and path.is_file() and "suspected" not in note:
            lines = map(_standing, nbformat.read(path, 4).cells)
            found += [{"student": who, **line} for line in lines if line]
    return sorted(found, key=lambda line: -line["accuracy"])


def _standing(cell):
    "What the grader found out about a model; None: this cell does not say it."
    if cell.metadata.get("nbgrader", {}).get("grade_id") != "a5-4":
        return None
    for output in cell.outputs:
        said = str(output.get("data", {}).get("text/plain", ""))
        if said.startswith("{'accuracy'"):
            line = ast.literal_eval(said)
            return line if line["accuracy"] > 0 else None
    return None


def twins(lines):
    "student -> who has handed in the same run."
    by_run = groupby(sorted(lines, key=lambda line: line["run"]), key=lambda line: line["run"])
    same = [[line["student"] for line in group] for _, group in by_run]
    return {who: [other for other in group if other != who] for group in same if len(group) > 1
            for who in group}


def write_leaderboard(lines, out):
    "leaderboard.md: names are left out, so that it can be shown."
    if not lines:
        return
    columns = [column for column in lines[0] if column not in ("student", "run")]
    table = [[place, *(f"{line[c]:.2%}" if c == "accuracy" else line[c] for c in columns),
              line["run"][:6]] for place, line in enumerate(lines, 1)]
    text = ["# The private leaderboard", "",
            "Accuracy of the weights that the grader recomputed. You know your own run by the "
            "first letters of its stream, which `leaderboard.line` shows.", "",
            *in_markdown(["place", *columns, "run"], table)]
    (out/"leaderboard.md").write_text("\n".join(text) + "\n", encoding="utf-8")


def write_tables(rows, out, lost=(), names={}):
    "students.csv and grades.md, a line per student; grades.csv, a line per question."
    lines = [["student", "assignment", "question", "points", "of", "note"]]
    for who, name, grades, note in rows:
        lines += [[who, name, question, number(points), number(most), note]
                  for question, points, most in grades or ()]
    write_csv(out/"grades.csv", lines)
    students = list(by_student(rows, names))
    write_csv(out/"students.csv", students)
    questions = [[who, name, ", ".join(f"{question.split('-')[-1]}: {number(points)}"
                                       for question, points, _ in grades or ()), note]
                 for who, name, grades, note in rows]
    text = [*in_markdown(students[0], students[1:]), "",
            *in_markdown(["student", "assignment", "points by question", "note"], questions)]
    if lost:
        text += ["", "Not graded: the names of these files say nobody's, or several people's, or "
                 "another file counts. Rename them, or add the name to roster.csv.", "",
                 *(f"- {as_text(path)}" for path in lost)]
    (out/"grades.md").write_text("\n".join(text) + "\n", encoding="utf-8")
