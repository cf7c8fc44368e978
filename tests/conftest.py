"Fixtures that several test modules share."
import matplotlib
import pytest
import torch

matplotlib.use("Agg")
torch.set_num_threads(2)


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
