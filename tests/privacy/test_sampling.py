"The Poisson sampler: a coin of 53 bits for every example."
import math

import pytest
import torch
from toys import generator as gen

from dp_course.privacy import poisson_indices

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


@pytest.mark.parametrize("q", [.01, .25, .9])
def test_every_example_is_a_coin_of_53_bits(q):
    "Whoever trusts the generator's numbers trusts the sample: it is these, compared with q."
    coins = torch.rand(400_000, dtype=torch.float64, generator=gen(3))
    assert torch.equal(poisson_indices(400_000, q, gen(3)), (coins < q).nonzero().flatten())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_indices_live_where_the_generator_is():
    assert poisson_indices(1000, .5, torch.Generator("cuda").manual_seed(0)).is_cuda
