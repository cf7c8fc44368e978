"""One example moves a clipped sum by C (1 + 1e-6): a search for one that moves it further.

Casacuberta, Shoemate, Vadhan & Wagaman 2022 (arXiv 2207.10635): a sum of floats moves by more.
"""
import copy
import math

import pytest
import torch
from oracle import ENGINES as EVERY
from oracle import every
from rounding import BOUND, C, alternating, at_random, blocks, dot, staircase
from torch import nn
from toys import loss

from dp_course.gradients import (
    FlatClip,
    bookkeeping_grad_sum,
    fast_grad_sum,
    ghost_grad_sum,
    hook_grad_sum,
    loop_grad_sum,
)
from dp_course.gradients.layers import KeptGradients
from dp_course.models import WSConv2d, resnet20

ENGINES = [engine for engine in EVERY.values() if engine is not loop_grad_sum]  # it is slow
PATTERNS = [staircase, lambda n: staircase(n, .51), blocks, alternating, at_random]
LAYERS = {  # model, shape of x, shape of its output
    "linear": (lambda: nn.Linear(1, 1, bias=False), (1,), (1,)),
    "bias": (lambda: nn.Linear(1, 1), (1,), (1,)),
    "conv": (lambda: nn.Conv2d(1, 1, 1, bias=False), (1, 1, 1), (1, 1, 1)),
    "transposed": (lambda: nn.ConvTranspose2d(1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "norm": (lambda: nn.GroupNorm(1, 1), (1, 2, 1), (1, 2, 1)),
    "embedding": (lambda: nn.Embedding(2, 1), (1,), (1, 1))}


def batch(kind, v, dtype=torch.float32):
    make, shape, out = LAYERS[kind]
    torch.manual_seed(0)
    model = make().to(dtype)
    if kind == "embedding":
        x = torch.zeros(len(v), *shape, dtype=torch.long)
    else:
        x = torch.ones(len(v), *shape, dtype=dtype)
    y = v.view(-1, *[1]*len(out)).expand(len(v), *out)
    return model, x, y.to(dtype)


def summed(engine, model, x, y):
    "The clipped sum, as one vector."
    sums, _ = engine(model, dot, x, y, FlatClip(C))
    assert all(g.dtype == torch.float64 for g in sums.values())
    return torch.cat([g.flatten() for g in sums.values()])


def moved(engine, model, x, y, row=0):
    "How far the sum moves when one row goes."
    keep = [*range(row), *range(row + 1, len(x))]
    whole = summed(engine, model, x, y)
    return (whole - summed(engine, model, x[keep], y[keep])).norm().item()


@pytest.mark.parametrize("engine", ENGINES)
def test_no_pattern_moves_a_sum_further(engine):
    for kind in LAYERS:
        for pattern in PATTERNS:
            assert moved(engine, *batch(kind, pattern(1500))) <= BOUND, (kind, pattern)


def test_the_attack_of_fifty_thousand_rows():
    "In float32 this sum moved by 34 C."
    model, x, y = batch("linear", staircase(50_000))
    assert moved(fast_grad_sum, model, x, y) <= BOUND
    ones = torch.ones(len(y))
    in_float32 = y.T @ ones - y[1:].T @ ones[1:]
    assert in_float32.abs().item() > 5*C  # the search would have noticed


def test_the_loop_adds_up_in_float64():
    for kind in ("linear", "norm"):
        model, x, y = batch(kind, staircase(200))
        assert moved(loop_grad_sum, model, x, y) <= BOUND


@every
def test_many_small_numbers_beside_a_large_one_are_measured(engine):
    "A float32 norm was 1.7e-4 too short."
    x = torch.full((1, 100_000), .3)
    x[0, 0] = 1e3
    sums, _ = engine(nn.Linear(100_000, 1, bias=False), dot, x, torch.ones(1, 1), FlatClip(C))
    assert .99*C <= sums["weight"].double().norm() <= BOUND


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_moves_a_sum_no_further(dtype):
    for engine in (hook_grad_sum, bookkeeping_grad_sum, fast_grad_sum, ghost_grad_sum):
        for kind in ("linear", "bias", "embedding"):
            for pattern in (staircase, blocks, at_random):
                assert moved(engine, *batch(kind, pattern(1000), dtype)) <= BOUND, kind


def words(x, y):
    return nn.Linear(x.shape[2], y.shape[2], bias=False).to(x.dtype), x, y


def pixels(x, y):
    "The same as a convolution of images in one line, whose filters see one pixel."
    made = nn.Conv2d(x.shape[2], y.shape[2], 1, bias=False).to(x.dtype)
    return made, x.mT[:, :, None].contiguous(), y.mT[:, :, None].contiguous()


def steps(t, width):
    "A one, and then numbers whose squares a float32 sum forgets one after the other."
    x = torch.full((2, t, width), (.98*2**-24)**.5)
    x[..., 0] = 1.
    return x*torch.tensor([1., 2.])[:, None, None], x


def cancelling(t, i, o, apart, seed):
    "Terms of a gradient that float32 hardly tells from nothing, in the first of three rows."
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(3, t, i, generator=g), torch.randn(3, t, o, generator=g)
    x[0] = 1e4*x[0, 0]*(1 + apart*torch.randn(t, i, generator=g))
    y[0] = 1e4*(y[0].double() - y[0].double().mean(0)).float()
    return x, y


@pytest.mark.parametrize("layer", [words, pixels])
def test_a_product_over_few_positions_is_measured_as_it_is_added_up(layer):
    "Norms in float32 and an exact sum once gave 1.00002 C (fast_grad_sum) and 1.018 C (ghost)."
    rows = [steps(2, 3000), steps(16, 400)]
    rows += [cancelling(t, i, o, apart, seed) for t, i, o in ((2, 2, 3), (9, 8, 24), (16, 64, 64))
             for apart in (1e-3, 1e-6) for seed in range(3)]
    for x, y in rows:
        for engine in (bookkeeping_grad_sum, fast_grad_sum, ghost_grad_sum):
            assert moved(engine, *layer(x, y)) <= BOUND, (engine.__name__, tuple(x.shape))


@pytest.mark.parametrize("layer", [words, pixels])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_gradient_is_measured_as_it_is_added_up(layer, dtype):
    "ghost_grad_sum once measured rounded gradients and added up exact ones: 1.0003 C."
    g = torch.Generator().manual_seed(0)
    for t, i, o in ((1, 16, 16), (4, 16, 16), (9, 8, 24), (16, 16, 16)):
        x, y = (torch.randn(7, t, width, generator=g).to(dtype) for width in (i, o))
        for engine in ENGINES:
            moves = [moved(engine, *layer(x, y), row=row) for row in range(4)]
            assert max(moves) <= BOUND, engine.__name__


def test_huge_terms_that_cancel_leave_the_other_rows_alone():
    "In one product with them, the sum of all others was rounded at 1e14."
    x, y = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    x[2, 2] = x[2, 0].mul_(1e15)
    y[2, 2] = -y[2, 0].mul_(1e15)
    for engine in ENGINES:
        for row in range(3):
            assert moved(engine, *words(x, y), row=row) <= BOUND, engine.__name__


def wide(kind):
    "Layers with many numbers, whose norms are rounded."
    torch.manual_seed(1)
    if kind == "linear":
        return nn.Linear(3000, 40), torch.randn(4, 3000).exp()*10, (4, 40)
    if kind == "words":
        return nn.Linear(50, 60), torch.randn(4, 9, 50) + 3, (4, 9, 60)
    if kind == "conv":
        return nn.Conv2d(8, 16, 3, padding=1), torch.randn(4, 8, 12, 12) + 1, (4, 16, 12, 12)
    if kind == "ghost conv":
        return nn.Conv2d(64, 64, 3, padding=1), torch.randn(4, 64, 4, 4) + 1, (4, 64, 4, 4)
    conv = WSConv2d(64, 64, 3, padding=1, bias=False)
    return conv, torch.randn(4, 64, 4, 4) + 1, (4, 64, 4, 4)


@pytest.mark.parametrize("kind", ["linear", "words", "conv", "ghost conv", "standardized"])
def test_rounded_norms_let_no_example_be_longer(kind):
    model, x, shape = wide(kind)
    for scale, centre in ((1., 0.), (100., 0.), (100., 1.)):
        y = torch.randn(shape, generator=torch.Generator().manual_seed(2))*scale
        if centre:
            y = y - .9*y.mean(dim=tuple(range(2, y.dim())), keepdim=True) if y.dim() > 2 else y
        for engine in ENGINES:
            for i in range(len(x)):
                sums, _ = engine(model, dot, x[i:i + 1], y[i:i + 1], FlatClip(C))
                length = torch.cat([g.flatten() for g in sums.values()]).norm().item()
                assert .9*C <= length <= BOUND, (engine.__name__, length)


@pytest.mark.parametrize("padding", [None, 0])
def test_rows_of_an_embedding_are_measured_as_they_are_added_up(padding):
    "A word that a text uses twice has one gradient; texts, words, widths and sizes at random."
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        words, width, t, b = (int(torch.randint(low, high, (), generator=g))
                              for low, high in ((1, 6), (1, 70), (1, 40), (2, 9)))
        model = nn.Embedding(words, width, padding_idx=padding)
        x = torch.randint(words, (b, t), generator=g)
        y = torch.randn(b, t, width, generator=g)*10**(40*torch.rand(b, 1, 1, generator=g) - 20)
        y[:, 1::2] = -y[:, :-1:2]*(1 + 1e-6) if t > 1 and seed % 2 and t % 2 == 0 else y[:, 1::2]
        assert moved(fast_grad_sum, model, x, y, row=seed % b) <= BOUND, seed
        _, norms = fast_grad_sum(model, dot, x, y, FlatClip(C))
        _, true = loop_grad_sum(copy.deepcopy(model).double(), dot, x, y.double(), FlatClip(C))
        near = y.double().flatten(1).norm(dim=1)*1e-6*t  # what float32 may lose in one sum
        assert ((norms - true).abs() <= near + 1e-12*true).all(), seed
        y[0, 0, 0] = math.nan  # counts nothing, and harms nobody
        if padding is None or x[0, 0]:
            assert moved(fast_grad_sum, model, x, y) == 0, seed


@every
def test_an_infinite_weight_gradient_beside_a_finite_bias_counts_nothing(engine):
    "One tensor's norm is enough: `any` in place of `all` would let 0*inf into the released sum."
    model = nn.Linear(2, 1)
    x = torch.tensor([[1., 2.], [math.inf, 1.], [3., 4.]])
    y = torch.full((3, 1), .1)
    sums, norms = engine(model, dot, x, y, FlatClip(C))
    want, _ = engine(model, dot, x[[0, 2]], y[[0, 2]], FlatClip(C))
    assert not norms[:, 1].isfinite().all() and norms[1, 1].isfinite()
    for name in want:
        assert sums[name].isfinite().all()
        torch.testing.assert_close(sums[name], want[name])


def hard_to_measure():
    "Rows whose length float32 loses: random, one large number before small ones, huge, tiny."
    rows = torch.randn(200, 2000, generator=torch.Generator().manual_seed(3))
    rows[50:100] = .4*2.**-12  # squares that a float32 one swallows, 63 times a block
    rows[50:100, ::64] = 1.
    rows[100:120] *= 1e25
    rows[120:140] *= 1e-30
    rows[140:150] = 0.
    return rows


@pytest.mark.parametrize("width", [2000, 1985, 1000])
def test_a_row_is_never_measured_too_short(width):
    "Float32 within 64 numbers: without its margin every other random row would be."
    rows = hard_to_measure()[:, :width]
    true = rows.double().norm(dim=1)
    norms = KeptGradients(rows).squared_norms().sqrt()
    assert (norms >= true*(1 - 1e-12)).all()
    assert (norms <= true*(1 + 1e-5)).all()
    in_float32 = torch.linalg.vector_norm(rows, dim=1).double()
    assert (in_float32 < true*(1 - 1e-8)).any()  # the search would have noticed


def test_a_row_that_is_not_finite_is_not_measured():
    rows = torch.ones(200, 2000)
    rows[3, 5], rows[4, 6] = math.inf, math.nan
    norms = KeptGradients(rows).squared_norms()
    assert norms.isfinite().sum() == 198 and not norms[3:5].isfinite().any()


def most_moved(model, x, y):
    "How far the sum moves beyond C, the furthest of three rows; a fraction of C."
    def total(x, y):
        sums, _ = fast_grad_sum(model, loss, x, y, FlatClip(C))
        return torch.cat([g.flatten() for g in sums.values()])

    whole, found = total(x, y), []
    for row in (0, len(x)//2, len(x) - 1):
        keep = [i for i in range(len(x)) if i != row]
        found.append((whole - total(x[keep], y[keep])).norm().item()/C - 1)
    return max(found)


def test_how_far_other_rows_round_differently():
    "The limit that is named: a row's own products may round by who stands beside it."
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Flatten(), nn.Linear(192, 60), nn.Tanh(), nn.Linear(60, 10))
    for b in (2, 9, 65):
        x, y = torch.randn(b, 3, 8, 8), torch.arange(b) % 10
        assert most_moved(dense, x, y) <= 1e-6
    # seen: 4e-6, where a ReLU of one row changed its side, so that its gradient did
    assert most_moved(resnet20(), x[:2], y[:2]) <= 1e-3


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", [1, 64, 9000, 40_000])
def test_many_wide_rows_are_added_up_in_float64(width, threads):
    "Rows that fill more than a core's cache are added up piece by piece, each thread its own."
    rows = staircase(2**18//width if width > 1 else 2**18).view(-1, 1).expand(-1, width)
    found = KeptGradients(rows.contiguous()).weighted_sum(torch.ones(len(rows)), None)
    want = rows[:, 0].double().sum()
    assert ((found - want).abs() <= 1e-12*want).all()


@pytest.mark.parametrize("b", [12, 127, 9000])
def test_every_row_is_added_once_by_whichever_thread(b, threads):
    g = torch.Generator().manual_seed(b)
    rows = torch.randn(b, 2**19//b, generator=g)
    factors = torch.rand(b, generator=g, dtype=torch.float64)
    found = KeptGradients(rows).weighted_sum(factors, None)
    torch.testing.assert_close(found, factors @ rows.double(), rtol=1e-10, atol=1e-10)
