"""Runs in the box: a student's cells, or those that see her files alone. No hidden check is here.

`python grade_student.py FD`: jobs come over the descriptor FD, and plain data go back.
"""
import base64
import io
import json
import numbers
import os
import pickle
import resource
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from decimal import Decimal
from pathlib import Path

ANSWER = 2**20  # bytes of one answer; the largest that a check asks for have a tenth of it


class TooMuch(Exception):
    pass


class Stopped(BaseException):
    "The other side has gone, or the time is over: no check may catch this."


class Channel:
    "Messages over a socket, with a deadline."
    def __init__(self, end, deadline=None):
        self.end, self.deadline, self.why, self.over = end, deadline, "", False

    def _stop(self, why=""):
        self.why, self.over = why, True
        raise Stopped(why)

    def _wait(self):
        if self.deadline is not None:
            self.end.settimeout(max(.01, self.deadline - time.monotonic()))

    def send(self, data):
        try:
            self._wait()
            self.end.sendall(struct.pack("<Q", len(data)) + data)
        except TimeoutError:
            self._stop("stopped: more time than a notebook may take")
        except OSError:
            self._stop()

    def _exactly(self, count):
        parts = []
        while count:
            try:
                self._wait()
                part = self.end.recv(min(count, 2**20))
            except TimeoutError:
                self._stop("stopped: more time than a notebook may take")
            except OSError:
                part = b""
            if not part:
                self._stop()
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def receive(self, most=2**62):
        size, = struct.unpack("<Q", self._exactly(8))
        if size > most:
            self._stop("stopped: more output than a notebook may have")
        return self._exactly(size)


# --- the cells


class Sink:
    "Takes whatever is printed, and keeps its beginning."
    encoding, errors = "utf-8", "replace"

    def __init__(self, most):
        self.kept, self.room, self.lost = [], most, 0

    def write(self, text):
        text = str(text)
        if self.room:
            self.kept.append(text[:self.room])
        self.lost += max(0, len(text) - self.room)
        self.room = max(0, self.room - len(text))
        if self.lost > 10**6:
            raise TooMuch("more than a million characters were printed in one cell")
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return False

    def fileno(self):
        raise OSError("no file")

    def text(self):
        more = f"\n... and {self.lost:,} more characters" if self.lost else ""
        return "".join(self.kept) + more


ALARMS = []  # that went off in this cell


def _too_slow(*_):
    ALARMS.append(time.monotonic())
    raise TooMuch("more time than a cell may take")


def _alarm(seconds):
    "Interrupt a cell after so many seconds of the processor, or three times as many of the clock."
    signal.setitimer(signal.ITIMER_PROF, seconds, 2)
    signal.setitimer(signal.ITIMER_REAL, 3*seconds, 2)


def _error(name, value, where=""):
    shown = where or value or name  # a feedback page shows the traceback and nothing else
    return dict(output_type="error", ename=name, evalue=value[:2000], traceback=[shown[-4000:]])


def _shown(shell, value, text):
    "A result as a notebook shows it, cut."
    if value is None:
        return []
    try:
        data, _ = shell.display_formatter.format(value)
    except BaseException as error:
        return [_error(type(error).__name__, str(error))]
    kept = {kind: body for kind, body in data.items()
            if kind.startswith("text/") and isinstance(body, str) and len(body) <= text}
    if not kept.get("text/plain", "").strip():
        kept.pop("text/plain", None)
    kept.setdefault("text/plain", "(too long to be shown)")
    return [dict(output_type="display_data", data=kept, metadata={})]


def figures(most=5):
    "Pictures of the figures that a cell has drawn; they are closed."
    plt = sys.modules.get("matplotlib.pyplot")
    drawn = []
    for number in plt.get_fignums()[:most] if plt else ():
        file = io.BytesIO()
        plt.figure(number).savefig(file, format="png", dpi=80, bbox_inches="tight")
        data = {"text/plain": "a figure", "image/png": base64.b64encode(file.getvalue()).decode()}
        drawn.append(dict(output_type="display_data", data=data, metadata={}))
    if plt:
        plt.close("all")
    return drawn


