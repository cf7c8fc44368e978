"The small tools of basics: comparisons, bars, the allocator."
import re
import sys

import pytest
import torch

from dp_course.basics import keep_memory, near, progress

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


# bars

def show_half(**kwargs):
    "A bar that stops halfway."
    with progress(40, "digits-eps3", **kwargs) as bar:
        bar.update(20)
        bar.set_postfix_str("eps 2.122  test 91.11%")


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


def test_keep_memory_is_harmless_elsewhere(monkeypatch):
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    monkeypatch.setattr("ctypes.CDLL", lambda name: 1/0)
    assert keep_memory() is False
