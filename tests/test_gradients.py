"""The engines against the loop: random networks, every layer, odd batches, bad examples, and a model left as it was."""
import copy
import gc
import math
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from torch import nn

from dp_course import gradients, layers
from dp_course.dpsgd import FlatClip, loop_grad_sum
from dp_course.gradients import ghost_grad_sum, vmap_grad_sum
from dp_course.models import WSConv2d, papernot_cnn, resnet20, wide_resnet

ENGINES = {n: getattr(gradients, n) for n in
           ("hook_grad_sum", "vmap_grad_sum", "ghost_grad_sum", "bookkeeping_grad_sum", "fast_grad_sum")}
BACKWARD = {n: f for n, f in ENGINES.items() if n != "vmap_grad_sum"}  # the ones that swap forwards
every = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
backward = pytest.mark.parametrize("engine", BACKWARD.values(), ids=BACKWARD.keys())
LOSS = partial(F.cross_entropy, reduction="none")


@pytest.fixture(autouse=True)
def one_thread():
    n = torch.get_num_threads()
    torch.set_num_threads(1); torch.manual_seed(0)
    yield
    torch.set_num_threads(n)


class PerLayer:
    "Another factor for every tensor: norms are clipped row by row."
    def __init__(self, bound): self.bound = bound

    def __call__(self, norms):
        f = (self.bound/norms).clamp(max=1)
        return torch.where(norms.isfinite().all(0), f, 0.)


def batch(shape, b=4, k=None, dtype=torch.float64, classes=3):
    return torch.randn(b, *([k] if k else []), *shape, dtype=dtype), torch.randint(classes, (b,))


def same(engine, model, x, y, clip=None, tol=1e-10, loss=LOSS):
    clip = clip or FlatClip(.5)
    want, norms = loop_grad_sum(model, loss, x, y, clip)
    got, got_norms = engine(model, loss, x, y, clip)
    assert list(got) == list(want) and got_norms.shape == (len(want), len(x))
    for n in want:
        assert got[n].shape == want[n].shape and not got[n].requires_grad
        assert (got[n] - want[n]).abs().max() <= tol, n
    if len(x): assert (got_norms - norms.to(got_norms)).abs().max() <= tol


class Lambda(nn.Module):
    def __init__(self, f): super().__init__(); self.f = f
    def forward(self, x): return self.f(x)


class Residual(nn.Module):
    def __init__(self, *layers): super().__init__(); self.layers = nn.Sequential(*layers)
    def forward(self, x): return self.layers(x) + x


# ---- random networks out of the supported layers

@st.composite
def networks(draw):
    pick, flag = lambda *v: draw(st.sampled_from(v)), lambda: draw(st.booleans())
    channels, blocks, shared = pick(2, 3), [], None
    c = channels
    for _ in range(draw(st.integers(1, 4))):
        kind = pick("conv", "conv", "ws", "group", "layer", "prelu", "residual", "instance", "linear")
        if kind in ("conv", "ws"):
            o, groups = pick(2, 4, 6), 1
            if c % 2 == 0 and flag(): groups = 2
            kernel, mode = pick(1, 2, 3, (3, 2)), pick("zeros", "zeros", "circular", "reflect")
            padding = pick("same", "valid", 0, 1) if kernel != 1 else 0
            stride = 1 if padding == "same" else pick(1, 2)
            if kind == "ws" and c//groups*(kernel if isinstance(kernel, int) else 2)**2 < 2: groups = 1
            cls = partial(WSConv2d, form=pick("fan_in", "unit", "report")) if kind == "ws" else nn.Conv2d
            blocks.append(cls(c, o, kernel, stride, padding, pick(1, 2) if kernel != (3, 2) else 1, groups, flag(), mode))
            c = o
        elif kind == "group": blocks.append(nn.GroupNorm(pick(1, c), c))
        elif kind == "instance": blocks.append(nn.InstanceNorm2d(c, affine=True))
        elif kind == "prelu": blocks.append(nn.PReLU(pick(1, c)))
        elif kind in ("layer", "linear"):
            inner = nn.LayerNorm(c, bias=flag()) if kind == "layer" else nn.Linear(c, c, bias=flag())
            blocks += [Lambda(lambda x: x.movedim(1, -1)), inner, Lambda(lambda x: x.movedim(-1, 1))]
        else:
            conv = nn.Conv2d(c, c, 3, padding=1)
            blocks.append(Residual(conv, nn.Tanh(), conv) if flag() else Residual(conv, nn.GroupNorm(1, c)))
        if flag(): blocks.append(nn.ReLU(inplace=flag()))
    head = pick("pool", "flat")
    if head == "pool": blocks += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 3)]
    else: blocks += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4*c, 5), nn.Tanh(), nn.Linear(5, 3, bias=flag())]
    model = nn.Sequential(*blocks).double()
    for p in model.parameters():
        nn.init.normal_(p, std=.6)
        if draw(st.integers(0, 7)) == 0: p.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()): model[-1].weight.requires_grad_(True)
    return model, channels, pick(None, None, 1, 2), draw(st.integers(1, 4)), draw(st.integers(0, 2**31)), flag()


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(networks())
def test_random_networks(case):
    model, c, k, b, seed, per_layer = case
    torch.manual_seed(seed)
    x, y = batch((c, 13, 12), b, k)
    try: model(x.clone().flatten(0, 1) if k else x.clone())
    except (RuntimeError, ValueError): assume(False)  # the maps got smaller than a kernel: not a network
    clip = PerLayer(.3) if per_layer else FlatClip(.5)
    for engine in ENGINES.values(): same(engine, model, x, y, clip, tol=1e-10)


