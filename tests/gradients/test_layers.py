"What a layer knows about each example, against autograd: every shape, in pieces, rounded up."
import copy

import pytest
import torch
import torch.nn.functional as F
from oracle import Net, parameter
from torch import nn
from toys import doubles, loss

from dp_course.gradients import (
    RULES,
    ConvWeight,
    FlatClip,
    KeptGradients,
    StandardizedWeight,
    Tap,
    bf16_engine,
    fast_grad_sum,
    layers,
    loop_grad_sum,
)
from dp_course.models import WSConv2d
from dp_course.models.resnet import standardized_convolution


def one_by_one(m, x, g, b):
    "Each example's weight gradient by autograd, its views added up."
    def grad(xi, gi):
        return torch.autograd.grad(m(xi), m.weight, gi)[0]

    rows = [grad(x[r:r+1], g[r:r+1]) for r in range(len(x))]
    return torch.stack([sum(rows[e::b]) for e in range(b)]).detach()


def squares(gradients):
    return gradients.flatten(1).square().sum(1)


LAYERS = {  # function with a rule -> a layer that uses it, shape of an example
    F.linear: (nn.Linear(5, 4), (5,)),
    F.conv1d: (nn.Conv1d(2, 3, 2), (2, 6)),
    F.conv2d: (nn.Conv2d(2, 4, 3, padding=1, groups=2), (2, 5, 4)),
    F.conv3d: (nn.Conv3d(2, 3, 2), (2, 3, 4, 3)),
    F.conv_transpose2d: (nn.ConvTranspose2d(3, 2, 2, 2), (3, 3, 4)),
    standardized_convolution: (WSConv2d(3, 4, 3, padding=1), (3, 4, 4)),
    F.group_norm: (nn.GroupNorm(2, 4), (4, 3, 3)),
    F.layer_norm: (nn.LayerNorm(4), (3, 4)),
    F.rms_norm: (nn.RMSNorm(4), (3, 4)),
    F.embedding: (nn.Embedding(7, 3), (4,)),
}


def test_every_rule_is_in_the_list():
    assert RULES.keys() == LAYERS.keys()


@pytest.mark.parametrize("t, i, o", [(1, 5, 4), (2, 40, 30), (9, 60, 50), (17, 5, 4)])
def test_products_with_few_and_many_positions(t, i, o):
    "Sums straight in float64, kept gradients, and such as are formed twice: all are a loop's."
    model = nn.Sequential(nn.Linear(i, o), nn.Tanh(), nn.Flatten(), nn.Linear(t*o, 3)).double()
    x = doubles(6, t, i)
    x[2] = torch.nan  # counts nothing
    given = model, loss, x, torch.arange(6) % 3
    found, expected = (engine(*given, FlatClip(.5)) for engine in (fast_grad_sum, loop_grad_sum))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("kernel, stride, size", [(1, 1, 2), (1, 2, 4), (3, 1, 3), (2, 2, 8)])
def test_wide_convolutions_of_small_maps(kernel, stride, size):
    "Norms from inner products and a sum straight in float64."
    conv = nn.Conv2d(24, 80, kernel, stride, padding=kernel//2)
    width = conv(torch.zeros(1, 24, size, size)).numel()
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(width, 3)).double()
    x = doubles(5, 24, size, size)
    given = model, loss, x, torch.arange(5) % 3
    found, expected = (engine(*given, FlatClip(.1)) for engine in (fast_grad_sum, loop_grad_sum))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def random_convolution(pick, pointwise):
    "Odd kernels, strides, dilations, paddings and groups; None if the map is too small for it."
    ranges = {"kernel": (1, 4), "dilation": (1, 3), "stride": (1, 2), "padding": (0, 5),
              "size": (1, 7)}
    pairs = {name: (pick(*r), pick(*r)) for name, r in ranges.items()}
    if pointwise:
        pairs["kernel"] = 1, 1
    if pick(0, 1):
        pairs["stride"] = 1, 1
    reach = [d*(k - 1) + 1 for d, k in zip(pairs["dilation"], pairs["kernel"])]
    size = pairs.pop("size")
    if any(s + 2*p < r for s, p, r in zip(size, pairs["padding"], reach)):
        return None, size
    groups, i = pick(1, 2), pick(1, 9)
    m = nn.Conv2d(i*groups, 2*groups, pairs["kernel"], pairs["stride"], pairs["padding"],
                  pairs["dilation"], groups, bias=False)
    return m.double(), size


