"Fixtures that several test modules share."
import os
import zlib
from functools import partial
from types import FunctionType

import matplotlib
import numpy as np
import pytest
import torch

from dp_course.training import trainer

matplotlib.use("Agg")
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


def pytest_collection_modifyitems(items):
    "Leave out what is slow, or needs a GPU that is not here."
    later = pytest.mark.skip(reason="slow: make test-slow runs it")
    lacking = pytest.mark.skip(reason="there is no GPU")
    for item in items:
        if "slow" in item.keywords and "DP_COURSE_SLOW" not in os.environ:
            item.add_marker(later)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(lacking)


@pytest.fixture(autouse=True)
def a_seed_of_its_own(request):
    "Random draws depend on the test's name, not on which tests ran before it on this machine."
    seed = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(seed)
    np.random.seed(seed)


@pytest.fixture(scope="module")
def one_thread():
    "For `pytest.mark.usefixtures`: a module whose sums must not depend on the number of threads."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def contents(value, seen=()):
    "What a thing consists of, as something to compare; numbers of a tensor by their checksum."
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return value.shape, value.dtype, value.requires_grad, zlib.crc32(numbers)
    if id(value) in seen:
        return "itself"
    seen = (*seen, id(value))
    if isinstance(value, dict):
        return tuple((key, contents(v, seen)) for key, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), *(contents(v, seen) for v in value)
    if isinstance(value, partial):
        return partial, contents([value.func, value.args, value.keywords], seen)
    if hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType)):
        return type(value), contents(vars(value), seen)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


_PROVED = set()


@pytest.fixture
def proved_once(monkeypatch):
    """For modules that are not about the proof: what was proved is not proved again.

    Only the very same engine, weights, loss, data and clip count as the same; a third of a second.
    """
    prove = trainer.prove_separate

    def proved(*parts, **more):
        told = contents([parts, more])
        if told not in _PROVED:
            prove(*parts, **more)
            _PROVED.add(told)
    monkeypatch.setattr(trainer, "prove_separate", proved)


@pytest.fixture
def real():
    "A loader for a real data set, or a skip with one clear line when there is no local copy."
    from dp_course.data import load

    def get(name):
        try:
            return load(name)
        except FileNotFoundError:
            pytest.skip(f"{name}: no local copy (set DP_COURSE_DATA); the other tests need none")

    return get


@pytest.fixture(autouse=True, scope="session")
def a_shelf_of_its_own(tmp_path_factory):
    "Ledgers of the tests' runs lie in no home; processes that tests start inherit the place."
    os.environ["DP_COURSE_LEDGERS"] = str(tmp_path_factory.mktemp("ledgers"))