def run_cell(shell, cell, limits):
    "Run one cell: outputs, and the number that it ends in, for cells that are graded."
    sink = Sink(limits["text"])
    sys.stdout = sys.stderr = sink
    found = dict(outputs=[], value=None)
    ALARMS.clear()
    _alarm(limits["cell_seconds"])
    try:
        shell.displayed = []
        result = shell.run_cell(cell["source"], silent=False, store_history=False)
        drawn = figures()
        _alarm(0)
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            where = "".join(traceback.format_exception_only(type(error), error))
            found["outputs"].append(_error(type(error).__name__, str(error), where))
        elif cell["grade"]:
            if type(result.result) in (int, float):
                found["value"] = float(result.result)
                shell.displayed.pop()
        shown = [output for value in shell.displayed
                 for output in _shown(shell, value, limits["text"])]
        found["outputs"] += shown[:20] + drawn
    except BaseException as error:
        found["outputs"].append(_error(type(error).__name__, str(error)))
    finally:
        _alarm(0)
        sys.stdout = sys.stderr = None
    found["slow"] = bool(ALARMS)  # also where her code, or ours, went on after it
    if sink.text():
        found["outputs"].insert(0, dict(output_type="stream", name="stdout", text=sink.text()))
    return found


def _make_shell():
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Hook(DisplayHook):
        def __call__(self, result=None):
            if result is not None:
                self.fill_exec_result(result)
                self.shell.displayed.append(result)

    class Publisher(DisplayPublisher):
        def publish(self, data, metadata=None, **_):
            self.shell.displayed.append(_Ready(data))

    class Shell(InteractiveShell):
        displayhook_class, display_pub_class = Hook, Publisher
        displayed = []

        def enable_gui(self, gui=None):
            pass

        def showtraceback(self, *args, **kwargs):
            pass

    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    shell = Shell.instance(config=config)
    shell.display_formatter.formatters["text/plain"].float_precision = "%.6g"
    return shell


class _Ready:
    "What `display` made of an object."
    def __init__(self, data):
        self.data = data

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self.data


# --- what goes back


def _as_torch_has_it(array):
    "The same numbers in an order of bytes and a precision that PyTorch knows."
    import numpy as np
    native = array.dtype.newbyteorder("=")
    return np.ascontiguousarray(array, np.float64 if native == np.longdouble else native)


def encode(x):
    """An answer as plain data for JSON: numbers, text, lists, tuples, dicts, tensors, arrays.

    What is of a kind of its own, a named tuple or a fraction, is sent as what it is made of."""
    import numpy as np
    import torch
    if x is None or type(x) in (bool, int, float, str):
        return x
    if x is Ellipsis or x is NotImplemented:
        return {"word": "..." if x is Ellipsis else "NotImplemented"}
    if isinstance(x, (list, tuple)):
        return {"list" if isinstance(x, list) else "tuple": list(map(encode, x))}
    if isinstance(x, dict):
        return {"dict": [[encode(key), encode(value)] for key, value in x.items()]}
    if isinstance(x, np.floating):  # the item of a longdouble is a longdouble
        return float(x)
    if isinstance(x, np.generic):
        return encode(x.item())
    if isinstance(x, str):
        return str.__str__(x)
    if isinstance(x, numbers.Integral):
        return int(x)
    if isinstance(x, (numbers.Real, Decimal)):
        return float(x)
    if isinstance(x, np.ndarray):
        return {"array": encode(torch.from_numpy(_as_torch_has_it(x)).reshape(x.shape))}
    if isinstance(x, torch.Tensor):
        x = x if x.layout == torch.strided else x.to_dense()
        flat = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        data = base64.b64encode(flat.numpy().tobytes()).decode()
        return {"tensor": data, "dtype": str(x.dtype).split(".")[1], "shape": list(x.shape)}
    return {"foreign": type(x).__name__[:80]}


