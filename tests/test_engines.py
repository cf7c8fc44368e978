"The engines against one example at a time: random networks, every layer, odd batches, bad examples."
import copy
import gc
import math
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from dp_course import gradients, layers
from dp_course.batches import Views, call_model, count, flatten_views, losses_of, take, tree_map
from dp_course.dpsgd import FlatClip
from dp_course.engines import bf16_engine, fixed_shape
from dp_course.gradients import fast_grad_sum, ghost_grad_sum, vmap_grad_sum
from dp_course.models import WSConv2d, papernot_cnn, resnet20, wide_resnet

NAMES = ["hook_grad_sum", "vmap_grad_sum", "ghost_grad_sum", "bookkeeping_grad_sum",
         "fast_grad_sum"]
ENGINES = {name: getattr(gradients, name) for name in NAMES}
SWAPPING = {name: f for name, f in ENGINES.items() if f is not vmap_grad_sum}
every = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
swapping = pytest.mark.parametrize("engine", SWAPPING.values(), ids=SWAPPING.keys())
LOSS = partial(F.cross_entropy, reduction="none")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


class PerLayer:
    "Another factor for every tensor: norms are clipped row by row."
    def __init__(self, bound):
        self.bound = bound

    def __call__(self, norms):
        factors = (self.bound/norms).clamp(max=1)
        return torch.where(norms.isfinite().all(0), factors, 0.)


class Lambda(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x) + x


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def batch(shape, b=4, k=None, classes=3):
    x = doubles(b, *([k] if k else []), *shape)
    return Views(x) if k else x, torch.randint(classes, (b,))


def one_at_a_time(model, loss, x, y, clip):
    "The oracle: autograd, one example after the other. Clipped sum and norms."
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in params.items()}
    norms = []
    for i in range(count(x)):
        rows, labels, _, k = flatten_views(*(take(v, slice(i, i + 1)) for v in (x, y)))
        losses = losses_of(loss, call_model(model, rows), labels, k)
        found = torch.autograd.grad(losses.mean(), list(params.values()), materialize_grads=True)
        norms.append(torch.stack([g.norm() for g in found]))
        for n, g, f in zip(params, found, clip(norms[-1][:, None])[:, 0]):
            total[n] += f*g
    return total, torch.stack(norms, 1) if norms else torch.zeros(len(params), 0)


def same(engine, model, x, y, clip=None, tol=1e-10, loss=LOSS):
    "An engine agrees with the oracle; the input survives."
    clip = clip or FlatClip(.5)
    want, norms = one_at_a_time(model, loss, tree_map(torch.clone, x), y, clip)
    got, got_norms = engine(model, loss, x, y, clip)
    assert list(got) == list(want) and got_norms.shape == (len(want), count(x))
    for n in want:
        assert got[n].shape == want[n].shape and not got[n].requires_grad
        assert (got[n] - want[n]).abs().max() <= tol, n
    if count(x):
        assert (got_norms - norms).abs().max() <= tol


def refuses(engine, model, x, y, match, loss=LOSS):
    with pytest.raises(ValueError, match=match):
        engine(model, loss, x, y, FlatClip(1.))


# --- random networks out of the supported layers


def random_convolution(pick, c):
    "A convolution of `c` channels, plain or standardized, and its number of filters."
    filters, flag = pick(2, 4, 6), partial(pick, False, True)
    groups = 2 if c % 2 == 0 and flag() else 1
    kernel, mode = pick(1, 2, 3, (3, 2)), pick("zeros", "zeros", "circular", "reflect")
    padding = pick("same", "valid", 0, 1) if kernel != 1 else 0
    stride = 1 if padding == "same" else pick(1, 2)
    dilation = pick(1, 2) if kernel != (3, 2) else 1
    cls = pick(nn.Conv2d, partial(WSConv2d, form=pick("fan_in", "unit", "report")))
    fan_in = c//groups*(kernel if isinstance(kernel, int) else 2)**2
    if cls is not nn.Conv2d and fan_in < 2:
        groups = 1
    return cls(c, filters, kernel, stride, padding, dilation, groups, flag(), mode), filters


