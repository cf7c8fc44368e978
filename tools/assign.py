"""Make the copies of the assignments: `python tools/assign.py [FOLDER]`.

From assignments/a*.ipynb nbgrader makes FOLDER/student (what students get), FOLDER/solution (what
the instructor keeps) and FOLDER/nbgrader (a course that nbgrader itself understands, with its
gradebook). FOLDER is out/assignments unless you name one.
Whatever was made before is made again; grades in the gradebook stay.
"""
import io
import logging
import os
import shutil
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT/"assignments"
KIT = {"a4": ("kit.py", "lab.py"), "a5": ("kit.py", "leaderboard.py")}  # beside the notebook
NEEDED = "nbgrader is not installed: make test-teach, make assignments or make grade install it"


def names(source=SOURCE):
    "The assignments, in order."
    return sorted(path.stem for path in source.glob("a*.ipynb"))


def fresh_cells(name, source=SOURCE):
    "Grade ids of the cells that are to see a student's files, but none of her code."
    cells = nbformat.read(source/f"{name}.ipynb", 4).cells
    return {c.metadata.nbgrader.grade_id for c in cells if "fresh" in c.metadata.get("tags", [])}


def settings(folder, name="*", student="*"):
    "nbgrader's settings for a course in a folder."
    from traitlets.config import Config
    config = Config()
    course = config.CourseDirectory
    course.root, course.assignment_id, course.student_id = str(folder), name, student
    course.db_url = f"sqlite:///{folder}/gradebook.db"
    config.HTMLExporter.sanitize_html = True  # of feedback pages: no script of a student's runs
    config.ClearSolutions.code_stub = {"python": "# YOUR CODE HERE\n..."}
    config.ClearSolutions.begin_solution_delimeter = "### BEGIN SOLUTION"
    config.ClearSolutions.end_solution_delimeter = "### END SOLUTION"
    return config


def convert(kind, config, **changes):
    "Run one of nbgrader's converters; what it logs is kept for its error."
    # RuntimeError: it failed
    from nbgrader.coursedir import CourseDirectory
    said = io.StringIO()
    log = logging.Logger("nbgrader")
    log.addHandler(logging.StreamHandler(said))
    converter = kind(coursedir=CourseDirectory(config=config), config=config, log=log)
    converter.force = True
    for name, value in changes.items():
        setattr(converter, name, value)
    try:
        converter.start()
    except (Exception, SystemExit) as error:
        told = f"{type(error).__name__}: {error}\n{said.getvalue()[-3000:]}"
        raise RuntimeError(f"{kind.__name__} failed: {told}") from error


def copy_source(folder, name, source=SOURCE):
    "Lay out an assignment as nbgrader wants it."
    place = folder/"source"/name
    place.mkdir(parents=True, exist_ok=True)
    for file in (f"{name}.ipynb", *KIT.get(name, ("kit.py",))):
        shutil.copy(source/file, place/file)


def make_course(folder, source=SOURCE, only=None):
    "Write FOLDER/source, release, solution and gradebook.db, of all assignments or of some."
    from nbgrader.converters import GenerateAssignment, GenerateSolution
    from nbgrader.preprocessors import Execute, InstantiateTests
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # alembic

    def steps(kind):  # without those that start a kernel
        usual = kind.preprocessors.default_args[0]
        return [step for step in usual if step not in (InstantiateTests, Execute)]

    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in names(source) if only is None else sorted(only):
        copy_source(folder, name, source)
        for kind in (GenerateAssignment, GenerateSolution):
            convert(kind, settings(folder, name, "."), preprocessors=steps(kind))
    return folder


def make(folder=ROOT/"out/assignments"):
    "Write all copies."
    course = make_course(folder/"nbgrader")
    for kind, made in (("student", "release"), ("solution", "solution")):
        shutil.rmtree(folder/kind, ignore_errors=True)
        shutil.copytree(course/made, folder/kind)
    return folder


if __name__ == "__main__":
    try:
        import nbgrader  # noqa: F401
    except ImportError:
        sys.exit(NEEDED)
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT/"out/assignments"
    made = make(where.resolve())
    for part, what in (("student", "to hand out"), ("solution", "to keep"),
                       ("nbgrader", "a course for nbgrader, with its gradebook")):
        print(f"{where}/{part}: {', '.join(names())}, {what}")
