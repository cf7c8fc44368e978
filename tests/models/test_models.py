"Networks: every count and every forward from a second derivation, and no look at the neighbours."
import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from dp_course.models import (
    TemperedSigmoid,
    WSConv2d,
    allconv_cifar,
    cost_table,
    papernot_cnn,
    resnet20,
    wide_resnet,
    wrn16_4,
    wrn40_4,
)

FORMS = "fan_in", "unit", "report"
ORDERS = "norm-relu", "relu-norm"
CIFAR, MNIST, DIGIT = (3, 32, 32), (1, 28, 28), (1, 8, 8)
by = pytest.mark.parametrize
close = torch.testing.assert_close


def size(model):
    return sum(p.numel() for p in model.parameters())


def macs(model, shape):
    return sum(row["macs"] for row in cost_table(model, shape))


def seeded(f, *args, **kwargs):
    torch.manual_seed(0)
    return f(*args, **kwargs)


def shaken(f, *args, **kwargs):
    "A float64 network without an initial value, so that a missing affine map cannot hide."
    m = seeded(f, *args, **kwargs).double()
    with torch.no_grad():
        for p in m.parameters():
            p.add_(.1*torch.randn_like(p))
    return m


# -- weight standardization ------------------------------------------------------------------------

def by_hand(w, form, eps):
    "Filter by filter, with Python's numbers."
    rows = []
    for filt in w.flatten(1).tolist():
        n, mean = len(filt), sum(filt)/len(filt)
        ss = sum((v - mean)**2 for v in filt)
        scale = {
            "fan_in": (n*(ss/n + eps))**-.5,
            "unit": (ss/n + eps)**-.5,
            "report": 1/((ss/(n-1))**.5 + eps),
        }[form]
        rows.append([(v - mean)*scale for v in filt])
    return torch.tensor(rows, dtype=torch.float64).view(w.shape)


VARIETIES = [
    {},
    dict(stride=2, padding=1),
    dict(groups=2),
    dict(dilation=2, padding=2, padding_mode="circular"),
    dict(bias=False),
]


@by("form", FORMS)
@by("kw", VARIETIES)
def test_wsconv_forward(form, kw):
    m = seeded(WSConv2d, 4, 6, 3, form=form, eps=1e-3, **kw).double()
    x = torch.randn(2, 4, 9, 7, dtype=torch.float64)
    plain = nn.Conv2d(4, 6, 3, **kw).double()
    filters = by_hand(m.weight, form, 1e-3)
    plain.load_state_dict({**m.state_dict(), "weight": filters})  # the same keys as nn.Conv2d
    close(m(x), plain(x), rtol=0, atol=1e-13)


@by("form", FORMS)
def test_wsconv_of_constant_filters(form):
    "Zero, and no NaN on the way back."
    m = WSConv2d(3, 4, 3, form=form)
    with torch.no_grad():
        m.weight.fill_(.25)
    g, = torch.autograd.grad(m.standardized().sum(), m.weight)
    assert not m.standardized().any()
    assert g.isfinite().all()
    assert all(t.isfinite().all() for t in m.centred())


def test_wsconv_refuses():
    with pytest.raises(ValueError, match="fan-in is 1"):
        WSConv2d(4, 4, 1, groups=4)
    with pytest.raises(ValueError, match="'fan_in', 'unit' or 'report'"):
        WSConv2d(4, 4, 3, form="plain")


def test_wsconv_survives_copies_formats_and_precisions():
    m = seeded(WSConv2d, 8, 8, 3, padding=1)
    x = torch.randn(2, 8, 6, 6)
    twins = [copy.deepcopy(m), pickle.loads(pickle.dumps(m)),
             copy.deepcopy(m).to(memory_format=torch.channels_last)]
    for twin in twins:
        close(twin(x), m(x))
    half = copy.deepcopy(m).bfloat16()
    y = half(x.bfloat16())
    assert y.dtype == torch.bfloat16
    close(y.float(), m(x), rtol=.05, atol=.05)


# -- networks: counts ------------------------------------------------------------------------------

