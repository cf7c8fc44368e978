"Every engine against one example at a time: networks of every kind, odd batches, bad examples."
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
from oracle import (
    ENGINES,
    Net,
    PerLayer,
    batch,
    call,
    every,
    every_but_the_loop,
    head,
    one_at_a_time,
    parameter,
    refuses,
    same,
)
from torch import nn
from torch.nn.utils import parametrizations, prune
from toys import doubles, loss

from dp_course.data import Views, flatten_views
from dp_course.gradients import FlatClip, fixed_shape, ghost_grad_sum, layers
from dp_course.models import WSConv2d, papernot_cnn, resnet20, wide_resnet

# --- random networks out of the layers that have a rule, and others


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


def residual(*parts):
    return Net(lambda net, x: net.parts(x) + x, parts=nn.Sequential(*parts))


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
        return [residual(*pick(twice, once))], c
    bias = pick(True, False)
    inner = nn.LayerNorm(c, bias=bias) if kind == "layer" else nn.Linear(c, c, bias=bias)
    return [call(lambda x: x.movedim(1, -1)), inner, call(lambda x: x.movedim(-1, 1))], c


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
        same(engine, model, x, y, clip, tol=1e-10)


NETWORKS = {"resnet20": (lambda: resnet20(3), (3, 8, 8)),
            "wrn": (lambda: wide_resnet(10, 1, 3), (3, 8, 8)),
            "papernot": (lambda: papernot_cnn(4, classes=3, image_size=14), (1, 14, 14))}


@pytest.mark.quick(6)
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

    def watched(*args, **kwargs):
        used.append(1)
        return real(*args, **kwargs)

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


# --- a table of layers, of places where a parameter is used, and of roads that rows take


def frames(net, x):  # (b,t,c,h,w)
    "A convolution sees the frames of all films as one long batch."
    h = net.conv(x.flatten(0, 1)).tanh().mean((2, 3))
    return net.head(h.unflatten(0, x.shape[:2]).mean(1))


def tokens_in_one_axis(net, x):  # (b,t,d)
    h = net.first(x.reshape(-1, x.shape[-1])).tanh()
    return net.norm(h).view(*x.shape).mean(1) @ net.w


def time_first(net, x):
    return net.last(net.norm(net.first(x.transpose(0, 1)).tanh()).mean(0))


def positions(net, x):  # (b,t) words
    t = torch.arange(x.shape[1])
    return net.head((net.words(x) + net.places(t)).tanh().mean(1))


def recurrent(net, x):
    "A cell by hand: two weights, used once a step."
    h = torch.zeros(len(x), 8, dtype=x.dtype)
    for step in x.unbind(1):
        h = torch.tanh(net.new(step) + net.old(h))
    return net.head(h)


def of_every_example(net, x):
    "A gradient inside the model: torch.func in forward."
    def energy(v):
        return net.inner(v).tanh().square().sum()

    return net.head(torch.func.vmap(torch.func.grad(energy))(x))


def hyper(net, x):
    "A layer whose weight another layer makes of the example."
    return F.linear(x, net.make(x).mean(0).view(3, 4))


def two_pools(net, x):
    h, where = F.max_pool2d(net.conv(x).tanh(), 2, return_indices=True)
    back = F.max_unpool2d(h, where, 2)
    return net.head(F.adaptive_max_pool2d(back, 2).flatten(1))


def pools(conv, pool, d, width):
    return Net(lambda net, x: net.head(pool(net.conv(x).tanh()).flatten(1)),
               conv=conv(2, 3, 2), head=nn.Linear(width, 3)), (2, *[7]*d)


def no_batch_axis(layer, d):
    "A layer that is given the only row of its batch."
    return Net(lambda net, x: net.head(net.layer(x.squeeze(0)).flatten()[None]),
               layer=layer, head=nn.LazyLinear(3)), d


