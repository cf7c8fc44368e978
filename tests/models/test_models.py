"Networks: every count and every forward from a second derivation, and no look at the neighbours."
import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call, grad, vmap

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
SMALL = (3, 8, 8)
NETS = {
    "resnet20": (resnet20, SMALL),
    "wide": (partial(wide_resnet, 16, 1), SMALL),
    "papernot": (papernot_cnn, MNIST),
    "allconv": (allconv_cifar, SMALL),
}
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
def test_wsconv_gradcheck(form):
    m = seeded(WSConv2d, 2, 3, 3, form=form).double()
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)

    def run(w, x):
        return functional_call(m, {"weight": w}, (x,))

    assert torch.autograd.gradcheck(run, (m.weight, x))


def total(v):
    return v.sum(1, keepdim=True)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    i=st.integers(1, 4),
    o=st.integers(1, 5),
    k=st.integers(1, 3),
    form=st.sampled_from(FORMS),
    scale=st.sampled_from([1e-6, 1e-3, 1., 1e3]),
    eps=st.sampled_from([1e-8, 1e-5, 1e-2]),
)
def test_raw_gradient_and_its_norm_from_three_scalars(i, o, k, form, scale, eps):
    if i*k*k < 2:
        return
    m = seeded(WSConv2d, i, o, k, form=form, eps=eps).double()
    with torch.no_grad():
        m.weight.mul_(scale)
    g = torch.randn(o, i*k*k, dtype=torch.float64)
    raw, = torch.autograd.grad(m.standardized(), m.weight, g.view_as(m.weight))
    raw = raw.flatten(1)
    c, f, h = m.centred()
    gc, g1, n = total(g*c), total(g), g.shape[1]
    close(f*(g - g1/n) - h*gc*c, raw, rtol=1e-8, atol=1e-9*raw.abs().max().item())
    square = f**2*(total(g*g) - g1**2/n) - (2*f*h - h**2*total(c*c))*gc**2
    norms = square.clamp(min=0).sqrt()[:, 0]
    close(norms, raw.norm(dim=1), rtol=1e-6, atol=1e-6*raw.norm().item())
    if form == "unit":  # the literature: s^2 = |c|^2/n + eps, a = 1/(n s^2), kappa = 2a - a^2 |c|^2
        ss = total(c*c)
        s2 = ss/n + eps
        a = 1/(n*s2)
        close(square, (total(g*g) - g1**2/n - (2*a - a*a*ss)*gc**2)/s2)


@by("form", FORMS)
def test_wsconv_invariances(form):
    m = shaken(WSConv2d, 3, 4, 3, form=form, eps=1e-12)
    w = m.standardized().detach()
    n = 27
    want = {"fan_in": 1., "unit": n**.5, "report": (n-1)**.5}[form]
    close(w.flatten(1).norm(dim=1), torch.full((4,), want, dtype=torch.float64))
    with torch.no_grad():
        m.weight.mul_(7.).add_(3.)
    close(m.standardized(), w)


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


def count_chain(convs, dense):
    "Each conv (i, o, k, side of the output map), each dense (i, o), all with bias."
    params = sum(i*o*k*k + o for i, o, k, _ in convs) + sum(i*o + o for i, o in dense)
    mults = sum(s*s*i*o*k*k for i, o, k, s in convs) + sum(i*o for i, o in dense)
    return params, mults


ALLCONV = [
    (3, 64, 3, 32),
    (64, 128, 3, 32),
    (128, 128, 3, 16),
    (128, 256, 3, 16),
    (256, 256, 3, 8),
    (256, 512, 3, 8),
    (512, 10, 3, 4),
]


def count_papernot(k):
    return count_chain([(1, k, 8, 14), (k, 2*k, 4, 5)], [(32*k, 32), (32, 10)])


COUNTS = [
    (resnet20, CIFAR, count_resnet20(), 272_474, .245),
    (wrn16_4, CIFAR, count_wide(2, 4), 2_748_890, 2.36),
    (wrn40_4, CIFAR, count_wide(6, 4), 8_949_210, 7.8),
    (allconv_cifar, CIFAR, count_chain(ALLCONV, []), 2_334_730, None),
    (papernot_cnn, MNIST, count_papernot(16), 26_010, None),
]