def count_resnet20():
    "(parameters, multiply-adds) at 32x32, from the architecture's numbers alone."
    def conv(i, o, k, side):  # each is followed by a GroupNorm: 2 per channel
        return i*o*k*k + 2*o, side*side*i*o*k*k

    parts = [conv(3, 16, 3, 32)] + 6*[conv(16, 16, 3, 32)]
    parts += [conv(16, 32, 3, 16), conv(16, 32, 1, 16)] + 5*[conv(32, 32, 3, 16)]
    parts += [conv(32, 64, 3, 8), conv(32, 64, 1, 8)] + 5*[conv(64, 64, 3, 8)]
    parts += [(64*10 + 10, 64*10)]
    return tuple(map(sum, zip(*parts)))


def count_wide(m, k):
    "The same for a wide network with m blocks per stage, k times as wide."
    params, mults, i = 27*16, 32*32*27*16, 16
    for o, side in ((16*k, 32), (32*k, 16), (64*k, 8)):
        convs = 9*i*o + i*o + (2*m - 1)*9*o*o
        norms = 2*i + (2*m - 1)*2*o
        params += convs + norms
        mults += side*side*convs
        i = o
    return params + 2*i + 10*i + 10, mults + 10*i


COUNTS = [
    (resnet20, CIFAR, 272_474, count_resnet20(), .245),
    (wrn16_4, CIFAR, 2_748_890, count_wide(2, 4), 2.36),
    (wrn40_4, CIFAR, 8_949_210, count_wide(6, 4), 7.8),
    (allconv_cifar, CIFAR, 2_334_730, None, None),
    (papernot_cnn, MNIST, 26_010, None, None),
]


@by("make, shape, params, counted, gflop", COUNTS, ids=lambda v: getattr(v, "__name__", ""))
def test_parameters_and_multiply_adds(make, shape, params, counted, gflop):
    m = make()
    assert size(m) == params == sum(row["params"] for row in cost_table(m, shape))
    if counted:  # three passes, each two operations per multiply-add; as many digits as are quoted
        digits = len(str(gflop).partition(".")[2])
        assert (params, macs(m, shape)) == counted
        assert round(6*counted[1]/1e9, digits) == gflop


class Shared(nn.Module):
    "One layer used twice, one weight in two layers, and a parameter that belongs to no leaf."
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6, bias=False)
        self.bn = nn.BatchNorm1d(6)
        self.b.weight = self.a.weight
        self.shift = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return self.bn(self.b(self.a(self.a(x)))) + self.shift.sum()


def test_cost_table_counts_sharing_once():
    m = Shared()
    rows = {row["name"]: row for row in cost_table(m, (6,))}
    assert sum(row["params"] for row in rows.values()) == size(m) == 36 + 6 + 12 + 5
    assert rows["a"]["macs"] == 72 and rows["b"]["macs"] == 36
    assert rows["b"]["params"] == 0


def test_cost_table_counts_a_transposed_convolution_by_what_goes_in():
    (row,) = cost_table(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (4, 5, 5))
    assert row["macs"] == 4*5*5 * 3*3*3  # every number that goes in, into 3 channels of 3 x 3


def test_cost_table_leaves_the_model_alone():
    m = Shared().train()
    m.b.eval()
    before = copy.deepcopy(m.state_dict())
    cost_table(m, (6,))
    with pytest.raises(RuntimeError):
        cost_table(m, (7,))
    assert m.training and m.bn.training and not m.b.training
    assert all(torch.equal(v, before[k]) for k, v in m.state_dict().items())
    assert not any(module._forward_hooks for module in m.modules())


# -- networks: forwards ----------------------------------------------------------------------------

def ws(w, eps=1e-5):
    n = w[0].numel()
    var, mean = torch.var_mean(w, dim=(1, 2, 3), correction=0, keepdim=True)
    return (w - mean)/(n*(var + eps)).sqrt()