NETS = {"resnet20": (lambda: resnet20(3), (3, 8, 8)), "wrn": (lambda: wide_resnet(10, 1, 3), (3, 8, 8)),
        "papernot": (lambda: papernot_cnn(4, classes=3, image_size=14), (1, 14, 14))}


@every
@pytest.mark.parametrize("name", NETS)
def test_course_networks(engine, name):
    make, shape = NETS[name]
    model = make().double()
    for k in (None, 2): same(engine, model, *batch(shape, 2, k), clip=FlatClip(5.))
    same(engine, model.eval(), *batch(shape, 2), clip=PerLayer(.1))


@every
def test_wide_convolutions_take_the_pixel_gram(engine, monkeypatch):
    "64 channels on 4x4 maps, where norms come from inner products; an in-place ReLU destroys the output that they use."
    used = []
    real = layers._gram_sq
    monkeypatch.setattr(layers, "_gram_sq", lambda *a: used.append(1) or real(*a))
    model = nn.Sequential(WSConv2d(3, 32, 3, padding=1), nn.ReLU(inplace=True), WSConv2d(32, 48, 3, padding=(2, 1), form="report"),
                          nn.GroupNorm(4, 48), nn.ReLU(inplace=True), nn.Conv2d(48, 40, (3, 2), dilation=(1, 2)), nn.ReLU(inplace=True),
                          WSConv2d(40, 40, 3, 2, 1, bias=False), nn.Flatten(), nn.Linear(160, 3)).double()
    same(engine, model, *batch((3, 4, 6)), clip=FlatClip(.5))
    assert bool(used) == (engine.__name__ in ("ghost_grad_sum", "bookkeeping_grad_sum", "fast_grad_sum"))


# ---- other layers

class Words(nn.Module):
    "Embedding, LayerNorm over two dimensions, a linear layer on (b,t,i), and output weights tied to the embedding."
    def __init__(self, tied=True):
        super().__init__()
        self.emb, self.norm, self.mix = nn.Embedding(9, 6, padding_idx=0), nn.LayerNorm((5, 6)), nn.Linear(6, 6)
        self.out = nn.Linear(6, 9, bias=False)
        if tied: self.out.weight = self.emb.weight

    def forward(self, x): return self.out(torch.tanh(self.mix(self.norm(self.emb(x)))).mean(1))


@every
@pytest.mark.parametrize("tied", [False, True])
def test_words(engine, tied):
    x = torch.randint(0, 9, (4, 5)); x[:, 1] = x[:, 0]; x[0, 2] = 0
    same(engine, Words(tied).double(), x, torch.randint(9, (4,)))


@every
def test_other_dimensions_and_inputs(engine):
    same(engine, nn.Sequential(nn.Conv1d(2, 4, 3, 2, 1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)).double(), *batch((2, 9)))
    same(engine, nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 40), nn.Flatten(), nn.Linear(80, 3)).double(), *batch((2, 4)))
    same(engine, nn.Linear(4, 3).double(), *batch((4,)))