def random_block(pick, c):
    "A few layers of `c` channels that keep them, or a convolution."
    kind = pick("conv", "conv", "group", "layer", "prelu", "residual", "instance", "linear")
    if kind == "conv":
        conv, c = random_convolution(pick, c)
        return [conv], c
    if kind == "group":
        return [nn.GroupNorm(pick(1, c), c)], c
    if kind == "instance":
        return [nn.InstanceNorm2d(c, affine=True)], c
    if kind == "prelu":
        return [nn.PReLU(pick(1, c))], c
    if kind == "residual":
        conv = nn.Conv2d(c, c, 3, padding=1)
        twice, once = (conv, nn.Tanh(), conv), (conv, nn.GroupNorm(1, c))
        return [Residual(*pick(twice, once))], c
    bias = pick(True, False)
    inner = nn.LayerNorm(c, bias=bias) if kind == "layer" else nn.Linear(c, c, bias=bias)
    return [Lambda(lambda x: x.movedim(1, -1)), inner, Lambda(lambda x: x.movedim(-1, 1))], c


def random_head(pick, c):
    if pick(True, False):
        return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 3)]
    return [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4*c, 5), nn.Tanh(),
            nn.Linear(5, 3, bias=pick(True, False))]


@st.composite
def networks(draw):
    def pick(*values):
        return draw(st.sampled_from(values))

    channels, blocks = pick(2, 3), []
    c = channels
    for _ in range(draw(st.integers(1, 4))):
        more, c = random_block(pick, c)
        blocks += more
        if pick(True, False):
            blocks.append(nn.ReLU(inplace=pick(True, False)))
    model = nn.Sequential(*blocks, *random_head(pick, c)).double()
    for p in model.parameters():
        nn.init.normal_(p, std=.6)
        p.requires_grad_(draw(st.integers(0, 7)) > 0)
    if not any(p.requires_grad for p in model.parameters()):
        model[-1].weight.requires_grad_(True)
    k, b, seed = pick(None, None, 1, 2), draw(st.integers(1, 4)), draw(st.integers(0, 2**31))
    return model, channels, k, b, seed, pick(FlatClip(.5), PerLayer(.3))


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=60, deadline=None, derandomize=True,
          suppress_health_check=list(HealthCheck))
@given(networks())
def test_random_networks(case):
    model, channels, k, b, seed, clip = case
    torch.manual_seed(seed)
    x, y = batch((channels, 13, 12), b, k)
    try:
        model(flatten_views(x, y)[0].clone())
    except (RuntimeError, ValueError):
        assume(False)  # the maps got smaller than a kernel: not a network
    for engine in ENGINES.values():
        same(engine, model, x, y, clip)


NETWORKS = {"resnet20": (lambda: resnet20(3), (3, 8, 8)),
            "wrn": (lambda: wide_resnet(10, 1, 3), (3, 8, 8)),
            "papernot": (lambda: papernot_cnn(4, classes=3, image_size=14), (1, 14, 14))}


@every
@pytest.mark.parametrize("name", NETWORKS)
def test_course_networks(engine, name):
    make, shape = NETWORKS[name]
    model = make().double()
    for k in (None, 2):
        same(engine, model, *batch(shape, 2, k), clip=FlatClip(5.))
    same(engine, model.eval(), *batch(shape, 2), clip=PerLayer(.1))


def wide_network():
    return nn.Sequential(
        WSConv2d(3, 32, 3, padding=1), nn.ReLU(inplace=True),
        WSConv2d(32, 48, 3, padding=(2, 1), form="report"), nn.GroupNorm(4, 48),
        nn.ReLU(inplace=True), nn.Conv2d(48, 40, (3, 2), dilation=(1, 2)), nn.ReLU(inplace=True),
        WSConv2d(40, 40, 3, 2, 1, bias=False), nn.Flatten(), nn.Linear(160, 3)).double()