def bag(mode, padding=None, weights=False):
    def forward(net, x):
        shares = x.double().add(1).sqrt() if weights else None
        return net.head(net.bag(x, per_sample_weights=shares))

    return Net(forward, bag=nn.EmbeddingBag(9, 6, mode=mode, padding_idx=padding),
               head=nn.Linear(6, 3)), "words"


def tied():
    "The table that looks words up also scores them."
    return Net(lambda net, x: F.linear(net.mix(net.emb(x)).tanh().mean(1), net.emb.weight),
               emb=nn.Embedding(9, 6, padding_idx=0), mix=nn.Linear(6, 6)), "words"


def used_twice():
    shared = nn.Linear(4, 4)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.PReLU(), nn.Linear(4, 3)), (4,)


def pruned():
    layer = nn.Linear(4, 3)
    prune.random_unstructured(layer, "weight", .5)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), layer), (4,)


def old_weight_norm():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.utils.weight_norm(nn.Linear(4, 3))), (4,)


CASES = {
    "conv 1d": lambda: (nn.Sequential(nn.Conv1d(2, 4, 3, 2, 1, groups=2), nn.Tanh(), nn.Flatten(),
                                      nn.Linear(20, 3)), (2, 9)),
    "conv 3d": lambda: (nn.Sequential(
        nn.Conv3d(2, 4, 2, padding=1, dilation=2), nn.GroupNorm(2, 4), nn.Tanh(),
        nn.Conv3d(4, 3, 2, stride=2), nn.Flatten(), nn.Linear(24, 3)), (2, 4, 4, 4)),
    "linear on positions": lambda: (nn.Sequential(
        nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 40), nn.Flatten(), nn.Linear(80, 3)), (2, 4)),
    "wide groups": lambda: (nn.Sequential(
        nn.Conv2d(48, 48, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(48, 64, 3, 2, 1, groups=2),
        nn.Flatten(), nn.Linear(64, 3)), (48, 2, 2)),
    "wide output padding": lambda: (nn.Sequential(
        nn.ConvTranspose2d(1, 6, 3, stride=2, dilation=(1, 4), output_padding=(0, 3)),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)), (1, 5, 5)),
    "transposed 1d, which has no rule": lambda: (nn.Sequential(
        nn.ConvTranspose1d(2, 4, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(28, 3)), (2, 3)),
    "group norm without a scale": lambda: (Net(
        lambda net, x: net.head(F.group_norm(x, 2, bias=net.shift).tanh()), shift=parameter(4),
        head=nn.Linear(4, 3)), (4,)),
    "rms norm over two axes": lambda: (nn.Sequential(nn.RMSNorm((2, 4)), nn.Flatten(),
                                                     nn.Linear(8, 3)), (2, 4)),
    "bilinear": lambda: (Net(lambda net, x: net.mix(x, x.tanh()), mix=nn.Bilinear(4, 4, 3)), (4,)),
    "a scalar gain": lambda: (Net(lambda net, x: net.gain*net.body(x*net.scale) + net.scale[:3],
                                  gain=parameter(), scale=parameter(4), body=nn.Linear(4, 3)),
                              (4,)),
    "lists of parameters": lambda: (Net(
        lambda net, x: net.head(torch.tanh(x @ net.ws[0])*net.gains["g"] @ net.ws[1]),
        ws=nn.ParameterList([torch.randn(2, 2) for _ in range(2)]),
        gains=nn.ParameterDict({"g": torch.randn(2)}), head=nn.Linear(2, 3)), (2,)),
    "a weight without its module": lambda: (Net(
        lambda net, x: F.linear(net.lin(x).tanh(), net.lin.weight), lin=nn.Linear(4, 4)), (4,)),
    "a weight by name": lambda: (Net(lambda net, x: F.linear(input=x, weight=net.w),
                                     w=parameter(3, 4)), (4,)),
    "a weight, turned": lambda: (Net(lambda net, x: torch.addmm(net.b, x, net.w),
                                     w=parameter(4, 3), b=parameter(3)), (4,)),
    "a hypernetwork": lambda: (Net(hyper, make=nn.Linear(4, 12)), (4,)),
    "used twice": used_twice,
    "tied": tied,
    "frames in the batch": lambda: (Net(frames, conv=nn.Conv2d(2, 4, 3), head=nn.Linear(4, 3)),
                                    (3, 2, 5, 5)),
    "frames, wide": lambda: (Net(frames, conv=WSConv2d(64, 64, 3, padding=1),
                                 head=nn.Linear(64, 3)), (2, 64, 4, 4)),
    "frames below each other": lambda: (nn.Sequential(
        call(lambda x: x.movedim(1, 2).flatten(2, 3)), nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(32, 3)), (2, 3, 5, 5)),
    "frames, transposed": lambda: (Net(frames, conv=nn.ConvTranspose2d(2, 4, 3),
                                       head=nn.Linear(4, 3)), (3, 2, 3, 3)),
    "frames, group norm": lambda: (Net(
        frames, conv=nn.Sequential(nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4)), head=nn.Linear(4, 3)),
        (3, 2, 4, 4)),
    "tokens in one axis": lambda: (Net(tokens_in_one_axis, first=nn.Linear(6, 6),
                                       norm=nn.LayerNorm(6), w=parameter(6, 3)), (5, 6)),
    "time first": lambda: (Net(time_first, first=nn.Linear(6, 6), norm=nn.LayerNorm(6),
                               last=nn.Linear(6, 3)), (5, 6)),
    "time first, as many as examples": lambda: (Net(
        time_first, first=nn.Linear(6, 6), norm=nn.RMSNorm(6), last=nn.Linear(6, 3)), (4, 6)),
    "positions": lambda: (Net(positions, words=nn.Embedding(9, 4), places=nn.Embedding(9, 4),
                              head=nn.Linear(4, 3)), "words"),
    "recurrent by hand": lambda: (Net(recurrent, new=nn.Linear(6, 8), old=nn.Linear(8, 8, False),
                                      head=nn.Linear(8, 3)), (3, 6)),
    "torch.func inside": lambda: (Net(of_every_example, inner=nn.Linear(4, 5),
                                      head=nn.Linear(4, 3)), (4,)),
    "weight norm": lambda: (nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3))), (4,)),
    "orthogonal": lambda: (nn.Sequential(
        parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"), nn.Tanh(),
        nn.Linear(4, 3)), (4,)),
    "pruned": pruned,
    "old weight norm": old_weight_norm,
    "batch norm, frozen": lambda: (nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4).requires_grad_(False), nn.Linear(4, 3)).eval(), (4,)),
    "bag, mean": lambda: bag("mean"),
    "bag, padding": lambda: bag("mean", 0),
    "bag, weights": lambda: bag("sum", 0, True),
    "max pool 1d": lambda: pools(nn.Conv1d, nn.MaxPool1d(2), 1, 9),
    "max pool 2d, overlapping": lambda: pools(nn.Conv2d, nn.MaxPool2d(3, 2, 1), 2, 27),
    "max pool 3d": lambda: pools(nn.Conv3d, nn.MaxPool3d(3), 3, 24),
    "adaptive max pool 1d": lambda: pools(nn.Conv1d, nn.AdaptiveMaxPool1d(2), 1, 6),
    "adaptive max pool 2d": lambda: pools(nn.Conv2d, nn.AdaptiveMaxPool2d((2, 1)), 2, 6),
    "adaptive max pool 3d": lambda: pools(nn.Conv3d, nn.AdaptiveMaxPool3d(1), 3, 3),
    "max pool by name": lambda: pools(nn.Conv2d, lambda x: F.max_pool2d(input=x, kernel_size=6), 2,
                                      3),
    "average pools": lambda: pools(nn.Conv2d, nn.AvgPool2d(2), 2, 27),
    "indices of a pool": lambda: (Net(two_pools, conv=nn.Conv2d(2, 3, 2), head=nn.Linear(12, 3)),
                                  (2, 7, 7)),
    "conv without a batch axis": lambda: no_batch_axis(nn.Conv2d(2, 3, 2), (2, 4, 4)),
    "conv 1d without a batch axis": lambda: no_batch_axis(nn.Conv1d(2, 3, 2), (2, 4)),
    "standardized without a batch axis": lambda: no_batch_axis(WSConv2d(2, 3, 2), (2, 4, 4)),
    "transposed without a batch axis": lambda: no_batch_axis(nn.ConvTranspose2d(2, 3, 2),
                                                             (2, 4, 4)),
    "linear with a vector": lambda: (Net(
        lambda net, x: net.out(x)*F.linear(x, net.w)[:, None], out=nn.Linear(4, 3),
        w=parameter(4)), (4,)),
    "sparse lookup": lambda: (nn.Sequential(
        nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(20, 3)), "words"),
    "linear on a vector": lambda: no_batch_axis(nn.Linear(4, 5), (4,)),
    "layer norm on a vector": lambda: no_batch_axis(nn.LayerNorm(4), (4,)),
    "max pool without a batch axis": lambda: no_batch_axis(
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.MaxPool2d(2)), (2, 5, 5)),
}