class Scaled(nn.Module):
    "A parameter of its own beside a child: the whole module goes through the fallback."
    def __init__(self): super().__init__(); self.scale, self.body = nn.Parameter(torch.rand(4)), nn.Linear(4, 4)
    def forward(self, x): return self.body(x*self.scale) + self.scale


@every
def test_fallback(engine):
    shared = nn.PReLU(4)
    model = nn.Sequential(Scaled(), shared, nn.Linear(4, 4), shared, nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))).double()
    same(engine, model, *batch((4,)))


# ---- odd batches and bad examples

@every
def test_empty_single_and_varying_batches(engine):
    model = papernot_cnn(2, classes=3, image_size=14).double()
    for b in (0, 1, 5, 2, 0): same(engine, model, *batch((1, 14, 14), b))
    same(engine, model, *batch((1, 14, 14), 0, 3))


@every
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e300])
def test_bad_examples_contribute_exactly_nothing(engine, poison):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), WSConv2d(4, 16, 3, padding=1), nn.PReLU(),
                          WSConv2d(16, 24, 2), nn.Flatten(), nn.LayerNorm(24*25), nn.Linear(24*25, 3)).double()
    x, y = batch((3, 8, 8))
    good, _ = engine(model, LOSS, x[[0, 1, 3]], y[[0, 1, 3]], FlatClip(.5))
    x[2, 1, 3, 3] = poison
    for clip in (FlatClip(.5), PerLayer(.1)):
        grads, norms = engine(model, LOSS, x, y, clip)
        assert all(g.isfinite().all() for g in grads.values())
        assert norms[:, [0, 1, 3]].isfinite().all()
    grads, norms = engine(model, LOSS, x, y, FlatClip(.5))
    if norms[:, 2].isfinite().all(): return  # 1e300 was normalized away: an example like any other
    for n in grads: assert (grads[n] - good[n]).abs().max() < 1e-12
    all_bad, _ = engine(model, LOSS, torch.full_like(x, float("nan")), y, FlatClip(.5))
    assert all((g == 0).all() for g in all_bad.values())


# ---- the model is left as it was

def state(model):
    return ([dict(m.__dict__) for m in model.modules()], [(p, p.grad, p.clone(), p.requires_grad) for p in model.parameters()],
            [b.clone() for b in model.buffers()])


def unchanged(model, before):
    modules, params, buffers = before
    for m, d in zip(model.modules(), modules):
        assert m.__dict__.keys() == d.keys() and all(m.__dict__[n] is v for n, v in d.items())
    for p, (q, g, v, r) in zip(model.parameters(), params): assert p is q and p.grad is g and p.equal(v) and p.requires_grad == r
    assert all(a.equal(b) for a, b in zip(model.buffers(), buffers))


@every
def test_model_is_left_as_it_was(engine):
    shared = nn.Linear(4, 4)
    model = nn.Sequential(Scaled(), shared, nn.Tanh(), shared, nn.PReLU(), nn.Linear(4, 3)).double()
    model[0].scale.grad = torch.ones_like(model[0].scale)
    before, (x, y) = state(model), batch((4,))
    engine(model, LOSS, x, y, FlatClip(1.))
    unchanged(model, before)
    assert torch.is_grad_enabled()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    same(engine, twin, x, y)


class Fails(nn.Module):
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(4))
    def forward(self, x): raise RuntimeError("broken on purpose")


@every
def test_exceptions_leave_the_model_clean(engine):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x, y = batch((4,))
    before = state(model)
    bad_loss = lambda o, y: F.cross_entropy(o, y)
    with pytest.raises(ValueError, match="one loss per row"): engine(model, bad_loss, x, y, FlatClip(1.))
    def bad_clip(norms): raise KeyError("clip")
    with pytest.raises(KeyError): engine(model, LOSS, x, y, bad_clip)
    unchanged(model, before)
    model.append(Fails().double())
    before = state(model)
    with pytest.raises(RuntimeError, match="on purpose"): engine(model, LOSS, x, y, FlatClip(1.))
    unchanged(model, before)


