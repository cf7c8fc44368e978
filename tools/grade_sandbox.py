"""Run notebooks that nobody has read yet: `python tools/grade_sandbox.py FOLDER` reads jobs.

One process imports PyTorch and the course once. For each job, a line of JSON on stdin, it forks
a supervisor, and that one forks the process in which the student's cells run: with its own copy
of her folder, no sight of any other, limits on time, memory, output and file size, and no way
to keep anything running. What comes back is one JSON file per job: outputs of every cell.
"""
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = dict(seconds=300, cell_seconds=60, memory_mb=3000, file_mb=200, text=20_000)
MOST = 8*2**20  # bytes of outputs from one notebook

_libc = ctypes.CDLL(None, use_errno=True)
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # Landlock's system calls, on every architecture
_NEWNS, _NEWUSER, _NEWPID = 0x20000, 0x10000000, 0x20000000
_READ = 0b1101  # execute, read a file, read a folder


# --- what a process may touch


def landlock_version():
    "0 where the kernel cannot lock folders (before Linux 5.13, or switched off; not Linux)."
    if sys.platform != "linux":
        return 0
    return max(0, _libc.syscall(_CREATE, None, 0, 1))


class _Rules(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scope", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def lock_folders(
    readable,  # paths; what does not exist is left out
    writable,
):
    "Let this process and its children read and write nothing else; TCP and signals neither."
    # OSError: the kernel cannot
    version = landlock_version()
    if not version:
        raise OSError("this kernel cannot lock folders")
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = _Rules(files, 0b11, 0b11)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _libc.syscall(_CREATE, ctypes.byref(rules), size, 0)
    for allowed, paths in ((_READ, readable), (files, writable)):
        for path in paths:
            if os.path.exists(path):
                parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
                mine = allowed if os.path.isdir(path) else allowed & 0b1100000000000111
                rule = _Beneath(mine & files, parent)
                _libc.syscall(_ADD, ruleset, 1, ctypes.byref(rule), 0)
                os.close(parent)
    _libc.prctl(38, 1, 0, 0, 0)  # no new privileges: the kernel asks for it
    if _libc.syscall(_RESTRICT, ruleset, 0):
        raise OSError(ctypes.get_errno(), "the folders cannot be locked")
    os.close(ruleset)


class _Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def _read_only_but(folder):
    "In mounts of our own, make everything read-only except one folder: chmod fails there, too."
    if _libc.unshare(_NEWNS) or _libc.mount(None, b"/", None, 0x44000, None):  # private: ours alone
        return
    place = os.fsencode(folder)
    if _libc.mount(place, place, None, 0x1000, None):  # bind: a mount that can differ
        return
    for path, changes in ((b"/", _Attributes(1)), (place, _Attributes(0, 1))):
        _libc.syscall(442, -100, path, 0x8000, ctypes.byref(changes), ctypes.sizeof(changes))


def own_namespaces():
    "Whether children now live in a world of processes that dies with the first of them."
    return not _libc.unshare(_NEWPID if not os.getuid() else _NEWUSER | _NEWPID)


def readable_folders():
    "What Python and the course need: libraries, the package, data sets; no submissions."
    found = [path for path in sys.path if path and Path(path).resolve() != ROOT]
    found += [ROOT/"dp_course", ROOT/"runs", sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64",
              "/bin", "/etc", "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat",
              "/sys/devices/system", "/dev/urandom", "/dev/null"]
    data = os.environ.get("DP_COURSE_DATA")
    found += [data] if data else []
    found.append(Path.home()/".cache/dp_course")
    tools = Path(__file__).parent
    return [str(path) for path in found if Path(path).resolve() not in (tools, ROOT/"assignments")]


def _limit(memory_mb, file_mb, seconds):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages*resource.getpagesize() + memory_mb*2**20
    for kind, most in ((resource.RLIMIT_AS, room), (resource.RLIMIT_FSIZE, file_mb*2**20),
                       (resource.RLIMIT_CPU, 4*seconds), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (most, most))


# --- the cells


class TooMuch(Exception):
    pass


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


class Originals:
    "The course as it was before the student's code ran."
    def __init__(self, packages=("dp_course", "checks", "lab", "leaderboard")):
        self.kept = []
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in packages:
                self.kept.append((module, dict(vars(module))))
                for item in vars(module).values():
                    if isinstance(item, type) and item.__module__.split(".")[0] in packages:
                        self.kept.append((item, dict(vars(item))))

    def restore(self):
        "Undo what was patched in modules and classes."
        for owner, names in self.kept:
            now = vars(owner)
            for name in [n for n in now if n not in names]:
                delattr(owner, name)
            for name, value in names.items():
                if now.get(name) is not value:
                    try:
                        setattr(owner, name, value)
                    except (AttributeError, TypeError):
                        pass


def _too_slow(*_):
    raise TooMuch("more time than a cell may take")