def inputs(shape, b=4, k=None):
    if shape != "words":
        return batch(shape, b, k)
    x = torch.randint(9, (b, *([k] if k else []), 5))
    x[..., 1] = x[..., 0]  # a word twice
    x[..., 2] = 0
    return Views(x) if k else x, torch.randint(3, (b,))


@every
def test_a_network_that_learns_nothing_has_an_empty_sum(engine):
    net = nn.Linear(5, 3).requires_grad_(False)
    sums, norms = engine(net, loss, torch.randn(4, 5), torch.tensor([0, 1, 2, 0]), FlatClip(1.))
    assert sums == {} and norms.shape == (0, 4)


@every
def test_complex_numbers_are_refused_by_name(engine):
    net = Net(lambda net, x: net.out((x*net.w).abs()), out=nn.Linear(5, 3),
              w=nn.Parameter(torch.ones(5, dtype=torch.cfloat)))
    with pytest.raises(ValueError, match="parameter w is torch.complex64, and only real numbers"):
        engine(net, loss, torch.randn(4, 5), torch.tensor([0, 1, 2, 0]), FlatClip(1.))


@pytest.mark.filterwarnings("ignore")
@every
@pytest.mark.parametrize("name", CASES)
def test_every_network_of_the_table(engine, name):
    model, shape = CASES[name]()
    model = model.double()
    x, y = inputs(shape)
    model(flatten_views(x[:1], y[:1])[0])  # a lazy layer finds out its width
    same(engine, model, x, y)
    same(engine, model, *inputs(shape, 3, 2), clip=PerLayer(.1))


