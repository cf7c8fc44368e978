"Processes forked from one that has the course in memory already, and the training command in one."
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from dp_course.cli.main import main


def server():
    "What starts such processes; all tests of a worker share it, and what it has imported."
    context = multiprocessing.get_context("forkserver")
    # an optimizer imports torch._dynamo when it is made: two seconds for each child, or once here
    context.set_forkserver_preload(["dp_course.cli.main", "torch._dynamo", "torch.distributed",
                                    "pytest"])
    return context


def _as_a_command(work, args, out, err, environment):
    "In the child: another environment and other files to write on, as a shell would give them."
    os.environ.clear()
    os.environ.update(environment)
    for path, number in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOCTTY, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.exit(work(*args))


def started(work, *args, out=os.devnull, err=os.devnull):
    "A process that runs `work(*args)`, writes to two files, and ends with the code it returns."
    child = server().Process(target=_as_a_command, args=(work, args, out, err, dict(os.environ)))
    child.start()
    return child


def run(work, *args):
    "Run `work(*args)` in such a process: its exit code and what it printed."
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder)/name for name in ("out", "err"))
        child = started(work, *args, out=out, err=err)
        child.join()
        return subprocess.CompletedProcess([work.__name__, *args], child.exitcode,
                                           out.read_text(), err.read_text())


def dp_train(*words, err):
    "Start the training command, with a terminal or a file to show its progress on."
    return started(main, [str(word) for word in words], err=err)
