"""Run notebooks that nobody has read yet: `python tools/grade_sandbox.py` reads jobs.

One process imports PyTorch and the course once, and forks a judge for each job, a line of JSON on
stdin. The student's cells run in a box of their own (grade_box.py, grade_student.py). Hidden checks
run with the judge and nowhere else: when one of them calls the student's function, the arguments
travel into the box, and the answer comes back as plain data.
What comes out is one JSON file per job: outputs of every cell.
"""
import ast
import base64
import builtins
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import grade_box
from grade_student import (  # noqa: F401
    ANSWER,
    Channel,
    Stopped,
    _error,
    _make_shell,
    encode,
    limit_memory,
    run_cell,
)

ROOT = Path(__file__).resolve().parent.parent
LIMITS = dict(seconds=300, cell_seconds=60, memory_mb=3000, file_mb=200, text=20_000)
MOST = 8*2**20  # bytes of outputs from one notebook
PICTURE, PIXELS = 2**20, 4*10**6  # bytes and pixels of one picture
ROOM = 2000  # MB of a box beside what its process may allocate: libraries, and files of the kernel
RESTARTS = 3  # of a student's process that ended before its cells had run
HIDDEN = "### BEGIN HIDDEN TESTS"
KIT = ("kit", "lab", "leaderboard")  # what students have, too


# --- what travels between judge and student


class Foreign:
    "An answer of a kind that no check asks for."
    def __init__(self, kind):
        self.kind = kind

    def __repr__(self):
        return f"an object of type {self.kind}"


WORDS = {"...": Ellipsis, "NotImplemented": NotImplemented}


def decode(said):
    "What `encode` was given; nothing that was sent is ever executed."
    import torch
    if type(said) is not dict:
        return said
    if "tensor" in said:
        dtype = getattr(torch, str(said["dtype"]))
        data = bytearray(base64.b64decode(said["tensor"]))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.zeros(0, dtype=dtype)
        return flat.reshape([int(n) for n in said["shape"]])
    (kind, inside), = said.items()
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(decode, inside))
    if kind == "dict":
        return {decode(key): decode(value) for key, value in inside}
    if kind == "array":
        return decode(inside).numpy()
    return WORDS[inside] if kind == "word" else Foreign(str(inside))


# --- the judge's side


def import_checks():
    import importlib
    sys.path.insert(0, str(ROOT/"assignments"))
    return [importlib.import_module(f"checks.{path.stem}")
            for path in sorted((ROOT/"assignments/checks").glob("a*.py"))]


def as_picture(said):
    "A picture that came as text, written anew; None: it is none."
    try:
        data = base64.b64decode(said, validate=True)
    except (TypeError, ValueError):
        return None
    if not data.startswith(b"\x89PNG\r\n\x1a\n") or not 24 < len(data) <= PICTURE:
        return None
    wide, high = (int.from_bytes(data[at:at + 4], "big") for at in (16, 20))
    return base64.b64encode(data).decode() if wide*high <= PIXELS else None


def shown_output(said, ours=False):
    "An output as it may be shown: of hers text and pictures, and nothing that looks like points."
    kind = said["output_type"]
    if kind == "error":
        return _error(str(said["ename"])[:80], str(said["evalue"]), str(said["traceback"][0]))
    if kind == "stream":
        return dict(output_type="stream", name="stdout", text=str(said["text"]))
    data = {str(key): str(value) for key, value in said["data"].items()
            if ours or key == "text/plain"}
    picture = as_picture(said["data"].get("image/png"))
    if picture:
        data["image/png"] = picture
    return dict(output_type="display_data", data=data, metadata={})


def raised(kind, told, base=""):
    "An exception of the same name; only Python's own plain ones are of the same type, or its base."
    own = getattr(builtins, base or kind, None)
    plain = isinstance(own, type) and issubclass(own, Exception) and own.__init__ in (
        Exception.__init__, ValueError.__init__, NameError.__init__)
    own = own if plain else Exception
    return (own if own.__name__ == kind else type(kind[:80], (own,), {}))(told[:500])


def no_alarm():
    "A check sets no alarm: its call would end here, and the next one would read this one's answer."
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


class Remote:
    "A student's function as a check sees it: it is called in her process."
    def __init__(self, judge, name):
        self.judge, self.__name__ = judge, name

    def __call__(self, *args):
        import torch
        judge, began = self.judge, time.monotonic()
        if judge.seconds_left() <= 0:
            judge.slow = "TooMuch", "more time than a question may take"
        if judge.slow:  # it would be interrupted again: the time is for the questions after this
            raise raised(*judge.slow)
        said = judge.ask("call", self.__name__, args, torch.initial_seed(), judge.seconds_left())
        judge.used += time.monotonic() - began
        print(str(said.get("printed", ""))[:1000], end="")
        if "raised" in said:
            judge.slow = said["raised"] if said["raised"][0] == "TooMuch" else None
            raise raised(*map(str, said["raised"]))
        return decode(said["value"])