def line_of(error):
    "The line of a cell in which it was raised."
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.line for frame in frames if "ipykernel" in frame.filename
           or frame.filename.startswith("<ipython")]
    return f" (your line `{own[-1]}`)" if own and own[-1] else ""


def answer(shell, name, args, seed, seconds):
    "Call a function of hers; what it returned, or what it raised."
    import torch
    sink = Sink(1000)
    sys.stdout = sys.stderr = sink
    _alarm(seconds)
    try:
        torch.manual_seed(seed)
        if name not in shell.user_ns:
            raise NameError(f"{name!r} is not defined")
        said = {"value": encode(shell.user_ns[name](*args))}
        if len(json.dumps(said)) > ANSWER:
            raise TooMuch(f"more than {ANSWER:,} bytes in one answer")
    except BaseException as error:
        kind, told = type(error), str(error)[:300]
        plain = next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")
        said = {"raised": [kind.__name__, told + line_of(error), plain]}
    finally:
        _alarm(0)
        sys.stdout = sys.stderr = None
    return {**said, "printed": sink.text()[:1000]}


def lend(space, imports, sources):
    "Put the course's functions in the place of hers; what was there, to be put back."
    course = {}
    for source in (imports, *sources.values()):
        exec(source, course)
    hers = {name: space.get(name) for name in sources}
    space.update({name: course[name] for name in sources})
    return hers


def limit_memory(memory_mb, for_good=False):
    "Set what this process may use beyond what it has now."
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages*resource.getpagesize() + memory_mb*2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (room, room if for_good else hard))


def limit(memory_mb, file_mb, seconds):
    "Set what this process may use, from now on and for good."
    limit_memory(memory_mb, for_good=True)
    limits = dict(FSIZE=file_mb*2**20, CPU=4*seconds, CORE=0, NOFILE=256, NPROC=128, SIGPENDING=64,
                  MSGQUEUE=0, MEMLOCK=0)  # a pipe has two files
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            _, hard = resource.getrlimit(kind)
            most = most if hard < 0 else min(most, hard)
            resource.setrlimit(kind, (most, most))


def prepare(job):
    "Import what everybody needs, and go to a copy of the submission."
    import IPython  # noqa: F401
    import torch

    import dp_course.cli.main  # noqa: F401
    torch.set_num_threads(1)
    if job["work"]:
        shutil.copytree(job["given"], job["work"], dirs_exist_ok=True)
        os.chdir(job["work"])
    if job["fresh"]:
        sys.path.insert(0, job["checks"])  # no cell is hers
    else:
        sys.path.insert(0, os.getcwd())
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    sys.stdin = open(0)


def main(end):
    "Take jobs until the judge hangs up."
    channel = Channel(socket.socket(fileno=end))
    job = json.loads(channel.receive())
    prepare(job)
    limits = job["limits"]
    limit(limits["memory_mb"], limits["file_mb"], limits["seconds"])
    signal.signal(signal.SIGALRM, _too_slow)
    signal.signal(signal.SIGPROF, _too_slow)
    if job["fresh"]:
        limits = {**limits, "cell_seconds": limits["seconds"]}
    shell = _make_shell()
    channel.send(b"ready")
    hers = {}
    while True:
        word, what, *rest = pickle.loads(channel.receive())
        said = {}
        if what == "lend":
            hers = lend(shell.user_ns, *rest)
        elif what == "take back":
            shell.user_ns.update(hers)
        else:
            said = run_cell(shell, *rest, limits) if what == "run" else answer(shell, *rest)
        channel.send(json.dumps([word, said]).encode())


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except Stopped:
        os._exit(0)  # the judge has hung up: all cells have run