# --- attention, and what is built of it


def attended(options=None, width=None, t=5, time=False, **given):
    "Attention to oneself, or to a memory of another width; `given` may be functions of x."
    def forward(net, x):
        query = x.transpose(0, 1) if time else x
        memory = query if width is None else net.memory(query)
        called = {name: v(x) if callable(v) else v for name, v in given.items()}
        out, shares = net.attend(query, memory, memory, **called)
        h = out.mean(0) if time else out.mean(1)
        total = net.head(h)
        return total if shares is None else total + shares.square().flatten(1).sum(1)[:, None]

    others = {} if width is None else dict(kdim=width, vdim=width)
    attend = nn.MultiheadAttention(8, 2, batch_first=not time, **(options or {}), **others)
    more = {} if width is None else {"memory": nn.Linear(8, width)}
    return Net(forward, attend=attend, head=nn.Linear(8, 3), **more)


def later(t=5):
    return torch.ones(t, t).triu(1).bool()


def short(x):
    "Words that only fill a row up."
    return x[..., 0] > 1


def unbatched(net, x):
    out, _ = net.attend(*[x.squeeze(0)]*3, key_padding_mask=short(x).squeeze(0))
    return net.head(out.mean(0))[None]


def by_kernel(**given):
    def forward(net, x):
        q, k, v = net.project(x).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-2, -3)
        called = {name: f(x) if callable(f) else f for name, f in given.items()}
        return net.head(F.scaled_dot_product_attention(q, k, v, **called).flatten(2).mean(-1))

    return Net(forward, project=nn.Linear(8, 24), head=nn.Linear(2, 3))