@every
def test_compiled_models(engine):
    "No compiler runs here: the engines go around compiled code."
    plain = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3*36, 3)).double()
    x, y = batch((1, 8, 8))
    want, norms = loop_grad_sum(plain, LOSS, x, y, FlatClip(.5))
    for model in (torch.compile(plain), nn.Sequential(*plain[:1], torch.compile(plain[1:]))):
        got, n = engine(model, LOSS, x, y, FlatClip(.5))
        for a, b in zip(got.values(), want.values()): assert (a - b).abs().max() < 1e-12
        assert (n - norms).abs().max() < 1e-10
    inside = copy.deepcopy(plain); inside.compile()
    got, _ = engine(inside, LOSS, x, y, FlatClip(.5))
    assert all((got[n] - want[n]).abs().max() < 1e-12 for n in want)


@every
def test_channels_last(engine):
    model = resnet20(3).double().to(memory_format=torch.channels_last)
    x, y = batch((3, 8, 8), 3)
    same(engine, model, x.to(memory_format=torch.channels_last), y, clip=FlatClip(5.))


# ---- what is refused

class Outside(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(4, 4)
    def forward(self, x): return F.linear(self.lin(x), self.lin.weight)


@backward
def test_a_parameter_used_outside_its_module_is_noticed(engine):
    model = Outside().double()
    before = state(model)
    with pytest.raises(ValueError, match="lin.weight is used outside"): engine(model, LOSS, *batch((4,)), FlatClip(1.))
    unchanged(model, before)
    same(gradients.vmap_grad_sum, model, *batch((4,)))


class Attention(nn.Module):
    def __init__(self): super().__init__(); self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
    def forward(self, x): return self.attn(x, x, x)[0].mean(1)


@every
@pytest.mark.parametrize("layer, name", [(nn.BatchNorm2d(3), "1 is BatchNorm2d"), (nn.InstanceNorm2d(3, track_running_stats=True), "1 is InstanceNorm2d"),
                                         (nn.LSTM(6, 3), "1 is LSTM"), (Attention(), "1.attn is MultiheadAttention"),
                                         (nn.Embedding(3, 4, max_norm=1.), "1 is Embedding"), (nn.SyncBatchNorm(3), "1 is SyncBatchNorm")])
def test_refused_by_name(engine, layer, name):
    model = nn.Sequential(nn.Identity(), layer)
    with pytest.raises(ValueError, match=name): engine(model, LOSS, *batch((3, 6, 6), dtype=torch.float32), FlatClip(1.))


@backward
def test_examples_must_come_first(engine):
    model = nn.Sequential(Lambda(lambda x: x.transpose(0, 1)), nn.Linear(4, 4), Lambda(lambda x: x.mean(0)))
    with pytest.raises(ValueError, match="1 .Linear. got"): engine(model, LOSS, *batch((6, 4), dtype=torch.float32), FlatClip(1.))


# ---- true sensitivity: what one example adds to the sum, measured in float64, never more than C

def worst_share(engine, model, x, y, bound, **autocast):
    "The longest contribution of one example: its batch with the others poisoned, so that every shape stays the same."
    longest = 0.
    for i in range(len(x)):
        alone = torch.full_like(x, float("nan")); alone[i] = x[i]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(autocast)):
            grads, norms = engine(model, LOSS, alone, y, FlatClip(bound))
        assert norms.dtype == torch.float32 and all(g.dtype == torch.float32 for g in grads.values())
        longest = max(longest, sum(g.double().square().sum() for g in grads.values()).sqrt().item())
    return longest


def hard_examples():
    "Large, tiny, constant and rank-one images: where inner products cancel."
    x = torch.randn(6, 3, 8, 8)
    x[1] *= 1e4; x[2] *= 1e-4; x[3] = 100.; x[4] = torch.linspace(-50, 50, 8)[None, None, :]; x[5] = 1e3 + 1e-2*x[5]
    return x, torch.randint(3, (6,))


@every
@pytest.mark.parametrize("autocast", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_no_example_counts_more_than_the_bound(engine, autocast):
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), WSConv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
                          nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.Flatten(), nn.Linear(1024, 3))
    x, y = hard_examples()
    for bound in (1e-3, 1.):
        assert worst_share(engine, model, x, y, bound, **autocast) <= bound*(1 + 1e-3)


