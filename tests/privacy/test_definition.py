"Notebook 01: the definition's formulas against independent oracles, and what bad input gets."
import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from toys import generator as gen

from dp_course.privacy import (
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mechanism,
    gaussian_sigma,
    gaussian_tpr,
    hockey_stick,
    laplace_mechanism,
    max_tpr,
    randomized_response,
    randomized_response_mean,
)

SIGMAS = [.05, .1, .3, .7, .999, 1., 1.001, 1.5, 4, 20, 300, 1e4]


def exact(eps, sigma):
    "Balle & Wang's formula with 400 digits, enough for any cancellation below."
    with mpmath.workdps(400):
        eps, sigma = mpmath.mpf(float(eps)), mpmath.mpf(float(sigma))
        there = mpmath.ncdf(.5/sigma - eps*sigma)
        return there - mpmath.exp(eps)*mpmath.ncdf(-.5/sigma - eps*sigma)


def normals(x, sigma=1.):
    "Densities of N(0, sigma^2) and N(1, sigma^2) at x."
    means = torch.tensor([[0.], [1.]], dtype=torch.float64)
    return torch.distributions.Normal(means, sigma).log_prob(x).exp()


# gaussian_delta, gaussian_epsilon, gaussian_sigma

@pytest.mark.parametrize("sigma", SIGMAS)
def test_delta_is_exact_and_never_too_small(sigma):
    "From delta = 1 down to 1e-300, at eps from 0 to 1200: relative error in [0, 2e-12]."
    # u = eps*sigma - 1/(2 sigma): how deep in the tail
    for u in (-9.9, -3, -.2, 0, .1, 1, 4, 9, 20, 30, 36):
        eps = max(0., (u + .5/sigma)/sigma)
        truth = exact(eps, sigma)
        assert 0 <= mpmath.mpf(gaussian_delta(eps, sigma))/truth - 1 < 2e-12, (eps, sigma)


def test_delta_does_not_overflow_or_go_below_zero():
    for eps in (710., 1e3, 1e5, 1e9, math.inf):
        for sigma in SIGMAS:
            d = gaussian_delta(eps, sigma)
            assert 0 <= d <= 1 and abs(mpmath.mpf(d) - exact(min(eps, 1e12), sigma)) < 1e-12
    assert gaussian_delta(0, 1e-3) == 1 and gaussian_delta(1e300, 1e300) == 0


DELTAS = [1e-300, 1e-50, 1e-12, 1e-5, .01, .4, .9]


@pytest.mark.parametrize("sigma", SIGMAS)
def test_epsilon_never_under_reports_and_is_tight(sigma):
    for delta in DELTAS:
        eps = gaussian_epsilon(delta, sigma)
        assert exact(eps, sigma) <= delta
        assert eps == 0 or exact(eps*(1 - 1e-8) - 1e-12, sigma) > delta


@pytest.mark.parametrize("eps", [0., 1e-6, .1, 1., 3., 30., 1e3, 1e6])
def test_sigma_never_overspends_and_is_tight(eps):
    for delta in [1e-100, *DELTAS[2:]]:
        sigma = gaussian_sigma(eps, delta)
        assert exact(eps, sigma) <= delta < exact(eps, sigma*(1 - 1e-8))


# hockey_stick

def test_hockey_stick_corner_cases():
    p = [.5, .5, 0.]
    assert hockey_stick(p, p, 0) == 0
    assert hockey_stick(p, [0., .5, .5], math.inf) == .5 and hockey_stick(p, [0, 0, 1], 1e4) == 1
    assert hockey_stick(torch.tensor(p), torch.tensor([0., .5, .5]), 800.) == .5
    eps = 1.1  # not a float32: an eps cut to single precision would show
    lie = 1/(1 + math.exp(eps))
    assert hockey_stick([1 - lie, lie], [lie, 1 - lie], eps) < 1e-15


def test_hockey_stick_weighs_cells_of_unequal_width():
    right = torch.logspace(-2, 1, 4000, dtype=torch.float64)
    edges = torch.cat([-right.flip(0), right])
    x, dx = (edges[1:] + edges[:-1])/2, edges.diff()
    p, q = normals(x)
    assert abs(hockey_stick(p, q, 1., dx=dx) - gaussian_delta(1., 1.)) < 1e-4


# mechanisms

BITS = [torch.tensor([True, False, True]), torch.tensor([1, 0, 1]), torch.tensor([1., 0., 1.]),
        [1, 0, 1]]


@pytest.mark.parametrize("x", BITS)
def test_randomized_response_keeps_kind_and_shape(x):
    y = randomized_response(x, 1., gen())
    assert y.shape == (3,) and y.dtype == (x.dtype if isinstance(x, torch.Tensor) else torch.int64)
    assert set(y.double().tolist()) <= {0., 1.}


@pytest.mark.parametrize("eps", [0., .5, 3.])
def test_randomized_response_lies_as_often_as_it_should(eps):
    "False alarm: 3 x 2 exact binomial tests at 1e-7 each."
    for bit in (0, 1):
        lies = (randomized_response(torch.full((200_000,), bit), eps, gen(bit)) != bit).sum().item()
        assert stats.binomtest(lies, 200_000, 1/(1 + math.exp(eps))).pvalue > 1e-7


def test_randomized_response_mean_is_unbiased():
    "Exact: the expectation over answers, no sampling. And one draw within 5 standard errors."
    for eps in (.1, 1., 5.):
        lie = 1/(1 + math.exp(eps))
        for share in (0., .3, 1.):
            expected = share*(1 - lie) + (1 - share)*lie
            assert abs(randomized_response_mean([expected], eps) - share) < 1e-12
    x = torch.arange(100_000) % 10 == 0
    error = randomized_response_mean(randomized_response(x, 1., gen()), 1.) - .1
    assert abs(error) < 5*math.sqrt(.25/100_000)/(1 - 2/(1 + math.e))