def test_convolutions_of_every_shape():
    "Patches, fold and Gram norms against autograd; norms are never too small."
    draw = torch.Generator().manual_seed(0)

    def pick(low, high):
        return int(torch.randint(low, high + 1, (), generator=draw))

    done = by_patches = 0
    while done < 300:
        m, size = random_convolution(pick, pointwise=done % 4 == 0)
        if m is None:
            continue
        k = pick(1, 2)
        x = torch.randn(3*k, m.in_channels, *size, dtype=torch.float64, generator=draw)
        g = torch.randn(m(x).shape, dtype=torch.float64, generator=draw)
        weight, want = ConvWeight(m, x, g, 3, m.padding), one_by_one(m, x, g, 3)
        for got in (weight.gradients(), weight.naive()):
            assert got.shape == want.shape and torch.allclose(got, want, 1e-10, 1e-10), m
        by_patches += layers._empty_lanes(m, 3*k, 3)
        if m.groups == k == 1:
            got, true, scale = weight.ghost_norms(), squares(want), squares(x)*squares(g)
            assert (got >= true*(1 - 1e-12)).all() and (got - true <= 1e-11*scale).all(), m
        done += 1
    assert 50 < by_patches < 250  # both ways were taken


def test_patches_are_taken_in_pieces(monkeypatch):
    "More than 4 MB of patches: several products, one result."
    m = nn.Conv2d(2, 3, 5, padding=2, bias=False).double()
    x = doubles(32, 2, 40, 40)
    g = torch.randn_like(m(x))
    calls, original = [], layers._patches

    def watched(x, *rest):
        calls.append(len(x))
        return original(x, *rest)

    monkeypatch.setattr(layers, "_patches", watched)
    got = ConvWeight(m, x, g, 32, (2, 2)).gradients()
    assert torch.allclose(got, one_by_one(m, x, g, 32), 1e-10, 1e-10)
    assert calls == [14, 14, 4]


@pytest.mark.parametrize("groups, k", [(1, 1), (1, 2), (2, 2)])
def test_wide_layers_are_folded_in_pieces(groups, k, monkeypatch):
    "More than 16 MB of gradients: several grouped convolutions, one result."
    m = nn.Conv2d(128*groups, 128, 3, padding=1, groups=groups).double()
    x, g = doubles(k*31, 128*groups, 3, 3), doubles(k*31, 128, 3, 3)
    calls, original = [], layers._weight_gradient

    def watched(*args):
        calls.append(args[-1])
        return original(*args)

    monkeypatch.setattr(layers, "_weight_gradient", watched)
    weight = ConvWeight(m, x, g, 31, (1, 1))
    assert torch.allclose(weight.gradients(), weight.naive(), 1e-10, 1e-10)
    assert calls == [16*groups, 15*groups]


DEEP = {  # small images with many channels: kernel, stride, padding, dilation
    "3x3": (3, 1, 1, 1),
    "stride 2": (3, 2, 1, 1),
    "uneven": ((2, 3), 1, (0, 2), 1),
    "dilated": (3, 1, 2, 2),
    "1x1": (1, 2, 0, 1),
}


def deep_weight(kind, conv, b=5):
    "What half precision knows of a layer whose gradients are made pixel by pixel."
    m = conv(80, 72, *DEEP[kind], bias=False)
    x = torch.randn(b, 80, 4, 4).bfloat16()
    g = torch.randn(m(x.float()).shape).bfloat16()
    weight = ConvWeight(m, x, g, b, m.padding)
    return StandardizedWeight(weight, m.centred()) if conv is WSConv2d else weight


@pytest.mark.parametrize("conv", [nn.Conv2d, WSConv2d])
@pytest.mark.parametrize("kind", DEEP)
def test_gradients_made_pixel_by_pixel(kind, conv):
    "The same gradients, norms and sums as from ordinary patches, in another order of memory."
    weight = deep_weight(kind, conv)
    by_pixel, plain = weight.gradients(), weight.naive()
    inner = getattr(weight, "inner", weight)
    assert inner._small_and_deep()
    assert torch.allclose(by_pixel, plain, 2**-7, 1e-2)  # a processor may add up otherwise
    assert by_pixel.movedim(2, -1).is_contiguous()
    factors, bad = torch.rand(5), torch.tensor([False, True, False, False, False])
    for once in (True, False):
        found, expected = weight.keep(by_pixel, once), weight.keep(plain, once)
        assert torch.allclose(found.squared_norms(), expected.squared_norms(), 1e-5)
        total = found.weighted_sum(factors, bad)
        assert total.is_contiguous() and total.shape == inner.conv.weight.shape
        assert torch.allclose(total, expected.weighted_sum(factors, bad), 1e-4, 1e-4)