def latent(net, x):
    "Queries that are parameters: they have no batch axis."
    h = F.scaled_dot_product_attention(net.queries, x, x)
    return net.head(h.mean(1))


def encoder(**options):
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True, **options)


def decoded(net, x):
    return net.head(net.decoder(x, 2*x).mean(1))


ATTENTION = {
    "plain": lambda: attended(),
    "weights of each head": lambda: attended(average_attn_weights=False),
    "mask of numbers": lambda: attended(attn_mask=later().double()*-3, need_weights=False),
    "mask of every head": lambda: attended(attn_mask=lambda x: later().expand(2*len(x), -1, -1)),
    "padding": lambda: attended(key_padding_mask=short),
    "both masks": lambda: attended(key_padding_mask=short, attn_mask=later(), need_weights=False),
    "causal": lambda: attended(attn_mask=later(), is_causal=True, need_weights=False),
    "causal and padding": lambda: attended(attn_mask=later(), is_causal=True, need_weights=False,
                                           key_padding_mask=short),
    "bias and zero": lambda: attended(dict(add_bias_kv=True, add_zero_attn=True),
                                      key_padding_mask=short, attn_mask=later()),
    "other widths": lambda: attended(dict(add_bias_kv=True), 6, need_weights=False),
    "memory of the same width": lambda: attended(width=8, key_padding_mask=short),
    "time first": lambda: attended(time=True, key_padding_mask=short),
    "as many words as examples": lambda: attended(t=4),
    "without a batch axis": lambda: Net(unbatched, attend=nn.MultiheadAttention(8, 2),
                                        head=nn.Linear(8, 3)),
    "kernel": lambda: by_kernel(),
    "kernel, causal": lambda: by_kernel(is_causal=True),
    "kernel, mask": lambda: by_kernel(attn_mask=later().logical_not()),
    "kernel, mask of an example": lambda: by_kernel(
        attn_mask=lambda x: ~short(x)[:, None, None] | torch.eye(5).bool()),
    "kernel, scale": lambda: by_kernel(scale=.3),
    "latent queries": lambda: Net(latent, queries=parameter(2, 8), head=nn.Linear(8, 3)),
    "encoder, norm first": lambda: head(encoder(norm_first=True)),
    "encoder, padding": lambda: head(Net(
        lambda net, x: net.layer(x, src_key_padding_mask=short(x)), layer=encoder())),
    "stack": lambda: head(nn.TransformerEncoder(encoder(), 2, enable_nested_tensor=False)),
    "decoder": lambda: Net(decoded, head=nn.Linear(8, 3), decoder=nn.TransformerDecoderLayer(
        8, 2, 16, dropout=0., batch_first=True)),
    "Opacus": lambda: Net(lambda net, x: net.head(net.attend(x, x, x)[0].mean(1)),
                          attend=DPMultiheadAttention(8, 2, batch_first=True),
                          head=nn.Linear(8, 3)),
    **{kind.__name__: partial(lambda kind: Net(
        lambda net, x: net.head(net.layer(x)[0].mean(1)), layer=kind(8, 8, batch_first=True),
        head=nn.Linear(8, 3)), kind) for kind in (DPLSTM, DPGRU, DPRNN)},
    "two LSTMs both ways, time first": lambda: Net(
        lambda net, x: net.head(net.layer(x.transpose(0, 1))[1][0][-1]),
        layer=DPLSTM(8, 4, num_layers=2, bidirectional=True), head=nn.Linear(4, 3)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.quick(120)
@every
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_and_recurrence(engine, name):
    model = ATTENTION[name]().double()
    same(engine, model, *batch((4 if "many" in name else 5, 8)))
    same(engine, model.eval(), *batch((4 if "many" in name else 5, 8), 2, 2))


# --- inputs, outputs, labels and losses of every form


class Table(nn.Module):
    "Numbers and a column of categories; an output that is a dict."
    def __init__(self):
        super().__init__()
        self.colour, self.mix = nn.Embedding(5, 4), nn.Linear(6, 3)
        self.scale = parameter(2)

    def forward(self, numbers, colour):
        scores = self.mix(torch.cat([numbers*self.scale, self.colour(colour)], 1))
        return {"scores": scores, "size": (numbers.sum(1),)}


def table_loss(output, y):
    return loss(output["scores"], y) + output["size"][0]*output["scores"].square().sum(1)


@every
def test_inputs_and_outputs_are_trees(engine):
    numbers, colour, y = doubles(4, 2), torch.randint(5, (4,)), torch.randint(3, (4,))
    model = Table().double()
    for x in ({"colour": colour, "numbers": numbers}, (numbers, colour)):
        same(engine, model, x, y, loss=table_loss)
    views = Views({"numbers": doubles(4, 3, 2), "colour": torch.randint(5, (4, 3))})
    same(engine, model, views, y, loss=table_loss)
    same(engine, model, Views((doubles(4, 1, 2), colour[:, None])), y, loss=table_loss)
    same(engine, model, (numbers[:0], colour[:0]), y[:0], loss=table_loss)


@every
def test_labels_are_trees_too(engine):
    labels = {"class": torch.randint(3, (4,)), "weight": torch.rand(4, dtype=torch.float64)}

    def weighted(output, y):
        return y["weight"]*loss(output, y["class"])

    for x in (doubles(4, 2), Views(doubles(4, 3, 2))):
        same(engine, nn.Linear(2, 3).double(), x, labels, loss=weighted)
    of_views = Views({"class": torch.randint(3, (4, 3)), "weight": doubles(4, 3)})
    same(engine, nn.Linear(2, 3).double(), Views(doubles(4, 3, 2)), of_views, loss=weighted)


def classes(*shape):
    return torch.randint(3, shape)


def ignored(*shape):
    return classes(*shape).masked_fill(torch.rand(shape) < .3, -100)


LOSSES = {  # loss, shape of an example, layers, labels of four examples
    "cross entropy": (nn.CrossEntropyLoss(), (4,), (), classes(4)),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=.1), (4,), (), classes(4)),
    "weighted classes": (nn.CrossEntropyLoss(torch.tensor([1., 2., 3.]).double()), (4,), (),
                         classes(4)),
    "shares of classes": (nn.CrossEntropyLoss(), (4,), (), torch.rand(4, 3).double()),
    "maps": (nn.CrossEntropyLoss(), (4, 5, 5), (call(lambda x: x.movedim(1, -1)),
                                                nn.Linear(4, 3), call(lambda x: x.movedim(-1, 1))),
             ignored(4, 5, 5)),
    "summed maps": (nn.CrossEntropyLoss(reduction="sum"), (5, 4),
                    (nn.Linear(4, 3), call(lambda x: x.mT)), ignored(4, 5)),
    "without a batch axis": (lambda output, y: F.cross_entropy(output[0], y[0]), (4,), (),
                             classes(4)),
    "squares": (nn.MSELoss(), (4,), (), doubles(4, 3)),
    "summed squares": (nn.MSELoss(reduction="sum"), (4,), (), doubles(4, 3)),
    "of logits": (nn.BCEWithLogitsLoss(), (4,), (), torch.rand(4, 3).double()),
    "likelihood": (nn.NLLLoss(), (4,), (nn.Linear(4, 3), nn.LogSoftmax(1)), classes(4)),
    "Huber": (nn.SmoothL1Loss(), (4,), (), doubles(4, 3)),
    "one number an example": (lambda output, y: output.logsumexp(1), (4,), (), classes(4)),
}


