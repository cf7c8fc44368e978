"The flat clip lets no example through that is longer; the noise has the size that it says."
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import generator

from dp_course.gradients import FlatClip, noisy_mean
from dp_course.privacy.randomness import normal


@given(st.lists(st.lists(st.floats(0, 1e30), min_size=3, max_size=3), min_size=1, max_size=6),
       st.floats(1e-6, 1e6))
@settings(max_examples=200, deadline=None)
def test_flat_clip_bounds(columns, max_norm):
    norms, clip = torch.tensor(columns, dtype=torch.float64).T, FlatClip(max_norm)
    factors = clip(norms)
    whole = torch.linalg.vector_norm(norms, dim=0)
    assert factors.shape == norms.shape and (factors[0] == factors[1]).all()
    passed = torch.linalg.vector_norm(factors*norms, dim=0)
    assert (passed <= max_norm*(1 + 1e-12)).all()
    assert (factors[0][whole <= max_norm*(1 - 1e-12)] == 1).all()


def test_noise_has_the_std_it_says():
    # 400,000 draws: the sample std is within 5.5 standard errors, 0.6 %, but for one run in 2e7
    n, std, batch = 400_000, torch.tensor([3., .5]), 50.
    sums = {"a": torch.ones(n), "b": torch.full((n,), 7.)}
    out = noisy_mean(sums, std, batch, torch.Generator().manual_seed(1))
    for v, s, m in zip(out.values(), std.tolist(), (1, 7)):
        assert abs((v*batch).std().item()/s - 1) < 5.5/math.sqrt(2*n)
        assert abs((v*batch).mean().item() - m) < 5.5*s/math.sqrt(n)
    assert abs(torch.corrcoef(torch.stack(list(out.values())))[0, 1]) < 5.5/math.sqrt(n)


@pytest.mark.parametrize("std, batch", [(-1, 5), (math.nan, 5), (math.inf, 5), (1, 0), (1, -3),
                                        (1, math.nan)])
def test_noise_refuses_nonsense(std, batch):
    with pytest.raises(ValueError, match="plan.batch_size"):
        noisy_mean({"a": torch.ones(2)}, std, batch)


def test_noise_is_larger_by_what_rounding_may_add_to_a_sum():
    noise = noisy_mean({"w": torch.zeros(5, dtype=torch.float64)}, 2., 1., generator(0))["w"]
    usual = 2*normal((5,), generator(0))
    torch.testing.assert_close(noise, usual*(1 + 1e-6), rtol=1e-12, atol=0)