def test_gradients_made_pixel_by_pixel_in_pieces(monkeypatch):
    torch.manual_seed(0)
    weight = deep_weight("3x3", WSConv2d)
    whole = weight.keep(weight.gradients())
    norms, total = whole.squared_norms(), whole.weighted_sum(torch.rand(5), None)
    monkeypatch.setattr(layers, "_PIECE", 2*80*72*9)  # three rows at a time
    sizes = [len(rows) for rows in layers._in_pieces(whole.flat)]
    torch.manual_seed(0)
    again = deep_weight("3x3", WSConv2d)
    pieces = again.keep(again.gradients())
    assert sizes == [3, 2]
    assert torch.allclose(pieces.squared_norms(), norms, 1e-6)
    assert torch.allclose(pieces.weighted_sum(torch.rand(5), None), total, 1e-4, 1e-4)


class LargeAndSmall(nn.Module):
    "One convolution, on a large map and on a small one."
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(80, 80, 3, padding=1, bias=False)
        self.head = nn.Linear(80, 3)

    def forward(self, x):
        return self.head(self.conv(nn.functional.avg_pool2d(self.conv(x), 6)).mean((2, 3)))


def test_a_convolution_used_on_maps_of_two_sizes():
    "Its gradients are made in two ways, and added."
    model, x, y = LargeAndSmall(), torch.randn(3, 80, 24, 24), torch.arange(3)
    clip = FlatClip(1.)
    half, _ = bf16_engine(fast_grad_sum)(model, loss, x, y, clip)
    full, _ = loop_grad_sum(model, loss, x, y, clip)
    assert (half["conv.weight"] - full["conv.weight"]).norm() < .05*full["conv.weight"].norm()


def test_standardized_filters_have_raw_norms_and_sums():
    m = WSConv2d(4, 5, (2, 3), padding=1, bias=False, form="report").double()
    x = doubles(6, 4, 5, 5)
    g = torch.randn_like(m(x))
    want, factors = one_by_one(m, x, g, 3), torch.rand(3, dtype=torch.float64)
    weight = StandardizedWeight(ConvWeight(m, x, g, 3, m.padding), m.centred())
    for once in (True, False):
        kept = weight.keep(weight.gradients(), once)
        assert torch.allclose(kept.squared_norms(), squares(want), 1e-9)
        total = torch.einsum("b,boihw->oihw", factors, want)
        assert torch.allclose(kept.weighted_sum(factors, None), total, 1e-9, 1e-10)
    assert isinstance(kept, KeptGradients)


@pytest.mark.parametrize("func", LAYERS, ids=lambda func: func.__name__)
def test_a_rule_is_used_where_a_module_calls_its_function(func, monkeypatch):
    "Whatever the module is called: subclasses need no rule of their own."
    layer, shape = LAYERS[func]
    kind = type(layer)
    called, rule = [], RULES[func]

    def watched(*args, **kwargs):
        called.append(func)
        return rule(*args, **kwargs)

    monkeypatch.setitem(RULES, func, watched)
    renamed = type("Renamed", (kind,), {"forward": lambda self, x: 2*kind.forward(self, x)})
    layer = copy.deepcopy(layer).float()
    layer.__class__ = renamed
    x = torch.randint(7, (6, *shape)) if func is F.embedding else torch.randn(6, *shape)
    fast_grad_sum(layer, lambda output, y: output.flatten(1).square().sum(1), x, x, FlatClip(1.))
    assert called == [func]


def test_a_rule_of_ones_own_in_six_lines():
    "A function of the user's own, which torch lets a mode see, and its rule."
    def scaled(x, weight):
        if torch.overrides.has_torch_function((x, weight)):
            return torch.overrides.handle_torch_function(scaled, (x, weight), x, weight)
        return x*weight

    def rule(tape, x, weight):
        def back(x, g, y):
            seen.append(g.shape)
            tape.add(weight, KeptGradients((g*x).reshape(tape.b, -1, len(weight)).sum(1)))

        return Tap.apply(tape.anchor, x*weight.detach(), x, back)

    seen = []
    model = Net(lambda net, x: net.last(scaled(x, net.w)), w=parameter(4), last=nn.Linear(4, 3))
    given = model.double(), loss, doubles(5, 4), torch.arange(5) % 3, FlatClip(.5)
    expected = loop_grad_sum(*given)
    RULES[scaled] = rule
    try:
        found = fast_grad_sum(*given)
    finally:
        del RULES[scaled]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert seen == [(5, 1, 4)]