@every
@pytest.mark.parametrize("name", LOSSES)
def test_losses_as_they_are(engine, name):
    "For one example a mean is its loss."
    of, shape, layers, y = LOSSES[name]
    model = nn.Sequential(*layers or [nn.Linear(4, 3)]).double()
    same(engine, model, doubles(4, *shape), y, loss=of)
    same(engine, model, Views(doubles(4, 2, *shape)), y, loss=of)


@every
def test_a_loss_may_read_weights(engine):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def penalized(output, y):
        return F.cross_entropy(output, y) + model[0].weight.square().sum() + model[2].bias.norm()

    same(engine, model, *batch((4,)), loss=penalized)


@every
def test_an_input_that_wants_a_gradient_is_no_parameter(engine):
    x, y = batch((4,))
    sums, _ = engine(nn.Linear(4, 3).double(), loss, x.requires_grad_(), y, FlatClip(1.))
    assert sums["weight"].norm() > 0 and x.grad is None


@every
@pytest.mark.parametrize("answer", [None, 3., torch.ones(2)])
def test_odd_losses_are_refused(engine, answer):
    refuses(engine, nn.Linear(4, 3).double(), *batch((4,)), "loss_fn returned",
            lambda output, y: answer)


@every
def test_models_that_overwrite_their_input(engine):
    model = nn.Sequential(call(lambda x: x.mul_(10)), nn.Linear(4, 30)).double()
    same(engine, model, *batch((4,), 3), clip=FlatClip(.1))