class Forged(Exception):
    "An answer that nobody asked for."
    def __str__(self):
        return "suspected cheating: its process answered what it was not asked"


class Judge:
    "Has the student's cells run elsewhere, and runs the hidden checks itself."
    def __init__(self, channel, job):
        import cloudpickle
        from IPython.core.interactiveshell import InteractiveShell
        self.channel, self.limits, self.fresh = channel, job["limits"], job["fresh"]
        self.imports, self.owed = job.get("imports", ""), job.setdefault("owed", {})
        self.dumps, self.used, self.shell, self.room = cloudpickle.dumps, 0., None, MOST
        self.slow = None  # what was said when a call was interrupted
        if not self.fresh:
            for module in import_checks():
                cloudpickle.register_pickle_by_value(module)
            InteractiveShell.clear_instance()  # of the process before this one
            self.shell = _make_shell()

    def ask(self, *message, most=2*ANSWER):
        "What her process says to a message; every question has a word that its answer repeats."
        word = secrets.token_hex(8)
        self.channel.send(self.dumps((word, *message)))
        try:
            again, said = json.loads(self.channel.receive(most))
        except (ValueError, TypeError):
            raise Forged from None
        if again != word or type(said) is not dict:
            raise Forged
        return said

    def seconds_left(self):
        "Of the processor; three times as many of the clock."
        return self.limits["cell_seconds"] - self.used/3

    def hidden(self, code):
        "Run a hidden check: outputs, and the points that it ends in."
        names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
        for name in names - set(vars(builtins)):
            self.shell.user_ns[name] = Remote(self, name)
        self.used, self.slow = 0., None
        cell = dict(source=code, grade=True)
        return run_cell(self.shell, cell, {**self.limits, "cell_seconds": 0})

    def repeat(self, cell):
        "Run a cell once more, in a new process; its outputs are known."
        shown = cell["source"].partition(HIDDEN)[0]
        self.ask("run", dict(source=shown, grade=False), most=MOST)

    def cell(self, cell):
        "What comes of one cell; where an earlier answer is wrong it calls the course's."
        lent = {name: self.owed[name] for name in cell.get("needs", ()) if name in self.owed}
        if lent:
            self.ask("lend", self.imports, lent)
        found = self.judged(cell)
        if lent:
            self.ask("take back")
            found["outputs"].insert(0, dict(output_type="stream", name="stdout", text=LENT.format(
                ", ".join(lent))))
        owe(self.owed, cell, found["value"])
        return found

    def judged(self, cell):
        "What comes of one cell, and of the hidden check in it."
        shown, _, code = cell["source"].partition(HIDDEN)
        apart = cell["grade"] and not self.fresh
        task = dict(source=shown, grade=False) if apart else cell
        found = self.ask("run", task, most=self.room)
        self.room -= len(json.dumps(found))
        outputs = [shown_output(output, ours=self.fresh) for output in found["outputs"]]
        if not apart:
            return dict(outputs=outputs, value=found["value"])
        if any(output["output_type"] == "error" for output in outputs):
            return dict(outputs=outputs, value=None)
        if found.get("slow"):  # so would the hidden check be: its time is for the next questions
            why = _error("TooMuch", "more time than a cell may take")
            return dict(outputs=[*outputs, why], value=None)
        judged = self.hidden(code)
        if self.channel.over:
            raise Stopped
        return dict(outputs=outputs + judged["outputs"], value=judged["value"])


LENT = ("This question was judged with the course's own {}: yours has lost points already, and a "
        "mistake is paid for once.\n")


def owe(owed, cell, value):
    "Remember the course's function for questions that call one which has not earned all points."
    if cell.get("function") and (value is None or value < cell["points"]):
        owed[cell["function"]] = cell["reference"]


# --- both together


def begin(
    job,
    end,    # socket of the student's side
    given,  # folder of the submission
    cage,   # `grade_box.Cage`
):          # `subprocess.Popen`
    "Start the student's process, in its box unless the job says otherwise."
    fd = end.fileno()
    program = [sys.executable, ROOT/"tools/grade_student.py", fd]
    log = open(Path(job["result"]).with_name("student.log"), "w")
    settings = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    if not job["boxed"]:
        return subprocess.Popen(list(map(str, program)), cwd=given, pass_fds=[fd], **settings)
    with grade_box.calls_file() as calls:
        more = [ROOT/"assignments"] if job["fresh"] else []
        words = grade_box.command(program, given, calls.fileno(), more=more,
                                  megabytes=job["limits"]["file_mb"])
        return subprocess.Popen(cage.around(words), pass_fds=[fd, calls.fileno()], **settings)


