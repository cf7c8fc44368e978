"Fixtures that several test modules share."
import json
import os
import sys
import zlib
from collections import defaultdict

import pytest

# nbformat loads it: grammars of web addresses, two seconds of each worker, and no notebook has any
sys.modules["rfc3987_syntax"] = None


def pytest_configure(config):
    "Whoever only hands tests to workers needs no torch: four seconds."
    worker = hasattr(config, "workerinput")
    if worker or not config.getoption("numprocesses", None):
        import matplotlib
        import torch
        matplotlib.use("Agg")
        torch.set_num_threads(1)  # sums in one order, and small tensors only lose by a second


def _all_but_a_few_are_slow(items):
    "Of the cases of a test marked quick(n), n wait for nobody: by their names, so always the same."
    cases = defaultdict(list)
    for item in items:
        few = item.get_closest_marker("quick")
        if few and "slow" not in item.keywords:
            cases[item.parent.nodeid, item.originalname, *few.args].append(item)
    for (*_, few), some in cases.items():
        for item in sorted(some, key=lambda item: zlib.crc32(item.name.encode()))[few:]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at `-m slow`
def pytest_collection_modifyitems(items):
    "Leave out what is slow, or needs a GPU that is not here."
    import torch
    _all_but_a_few_are_slow(items)
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
    import numpy as np
    import torch
    seed = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(seed)
    np.random.seed(seed)


_DRAWN = {}


@pytest.fixture(autouse=True)
def one_figure_for_each_preset(monkeypatch):
    "A run ends with its figure, a third of a second: later runs of a preset get the first one's."
    progress = sys.modules.get("dp_course.cli.progress")
    if progress:
        draw = progress._draw

        def drawn_once(record, path):
            with open(record) as lines:
                preset = json.loads(lines.readline())["preset"]
            if preset not in _DRAWN:
                draw(record, path)
                _DRAWN[preset] = path.read_bytes()
            path.write_bytes(_DRAWN[preset])
        monkeypatch.setattr(progress, "_draw", drawn_once)


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


@pytest.fixture
def nothing_remembered(monkeypatch, tmp_path):
    "For modules about exercises: a folder without anybody's progress, and no tries from before."
    from dp_course.exercises import cards
    monkeypatch.chdir(tmp_path)
    cards._FORGOTTEN.clear()


@pytest.fixture(autouse=True, scope="session")
def a_shelf_of_its_own(tmp_path_factory):
    "Ledgers of the tests' runs lie in no home; processes that tests start inherit the place."
    os.environ["DP_COURSE_LEDGERS"] = str(tmp_path_factory.mktemp("ledgers"))