@pytest.mark.parametrize("mechanism, law", [(laplace_mechanism, stats.laplace(5, 3/.7)),
                                            (gaussian_mechanism, stats.norm(5, 3*.7))])
def test_noise_has_the_law_it_should(mechanism, law):
    "Shape by Kolmogorov-Smirnov, size by the mean of |noise|: false alarm 1e-7 each; 2 % is seen."
    n = 200_000
    y = mechanism(torch.full((n,), 5, dtype=torch.int64), 3., .7, gen(1))
    assert y.dtype == torch.float64 and stats.kstest(y.numpy(), law.cdf).pvalue > 1e-7
    size = law.expect(lambda v: abs(v - 5))
    limit = 5.4*math.sqrt((law.var() - size**2)/n)
    assert abs((y - 5).abs().mean() - size) < limit
    assert abs(.98*(y - 5).abs().mean() - size) > limit  # the test can fail


def test_a_sensitivity_of_eight_bits_does_not_wrap_around():
    "Such as the largest of some pixels, 255."
    x, most = torch.zeros(20_000), np.uint8(255)
    assert gaussian_mechanism(x, most, np.uint8(2), gen()).std() == gaussian_mechanism(
        x, 255, 2, gen()).std() > 500
    assert laplace_mechanism(x, np.float16(300), np.float16(.001), gen()).isfinite().all()


@pytest.mark.parametrize("mechanism", [laplace_mechanism, gaussian_mechanism])
def test_mechanisms_keep_shape_and_input(mechanism):
    x = torch.zeros(2, 3)
    y = mechanism(x, 1., 1., gen())
    assert y.shape == (2, 3) and y.dtype == torch.float32
    assert (x == 0).all() and y.unique().numel() == 6
    assert mechanism(3, 1., 1., gen()).shape == () and torch.equal(y, mechanism(x, 1., 1., gen()))
    for x in (np.ones(4), torch.zeros(0), [[1, 2]]):
        assert mechanism(x, 1., 1., gen()).shape == np.shape(x)


# attacks

def test_max_tpr_is_reached_by_randomized_response_and_never_by_gaussian():
    fpr = torch.linspace(0, 1, 1001, dtype=torch.float64)
    for eps in (.1, 1., 3.):
        lie = 1/(1 + math.exp(eps))
        assert abs(max_tpr(lie, eps) - (1 - lie)) < 1e-15
        assert abs((max_tpr(fpr, eps) - fpr).max() - math.tanh(eps/2)) < 1e-3
        for sigma in (.5, 1., 5.):  # for every eps the bound holds, at some fpr it is tight
            bound = max_tpr(fpr, eps, gaussian_delta(eps, sigma))
            curve = gaussian_tpr(fpr, sigma)
            assert (curve <= bound + 1e-12).all() and (bound - curve).min() < 1e-4
    assert max_tpr(.2, 1e4) == 1 and max_tpr(0., 1e4) == 0
    assert max_tpr(0., 1., .1) == pytest.approx(.1)
    assert gaussian_tpr(fpr, 1.)[[0, -1]].tolist() == [0., 1.]


# errors: the rule, the value

OUT_OF_RANGE = [  # what is called with which values, and words of the refusal
    *((call, (0, -1., math.nan, math.inf), "finite number > 0") for call in (
        lambda bad: gaussian_delta(1., bad), lambda bad: gaussian_epsilon(1e-5, bad),
        lambda bad: gaussian_tpr(.1, bad), lambda bad: laplace_mechanism(0., bad, 1., gen()),
        lambda bad: laplace_mechanism(0., 1., bad, gen()),
        lambda bad: gaussian_mechanism(0., bad, 1., gen()),
        lambda bad: gaussian_mechanism(0., 1., bad, gen()),
        lambda bad: randomized_response_mean([1], bad))),
    *((call, (-1e-9, -3, math.nan), "no privacy level") for call in (
        lambda bad: gaussian_delta(bad, 1.), lambda bad: gaussian_sigma(bad, 1e-5),
        lambda bad: max_tpr(.1, bad), lambda bad: hockey_stick([1.], [1.], bad),
        lambda bad: randomized_response([1], bad, gen()))),
    *((call, (0, 1, -.1, 2., math.nan), "between 0 and 1") for call in (
        lambda bad: gaussian_sigma(1., bad), lambda bad: gaussian_epsilon(bad, 1.))),
    *((lambda x, f=f: f(x, 1., 1., gen()), (math.nan, [1., math.inf], torch.tensor([math.nan])),
       "NaN or infinity") for f in (laplace_mechanism, gaussian_mechanism)),
    (lambda x: randomized_response(x, 1., gen()), ([0, 2], [.5], [math.nan]), "bits"),
    (lambda eps: gaussian_sigma(eps, 1e-5), (math.inf,), "no privacy at all"),
    (lambda fpr: max_tpr(fpr, 1.), (1.2,), "no rate"),
    (lambda delta: max_tpr(.2, 1., delta), (1.,), "delta"),
    *((lambda pair: hockey_stick(*pair, 1.), (pair,), words) for words, pair in {
        "same outputs": ([1.], [.5, .5]), "p has negative": ([1.5, -.5], [.5, .5]),
        "q has negative": ([.5, .5], [math.nan, .5]), "not 1": ([.5, .5], [1., 1.])}.items())]


@pytest.mark.parametrize("call, values, words", OUT_OF_RANGE)
def test_what_is_out_of_range_is_refused(call, values, words):
    for value in values:
        with pytest.raises(ValueError, match=words):
            call(value)