def test_ghost_norms_round_up_where_inner_products_cancel():
    "A constant image and an output gradient that sums to almost zero: float32 Gram matrices lose the small rest."
    x = torch.full((1, 64, 8, 8), 1e3)
    g = torch.randn(1, 64, 8, 8); g -= g.mean((2, 3), keepdim=True)
    m = nn.Conv2d(64, 64, 1)
    weight = layers.ConvWeight(m, x, g, None, (0, 0), 1)
    exact = torch.einsum("bot,bit->boi", g.flatten(2).double(), x.flatten(2).double()).norm()
    summed = weight.total(torch.ones(1), None).double().norm()  # what would really be added
    assert weight.gram().sqrt().item() >= max(exact.item(), summed.item())
    A, D = x.flatten(2).mT @ x.flatten(2), g.flatten(2).mT @ g.flatten(2)
    naive = (A*D).sum().clamp(min=0).sqrt()
    assert not naive >= summed*.999 or weight.gram().sqrt() > naive  # without the slack it may under-report


@pytest.mark.parametrize("engine", [gradients.fast_grad_sum, gradients.bookkeeping_grad_sum, gradients.hook_grad_sum], ids=lambda f: f.__name__)
def test_nothing_waits_for_the_garbage_collector(engine):
    "A reference cycle would keep a step's activations until Python's collector runs: twice the memory, fresh pages."
    model, x, y = resnet20(), torch.randn(3, 3, 32, 32), torch.tensor([1, 2, 3])
    tensors = lambda: sum(type(o) in (torch.Tensor, nn.Parameter) for o in gc.get_objects())
    engine(model, LOSS, x, y, FlatClip(1.))
    gc.collect(); gc.disable()
    try: before = tensors(); engine(model, LOSS, x, y, FlatClip(1.)); assert tensors() == before
    finally: gc.enable()


def one_by_one(m, x, g, b):
    "Each example's weight gradient by autograd, its views added up."
    def grad(xi, gi): return torch.autograd.grad(m(xi), m.weight, gi)[0]
    return torch.stack([sum(grad(x[r:r+1], g[r:r+1]) for r in range(e, len(x), b)) for e in range(b)]).detach()


def test_convolutions_of_every_shape():
    "Patches, fold and Gram norms against autograd: odd kernels, strides, dilations, paddings, groups, views; norms never too small."
    draw = torch.Generator().manual_seed(0)
    pick = lambda low, high: int(torch.randint(low, high + 1, (), generator=draw))
    done = thin = 0
    while done < 300:
        (kh, kw), (dh, dw), (sh, sw), (ph, pw), (h, w) = [(pick(*r), pick(*r)) for r in ((1, 4), (1, 3), (1, 2), (0, 5), (1, 7))]
        if h + 2*ph < dh*(kh-1) + 1 or w + 2*pw < dw*(kw-1) + 1: continue
        groups, k, i = pick(1, 2), pick(1, 2), pick(1, 9)
        if done % 4 == 0: kh = kw = 1
        if pick(0, 1): sh = sw = 1
        m = nn.Conv2d(i*groups, 2*groups, (kh, kw), (sh, sw), (ph, pw), (dh, dw), groups, bias=False).double()
        x = torch.randn(3*k, i*groups, h, w, dtype=torch.float64, generator=draw)
        g = torch.randn(m(x).shape, dtype=torch.float64, generator=draw)
        weight, G = layers.ConvWeight(m, x, g, None, (ph, pw), 3), one_by_one(m, x, g, 3)
        for got in (weight.grads(), weight.naive()): assert got.shape == G.shape and torch.allclose(got, G, 1e-10, 1e-10), m
        thin += layers._thin(m, 3*k, 3)
        if groups == k == 1:
            got, true, scale = weight.gram(), G.flatten(1).square().sum(1), x.flatten(1).square().sum(1)*g.flatten(1).square().sum(1)
            assert (got >= true*(1 - 1e-12)).all() and ((got - true) <= 1e-11*scale).all(), m
        done += 1
    assert 50 < thin < 250  # both ways were taken


