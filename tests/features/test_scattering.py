"Scattering against kymatio, the linear engine against the loop, network, cache, statistics, runs."
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from make_kymatio_reference import CASES, image
from torch import nn
from toys import loss

from dp_course.cli import Job, make_config, make_trainer, train
from dp_course.data import Examples, Views, dead_leaves, load
from dp_course.features import (
    ParallelSum,
    Scattering,
    ScatteringRecipe,
    crop_spectrum,
    filter_and_subsample,
    filter_bank,
    gabor,
    morlet,
    private_channel_stats,
    scatter_cnn,
    scattered,
)
from dp_course.gradients import FlatClip, fast_grad_sum, loop_grad_sum
from dp_course.models import linear_head
from dp_course.privacy import Budget, PLDAccountant
from dp_course.training import load_runs, read_record

STORED = np.load(Path(__file__).with_name("kymatio_reference.npz"))
by = pytest.mark.parametrize


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def off(a, b):
    "The largest difference, relative to the largest number."
    return ((a - b).abs().max()/b.abs().max()).item()


def gap(a, b):
    "The largest difference of two clipped sums."
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def shake(model, scale=1.):
    "Move every parameter away from where it starts."
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(scale*randn(*p.shape, seed=i).to(p.dtype))
    return model


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


def test_a_slip_would_be_noticed():
    "A filter turned by a degree, or pi for kymatio's 3.1415, is far outside the tolerance."
    want = torch.from_numpy(STORED["a_float64"])
    scattering = Scattering((32, 32), dtype=torch.float64)
    x = torch.from_numpy(image((32, 32)))
    assert off(scattering(x)*3.1415/math.pi, want) > 1e-5
    turned = torch.fft.fft2(morlet(40, 40, .8, 1*math.pi/180, .75*math.pi)).real
    scattering.psi0_0[3] = turned.repeat_interleave(2, -1)
    assert off(scattering(x), want) > 1e-4


@by("size", [(40, 40), (24, 36)])
def test_filters(size):
    psi, phi = filter_bank(*size)
    assert psi[..., 0, 0].abs().max() < 1e-12  # a constant image gives nothing
    assert abs(phi[0, 0] - 1) < 1e-4 and phi.max() == phi[0, 0]  # the blur keeps the mean
    assert gabor(*size, .8, .3).imag.abs().max() == 0
    mirrored = torch.roll(morlet(*size, 1.6, -.7, 1.2).flip(1), 1, 1)
    assert (mirrored - morlet(*size, 1.6, .7, 1.2)).abs().max() < 1e-12  # is the opposite angle


def test_filter_and_subsample_are_two_steps_in_one():
    x, psi = randn(3, 12, 8), randn(5, 12, 8, seed=1)
    z = torch.fft.fft2(x)
    filtered = torch.fft.ifft2(z[:, None]*psi)
    want = torch.view_as_real(torch.fft.fft2(filtered[..., ::2, ::2])).flatten(-2)
    pairs = torch.view_as_real(z).flatten(-2)
    got = filter_and_subsample(pairs, psi.repeat_interleave(2, -1)/4, 2)
    assert (want - got).abs().max() < 1e-12


def test_a_cropped_spectrum_has_the_lowest_frequencies():
    x = torch.fft.fftfreq(12)[:, None] + 10*torch.fft.fftfreq(8)
    want = torch.fft.fftfreq(6)[:, None]/2 + 10*torch.fft.fftfreq(4)/2
    assert torch.allclose(crop_spectrum(x, 2), want)


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


# -- the linear engine -----------------------------------------------------------------------------

def linear(bias=True, shape=(2, 4, 3), classes=5):
    "A linear head that does not start from zero, in float64."
    model = linear_head(shape, classes).double()
    if not bias:
        model[1].bias = None
    return shake(model)


def same_as_the_loop(model, x, y, clip):
    total, norms = fast_grad_sum(model, loss, x, y, clip)
    want_total, want_norms = loop_grad_sum(model, loss, x, y, clip)
    assert gap(total, want_total) < 1e-12
    assert norms.shape == want_norms.shape
    assert torch.allclose(norms, want_norms, rtol=0, atol=1e-12)


@by("shape", [(6, 2, 4, 3), (6, 3, 2, 4, 3), (0, 2, 4, 3), (0, 3, 2, 4, 3)])
@by("bias", [True, False])
def test_a_linear_model_has_the_gradients_of_the_loop(shape, bias):
    model, x, y = linear(bias), randn(*shape, seed=7), torch.arange(shape[0]) % 5
    if len(shape) == 5:
        x = Views(x)
    for clip in (FlatClip(1.), FlatClip(3.), FlatClip(1e6)):
        same_as_the_loop(model, x, y, clip)


