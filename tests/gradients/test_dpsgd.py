"The loop, the clip and the noise against oracles and under faults."
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap
from toys import close, conv, generator, linear, loss, toy

from dp_course.data import Views, take
from dp_course.gradients import FlatClip, example_grads, loop_grad_sum, noisy_mean
from dp_course.privacy.randomness import normal


class Tied(nn.Module):
    "One matrix, used twice and known under two names."
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.out = nn.Linear(5, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(self.b(self.a(x).tanh()).tanh())


def oracle(model, x, y, max_norm):
    "Per-example gradients by torch.func, clipped by hand; x is (b,k,...)."
    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def f(params, rows, label):
        return loss(functional_call(model, params, (rows,)), label.expand(len(rows))).mean()

    grads = vmap(grad(f), (None, 0, 0))(params, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()])
    factors = max_norm/norms.square().sum(0).sqrt().clamp(min=max_norm)
    return {n: torch.einsum("b,b...->...", factors, g) for n, g in grads.items()}, norms


@pytest.mark.parametrize("net, shape, k", [(linear, (5,), 1), (Tied, (5,), 1), (conv, (2, 6, 6), 1),
                                           (conv, (2, 6, 6), 3)],
                         ids=["linear", "tied", "conv", "views"])
@pytest.mark.parametrize("b", [1, 5])
@pytest.mark.parametrize("max_norm", [.3, 1e9])
def test_loop_is_the_oracle(net, shape, k, b, max_norm):
    torch.manual_seed(0)
    model, data = net().double(), toy(b, shape=(k, *shape))
    x = Views(data.train_x) if k > 1 else data.train_x[:, 0]
    got, norms = loop_grad_sum(model, loss, x, data.train_y, FlatClip(max_norm))
    want, want_norms = oracle(model, data.train_x, data.train_y, max_norm)
    assert list(got) == [n for n, p in model.named_parameters() if p.requires_grad] == list(want)
    for n in want:
        close(got[n], want[n])
    close(norms, want_norms)
    assert all(p.grad is None for p in model.parameters())


class Sum(nn.Module):
    "Takes two inputs, by name or by position."
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(2, 3)

    def forward(self, a, b):
        return self.left(a) + self.right(b)


@pytest.mark.parametrize("kind", [tuple, dict])
def test_dicts_and_tuples_are_batches(kind):
    torch.manual_seed(0)
    model, y = Sum().double(), torch.tensor([0, 1, 2, 0])
    a, b = torch.randn(4, 5).double(), torch.randn(4, 2).double()
    x = (a, b) if kind is tuple else {"b": b, "a": a}
    got, norms = loop_grad_sum(model, loss, x, y, FlatClip(1e9))
    loss(model(a, b), y).sum().backward()
    for n, p in model.named_parameters():
        close(got[n], p.grad)
    one = example_grads(model, loss, take(x, 2), y[2])
    close(torch.stack([g.norm() for g in one.values()]), norms[:, 2])


def test_outputs_reach_the_loss_whole():
    class Two(nn.Linear):
        def forward(self, x):
            return {"a": super().forward(x), "b": super().forward(-x)}

    model, data = Two(5, 3).double(), toy(3)
    def both(output, y):
        return loss(output["a"], y) - loss(output["b"], y)
    got, _ = loop_grad_sum(model, both, data.train_x, data.train_y, FlatClip(1e9))
    both(model(data.train_x), data.train_y).sum().backward()
    close(got["weight"], model.weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float64(dtype):
    model, data = linear(dtype), toy(64, dtype=torch.float32)
    x = data.train_x.to(dtype)
    got, norms = loop_grad_sum(model, loss, x, data.train_y, FlatClip(1e9))
    assert norms.dtype == torch.float32 and {g.dtype for g in got.values()} == {torch.float64}
    each = [example_grads(model, loss, u, v) for u, v in zip(x, data.train_y)]
    close(got["weight"], sum(g["weight"].double() for g in each), rtol=1e-12, atol=1e-12)


def test_empty_batch_has_a_zero_sum():
    model, data = conv().double(), toy(1, shape=(2, 6, 6))
    x, y = take((data.train_x, data.train_y), slice(0))
    grads, norms = loop_grad_sum(model, loss, x, y, FlatClip(1.))
    assert norms.shape == (5, 0) and len(grads) == 5
    assert all((g == 0).all() for g in grads.values())


def test_a_loss_may_be_one_number():
    "Of one example a mean is its loss."
    data = toy(4)
    per_row, mean = (loop_grad_sum(linear(), f, data.train_x, data.train_y, FlatClip(1.))[0]
                     for f in (loss, F.cross_entropy))
    for name in per_row:
        assert torch.equal(per_row[name], mean[name])
    with pytest.raises(ValueError, match="one loss per row"):
        loop_grad_sum(linear(), lambda output, y: output, data.train_x, data.train_y, FlatClip(1.))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_bad_example_contributes_zero(bad):
    model, data, clip = linear(), toy(5), FlatClip(.5)
    x, y = data.train_x.clone(), data.train_y
    x[0] = bad

    def overflows(output, y):
        return output.square().sum(1) if bad == 1e200 else loss(output, y)

    got, norms = loop_grad_sum(model, overflows, x[:1], y[:1], clip)
    assert all((g == 0).all() for g in got.values()) and not norms.isfinite().all()
    got, _ = loop_grad_sum(model, overflows, x, y, clip)
    want, _ = loop_grad_sum(model, overflows, x[1:], y[1:], clip)
    for n in want:
        assert torch.equal(got[n], want[n])


def test_mean_over_views_comes_before_the_norm():
    torch.manual_seed(0)
    model, x = conv().double(), torch.randn(3, 2, 6, 6, dtype=torch.float64)
    y = torch.tensor(1)
    together = example_grads(model, loss, Views(x[None]), y)
    apart = [example_grads(model, loss, view, y) for view in x]
    for n, g in together.items():
        close(g, sum(a[n] for a in apart)/3, rtol=1e-10)


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


def test_flat_clip_edges():
    clip = FlatClip(2.)
    assert clip(torch.zeros(3, 0)).shape == (3, 0) and (clip(torch.zeros(3, 2)) == 1).all()
    factors = clip(torch.tensor([[1., math.nan, math.inf, 3.], [1., 1., 1., 4.]]))
    assert factors.tolist() == [[1, 0, 0, pytest.approx(.4)]]*2
    assert clip.sensitivity == 2 and clip.std(1.5) == 3
    for bad in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="no bound"):
            FlatClip(bad)


@pytest.mark.parametrize("scale", [1e-3, 1., 1e8, 1e30, 1e300])
def test_one_example_moves_the_sum_by_at_most_c(scale):
    model, data, clip = linear(), toy(6), FlatClip(.7)
    x, y = data.train_x, data.train_y
    stranger = scale*torch.randn(1, 5, dtype=torch.float64)
    a, _ = loop_grad_sum(model, loss, x, y, clip)
    b, _ = loop_grad_sum(model, loss, torch.cat([x, stranger]), torch.cat([y, y[:1]]), clip)
    assert torch.cat([(a[n] - b[n]).flatten() for n in a]).norm() <= .7*(1 + 1e-9)


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
