"Scattering against kymatio, private statistics, data sets of features, runs."
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from make_kymatio_reference import CASES, image
from toys import first_digits

from dp_course.cli import Job, make_config, train
from dp_course.data import Examples
from dp_course.features import Scattering, ScatteringRecipe, private_channel_stats, scattered
from dp_course.privacy import Budget
from dp_course.training import read_record

STORED = np.load(Path(__file__).with_name("kymatio_reference.npz"))
by = pytest.mark.parametrize


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def off(a, b):
    "The largest difference, relative to the largest number."
    return ((a - b).abs().max()/b.abs().max()).item()


# -- the transform ---------------------------------------------------------------------------------

@by("case", CASES)
def test_numbers_are_kymatios(case):
    shape, J, L = CASES[case]
    x = torch.from_numpy(image(shape))
    got = Scattering(shape, J, L, dtype=torch.float64)(x)
    assert off(got, torch.from_numpy(STORED[f"{case}_float64"])) < 1e-12
    assert off(got, torch.from_numpy(STORED[f"{case}_stock"])) < 5e-7  # its filters have 24 bits
    single = Scattering(shape, J, L)(x)
    assert single.dtype == torch.float32
    assert off(single.double(), got) < 5e-6


SHAPES = [((32, 32), 2, 8), ((8, 8), 2, 8), ((28, 30), 3, 6), ((5, 9), 2, 4), ((16, 12), 1, 8)]


@by("shape, J, L", SHAPES)
def test_numbers_are_those_of_the_kymatio_here(shape, J, L):
    reason = "no kymatio here (pip install kymatio==0.3.0); its stored numbers are compared"
    kymatio = pytest.importorskip("kymatio.torch", reason=reason)
    x = randn(2, 3, *shape)
    want = kymatio.Scattering2D(J, shape, L=L).double()(x)
    assert off(Scattering(shape, J, L, torch.float64)(x), want) < 1e-6


def test_contract():
    s = Scattering((32, 32))
    x = torch.rand(4, 3, 32, 32)
    assert s(x).shape == (4, 3, 81, 8, 8)
    assert s(x[:0]).shape == (0, 3, 81, 8, 8)
    assert not list(s.parameters()) and not s.state_dict()
    assert torch.allclose(s(x)[1:2], s(x[1:2]), atol=1e-6)  # no example sees its neighbour
    assert (s(x + 1) - s(x))[:, :, 1:].abs().max() < 1e-5  # only the blur answers to a constant
    assert torch.allclose(s(3*x), 3*s(x), atol=1e-5)


def test_impossible_transforms_are_refused():
    for shape, J in (((4, 32), 2), ((32, 32), 0)):
        with pytest.raises(ValueError):
            Scattering(shape, J)
    with pytest.raises(ValueError, match="filters are for"):
        Scattering((32, 32))(torch.zeros(1, 32, 16))


# -- what is released ------------------------------------------------------------------------------


def test_private_statistics_are_right_without_noise():
    f = randn(50, 3, 4, 4)*torch.tensor([1., 2., 3.]).view(3, 1, 1) + 5
    mean, std = private_channel_stats(f, 1e-12, (1e6, 1e6))
    assert torch.allclose(mean.double(), f.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(std.double(), f.std((0, 2, 3), correction=0), atol=1e-4)


@pytest.mark.parametrize("bad, words", [
    (dict(sigma=0), "sigma=0 is no noise multiplier"), (dict(sigma=math.nan), "sigma=nan is no"),
    (dict(max_norms=(1., -2.)), "are no bounds"),
    (dict(max_norms=(math.nan, 2.)), "are no bounds"), (dict(max_norms=(1.,)), "are no bounds")])
def test_private_statistics_refuse_what_hides_nobody(bad, words):
    good = dict(sigma=8., max_norms=(1., 2.))
    with pytest.raises(ValueError, match=words):
        private_channel_stats(randn(9, 2, 4, 4), **good | bad)


def test_private_statistics_are_posted_or_not_drawn():
    f, generator = randn(9, 2, 4, 4), torch.Generator().manual_seed(0)
    book = Budget(eps=2., delta=1e-5)
    private_channel_stats(f, 8., (1., 2.), generator, budget=book)
    assert book.posts == {"channel statistics": [(1., 8., 2)]}
    state = generator.get_state()
    with pytest.raises(ValueError, match="channel statistics .* would bring the run to eps"):
        private_channel_stats(f, 1., (1., 2.), generator, budget=book)
    assert torch.equal(generator.get_state(), state)


def test_private_statistics_have_the_noise_they_pay_for():
    f = randn(50, 3, 4, 4)*torch.tensor([1., 2., 3.]).view(3, 1, 1) + 5
    noisy = [private_channel_stats(f, 8., (10., 50.), torch.Generator().manual_seed(seed))
             for seed in range(200)]
    # std of the mean = 8*10/50 = 1.6 per channel; 600 draws: 15 % is 5 standard errors, so that
    # false alarms are below 1e-6
    means = torch.stack([mean for mean, _ in noisy])
    assert abs(means.std().item()/1.6 - 1) < .15
    assert all(std.isfinite().all() and (std > 0).all() for _, std in noisy)


# -- data sets of features ------------------------------------------------------------------------

SMALL = ScatteringRecipe(synthetic=50)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    return folder, scattered(first_digits(), SMALL, folder)


def test_features_are_examples_like_any_other(digits):
    _, features = digits
    images = first_digits()
    assert features.name == "digits (scattered)" and features.classes == images.classes
    assert torch.equal(features.train_y, images.train_y)
    assert features.train_x.dtype == torch.float16
    no_test = Examples(images.train_x[:4], images.train_y[:4])
    assert scattered(no_test, SMALL, cache=False).test_x is None
    with pytest.raises(ValueError, match="data set of images"):
        scattered(Examples({"x": no_test.train_x}, no_test.train_y), SMALL, cache=False)


# -- runs ------------------------------------------------------------------------------------------

@by("preset, least, parameters", [("scatter-linear-eps3-fast", .6, 3_250),
                                  pytest.param("scatter-cnn-eps3-fast", .3, 61_884,
                                               marks=pytest.mark.slow)])
def test_run_leaves_a_record(tmp_path, preset, least, parameters):
    job = Job(make_config(preset), out=tmp_path, device="cpu", seed=3)

    def record():
        end = train(job, say=lambda line: None, show=False)
        return read_record(end["paths"]["record"])

    start, *_, end = record()
    assert start["preset"] == preset and start["config"]["features"] == "scatter"
    assert start["data"] == "digits (scattered)" and start["parameters"] == parameters
    assert start["plan"]["steps"] == end["step"] and end["finished"]
    assert 2.99 < end["eps_pld"] <= 3 < end["eps_rdp"] and end["delta"] == 1e-5
    assert end["test_accuracy"] > least  # 0.76 and 0.57 with seed 0; guessing: 0.1
    assert record()[-1]["test_accuracy"] == end["test_accuracy"]


def test_real_features(real):
    "Ten CIFAR-10 images through the real recipe: finite, and of a size that float16 likes."
    f = ScatteringRecipe(synthetic=100).features(real("cifar10").train_x[:10])
    assert f.shape == (10, 243, 8, 8)
    assert f.isfinite().all() and .3 < f.float().std() < 3