# -- the network -----------------------------------------------------------------------------------

@by("shape", [(243, 8, 8), (81, 2, 2), (5, 5, 7), (4, 1, 2)])
@by("views", [1, 3])
def test_network_has_the_gradients_of_the_loop(shape, views):
    torch.manual_seed(0)
    model = scatter_cnn(shape, 10, width=16).double()
    x = randn(4, views, *shape)
    assert model(x.flatten(0, 1)).abs().max() == 0  # says nothing at first
    shake(model, .1)
    x = x[:, 0] if views == 1 else Views(x)
    for clip in (FlatClip(.3), FlatClip(1e6)):
        got, want = (engine(model, loss, x, torch.arange(4), clip)
                     for engine in (fast_grad_sum, loop_grad_sum))
        assert gap(got[0], want[0]) < 1e-11
        assert (got[1] - want[1]).abs().max() < 1e-9


def test_network_is_the_linear_model_plus_something():
    model = scatter_cnn((6, 4, 4), 3, weight=.25).double()
    x = randn(5, 6, 4, 4)
    shake(model.first)
    want = model.first[1](x.flatten(1)/4)  # the network's last layer is still zero
    assert (model(x) - want).abs().max() < 1e-12
    assert torch.equal(ParallelSum(nn.Identity(), nn.Identity(), 3.)(x), 3*x + x)
    assert sum(p.numel() for p in scatter_cnn((243, 8, 8), 10).parameters()) == 265_236


def test_weight_decides_who_fills_the_bound():
    "At the start only the last layers have gradients; the linear model's scales with `weight`."
    x, y = randn(6, 9, 4, 4).float(), torch.arange(6) % 4

    def parts(weight):
        torch.manual_seed(0)
        model = scatter_cnn(x.shape[1:], 4, weight=weight)
        _, norms = fast_grad_sum(model, loss, x, y, FlatClip(1.))
        return norms[0], norms[2:]

    whole, rest = parts(1.)
    tenth, same = parts(.1)
    assert torch.allclose(tenth, .1*whole, rtol=1e-5)
    assert torch.allclose(rest, same) and rest.norm() > 0


# -- what is released ------------------------------------------------------------------------------

def test_private_statistics_move_by_no_more_than_they_promise():
    "Same noise with and without one image, which tries hard: each sum moves by its bound at most."
    bounds, x = (2., 3.), randn(20, 5, 4, 4)

    def sums(features):
        generator = torch.Generator().manual_seed(0)
        mean, std = private_channel_stats(features, 1e-9, bounds, generator, n=20)
        return 20*mean, 20*(std.double()**2 + mean.double()**2)

    before = sums(x)
    ones = torch.ones(1, 5, 4, 4, dtype=torch.float64)
    newcomers = [randn(1, 5, 4, 4, seed=1), 1e4*ones, -100*randn(1, 5, 4, 4, seed=2), math.nan*ones]
    for newcomer in newcomers:
        after = sums(torch.cat([x, newcomer]))
        moved = [torch.linalg.vector_norm(a - b).item() for a, b in zip(after, before)]
        assert all(m <= bound*(1 + 1e-4) for m, bound in zip(moved, bounds)), moved


