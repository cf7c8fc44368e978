"The distribution of the Poisson sampler, and tests that notice a wrong one."
import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from toys import generator as gen

from dp_course.privacy import poisson_indices


def test_indices_are_a_sorted_int64_set():
    idx = poisson_indices(10_000, .3, gen())
    assert idx.dtype == torch.int64 and idx.ndim == 1 and idx.device.type == "cpu"
    assert (idx[1:] > idx[:-1]).all() and idx[0] >= 0 and idx[-1] < 10_000
    assert torch.equal(idx, poisson_indices(10_000, .3, gen()))
    assert not torch.equal(idx, poisson_indices(10_000, .3, gen(1)))


EXTREMES = [(50, 1, 50), (50, 1., 50), (50, 0, 0), (0, .5, 0), (1, 1, 1), (10**6, 1e-300, 0)]


@pytest.mark.parametrize("n, q, size", EXTREMES)
def test_extreme_rates(n, q, size):
    idx = poisson_indices(n, q, gen())
    assert idx.dtype == torch.int64 and len(idx) == size
    if size:
        assert torch.equal(idx, torch.arange(size))


@pytest.mark.parametrize("q", [-1e-9, 1.0000001, math.nan, math.inf, 64])
def test_rate_that_is_no_probability(q):
    with pytest.raises(ValueError, match="batch_size/n"):
        poisson_indices(10, q, gen())


@pytest.mark.parametrize("n", [-1, 2.5])
def test_n_that_is_no_count(n):
    with pytest.raises(ValueError, match="number of examples"):
        poisson_indices(n, .5, gen())


def two_sided(cdf, sf):
    return min(1., 2*min(cdf, sf))


def sampler_alarms(sample, n, q, draws, alpha=1e-6):
    """Names of the properties of independent coins that `sample()` lacks, over `draws` batches.

    Each of the four tests rejects a correct sampler with probability at most alpha.
    """
    x = torch.zeros(draws, n, dtype=torch.float64)
    for row in x:
        row[sample()] = 1
    sizes, counts = x.sum(1).numpy(), x.sum(0).numpy()
    # one example too often or too seldom: everybody's own two-sided test, with a union bound over n
    own = 2*np.minimum(stats.binom.sf(counts - 1, draws, q), stats.binom.cdf(counts, draws, q))
    # (draws-1) s^2/var is close to chi-squared for n q (1-q) >> 1
    t = ((sizes - sizes.mean())**2).sum()/(n*q*(1-q))
    # how often an example is in two batches in a row: correlated if there is memory
    twice = int((x[:-1:2]*x[1::2]).sum())
    p = {"rate": stats.binomtest(int(sizes.sum()), draws*n, q).pvalue,
         "example": n*own.min(),
         "size variance": two_sided(stats.chi2.cdf(t, draws - 1), stats.chi2.sf(t, draws - 1)),
         "memory": stats.binomtest(twice, n*len(x[1::2]), q*q).pvalue}
    return {question for question, value in p.items() if value < alpha}


def shuffled(n, batch_size, generator):
    "What a shuffled loader does, for ever."
    while True:
        order = torch.randperm(n, generator=generator)
        yield from order[:n//batch_size*batch_size].view(-1, batch_size)


@pytest.mark.parametrize("q", [.02, .2, .7])
def test_every_example_is_an_independent_coin(q):
    "False-alarm rate at most 4e-6 per q, and the seed is fixed."
    assert sampler_alarms(partial(poisson_indices, 500, q, gen(3)), 500, q, 4000) == set()


def test_the_coin_test_notices_wrong_samplers():
    n, q = 500, .1
    g, batches = gen(4), shuffled(n, 50, gen(5))
    skewed = torch.full((n,), q)
    skewed[:2] = torch.tensor([.2, .0])

    def alarms(sample):
        return sampler_alarms(sample, n, q, 4000)
    assert alarms(lambda: next(batches)) == {"size variance", "memory"}
    assert alarms(lambda: torch.randperm(n, generator=g)[:50]) == {"size variance"}
    assert "rate" in alarms(lambda: poisson_indices(n, .105, g))
    assert alarms(lambda: poisson_indices(n - 1, q, g)) == {"example"}
    assert alarms(lambda: 1 + poisson_indices(n - 1, q, g)) == {"example"}
    assert alarms(lambda: (torch.rand(n, generator=g) < skewed).nonzero().flatten()) == {"example"}


def test_false_alarms_are_as_rare_as_stated():
    "200 correct samplers at alpha = .01: at most 4 % alarms on average. Fails once in 1e6 seeds."
    found = [bool(sampler_alarms(partial(poisson_indices, 60, .2, gen(seed)), 60, .2, 100, .01))
             for seed in range(200)]
    assert stats.binomtest(sum(found), 200, .04, alternative="greater").pvalue > 1e-6


def test_tiny_rates_are_not_rounded_up():
    """8e7 coins with q = 1e-12: P[more than one hit] = 3.2e-9.

    Coins in float32 (multiples of 2^-24) would hit 4.8 times on average.
    """
    g = gen(6)
    assert sum(len(poisson_indices(4_000_000, 1e-12, g)) for _ in range(20)) <= 1


def test_empty_batch_probability():
    "3,000 draws of a set that is empty with probability .9^20 = .1216; false-alarm rate 1e-6."
    g = gen(7)
    empty = sum(len(poisson_indices(20, .1, g)) == 0 for _ in range(3000))
    assert stats.binomtest(empty, 3000, .9**20).pvalue > 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_indices_live_where_the_generator_is():
    assert poisson_indices(1000, .5, torch.Generator("cuda").manual_seed(0)).is_cuda