@every
def test_wide_convolutions_take_the_pixel_gram(engine, monkeypatch):
    "Norms from inner products; an activation in place destroys the output that they use."
    used, real = [], layers.gram_norms

    def watched(*args):
        used.append(1)
        return real(*args)

    monkeypatch.setattr(layers, "gram_norms", watched)
    same(engine, wide_network(), *batch((3, 4, 6)))
    ghosts = ("ghost_grad_sum", "bookkeeping_grad_sum", "fast_grad_sum")
    assert bool(used) == (engine.__name__ in ghosts)


@every
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", [nn.ReLU, partial(nn.ReLU, inplace=True),
                                 partial(nn.ELU, inplace=True)])
def test_wide_standardized_convolutions_before_an_activation(engine, act, bias):
    "Their norms read the layer's own output, unless an activation in place has overwritten it."
    conv = WSConv2d(48, 48, 3, padding=1, bias=bias)
    model = nn.Sequential(conv, act(), nn.Flatten(), nn.Linear(48*16, 5)).double()
    x, y = batch((48, 4, 4))
    assert layers._conv_ghost_pays(conv, x, x, 4)
    same(engine, model, x, y)


# --- other layers, other dimensions


class Words(nn.Module):
    "Embedding, LayerNorm over two dimensions, a linear layer on (b,t,i), tied output weights."
    def __init__(self, tied=True):
        super().__init__()
        self.emb = nn.Embedding(9, 6, padding_idx=0)
        self.norm, self.mix = nn.LayerNorm((5, 6)), nn.Linear(6, 6)
        self.out = nn.Linear(6, 9, bias=False)
        if tied:
            self.out.weight = self.emb.weight

    def forward(self, x):
        return self.out(torch.tanh(self.mix(self.norm(self.emb(x)))).mean(1))


@every
@pytest.mark.parametrize("tied", [False, True])
def test_words(engine, tied):
    x = torch.randint(0, 9, (4, 5))
    x[:, 1] = x[:, 0]
    x[0, 2] = 0
    same(engine, Words(tied).double(), x, torch.randint(9, (4,)))


@every
def test_tables_and_sequences(engine):
    conv = nn.Conv1d(2, 4, 3, 2, 1, groups=2)
    sequence = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(20, 3))
    same(engine, sequence.double(), *batch((2, 9)))
    positions = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 40), nn.Flatten(),
                              nn.Linear(80, 3))
    same(engine, positions.double(), *batch((2, 4)))
    same(engine, nn.Linear(4, 3).double(), *batch((4,)))


@every
@pytest.mark.parametrize("k", [None, 3])
def test_volumes(engine, k):
    model = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(),
                          nn.Conv3d(4, 3, 2, stride=2), nn.Flatten(), nn.Linear(24, 3))
    same(engine, model.double(), *batch((2, 4, 4, 4), k=k))


@every
@pytest.mark.parametrize("k", [None, 2])
def test_videos(engine, k):
    "Frames below each other in one picture: five dimensions that are no views."
    model = nn.Sequential(Lambda(lambda x: x.movedim(1, 2).flatten(2, 3)), nn.Conv2d(3, 8, 3),
                          nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3))
    same(engine, model.double(), *batch((2, 3, 5, 5), k=k))


@every
def test_wide_grouped_convolutions(engine):
    "Few positions and many weights, but two groups: no inner products across the groups."
    model = nn.Sequential(nn.Conv2d(48, 48, 3, padding=1, groups=2), nn.ReLU(),
                          nn.Conv2d(48, 64, 3, 2, 1, groups=2), nn.Flatten(), nn.Linear(64, 3))
    same(engine, model.double(), *batch((48, 2, 2)))


class Scaled(nn.Module):
    "Parameters of its own, one without dimensions, beside a child: all of it has no rule."
    def __init__(self):
        super().__init__()
        self.scale, self.gain = nn.Parameter(torch.rand(4)), nn.Parameter(torch.tensor(.7))
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return self.gain*self.body(x*self.scale) + self.scale