def test_private_statistics_are_right_without_noise():
    f = randn(50, 3, 4, 4)*torch.tensor([1., 2., 3.]).view(3, 1, 1) + 5
    mean, std = private_channel_stats(f, 1e-12, (1e6, 1e6))
    assert torch.allclose(mean.double(), f.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(std.double(), f.std((0, 2, 3), correction=0), atol=1e-4)


def test_each_moment_is_clipped_at_its_own_bound():
    "All images alike, their rows longer than both bounds: the noiseless sums are the bounds."
    f = torch.full((10, 4, 2, 2), 3., dtype=torch.float64)  # means of length 6, squares of 18
    mean, std = private_channel_stats(f, 1e-12, (1., 5.))
    assert torch.linalg.vector_norm(mean.double()).item() == pytest.approx(1, abs=1e-6)
    square = std.double()**2 + mean.double()**2
    assert torch.linalg.vector_norm(square).item() == pytest.approx(5, abs=1e-5)


@pytest.mark.parametrize("bad, words", [
    (dict(sigma=0), "sigma=0 is no noise multiplier"), (dict(sigma=-1), "sigma=-1 is no noise"),
    (dict(sigma=math.nan), "sigma=nan is no"), (dict(sigma=math.inf), "sigma=inf is no"),
    (dict(max_norms=(1., -2.)), "are no bounds"), (dict(max_norms=(0., 2.)), "are no bounds"),
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


def test_releases_are_paid_for():
    "Heterogeneous composition: two releases at 8 cost 3 % of the noise of 360 sampled steps."
    q = 8192/50_000

    def eps(sigma):
        return PLDAccountant().step(1., 8., 2).step(q, sigma, 360).epsilon(1e-5)

    assert eps(4.579) <= 3.001
    assert eps(4.57) > 3
    assert eps(4.45) > 3.06


def test_constants_are_public():
    "The features of an image depend on no other image, and the constants on no image at all."
    x = load("digits").train_x[:8]
    recipe = ScatteringRecipe(J=1, synthetic=30)
    f = recipe.features(x)
    assert f.dtype == torch.float16 and f.shape == (8, 9, 4, 4)
    among_others = torch.cat([x[3:4], 255 - x])
    assert torch.equal(recipe.features(among_others)[0], f[3])
    assert recipe.features(x[:0]).shape == (0, 9, 4, 4)
    assert torch.equal(dead_leaves(3), dead_leaves(3)) and dead_leaves(3).std() > .05
    mirrored = recipe.features(x.flip(-1))  # mirror images have the same features
    assert torch.allclose(mirrored.float(), f.float(), atol=2e-3)


# -- data sets of features ------------------------------------------------------------------------

SMALL = ScatteringRecipe(synthetic=50)


def few():
    "Sixty digits to train on, twenty to test on."
    d = load("digits")
    return d.replace(train_x=d.train_x[:60], train_y=d.train_y[:60],
                     test_x=d.test_x[:20], test_y=d.test_y[:20])


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    return folder, scattered(few(), SMALL, folder)


def test_another_recipe_is_another_file(digits, tmp_path):
    _, want = digits
    scattered(few(), SMALL, tmp_path)
    other = scattered(few(), ScatteringRecipe(synthetic=51), tmp_path)
    assert other.train_x.ne(want.train_x).any()
    assert len(list(tmp_path.glob("*.npy"))) == 2


def test_features_are_examples_like_any_other(digits):
    _, features = digits
    assert features.name == "digits (scattered)" and features.classes == few().classes
    assert torch.equal(features.train_y, few().train_y)
    x, y = features.made_up(3, torch.Generator().manual_seed(0))
    assert x.dtype == torch.float16 and x.shape[1:] == features.train_x.shape[1:] and len(y) == 3
    no_test = Examples(few().train_x[:4], few().train_y[:4])
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


@by("preset", ["scatter-linear-eps3-fast", "scatter-cnn-eps3-fast"])
def test_a_small_micro_batch_changes_nothing(digits, preset):
    config = make_config(preset, batch_size=30, epochs=1)
    idx = torch.arange(30)
    sums = [make_trainer(replace(config, micro_batch=size), digits[1], seed=0)._clipped_sum(idx, 0)
            for size in (7, 5000)]
    (small, small_norms), (large, large_norms) = sums
    assert torch.allclose(small_norms, large_norms, rtol=1e-5)
    for name in small:
        assert torch.allclose(small[name], large[name], atol=1e-6), name


@by("preset, least", [("scatter-linear-eps3", 70.), ("scatter-linear-eps2.38", 69.),
                      ("scatter-cnn-eps3", 71.)])
def test_recorded_runs_say_what_the_notebook_quotes(preset, least):
    runs = load_runs(preset)
    assert len({record[0]["seed"] for record in runs}) >= 3
    for start, *_, end in runs:
        plan = start["plan"]
        q = plan["batch_size"]/plan["n"]
        accountant = PLDAccountant().step(q, plan["sigma"], plan["steps"])
        eps = accountant.epsilon(plan["delta"])
        assert "cifar10" in start["data"]
        assert plan["n"] == 50_000 and end["tested_on"] == 10_000 and end["step"] == plan["steps"]
        assert eps <= plan["eps"]*1.0001 and abs(eps - end["eps_pld"]) < 1e-3
        assert end["tuning_runs"] >= 17
    assert sum(100*record[-1]["test_accuracy"] for record in runs)/len(runs) > least


def test_real_features(real):
    "Ten CIFAR-10 images through the real recipe: finite, and of a size that float16 likes."
    f = ScatteringRecipe(synthetic=100).features(real("cifar10").train_x[:10])
    assert f.shape == (10, 243, 8, 8)
    assert f.isfinite().all() and .3 < f.float().std() < 3
