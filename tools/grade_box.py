"""A box for programs that nobody has read: bubblewrap and seccomp, and no code of ours inside them.

In the box there are Python, the course, its data sets (all read-only) and one folder of limited
size; nothing else of the machine: no network, no environment, no other user's memory, and no other
process: the program is the first one of the box, so /proc/1 is the program itself. Threads, files
and memory are bounded by limits of the process (it cannot fork), and by a control group where
one can be made. A flaw of the kernel would open the box.
"""
import itertools
import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from errno import EPERM
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK, GIVEN, DATA = "/box/work", "/box/given", "/box/data"
REFUSED = """unshare setns mount umount2 pivot_root chroot move_mount open_tree fsopen mount_setattr
    ptrace process_vm_readv process_vm_writev kcmp bpf perf_event_open userfaultfd keyctl add_key
    request_key memfd_create memfd_secret socket socketpair shmget semget msgget mq_open mknod
    mknodat clock_settime settimeofday adjtimex sethostname setdomainname reboot swapon swapoff
    init_module finit_module delete_module kexec_load kexec_file_load io_uring_setup personality
    open_by_handle_at quotactl syslog acct fork vfork""".split()
THREAD, ENOSYS = 0x10000, 38  # CLONE_THREAD; glibc falls back from clone3 to clone
SHUT = "sysrq-trigger", "kcore", "kmsg", "kallsyms", "keys", "key-users", "timer_list"
NEEDED = """Submissions run in a box (bubblewrap and libseccomp), and this machine lacks {}.
On Debian or Ubuntu: apt-get install bubblewrap libseccomp2. Elsewhere grade in a container that has
them. --unprotected runs submissions without the box: they can then read and delete whatever you
can, use the network, and see each other; root may not."""
CANNOT = """bubblewrap is there, and cannot build a box on this machine: {}
Nothing was graded. On Ubuntu 24.04 AppArmor forbids it: give /usr/bin/bwrap a profile that allows
userns, or as root: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0. On an older Debian:
sysctl -w kernel.unprivileged_userns_clone=1. In Docker: --security-opt seccomp=unconfined
--security-opt apparmor=unconfined. Or grade on another machine."""


def missing():
    "What the box lacks on this machine, in words; empty if a program runs in it."
    lacks = [] if shutil.which("bwrap") else ["bwrap"]
    try:
        import pyseccomp  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        lacks.append("libseccomp (or the package pyseccomp)")
    return NEEDED.format(" and ".join(lacks)) if lacks else trial()


def trial():
    "What comes of a first box, in words; empty if a program runs in it."
    program = [sys.executable, "-c", "print('inside')"]
    with tempfile.TemporaryDirectory() as folder, calls_file() as calls:
        words = command(program, folder, calls.fileno(), megabytes=1)
        try:
            done = subprocess.run(words, pass_fds=[calls.fileno()], capture_output=True, text=True,
                                  timeout=60)
        except subprocess.TimeoutExpired:
            return CANNOT.format("it does not answer")
    if done.stdout == "inside\n":
        return ""
    said = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
    return CANNOT.format(said[-1])


def filter_of_calls(
    file,  # open for writing
):
    "Write the filter of system calls that the kernel enforces, as bubblewrap takes it."
    import pyseccomp as seccomp
    rules = seccomp.SyscallFilter(defaction=seccomp.ALLOW)
    for call in REFUSED:
        try:
            rules.add_rule(seccomp.ERRNO(EPERM), call)
        except (OSError, RuntimeError):  # unknown on this processor
            continue
    no_thread = seccomp.Arg(0, seccomp.MASKED_EQ, THREAD, 0)
    rules.add_rule(seccomp.ERRNO(EPERM), "clone", no_thread)  # a process, not a thread
    rules.add_rule(seccomp.ERRNO(ENOSYS), "clone3")           # its flags cannot be looked at
    rules.export_bpf(file)
    file.seek(0)


def readable():
    "What Python and the course need, at the places where they are."
    packages = [*site.getsitepackages(), sys.prefix, sys.base_prefix]
    course = [ROOT/"dp_course", ROOT/"runs", ROOT/"tools/grade_student.py"]
    found = dict.fromkeys(map(str, [*packages, *course]))
    return [path for path in found if Path(path).exists()]