@pytest.mark.parametrize("conv, shape", [(nn.Conv1d, (9,)), (nn.Conv3d, (4, 5, 3))])
def test_patches_in_one_and_three_dimensions(conv, shape):
    torch.manual_seed(0)
    m = conv(2, 3, 2, stride=2, padding=1, dilation=2, bias=False).double()
    x = torch.randn(4, 2, *shape).double()
    g = torch.randn_like(m(x))
    weight = layers.ConvWeight(m, x, g, None, m.padding, 2)
    assert layers._thin(m, 4, 2) and torch.allclose(weight.grads(), one_by_one(m, x, g, 2), 1e-10, 1e-10)


@every
def test_wide_grouped_convolutions(engine):
    "Few positions and many weights, but two groups: no inner products across the groups."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(48, 48, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(48, 64, 3, 2, 1, groups=2), nn.Flatten(), nn.Linear(64, 3)).double()
    x, y = torch.randn(4, 48, 2, 2).double(), torch.arange(4) % 3
    (G, N), (g, n) = (e(model, LOSS, x, y, FlatClip(.5)) for e in (loop_grad_sum, engine))
    assert torch.allclose(n, N, 1e-9) and all(torch.allclose(g[k], G[k], 1e-9, 1e-12) for k in G)


@every
def test_wide_convolutions_in_half_precision(engine):
    "A clipped example uses its bound, and no more, also where float32 would take inner products."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64*16, 3)).bfloat16()
    x, y, bound = torch.randn(6, 64, 4, 4).bfloat16(), torch.arange(6) % 3, 1e-2
    for i in range(6):
        g, _ = engine(model, LOSS, x[i:i+1], y[i:i+1], FlatClip(bound))
        assert .999*bound < torch.cat([v.flatten() for v in g.values()]).norm() <= bound*(1 + 1e-3)


@pytest.mark.parametrize("i, bias", [(3, True), (64, False), (64, True)])
@every
def test_standardized_convolutions_in_half_precision(engine, i, bias):
    torch.manual_seed(0)
    model = nn.Sequential(WSConv2d(i, 64, 3, padding=1, bias=bias), nn.ReLU(), nn.Flatten(), nn.Linear(64*16, 3)).bfloat16()
    x, y = torch.randn(1, i, 4, 4).bfloat16(), torch.tensor([1])
    g, n = engine(model, LOSS, x, y, FlatClip(1e-2))
    assert .999e-2 < torch.cat([v.flatten() for v in g.values()]).norm() <= 1e-2*(1 + 1e-3)
    assert torch.allclose(n, loop_grad_sum(model, LOSS, x, y, FlatClip(1e-2))[1].to(n), .05)


@pytest.mark.parametrize("bias", [1e2, 1e4, 1e6])
@every
def test_a_large_bias_hides_no_gradient(engine, bias):
    "The output of a standardized convolution says <G,w^> only without its bias, which would drown it."
    worst = 0
    for seed in range(10):
        torch.manual_seed(seed)
        m, base, v = WSConv2d(64, 64, 3, padding=1), torch.randn(1, 64, 3, 3), torch.randn(64)
        m.weight.data = base + 1e-3*torch.randn(64, 64, 3, 3); m.bias.data.fill_(bias); m.bias.requires_grad_(False)
        x = 1e-3*torch.randn(1, 64, 4, 4); x[0, :, :3, :3] += base[0]
        g, _ = engine(m, lambda o, y: o[:, :, 1, 1] @ v, x, torch.zeros(1), FlatClip(1e-3))
        worst = max(worst, g["weight"].double().norm().item()/1e-3)
    assert .5 < worst <= 1 + 1e-3


class Gain(nn.Module):
    "A parameter without dimensions, beside a layer."
    def __init__(self): super().__init__(); self.gain, self.linear = nn.Parameter(torch.tensor(.7)), nn.Linear(4, 3)
    def forward(self, x): return self.gain*self.linear(x)


@every
def test_parameters_without_dimensions(engine):
    torch.manual_seed(0)
    model, x, y = Gain().double(), torch.randn(5, 4).double(), torch.arange(5) % 3
    (G, N), (g, n) = (e(model, LOSS, x, y, FlatClip(.1)) for e in (loop_grad_sum, engine))
    assert torch.allclose(n, N, 1e-10) and all(g[k].shape == G[k].shape and torch.allclose(g[k], G[k], 1e-10, 1e-12) for k in G)