# --- odd batches and bad examples


@every
def test_empty_single_and_varying_batches(engine):
    model = papernot_cnn(2, classes=3, image_size=14).double()
    for b in (0, 1, 5, 2, 0):
        same(engine, model, *batch((1, 14, 14), b))
    same(engine, model, *batch((1, 14, 14), 0, 3))


@every
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e300])
def test_bad_examples_contribute_exactly_nothing(engine, poison):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), WSConv2d(4, 16, 3, padding=1),
        nn.PReLU(), WSConv2d(16, 24, 2), nn.Flatten(), nn.LayerNorm(24*25), nn.Linear(24*25, 3))
    model, (x, y), kept = model.double(), batch((3, 8, 8)), [0, 1, 3]
    good, _ = engine(model, loss, x[kept], y[kept], FlatClip(.5))
    x[2, 1, 3, 3] = poison
    for clip in (FlatClip(.5), PerLayer(.1)):
        sums, norms = engine(model, loss, x, y, clip)
        assert all(g.isfinite().all() for g in sums.values()) and norms[:, kept].isfinite().all()
    sums, norms = engine(model, loss, x, y, FlatClip(.5))
    if norms[:, 2].isfinite().all():
        return  # 1e300 was normalized away: an example like any other
    assert all((sums[n] - good[n]).abs().max() < 1e-12 for n in good)
    all_bad, _ = engine(model, loss, torch.full_like(x, math.nan), y, FlatClip(.5))
    assert all((g == 0).all() for g in all_bad.values())


def test_ghost_counts_good_examples_once_beside_bad_ones():
    "Dropout beside a NaN: a second pass over fewer rows would draw other masks."
    model = nn.Sequential(nn.Linear(20, 50), nn.Dropout(.5), nn.Linear(50, 300)).double()
    x = doubles(3, 20)
    x[0] = x[2] = math.nan
    for seed in range(10):
        torch.manual_seed(seed)
        sums, norms = ghost_grad_sum(model, loss, x, torch.randint(300, (3,)), FlatClip(.1))
        assert torch.cat([v.flatten() for v in sums.values()]).norm() <= .1*(1 + 1e-9)
        assert norms[:, [0, 2]].isnan().any(0).all()


@every
def test_every_row_gets_a_dropout_mask_of_its_own(engine):
    "Twenty masks of 40 numbers: two equal ones in 1 of 5e9 runs."
    model = nn.Sequential(Net(lambda net, x: x*net.w, w=nn.Parameter(torch.ones(40))),
                          nn.Dropout(.5))
    x = torch.linspace(1, 2, 40).expand(20, 40)
    _, norms = engine(model, lambda output, y: output.sum(1), x, torch.zeros(20), FlatClip(1.))
    assert len(norms[0].unique()) == 20