def introduce(channel, job):
    "Tell the student's process what it is to do, and wait until it has imported what it needs."
    place = dict(given=grade_box.GIVEN, work=grade_box.WORK) if job["boxed"] else dict(
        given=job["folder"], work="")
    told = dict(limits=job["limits"], fresh=job["fresh"], checks=str(ROOT/"assignments"), **place)
    channel.send(json.dumps(told).encode())
    channel.receive(100)


def end_of(process, patience):
    "The status of a process that is about to end, or that is made to."
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its box everything in it goes
        return process.wait()


def why_ended(status, log, cell):
    "Why a process ended before its cells had run."
    where = f"in code cell {cell + 1} the process" if cell >= 0 else "before its first cell it"
    code = -status if status < 0 else status - 128 if status > 128 else 0
    if code:
        return f"{where} was killed by signal {code}"
    said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    more = f": {said[-1][:200]}" if status and said else ""
    return f"{where} ended itself (exit code {status}){more}" if status else (
        f"{where} ended itself")


def attempt(
    job,
    cells,     # what came of the cells so far: the next ones are added
    deadline,
):             # why it ended before its time, "" if it did not; whether a new start may help
    "Start a process, bring it to where the one before it ended, and run the cells that are left."
    ours, theirs = socket.socketpair()
    limits = job["limits"]
    cage = grade_box.Cage(limits["memory_mb"] + limits["file_mb"] + ROOM)
    process = begin(job, theirs, job["folder"], cage)
    theirs.close()
    channel, again, at = Channel(ours, deadline), len(cells), -1
    try:
        introduce(channel, job)
        job["reached"] = True  # from now on it is her code that runs
        judge = Judge(channel, job)
        for at, cell in enumerate(job["cells"]):
            if at >= again:
                cells.append(judge.cell(cell))
            elif not cells[at].get("ended"):
                judge.repeat(cell)
    except Stopped:
        pass
    except Forged as forged:
        channel.why = str(forged)
    except Exception as error:  # what came back was of another kind
        channel.why = channel.why or f"stopped: {type(error).__name__}: {error}"
    ours.close()
    status = end_of(process, 0 if channel.why else 1)
    cage.remove()
    if len(cells) == len(job["cells"]):
        return "", False
    log = Path(job["result"]).with_name("student.log")
    why = channel.why or why_ended(status, log, at)
    return why, not channel.why and at == len(cells)


def supervise(job):
    "Run one job to its end, whatever the end is; a cell that ends the process costs itself alone."
    began = time.monotonic()
    cells, whys = [], []
    while len(cells) < len(job["cells"]) and len(whys) <= RESTARTS:
        why, helps = attempt(job, cells, began + job["limits"]["seconds"])
        whys += [why] if why else []
        if why and not helps:
            break
        if why:
            owe(job.setdefault("owed", {}), job["cells"][len(cells)], None)
            cells.append(dict(outputs=[_error("Ended", why)], value=None, ended=True))
    result = dict(cells=cells, why="; ".join(whys), begun=job.get("reached", False),
                  seconds=round(time.monotonic() - began, 2))
    written = Path(job["result"] + ".part")
    text = json.dumps(result, ensure_ascii=False)
    written.write_bytes(text.encode(errors="replace"))  # half a character can be printed
    written.rename(job["result"])


def serve():
    "Read jobs from stdin, one a line, until it ends; answer `ready` first."
    sys.path.insert(0, str(ROOT/"assignments"))
    sys.path.insert(0, str(ROOT))
    import importlib

    import cloudpickle  # noqa: F401
    import IPython  # noqa: F401
    import torch

    for name in KIT:
        importlib.import_module(name)
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        while True:
            try:
                if not os.waitpid(-1, os.WNOHANG)[0]:
                    break
            except ChildProcessError:
                break
        if not os.fork():
            try:
                job = json.loads(line)
                patience = threading.Timer(job["limits"]["seconds"] + 10, os._exit, (1,))
                patience.daemon = True  # should an answer keep the judge himself busy
                patience.start()
                no_alarm()
                limit_memory(job["limits"]["memory_mb"])  # an answer may grow when it is compared
                supervise(job)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)


if __name__ == "__main__":
    serve()