@every
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_modules_without_a_rule(engine):
    shared = nn.PReLU(4)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    model = nn.Sequential(Scaled(), shared, nn.Linear(4, 4), shared, normed).double()
    for k in (None, 2):
        same(engine, model, *batch((4,), k=k))


# --- attention and recurrence


class Pooled(nn.Module):
    "A layer on (b,t,8), its mean over time, and a head."
    def __init__(self, layer, **arguments):
        super().__init__()
        self.layer, self.arguments, self.head = layer, arguments, nn.Linear(8, 3)

    def forward(self, x):
        h = self.layer(x, **self.arguments)
        h = h[0] if isinstance(h, tuple) else h
        return self.head(h.mean(1))


class Attention(nn.Module):
    "Self-attention, called by position and by name."
    def __init__(self, t, mode=None, **kwargs):
        super().__init__()
        self.attn, self.head = nn.MultiheadAttention(8, 2, batch_first=True, **kwargs), nn.Linear(8, 3)
        self.register_buffer("mask", torch.full((t, t), -math.inf).triu(1))
        self.mode = mode

    def forward(self, x):
        kwargs = {"causal": {"attn_mask": self.mask, "is_causal": True, "need_weights": False},
                  "padded": {"key_padding_mask": x[..., 0] > 1}}.get(self.mode, {})
        return self.head(self.attn(x, key=x, value=x, **kwargs)[0].mean(1))


@every
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("t", [4, 5])  # a mask (t,t) is no batch of rows, not even of 4
@pytest.mark.parametrize("mode", [None, "causal", "padded"])
def test_attention(engine, t, mode):
    model = Attention(t, mode).double()
    for mode in (model, model.eval()):
        same(engine, mode, *batch((t, 8)))


@every
def test_attention_with_more_of_its_options(engine):
    model = Attention(5, add_bias_kv=True, add_zero_attn=True, bias=False).double()
    same(engine, model, *batch((5, 8)))


@every
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_layers(engine, norm_first):
    options = dict(dropout=0., batch_first=True, norm_first=norm_first)
    layer = nn.TransformerEncoderLayer(8, 2, 16, **options)
    same(engine, Pooled(layer).double(), *batch((5, 8)))
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    same(engine, Pooled(stack).double().eval(), *batch((5, 8), k=2))
    decoder = nn.TransformerDecoderLayer(8, 2, 16, **options)
    both = Pooled(Lambda(lambda x: decoder(tgt=x, memory=2*x)))
    both.decoder = decoder
    same(engine, both.double(), *batch((5, 8)))


class ViT(nn.Module):
    "A small vision transformer that holds its positions itself."
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.patch(x).flatten(2).mT
        h = torch.cat([self.first.expand(len(h), -1, -1), h], 1) + self.positions
        return self.head(self.layer(h)[:, 0])


@every
@pytest.mark.parametrize("k", [None, 2])
def test_vision_transformer(engine, k):
    same(engine, ViT().double(), *batch((3, 8, 8), k=k))


@every
@pytest.mark.parametrize("layer", [DPLSTM, DPGRU, DPRNN])
def test_recurrent_layers_of_opacus(engine, layer):
    same(engine, Pooled(layer(8, 8, batch_first=True)).double(), *batch((5, 8)))
    both = layer(8, 4, num_layers=2, bidirectional=True, batch_first=True)
    same(engine, Pooled(both).double(), *batch((3, 8), k=2))


@every
@pytest.mark.parametrize("t", [4, 5])
def test_recurrent_layers_with_time_first(engine, t):
    lstm = DPLSTM(8, 8)
    model = nn.Sequential(Lambda(lambda x: x.transpose(0, 1)), lstm,
                          Lambda(lambda out: out[1][0][-1]), nn.Linear(8, 3))  # last hidden state
    same(engine, model.double(), *batch((t, 8)))


@every
def test_attention_of_opacus(engine):
    layer = DPMultiheadAttention(8, 2, batch_first=True)
    same(engine, Pooled(Lambda(lambda x: layer(x, x, x))).double(), *batch((5, 8)))