def functional_resnet20(p, x, order):
    "The report's network, written out; `p` yields parameters in the order of `named_parameters`."
    take = partial(next, p)

    def norm(h, scale, shift):
        return F.group_norm(h, h.shape[1]//4, scale, shift)

    def unit(h, stride):
        h = F.conv2d(h, ws(take()), stride=stride, padding=1)
        affine = take(), take()
        return norm(F.relu(h), *affine) if order == "relu-norm" else F.relu(norm(h, *affine))

    x = unit(x, 1)
    for stage in range(3):
        for block in range(3):
            stride = 2 if stage and not block else 1
            h = F.conv2d(unit(x, stride), ws(take()), padding=1)
            affine = take(), take()
            if stride == 2:
                x = F.conv2d(x, ws(take()), stride=2)
                x = norm(x, take(), take())
            if order == "relu-norm":
                x = norm(h.relu(), *affine) + x
            else:
                x = (norm(h, *affine) + x).relu()
    w, b = take(), take()
    return x.mean((2, 3)) @ w.T + b


def functional_wide(p, x, order, blocks):
    "The wide network, written out in the same way."
    take = partial(next, p)

    def act(h):
        affine = take(), take()
        if order == "relu-norm":
            return F.group_norm(h.relu(), 16, *affine)
        return F.group_norm(h, 16, *affine).relu()

    x = F.conv2d(x, ws(take()), padding=1)
    for stage in range(3):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            h = act(x)
            y = F.conv2d(h, ws(take()), stride=stride, padding=1)
            y = F.conv2d(act(y), ws(take()), padding=1)
            x = y + (x if block else F.conv2d(h, ws(take()), stride=stride))
    x = act(x).mean((2, 3))
    return x @ take().T + take()


@by("order", ORDERS)
def test_resnets_against_a_functional_twin(order):
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    m = shaken(resnet20, order=order)
    close(m(x), functional_resnet20(m.parameters(), x, order), rtol=0, atol=1e-11)
    m = shaken(wide_resnet, 16, 2, order=order)
    close(m(x), functional_wide(m.parameters(), x, order, 2), rtol=0, atol=1e-11)


def test_papernot_cnn_against_a_functional_twin():
    x = torch.randn(2, *MNIST, dtype=torch.float64)
    m = shaken(papernot_cnn, 5)
    take = partial(next, m.parameters())
    h = F.conv2d(x, take(), take(), 2, 3)
    h = F.max_pool2d(h.tanh(), 2, 1)
    h = F.conv2d(h, take(), take(), 2)
    h = F.max_pool2d(h.tanh(), 2, 1)
    h = F.linear(h.flatten(1), take(), take())
    close(m(x), F.linear(h.tanh(), take(), take()))


def test_shapes_of_other_data_sets():
    for make in (resnet20, partial(wide_resnet, 16, 1), allconv_cifar):
        m = make(classes=7, in_channels=1)
        assert [m(torch.zeros(b, *DIGIT)).shape for b in (0, 2)] == [(0, 7), (2, 7)]
    m = papernot_cnn(4, in_channels=3, image_size=32, classes=5)
    assert m(torch.zeros(2, *CIFAR)).shape == (2, 5)
    for side in (14, 29):
        assert papernot_cnn(2, image_size=side)(torch.zeros(1, 1, side, side)).shape == (1, 10)


def test_what_a_network_is_made_of_can_be_exchanged():
    plain = resnet20(conv=nn.Conv2d)
    assert not any(isinstance(layer, WSConv2d) for layer in plain.modules())
    assert size(plain) == 272_474
    bare = resnet20(norm=lambda c: nn.Identity())
    assert not any(isinstance(layer, nn.GroupNorm) for layer in bare.modules())
    assert bare(torch.zeros(1, *CIFAR)).shape == (1, 10)


BAD = {
    "order": lambda: resnet20(order="relu"),
    "depth 18": lambda: wide_resnet(18, 4),
    "depth 4": lambda: wide_resnet(4, 4),
    "image": lambda: papernot_cnn(image_size=8),
    "activation": lambda: papernot_cnn(act="gelu"),
    "filters": lambda: papernot_cnn(0),
}


@by("name", BAD)
def test_bad_arguments_are_refused_with_a_way_out(name):
    with pytest.raises(ValueError, match="pass |upsample"):
        BAD[name]()


def test_activations():
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    close(TemperedSigmoid()(x), x.tanh())
    close(TemperedSigmoid(1.58, 3., .71)(x), 1.58/(1 + (-3*x).exp()) - .71)


def test_every_activation_is_a_fresh_module():
    act = TemperedSigmoid(1.5)
    inside = [m for m in papernot_cnn(act=act).modules() if isinstance(m, TemperedSigmoid)]
    assert len(set(map(id, inside))) == 3
    assert all(m is not act and m.scale == 1.5 for m in inside)
    assert sum(isinstance(m, nn.ReLU) for m in allconv_cifar("relu")) == 6
    assert sum(isinstance(m, nn.Tanh) for m in allconv_cifar()) == 6