@pytest.mark.parametrize("wrap", [lambda m: nn.utils.prune.identity(m, "weight"), nn.utils.weight_norm])
@every
@pytest.mark.filterwarnings("ignore")
def test_computed_weights_are_refused_by_name(engine, wrap):
    "A rule would read the computed weight and never see the gradient of what it was computed from."
    import torch.nn.utils.prune  # noqa: F401
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)); wrap(model[1])
    with pytest.raises(ValueError, match="1 is Linear: its weight is computed"): engine(model, LOSS, torch.randn(2, 4), torch.arange(2), FlatClip(1.))


@every
def test_weights_computed_in_forward_are_refused_by_name(engine):
    class Hyper(nn.Module):
        def __init__(self): super().__init__(); self.make, self.use = nn.Linear(4, 12), nn.Linear(4, 3); del self.use.weight
        def forward(self, x): self.use.weight = self.make(x).mean(0).view(3, 4); return self.use(x)
    if engine is vmap_grad_sum: pytest.skip("runs each example alone: nothing is shared")
    with pytest.raises(ValueError, match="use is Linear: its weight is computed"): engine(Hyper(), LOSS, torch.randn(2, 4), torch.arange(2), FlatClip(1.))


@every
def test_hooks_on_parameters_are_refused_by_name(engine):
    model = nn.Sequential(nn.Linear(4, 3)); model[0].weight.register_hook(lambda g: 2*g)
    with pytest.raises(ValueError, match="parameter 0.weight has a hook"): engine(model, LOSS, torch.randn(2, 4), torch.arange(2), FlatClip(1.))


def test_ghost_counts_good_examples_once_beside_bad_ones():
    "Dropout beside a NaN: a second pass over fewer rows would draw other masks than the norms saw."
    model = nn.Sequential(nn.Linear(20, 50), nn.Dropout(.5), nn.Linear(50, 300)).double()
    x = torch.randn(3, 20).double(); x[0] = x[2] = math.nan
    for seed in range(10):
        torch.manual_seed(seed)
        g, n = ghost_grad_sum(model, LOSS, x, torch.randint(300, (3,)), FlatClip(.1))
        assert torch.cat([v.flatten() for v in g.values()]).norm() <= .1*(1 + 1e-9) and n[:, [0, 2]].isnan().any(0).all()


class InPlace(nn.Module):
    def forward(self, x): return x.mul_(10)


@every
def test_models_that_overwrite_their_input(engine):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(InPlace(), nn.Linear(4, 30)).double(), torch.randn(3, 4).double(), torch.arange(3)
    (G, N), (g, n) = (e(model, LOSS, x.clone(), y, FlatClip(.1)) for e in (loop_grad_sum, engine))
    assert torch.allclose(n, N, 1e-10) and all(torch.allclose(g[k], G[k], 1e-10, 1e-12) for k in G)


@pytest.mark.parametrize("b, d", [(4, 4), (3, 5)])
@pytest.mark.parametrize("part", [nn.Linear, lambda i, o: nn.Sequential(nn.Linear(i, o), nn.PReLU(o), nn.LayerNorm(o))])
@every
def test_checkpointed_activations(engine, part, b, d):
    "Forwards that run again during the backward pass still know their tape."
    from torch.utils.checkpoint import checkpoint
    class Saver(nn.Module):
        def __init__(self): super().__init__(); self.p, self.a, self.b = nn.Linear(d, d), part(d, d), nn.Linear(d, 3)
        def forward(self, x): return self.b(checkpoint(self.a, self.p(x), use_reentrant=False) if self.save else self.a(self.p(x)))
    torch.manual_seed(0)
    model, x, y = Saver().double(), torch.randn(b, d).double(), torch.arange(b) % 3
    model.save = False; G, N = loop_grad_sum(model, LOSS, x, y, FlatClip(.1))
    if engine is vmap_grad_sum: return
    model.save = True; g, n = engine(model, LOSS, x, y, FlatClip(.1))
    assert torch.allclose(n, N, 1e-10) and all(torch.allclose(g[k], G[k], 1e-10, 1e-12) for k in G)
    assert not any("forward" in m.__dict__ for m in model.modules())


