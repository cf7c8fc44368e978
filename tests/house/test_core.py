"The small tools of basics: comparisons, bars, devices, the allocator."
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch

from dp_course.basics import data_root, keep_memory, near, pick_device, progress, seed_all

# near

@pytest.mark.parametrize("a, b", [
    (1 + 2e-6, 1.), (float("nan"), 0.), (float("nan"), float("nan")), (torch.inf, 1.),
    (1., torch.inf), ([1, 2], [1]), ({"a": 1}, {"b": 1}), ("x", "y"), (True, False), (None, 0.),
    (torch.ones(2), 1.), ([1, (2, [3])], [1, (2, [4])]), ("text", 1.),
])
def test_near_notices(a, b):
    with pytest.raises(AssertionError):
        near(a, b)


@pytest.mark.parametrize("a, b", [
    (1 + 5e-7, 1.), (torch.inf, torch.inf), (torch.zeros(0), torch.zeros(0)), ("x", "x"),
    (None, None),
    ({"a": [1, torch.ones(2)]}, {"a": (1., torch.ones(2).double())}), (True, True),
])
def test_near_accepts(a, b):
    near(a, b)


def test_near_says_where():
    with pytest.raises(AssertionError, match=re.escape("off by 1 (allowed 1e-06)['a'][1]: got 3")):
        near({"a": [1, 3]}, {"a": [1, 2]})


def test_seed_all_starts_everything_again():
    first = seed_all(3), torch.rand(2)
    again = seed_all(3), torch.rand(2)
    assert torch.equal(first[1], again[1])
    assert torch.equal(*(torch.rand(2, generator=g) for g, _ in (first, again)))


# devices, folders, classes

def test_pick_device():
    assert pick_device("cpu") == torch.device("cpu") and pick_device().type in ("cpu", "cuda")
    for name in ("cuda:99", "abacus"):
        with pytest.raises(ValueError, match="no such device.*here are cpu"):
            pick_device(name)


def test_data_root(monkeypatch, tmp_path):
    monkeypatch.setenv("DP_COURSE_DATA", str(tmp_path))
    assert data_root() == tmp_path and str(data_root("here")) == "here"


# bars

def show_half(**kwargs):
    "A bar that stops halfway."
    with progress(40, "digits-eps3", **kwargs) as bar:
        bar.update(20)
        bar.set_postfix_str("eps 2.122  test 91.11%")


def everything(terminal):
    "What was written to a terminal."
    os.set_blocking(terminal, False)
    said = b""
    try:
        while True:
            said += os.read(terminal, 4096)
    except BlockingIOError:
        return said.decode()


@pytest.mark.parametrize("columns", [50, 100])
def test_a_narrow_terminal_shortens_the_bar_first(columns, monkeypatch):
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    with os.fdopen(theirs, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        assert screen.isatty()
        show_half()
        screen.flush()
        said = everything(ours)
    os.close(ours)
    last = [line.strip() for line in re.split(r"[\r\n]+", said) if line.strip()][-1]
    assert "50%" in last and "eps 2.122  test 91.11%" in last and len(last) <= columns
    assert ("digits-eps3" in last and "20/40" in last) == (columns == 100)


@pytest.mark.parametrize("kernel, server, shown", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 1)])
def test_only_a_notebook_in_jupyter_shows_a_bar(kernel, server, shown, monkeypatch, capsys):
    "A kernel without a server executes a notebook; a server without a kernel is a child process."
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    if kernel:
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    if server:
        monkeypatch.setenv("JPY_SESSION_NAME", "lesson.ipynb")
    show_half()
    assert ("eps 2.122" in capsys.readouterr().err) == bool(shown)


# the allocator

FAULTS = """
    import resource
    import torch
    from dp_course.basics import keep_memory
    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            torch.ones(2**24)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    before = faults()
    kept = keep_memory()
    faults()
    print(kept, before, faults())
"""


@pytest.mark.slow
def test_keep_memory_keeps_it():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(FAULTS)], check=True,
                          capture_output=True, text=True, timeout=120)
    kept, before, after = done.stdout.split()
    if kept == "False":
        pytest.skip("no glibc here")
    assert int(before) > 0 and int(after) < int(before)/100


def test_keep_memory_is_harmless_elsewhere(monkeypatch):
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    monkeypatch.setattr("ctypes.CDLL", lambda name: 1/0)
    assert keep_memory() is False