def _alarm(seconds):
    "Interrupt a cell after so many seconds of the processor, or three times as many of the clock."
    signal.setitimer(signal.ITIMER_PROF, seconds, 2)
    signal.setitimer(signal.ITIMER_REAL, 3*seconds, 2)


def _error(name, value, where=""):
    return dict(output_type="error", ename=name, evalue=value[:2000], traceback=[where[-4000:]])


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
    kept.setdefault("text/plain", "(too long to be shown)")
    return [dict(output_type="display_data", data=kept, metadata={})]


def run_cell(shell, cell, limits):
    "Run one cell: outputs, and the number that it ends in, for cells that are graded."
    sink = Sink(limits["text"])
    sys.stdout = sys.stderr = sink
    found = dict(outputs=[], value=None)
    _alarm(limits["cell_seconds"])
    try:
        shell.displayed = []
        result = shell.run_cell(cell["source"], silent=False, store_history=False)
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
        found["outputs"] += shown[:20]
    except BaseException as error:
        found["outputs"].append(_error(type(error).__name__, str(error)))
    finally:
        _alarm(0)
        sys.stdout = sys.stderr = None
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
    return Shell.instance(config=config)


class _Ready:
    "What `display` made of an object."
    def __init__(self, data):
        self.data = data

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self.data


def student(job, pipe):
    "The process in which a student's cells run."
    limits, folder = job["limits"], job["folder"]
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder, MPLCONFIGDIR=folder, MPLBACKEND="Agg")
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    sys.stdin = open(0)
    _limit(limits["memory_mb"], limits["file_mb"], limits["seconds"])
    if job["locked"]:
        lock_folders(readable_folders(), [folder, "/dev/null"])
    signal.signal(signal.SIGALRM, _too_slow)
    signal.signal(signal.SIGPROF, _too_slow)
    sys.path.insert(0, folder)
    shell, originals = _make_shell(), Originals()
    write, dumps = os.write, json.dumps
    for cell in job["cells"]:
        if cell["grade"]:
            originals.restore()
        line = dumps(run_cell(shell, cell, limits)).encode() + b"\n"
        while line:
            line = line[write(pipe, line):]


# --- its supervisor


def _children(pid):
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def _kill_all(pid):
    "Kill a process and whatever it started, children first found, then the rest."
    family, todo = [], [pid]
    while todo:
        family.append(todo.pop())
        todo += _children(family[-1])
    for member in family:
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _collect(read, deadline):
    "What the process says, and why we stopped listening."
    data = b""
    while True:
        ready, _, _ = select.select([read], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            return data, "stopped: more time than a notebook may take"
        more = os.read(read, 2**16)
        if not more:
            return data, ""
        data += more
        if len(data) > MOST:
            return data, "stopped: more output than a notebook may have"


def _first(job, write, alone):
    "The first process in a world of its own: it waits for the student's, and takes all with it."
    if alone:
        _read_only_but(job["folder"])
    pid = os.fork()
    if not pid:
        code = 1
        try:
            student(job, write)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    while True:
        ended, status = os.wait()
        if ended == pid:
            signalled = os.WIFSIGNALED(status)
            os._exit(100 + os.WTERMSIG(status) if signalled else os.WEXITSTATUS(status) % 100)


def supervise(job):
    "Run one job to its end, whatever the end is."
    _libc.prctl(36, 1, 0, 0, 0)  # orphans come to us
    read, write = os.pipe()
    began = time.monotonic()
    alone = own_namespaces()
    pid = os.fork()
    if not pid:
        os.close(read)
        _first(job, write, alone)
    os.close(write)
    data, why = _collect(read, began + job["limits"]["seconds"])
    ended, status = os.waitpid(pid, os.WNOHANG)
    for _ in range(0 if why else 100):  # it has closed its pipe: it is about to end
        if not ended:
            time.sleep(.01)
            ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        _kill_all(pid)
        _, status = os.waitpid(pid, 0)
    for orphan in _children(os.getpid()):
        _kill_all(orphan)
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    if not why and code:
        why = f"the process was killed by signal {code - 100}" if code > 100 else (
            f"the process ended itself (exit code {code})")
    if not why and data.count(b"\n") < len(job["cells"]):
        why = "the process ended itself"
    cells = []
    for line in data.split(b"\n")[:-1]:
        try:
            cells.append(json.loads(line))
        except ValueError:
            break
    finished = dict(cells=cells, why=why, seconds=round(time.monotonic() - began, 2))
    written = Path(job["result"] + ".part")
    written.write_text(json.dumps(finished))
    written.rename(job["result"])


def serve():
    "Read jobs from stdin, one a line, until it ends; answer `ready` first."
    sys.path.insert(0, str(ROOT/"assignments"))
    sys.path.insert(0, str(ROOT))
    import importlib

    import IPython  # noqa: F401
    import nbformat  # noqa: F401
    import torch

    import dp_course.train  # noqa: F401
    for path in sorted((ROOT/"assignments/checks").glob("a*.py")):
        importlib.import_module(f"checks.{path.stem}")
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
                supervise(json.loads(line))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)


if __name__ == "__main__":
    serve()