@every_but_the_loop
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"x": x}, lambda x: Views(x[:, None])])
def test_fixed_shapes_count_real_examples_only(engine, wrap):
    model = nn.Sequential(nn.Linear(4, 30), nn.PReLU(), nn.Linear(30, 3)).double()
    x, y = batch((4,), 4)
    called = Net(lambda net, x: net.model(x["x"] if isinstance(x, dict) else x), model=model)
    seen = []

    def clip(norms):
        seen.append(norms.shape)
        return FlatClip(.1)(norms)

    want, norms = engine(called, loss, wrap(x), y, clip)
    for rows in (4, 7):  # as many as there are, and more
        got, got_norms = fixed_shape(engine, rows)(called, loss, wrap(x), y, clip)
        assert torch.allclose(got_norms, norms) and got_norms.shape == norms.shape
        assert all(torch.allclose(got[n], want[n], 1e-9, 1e-12) for n in want)
    assert set(seen) == {(5, 4)}


# --- compiled, in another order of memory, copied; and what is in the way of the garbage collector


@every
def test_compiled_models(engine):
    "No compiler runs here: the engines go around compiled code."
    plain = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3)).double()
    x, y = batch((1, 8, 8))
    want, norms = one_at_a_time(plain, loss, x, y, FlatClip(.5))
    inside = copy.deepcopy(plain)
    inside.compile()
    partly = nn.Sequential(*plain[:1], torch.compile(plain[1:]))
    for model in (torch.compile(plain), partly, inside):
        got, got_norms = engine(model, loss, x, y, FlatClip(.5))
        assert (got_norms - norms).abs().max() < 1e-10
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(got.values(), want.values()))


@every
def test_channels_last_and_copies_of_a_model(engine):
    model = resnet20(3).double().to(memory_format=torch.channels_last)
    x, y = batch((3, 8, 8), 3)
    x = x.to(memory_format=torch.channels_last)
    same(engine, model, x, y, clip=FlatClip(5.))
    same(engine, pickle.loads(pickle.dumps(copy.deepcopy(model))), x, y)


@every
def test_nothing_waits_for_the_garbage_collector(engine):
    "A reference cycle would keep a step's activations: twice the memory, fresh pages."
    model, x, y = resnet20(), torch.randn(3, 3, 16, 16), torch.tensor([1, 2, 3])

    def tensors():
        return sum(type(o) in (torch.Tensor, nn.Parameter) for o in gc.get_objects())

    engine(model, loss, x, y, FlatClip(1.))
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        engine(model, loss, x, y, FlatClip(1.))
        assert tensors() == before
    finally:
        gc.enable()


# --- what is refused


@every_but_the_loop
@pytest.mark.parametrize("given, match", [
    ((None, loss, FlatClip(1.)), "no network"), ((nn.Linear(4, 3), 7, FlatClip(1.)), "no function"),
    ((nn.Linear(4, 3), loss, .5), r"pass FlatClip\(0.5\)")])
def test_what_is_no_model_loss_or_clip_is_refused(engine, given, match):
    model, of, clip = given
    with pytest.raises(ValueError, match=match):
        engine(model, of, torch.randn(2, 4), torch.tensor([0, 1]), clip)


@every_but_the_loop
@pytest.mark.parametrize("option", [dict(max_norm=1.), dict(scale_grad_by_freq=True)])
def test_two_options_of_an_embedding_are_refused(engine, option):
    model = nn.Sequential(nn.Embedding(9, 4, **option), nn.Flatten(), nn.Linear(20, 3))
    refuses(engine, model, *inputs("words"), "leave them out")


@every
def test_batch_norm_in_training_is_refused(engine):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    refuses(engine, model, *batch((4,)), "BatchNorm|batch norm|more than 1 value")