@every
def test_parameters_in_the_loss_are_refused_by_name(engine):
    model, x, y = nn.Linear(4, 3).double(), torch.randn(4, 4).double(), torch.randint(3, (4,))
    with pytest.raises(ValueError, match="parameter weight is used outside"):
        engine(model, lambda o, y: LOSS(o, y) + .1*model.weight.square().sum(), x, y, FlatClip(1.))
    g, _ = engine(model, LOSS, x.requires_grad_(), y, FlatClip(1.))  # an input that wants a gradient is no parameter
    assert g["weight"].norm() > 0


@every
def test_prelu_after_a_convolution_under_autocast(engine):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU(), nn.Flatten(), nn.Linear(32, 3)), torch.randn(2, 3, 4, 4), torch.arange(2)
    with torch.autocast("cpu", torch.bfloat16): g, n = engine(model, LOSS, x, y, FlatClip(.01))
    assert torch.allclose(n, loop_grad_sum(model, LOSS, x, y, FlatClip(.01))[1], .05, .02)


@every
def test_named_arguments_and_odd_outputs(engine):
    class Named(nn.Module):
        def __init__(self): super().__init__(); self.a = nn.Linear(4, 3)
        def forward(self, x): return self.a(input=x)
    x, y = torch.randn(2, 4), torch.arange(2)
    g, _ = engine(Named(), LOSS, x, y, FlatClip(1.)); assert g["a.weight"].norm() > 0
    with pytest.raises(ValueError, match="loss_fn returned shape NoneType"): engine(nn.Linear(4, 3), lambda o, y: None, x, y, FlatClip(1.))
    with pytest.raises(ValueError, match="no views"): engine(nn.Conv2d(3, 3, 1), LOSS, torch.zeros(2, 0, 3, 4, 4), y, FlatClip(1.))


def test_patches_are_taken_in_pieces(monkeypatch):
    "More than 4 MB of patches: several products, one result."
    torch.manual_seed(0)
    m = nn.Conv2d(2, 3, 5, padding=2, bias=False).double()
    x = torch.randn(32, 2, 40, 40).double()
    g = torch.randn_like(m(x))
    calls, original = [], layers._patches
    monkeypatch.setattr(layers, "_patches", lambda x, *a: calls.append(len(x)) or original(x, *a))
    assert torch.allclose(layers.ConvWeight(m, x, g, None, (2, 2), 32).grads(), one_by_one(m, x, g, 32), 1e-10, 1e-10)
    assert calls == [14, 14, 4]


@pytest.mark.parametrize("groups, k", [(1, 1), (1, 2), (2, 2)])
def test_wide_layers_are_folded_in_pieces(groups, k, monkeypatch):
    "More than 16 MB of gradients: several grouped convolutions, one result."
    torch.manual_seed(0)
    m = nn.Conv2d(128*groups, 128, 3, padding=1, groups=groups).double()
    x, g = torch.randn(k*31, 128*groups, 3, 3).double(), torch.randn(k*31, 128, 3, 3).double()
    calls, original = [], layers.ConvWeight._backward
    monkeypatch.setattr(layers.ConvWeight, "_backward", lambda self, *a: calls.append(a[2]) or original(self, *a))
    weight = layers.ConvWeight(m, x, g, None, (1, 1), 31)
    assert torch.allclose(weight.grads(), weight.naive(), 1e-10, 1e-10)
    assert calls == [16*groups, 15*groups]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU, partial(nn.ReLU, inplace=True), partial(nn.ELU, inplace=True)])
@every
def test_wide_standardized_convolutions_before_an_activation(engine, activation, bias):
    "Their norms read the layer's own output, unless an activation in place has overwritten it."
    torch.manual_seed(0)
    conv = WSConv2d(48, 48, 3, padding=1, bias=bias)
    model = nn.Sequential(conv, activation(), nn.Flatten(), nn.Linear(48*16, 5)).double()
    x, y = torch.randn(4, 48, 4, 4).double(), torch.arange(4)
    assert layers._gram_pays(conv, x, x, 4)
    (G, N), (g, n) = (e(model, LOSS, x, y, FlatClip(.5)) for e in (loop_grad_sum, engine))
    assert torch.allclose(n, N, 1e-9) and all(torch.allclose(g[k], G[k], 1e-9, 1e-12) for k in G)