def _mounts(folder, more, megabytes):
    "Arguments of bubblewrap: what is in the box."
    system = ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for name in ("bin", "lib", "lib64", "sbin"):
        if Path("/", name).is_symlink():
            system += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif Path("/", name).exists():
            system += ["--ro-bind", f"/{name}", f"/{name}"]
    if Path("/etc/ld.so.cache").exists():
        system += ["--ro-bind", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    # The kernel takes settings from the machine's root, whatever rights he has given up.
    system += ["--ro-bind", "/proc/sys", "/proc/sys"]
    for name in SHUT:
        if Path("/proc", name).is_file():
            system += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    small = ["--symlink", WORK, "/tmp", "--remount-ro", "/dev"]
    binds = [part for path in [*readable(), *map(str, more)] if not path.startswith("/usr/")
             for part in ("--ro-bind", path, path)]
    data = Path(os.environ.get("DP_COURSE_DATA") or Path.home()/".cache/dp_course")
    if data.exists():
        binds += ["--ro-bind", str(data.resolve()), DATA]
        if (data/"ledgers").exists():  # of the teacher's own runs
            binds += ["--size", "4096", "--tmpfs", f"{DATA}/ledgers"]
    mine = ["--ro-bind", str(folder), GIVEN, "--size", str(megabytes*2**20), "--tmpfs", WORK]
    return [*system, *small, *binds, *mine, "--remount-ro", "/", "--chdir", WORK]


def _environment():
    "Arguments of bubblewrap: the whole environment; nothing of ours is in it."
    found = dict(PATH="/usr/bin:/bin", HOME=WORK, TMPDIR=WORK, LANG="C.UTF-8", MPLBACKEND="Agg",
                 MPLCONFIGDIR=WORK, IPYTHONDIR=WORK, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1",
                 MKL_NUM_THREADS="1", DP_COURSE_DATA=DATA, PYTHONDONTWRITEBYTECODE="1")
    return ["--clearenv", *(part for name, value in found.items()
                            for part in ("--setenv", name, value))]


def command(
    program,        # list: what runs in the box
    folder,         # the submission; the box sees it as /box/given, and works in /box/work
    calls:int,      # descriptor of the filter of calls
    *,
    more=(),        # other folders that may be read
    megabytes=200,  # size of /box/work
):
    "Say what starts a program in the box."
    alone = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent",
             "--new-session", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534",
             "--hostname", "box", "--as-pid-1"]  # without it /proc/1 is bubblewrap, with our PATH
    return ["bwrap", *alone, *_environment(), *_mounts(folder, more, megabytes),
            "--seccomp", str(calls), "--", *map(str, program)]


def calls_file():
    "A temporary file with the filter of calls, to be inherited by bubblewrap."
    file = tempfile.TemporaryFile()
    filter_of_calls(file)
    return file


# --- what the kernel counts for a box as a whole

GROUPS = Path("/sys/fs/cgroup")
PROCESSES = 128  # threads in a box, bubblewrap's own two included
_NUMBERS = itertools.count()


class Cage:
    "A control group that bounds the threads and the memory of a box, where one can be made."
    # root needs it: the kernel holds no limit of processes against him
    def __init__(self, megabytes):
        name = f"dp-course-{os.getpid()}-{next(_NUMBERS)}"
        if (GROUPS/"cgroup.controllers").is_file():
            limits = {GROUPS/name: {"pids.max": PROCESSES, "memory.max": megabytes*2**20}}
        else:
            limits = {_own_group("pids")/name: {"pids.max": PROCESSES},
                      _own_group("memory")/name: {"memory.limit_in_bytes": megabytes*2**20}}
        self.folders = [folder for folder in limits if _limited(folder, limits[folder])]

    def around(self, words):
        "The command that runs another one inside."
        enter = 'for group; do shift; [ "$group" = -- ] && break; echo $$ > "$group"; done; '
        files = [str(folder/"cgroup.procs") for folder in self.folders]
        return ["sh", "-c", enter + 'exec "$@"', "sh", *files, "--", *words]

    def remove(self):
        "Forget the group, when all that was in it has ended."
        for folder in self.folders:
            _gone(folder)


def _gone(folder, tries=40):
    "Remove a group; the kernel keeps it busy for a moment after its last process."
    for _ in range(tries):
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(.05)


def _own_group(kind):
    "The folder of the control group in which this process is, of one kind."
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kind in kinds.split(","):
            mine = GROUPS/kind/path.lstrip("/")
            return mine if mine.is_dir() else GROUPS/kind
    return GROUPS/kind


def _limited(folder, limits):
    "Whether a group with these limits could be made."
    try:
        folder.mkdir()
        for name, most in limits.items():
            (folder/name).write_text(str(most))
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        return False
    return True