@by("make, shape, counted, params, gflop", COUNTS, ids=lambda v: getattr(v, "__name__", ""))
def test_parameters_and_multiply_adds(make, shape, counted, params, gflop):
    m = make()
    assert (size(m), macs(m, shape)) == counted
    assert size(m) == params
    assert sum(row["params"] for row in cost_table(m, shape)) == params
    if gflop:  # three passes, each two operations per multiply-add; as many digits as are quoted
        digits = len(str(gflop).partition(".")[2])
        assert round(6*counted[1]/1e9, digits) == gflop


def test_width_of_the_second_papernot_layer_follows_the_first():
    for k in (4, 15, 40):
        assert size(papernot_cnn(k)) == count_papernot(k)[0]


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


def test_defaults_of_the_two_papers():
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    m = shaken(resnet20)
    close(m(x), functional_resnet20(m.parameters(), x, "norm-relu"), rtol=0, atol=1e-11)
    m = shaken(wrn16_4)
    close(m(x), functional_wide(m.parameters(), x, "relu-norm", 2), rtol=0, atol=1e-11)
    norms = [g for g in resnet20().modules() if isinstance(g, nn.GroupNorm)]
    assert {g.num_channels//g.num_groups for g in norms} == {4}
    assert {g.num_groups for g in wrn40_4().modules() if isinstance(g, nn.GroupNorm)} == {16}


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


def test_allconv_against_a_functional_twin():
    x = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    m = shaken(allconv_cifar, "relu")
    take, h = partial(next, m.parameters()), x
    for layer in range(6):
        h = F.conv2d(h, take(), take(), padding=1).relu()
        if layer % 2:
            h = F.avg_pool2d(h, 2)
    close(m(x), F.conv2d(h, take(), take(), padding=1).mean((2, 3)))


@by("name", NETS)
def test_no_example_sees_another(name):
    make, shape = NETS[name]
    m = seeded(make).double().train()
    x = torch.randn(3, *shape, dtype=torch.float64)
    y = m(x)
    other = torch.cat([x[:1], 1e3*torch.randn_like(x[1:])])
    close(m(other)[0], y[0], rtol=1e-9, atol=1e-9)
    close(m(x[:1])[0], y[0], rtol=1e-9, atol=1e-9)
    assert not list(m.buffers())
    assert not any(getattr(layer, "inplace", False) for layer in m.modules())


@by("name", NETS)
def test_every_example_by_vmap_equals_the_loop(name):
    make, shape = NETS[name]
    m = seeded(make).double()
    x, y = torch.randn(2, *shape, dtype=torch.float64), torch.tensor([3, 8])
    params = dict(m.named_parameters())

    def loss(params, x, y):
        return F.cross_entropy(functional_call(m, params, (x[None],)), y[None])

    got = vmap(grad(loss), (None, 0, 0))(params, x, y)
    for b in range(2):
        one = F.cross_entropy(m(x[b:b+1]), y[b:b+1])
        for key, want in zip(params, torch.autograd.grad(one, list(params.values()))):
            close(got[key][b], want, rtol=1e-8, atol=1e-10)


def test_shapes_of_other_data_sets():
    for make in (resnet20, partial(wide_resnet, 16, 1), allconv_cifar):
        m = make(classes=7, in_channels=1)
        for b in (0, 1, 2):
            assert m(torch.zeros(b, *DIGIT)).shape == (b, 7)
        assert m(torch.zeros(1, *MNIST)).shape == (1, 7)
    m = papernot_cnn(4, in_channels=3, image_size=32, classes=5)
    assert m(torch.zeros(2, *CIFAR)).shape == (2, 5)
    for side in (14, 15, 28, 29, 31):
        m = papernot_cnn(2, image_size=side)
        assert m(torch.zeros(1, 1, side, side)).shape == (1, 10)


def test_what_a_network_is_made_of_can_be_exchanged():
    plain = resnet20(conv=nn.Conv2d)
    assert not any(isinstance(layer, WSConv2d) for layer in plain.modules())
    assert size(plain) == 272_474
    report = resnet20(conv=partial(WSConv2d, form="report"))
    assert {m.form for m in report.modules() if isinstance(m, WSConv2d)} == {"report"}
    bare = resnet20(norm=lambda c: nn.Identity())
    assert not any(isinstance(layer, nn.GroupNorm) for layer in bare.modules())
    assert bare(torch.zeros(1, *CIFAR)).shape == (1, 10)


def test_pickles_and_copies():
    x = torch.randn(2, *SMALL)
    for m in (resnet20(), allconv_cifar("tempered")):
        close(pickle.loads(pickle.dumps(m))(x), m(x))
        close(copy.deepcopy(m)(x), m(x))


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
