"What must be refused before the first step is refused by name, and innocent networks are not."
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from leaks import Inside, OfInput, Weighed, loss, of_losses
from torch import nn
from toys import generator as gen

from dp_course.data import Examples, Views, pixel_loss
from dp_course.gradients import (
    AdaptiveClip,
    AutoClip,
    FlatClip,
    LayerClip,
    bf16_engine,
    bookkeeping_grad_sum,
    fast_grad_sum,
    fixed_shape,
    ghost_grad_sum,
    hook_grad_sum,
    loop_grad_sum,
    refuse_statistics,
    trainable,
    vmap_grad_sum,
)
from dp_course.models import resnet20, wide_resnet
from dp_course.privacy import PrivacyPlan, RDPAccountant
from dp_course.training import (
    Trainer,
    check_labels,
    check_model,
    check_plan,
    prove_separate,
    refuse_mixed_clip,
    refuse_unbounded,
)
from dp_course.training.guard_rows import _WideDraws

TAPED = [hook_grad_sum, ghost_grad_sum, bookkeeping_grad_sum, fast_grad_sum]


def floats(*shape, n=9, classes=3):
    "A data set of noise."
    return Examples(torch.randn(n, *shape, generator=gen()),
                    torch.randint(classes, (n,), generator=gen(1)))


def targets(*shape, d=1, n=9):
    "Noise with one number, or `d`, to predict."
    y = torch.randn(n, generator=gen(1)) if d is None else torch.randn(n, d, generator=gen(1))
    return Examples(torch.randn(n, *shape, generator=gen()), y)


def tokens(t, n=9, words=11, classes=3):
    "Rows of token ids."
    x = torch.randint(words, (n, t), generator=gen())
    x[0, 0], x[1, 0] = 0, words - 1
    return Examples(x, torch.randint(classes, (n,), generator=gen(1)))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# Leaks, each accepted by the first version


def one_against_all(output, y):
    "Outputs (b,1) and labels (b,) make a table of everybody and everybody."
    return ((output - y)**2).mean(1)


def centred(output, y):
    return F.cross_entropy(output - output.mean(0), y, reduction="none")


def pairwise(output, y):
    return torch.cdist(output, output).mean(1) + loss(output, y)


def contrastive(output, y):
    rows = F.normalize(output, dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(y)), reduction="none")


def by_largest(output, y):
    each = loss(output, y)
    return each/each.max()


def by_largest_label(output, y):
    return loss(output, y)/(1 + y.max())


@pytest.mark.parametrize("engine", [*TAPED, vmap_grad_sum, loop_grad_sum])
@pytest.mark.parametrize("mixing", [centred, pairwise, contrastive, by_largest, by_largest_label])
def test_losses_that_mix_are_refused_in_every_engine(engine, mixing):
    with pytest.raises(ValueError, match="loss_fn mixes examples"):
        prove_separate(engine, nn.Linear(5, 3), mixing, floats(5))


@pytest.mark.parametrize("engine", [*TAPED, vmap_grad_sum])
def test_labels_against_everybody_are_refused(engine):
    with pytest.raises(ValueError, match=r"loss_fn mixes .*shapes fit.*\(4, 1\), \(4,\)"):
        prove_separate(engine, nn.Linear(5, 1), one_against_all, targets(5, d=None))


class TimeFirst(nn.Module):
    "A linear layer that sees time where the others see examples."
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):  # (b,t,5)
        return self.out(self.inner(x.transpose(0, 1)).transpose(0, 1).tanh().mean(1))


class Positions(nn.Module):
    "nanoGPT's positions: one row of them for all examples."
    def __init__(self, t, words=11):
        super().__init__()
        self.t = t
        self.word, self.place = nn.Embedding(words, 8), nn.Embedding(t, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        h = self.word(x) + self.place(torch.arange(self.t, device=x.device))
        return self.out(h.tanh().mean(1))


class Sorted(nn.Module):
    "Sends the rows through a layer in another order, and puts them back."
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.out(self.inner(x[order]).tanh()[order.argsort()])


@pytest.mark.quick(4)
@pytest.mark.parametrize("engine", TAPED)
@pytest.mark.parametrize("t", [3, 4, 8])
def test_time_instead_of_examples_is_refused(engine, t):
    "Also where a fixed shape makes both equal at every batch size."
    with pytest.raises(ValueError, match="first dimension"):
        prove_separate(engine, TimeFirst(), loss, floats(t, 5))
    with pytest.raises(ValueError, match="first dimension"):
        prove_separate(engine, Positions(t), loss, tokens(t))


@pytest.mark.parametrize("engine", [fast_grad_sum, bookkeeping_grad_sum])
def test_a_fixed_shape_of_the_same_length_does_not_hide_it(engine):
    with pytest.raises(ValueError, match=r"not its own.*inner \(Linear\)"):
        prove_separate(fixed_shape(engine, 8), TimeFirst(), loss, floats(8, 5))
    with pytest.raises(ValueError, match=r"not its own.*place \(Embedding\)"):
        prove_separate(fixed_shape(engine, 8), Positions(8), loss, tokens(8))


@pytest.mark.parametrize("engine", TAPED)
def test_rows_in_another_order_are_refused(engine):
    with pytest.raises(ValueError, match=r"inner \(Linear\).*another order"):
        prove_separate(engine, Sorted(), loss, floats(5))


@pytest.mark.parametrize("model, data", [(TimeFirst(), floats(4, 5)), (Positions(4), tokens(4)),
                                         (Sorted(), floats(5))])
def test_vmap_runs_each_example_by_itself_and_may(model, data):
    assert prove_separate(vmap_grad_sum, model, loss, data)[:2] == (3, 4)


def by_maximum(x):
    return x/x.abs().max()


def standardized(x):
    return (x - x.mean(0))/(x.std(0) + 1e-3)


@pytest.mark.parametrize("normalize", [by_maximum, standardized])
def test_statistics_of_the_batch_are_refused(normalize):
    data = Examples(torch.randn(9, 5), torch.randint(3, (9,)), normalize=normalize)
    with pytest.raises(ValueError, match="normalize mixes examples"):
        prove_separate(fast_grad_sum, nn.Linear(5, 3), loss, data)


def test_augmentation_that_mixes_is_refused():
    def mixup(x, y, g):
        return .5*x + .5*x.roll(1, 0), y

    def labels(x, y, g):
        return x, y.roll(1, 0)

    def jitter(x, y, g):
        return x + torch.randn(x.shape, generator=g), y

    def views(x, y, g):
        return Views(torch.stack([x, x + torch.randn(x.shape, generator=g)], 1)), y

    def drop(x, y, g):
        return x[1:], y[1:]

    def prove(augment):
        return prove_separate(fast_grad_sum, nn.Linear(5, 3), loss, floats(5), augment=augment)

    for mixing in (mixup, labels):
        with pytest.raises(ValueError, match="no mixup"):
            prove(mixing)
    with pytest.raises(ValueError, match="as many rows"):
        prove(drop)
    assert prove(jitter) and prove(views)


# Clips


class TooMuch(FlatClip):
    "Per layer, without 1/sqrt(l)."
    def __call__(self, norms):
        return (self.max_norm/norms).clamp(max=1)


class TooQuiet(FlatClip):
    def std(self, sigma):
        return .9*sigma*self.sensitivity


@pytest.mark.parametrize("clip", [TooMuch(1.), TooQuiet(1.)])
def test_clip_that_breaks_its_promise_is_refused(clip):
    with pytest.raises(ValueError, match="promises sensitivity"):
        refuse_unbounded(clip, 1., 4)
    refuse_unbounded(FlatClip(3.), 1., 4)


class OneFactor(FlatClip):
    def __call__(self, norms):
        longest = torch.linalg.vector_norm(norms, dim=0).max()
        return (self.max_norm/longest).clamp(max=1).expand_as(norms)


class Rank(FlatClip):
    "The longest example is left out."
    def __call__(self, norms):
        whole = torch.linalg.vector_norm(norms, dim=0)
        return FlatClip(self.max_norm)(norms)*(whole < whole.max())


class Median(FlatClip):
    "Learns from the norms as they are."
    def update(self, norms, generator=None):
        if norms.shape[1]:
            self.max_norm = torch.linalg.vector_norm(norms, dim=0).median().item()


class Remembers(FlatClip):
    "A noised threshold, and an unnoised memory beside it."
    def update(self, norms, generator=None):
        self.max_norm += norms.mean().item() + torch.randn((), generator=generator).item()
        self.last = norms.mean()


class Jitters(FlatClip):
    "Moves, but not with the norms."
    def update(self, norms, generator=None):
        self.max_norm *= 1 + .1*torch.rand(1, generator=generator).item()


@pytest.mark.parametrize("clip, words", [
    (OneFactor(1.), "mixes examples"), (Rank(1.), "mixes examples"),
    (Median(1.), "learns max_norm .*without noise"), (Remembers(1.), "learns last .*without noise"),
], ids=["one_factor", "rank", "median", "memory"])
def test_clips_that_mix_or_learn_openly_are_refused(clip, words):
    with pytest.raises(ValueError, match=words):
        prove_separate(fast_grad_sum, nn.Linear(5, 3), loss, floats(5), clip=clip)


@pytest.mark.parametrize("clip", [FlatClip(1.), AutoClip(1.), AdaptiveClip(8.), Jitters(1.),
                                  LayerClip(1.)])
def test_clips_that_keep_examples_apart_are_not(clip):
    before = repr(clip)
    refuse_mixed_clip(clip, 2)
    assert repr(clip) == before


# Plans


def test_plan_and_data_must_agree():
    with pytest.raises(ValueError, match=r"n=12.*9 examples"):
        check_plan(SimpleNamespace(n=12), floats(5))
    plan = PrivacyPlan(n=9, batch_size=4, steps=2, eps=3., delta=1e-5, accountant=RDPAccountant)
    check_plan(plan, floats(5))


def test_labels_that_no_output_is_for_are_refused():
    plan = PrivacyPlan(n=9, batch_size=4, steps=2, eps=3., delta=1e-5, accountant=RDPAccountant)
    data = Examples(torch.randn(9, 5), torch.arange(9) % 4)
    with pytest.raises(ValueError, match="label 3 is out of range.*3 outputs"):
        Trainer(nn.Linear(5, 3), data, plan)
    with pytest.raises(ValueError, match="label -1 is out of range"):
        Trainer(nn.Linear(5, 3), Examples(torch.randn(9, 5), torch.arange(9) % 3 - 1), plan)


# Models


class Mix(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class HiddenMix(nn.Module):
    "A branch that is switched off at the start."
    def __init__(self):
        super().__init__()
        self.gain, self.out = nn.Parameter(torch.zeros(())), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(x + self.gain*x.amax(0))


class Remember(nn.Module):
    "A running mean that is used later."
    def __init__(self):
        super().__init__()
        self.register_buffer("m", torch.zeros(5))
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        if self.training:
            self.m.lerp_(x.detach().mean(0).to(self.m), .1)
        return self.out(x)


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Count(nn.Module):
    "State outside of the buffers."
    def __init__(self):
        super().__init__()
        self.seen = 0.

    def forward(self, x):
        self.seen = .9*self.seen + x.detach().mean()
        return x*(1 + self.seen)


class Sequence(nn.Module):
    "Takes the batch for a sequence: an example sees those before it."
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 3)

    def forward(self, x):
        return self.rnn(x)[0]


def nest(m):
    return nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Tanh(), m), nn.Linear(5, 3))


def instance_norm():
    norm = nn.InstanceNorm1d(5, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (5, 1)), norm, nn.Flatten(), nn.Linear(5, 3))


class ColumnDropout(nn.Dropout):
    "One mask for all examples."
    def forward(self, x):
        return x*super().forward(torch.ones_like(x[:1]))


MIXING = {
    "bn": (nest(nn.BatchNorm1d(5)), r"1\.1 \(BatchNorm1d\).*GroupNorm"),
    "bn_eval": (nest(nn.BatchNorm1d(5)).eval(), r"1\.1 \(BatchNorm1d\).*GroupNorm"),
    "syncbn": (nest(nn.SyncBatchNorm(5)), r"1\.1 \(SyncBatchNorm\).*GroupNorm"),
    "bn_batch": (nest(nn.BatchNorm1d(5, track_running_stats=False)), r"1\.1 \(BatchNorm1d\)"),
    "dropout": (nest(ColumnDropout()), r"1\.1 \(ColumnDropout\) draws random"),
    "frozen": (nest(nn.BatchNorm1d(5).eval().requires_grad_(False)), "FrozenBatchNorm2d"),
    "mix": (nest(Mix()), r"1\.1 \(Mix\) mixes examples.*GroupNorm"),
    "hidden": (HiddenMix(), r"the model \(HiddenMix\) mixes examples"),
    "noise": (nest(Noisy()), r"1\.1 \(Noisy\) draws random"),
    "buffer": (Remember(), r"the model \(Remember\) keeps statistics"),
    "count": (nest(Count()), r"1\.1 \(Count\)"),
    "lstm": (Sequence(), r"rnn \(LSTM\) takes time"),
    "instance": (instance_norm(), r"1 \(InstanceNorm1d\)"),
}


@pytest.mark.parametrize("kind", MIXING)
def test_models_that_mix_examples_are_refused_by_name(kind):
    model, words = MIXING[kind]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        prove_separate(loop_grad_sum, model, loss, floats(5))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("layer", [nn.LayerNorm(5), nn.GroupNorm(1, 5), nn.Dropout(.5), nn.PReLU()])
def test_nothing_is_left_behind(layer):
    model = nest(layer).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    prove_separate(fast_grad_sum, model, loss, floats(5))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state()) and torch.get_default_dtype() == torch.float32
    assert not model.training and not any(m._forward_hooks for m in model.modules())


# Engines that are wrong


def batch_gradient(model, loss_fn, x, y, clip):
    "Every example gets the batch's gradient."
    grads, norms = loop_grad_sum(model, loss_fn, x, y, clip)
    return grads, norms.mean(1, keepdim=True).expand_as(norms)


def neighbour(model, loss_fn, x, y, clip):
    "The factors are those of the next example."
    return loop_grad_sum(model, loss_fn, x.roll(1, 0), y.roll(1, 0), clip)


def unclipped(model, loss_fn, x, y, clip):
    "Norms are right, the sum is not clipped."
    _, norms = loop_grad_sum(model, loss_fn, x, y, clip)
    return loop_grad_sum(model, loss_fn, x, y, torch.ones_like)[0], norms


def forgets_bias(model, loss_fn, x, y, clip):
    grads, norms = loop_grad_sum(model, loss_fn, x, y, clip)
    return {n: g for n, g in grads.items() if "bias" not in n}, norms


@pytest.mark.parametrize("engine, words", [
    (batch_gradient, "not its own"), (neighbour, "not its own"), (unclipped, "not its own"),
    (forgets_bias, "1 sums"),
])
def test_wrong_engines_are_refused(engine, words):
    with pytest.raises(ValueError, match=words):
        prove_separate(engine, nn.Linear(5, 3), loss, floats(5))


def test_sizes_follow_from_the_shapes(monkeypatch):
    prove = partial(prove_separate, fast_grad_sum)
    model = nn.Sequential(nn.Flatten(), nn.Linear(35, 3))
    assert prove(model, loss, floats(7, 5)) == (3, 4, 5, 7, 8, 35)
    assert prove(model, loss, floats(7, 5), largest=90) == (3, 4, 5, 7, 8, 35, 90)
    work = "dp_course.training.guard_engine._WORK"
    monkeypatch.setattr(work, 1e5)  # a larger network, as it were
    assert prove(model, loss, floats(7, 5), largest=90) == (3, 4, 5)


def test_rows_that_prove_nothing_are_said():
    data = Examples(torch.rand(9, 5), torch.randint(3, (9,)))
    model = nn.Sequential(nn.Linear(5, 3))
    def only_positive(output, y):
        return loss(output.log(), y)
    with pytest.raises(ValueError, match="probe="):
        prove_separate(fast_grad_sum, model, only_positive, data)


# Innocent networks


class Attention(nn.Module):
    def __init__(self, d, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3*d), nn.Linear(d, d)

    def forward(self, x, causal=False):  # (b,t,d)
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(h.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d, causal=False):
        super().__init__()
        self.causal = causal
        self.norm1, self.attention = nn.LayerNorm(d), Attention(d)
        self.norm2 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2*d), nn.GELU(), nn.Linear(2*d, d))

    def forward(self, x):
        x = x + self.attention(self.norm1(x), self.causal)
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    "Patches, positions as a parameter of a module of its own, two blocks."
    class Place(nn.Module):
        def __init__(self, t, d):
            super().__init__()
            self.p = nn.Parameter(torch.randn(t, d)*.02)

        def forward(self, x):
            return x + self.p

    def __init__(self):
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, 16, 4, 4), self.Place(4, 16)
        self.blocks, self.head = nn.Sequential(Block(16), Block(16)), nn.Linear(16, 3)

    def forward(self, x):
        tokens = self.place(self.patch(x).flatten(2).mT)
        return self.head(self.blocks(tokens).mean(1))


class GPT(nn.Module):
    "Tied weights, and positions for each row."
    def __init__(self, words=11, d=16, t=6):
        super().__init__()
        self.word, self.place = nn.Embedding(words, d), nn.Embedding(t, d)
        self.blocks, self.norm = Block(d, causal=True), nn.LayerNorm(d)
        self.head = nn.Linear(d, words, bias=False)
        self.head.weight = self.word.weight

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)
        return self.head(self.norm(self.blocks(self.word(x) + self.place(places))))


def next_word(output, y):
    return F.cross_entropy(output.mT, y, reduction="none").mean(1)


class Window(nn.Module):
    "Attention within windows, which are folded into the batch and back."
    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Conv2d(3, 8, 1), Attention(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.embed(x)
        b, d, height, width = h.shape
        windows = h.view(b, d, height//4, 4, width//4, 4).permute(0, 2, 4, 3, 5, 1)
        out = self.attention(windows.reshape(b, -1, d))
        return self.head(out.mean(1))


class ConvNeXt(nn.Module):
    "A depthwise convolution, LayerNorm over channels, and a scale that begins at zero."
    class Scale(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.gamma = nn.Parameter(torch.zeros(d))

        def forward(self, x):
            return self.gamma*x

    def __init__(self, d=8):
        super().__init__()
        self.stem, self.depth = nn.Conv2d(3, d, 2, 2), nn.Conv2d(d, d, 3, padding=1, groups=d)
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2*d), nn.Linear(2*d, d)
        self.scale, self.head = self.Scale(d), nn.Linear(d, 3)

    def forward(self, x):
        h = self.stem(x)
        inner = self.norm(self.depth(h).permute(0, 2, 3, 1))
        inner = self.scale(self.down(F.gelu(self.up(inner))))
        return self.head((h.permute(0, 2, 3, 1) + inner).mean((1, 2)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, padding=1)
        self.up = nn.Upsample(scale_factor=2)
        self.norm = nn.GroupNorm(2, 8)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        skip = self.norm(self.down(x)).relu()
        return self.out(torch.cat([skip, self.up(self.middle(skip).relu())], 1))


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(3, 8, 3), nn.Linear(8, 4), nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.conv(x).relu()
        gate = self.up(self.down(h.mean((2, 3))).relu()).sigmoid()
        return self.head((h*gate[..., None, None]).mean((2, 3)))


class Bag(nn.Module):
    "Embeddings of a row's words, added up by hand."
    def __init__(self):
        super().__init__()
        self.word, self.out = nn.Embedding(11, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, x):
        known = (x > 0).unsqueeze(-1)
        return self.out((self.word(x)*known).sum(1)/known.sum(1).clamp(min=1))


class Table(nn.Module):
    "Numbers and a category, by name."
    def __init__(self):
        super().__init__()
        self.kind, self.out = nn.Embedding(4, 3), nn.Linear(8, 3)

    def forward(self, numbers, kind):
        return self.out(torch.cat([numbers, self.kind(kind)], 1))


class Two(nn.Module):
    "Two inputs, one of them an image."
    def __init__(self):
        super().__init__()
        self.image, self.out = nn.Conv2d(1, 4, 3), nn.Linear(9, 3)

    def forward(self, image, numbers):
        return self.out(torch.cat([self.image(image).relu().mean((2, 3)), numbers], 1))


class Heads(nn.Module):
    "A dict of outputs."
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 8)
        self.label, self.size = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x):
        h = self.body(x).tanh()
        return {"label": self.label(h), "size": self.size(h).squeeze(1)}


def both(output, y):
    return loss(output["label"], y) + output["size"].square()


class Autoencoder(nn.Module):
    "The decoder is the encoder, transposed: one matrix."
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 6)*.3)

        def forward(self, x):
            return (x @ self.w.T).tanh() @ self.w

    def __init__(self):
        super().__init__()
        self.tied, self.last = self.Tied(), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.tied(x))


def per_row(f):
    return lambda output, y: f(output, y, reduction="none").flatten(1).mean(1)


def recurrent():
    opacus = pytest.importorskip("opacus.layers")

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = opacus.DPLSTM(5, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x):
            return self.out(self.rnn(x)[0][:, -1])
    return Last()


def mlp(i, o):
    return nn.Sequential(nn.Flatten(), nn.Linear(i, 16), nn.ReLU(), nn.Linear(16, o))


def cnn(conv, pool, i=1):
    return nn.Sequential(conv(i, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), pool(1), nn.Flatten(),
                         nn.Linear(4, 3))


def table_data():
    x = {"numbers": torch.randn(9, 5), "kind": torch.arange(9) % 4}
    return Examples(x, torch.arange(9) % 3)


def tuple_data():
    return Examples((torch.randn(9, 1, 6, 6), torch.randn(9, 5)), torch.arange(9) % 3)


def word_data():
    x = tokens(6).train_x
    return Examples(x, x.roll(-1, 1))


def mask_data():
    return Examples(torch.randn(9, 3, 8, 8), torch.randint(2, (9, 8, 8)))


def multi_label():
    return Examples(torch.randn(9, 5), torch.randint(2, (9, 4)).float())


INNOCENT = {  # model, data, loss
    "mlp": (lambda: mlp(5, 3), lambda: floats(5), loss),
    "linear": (lambda: nn.Linear(5, 3), lambda: floats(5), loss),
    "cnn": (lambda: cnn(nn.Conv2d, nn.AdaptiveMaxPool2d), lambda: floats(1, 6, 6), loss),
    "conv1d": (lambda: cnn(nn.Conv1d, nn.AdaptiveAvgPool1d), lambda: floats(1, 7), loss),
    "conv3d": (lambda: cnn(nn.Conv3d, nn.AdaptiveAvgPool3d), lambda: floats(1, 4, 5, 4), loss),
    "resnet20": (partial(resnet20, 3), lambda: floats(3, 16, 16), loss),
    "wrn10": (lambda: wide_resnet(10, 1, 3), lambda: floats(3, 16, 16), loss),
    "unet": (UNet, mask_data, pixel_loss),
    "vit": (ViT, lambda: floats(3, 8, 8), loss),
    "gpt": (GPT, word_data, next_word),
    "window": (Window, lambda: floats(3, 8, 8), loss),
    "convnext": (ConvNeXt, lambda: floats(3, 8, 8), loss),
    "lstm": (recurrent, lambda: floats(4, 5), loss),
    "bag": (Bag, lambda: tokens(6), loss),
    "table": (Table, table_data, loss),
    "tuple": (Two, tuple_data, loss),
    "heads": (Heads, lambda: floats(5), both),
    "squeeze": (SqueezeExcite, lambda: floats(3, 6, 6), loss),
    "autoencoder": (Autoencoder, lambda: targets(6, d=6), per_row(F.mse_loss)),
    "regression": (lambda: mlp(5, 1), lambda: targets(5), per_row(F.mse_loss)),
    "multilabel": (lambda: mlp(5, 4), multi_label, per_row(F.binary_cross_entropy_with_logits)),
    "transformer": (lambda: nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True),
        nn.Flatten(), nn.Linear(32, 3)), lambda: floats(4, 8), loss),
}


@pytest.mark.quick(14)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, engine", [
    pytest.param(name, engine, id=f"{name}-{engine.__name__}",
                 marks=[pytest.mark.slow]*(name == "wrn10" or engine is vmap_grad_sum))
    for name in INNOCENT for engine in (fast_grad_sum, vmap_grad_sum)])
def test_innocent_networks_pass(name, engine):
    model, data, loss_fn = INNOCENT[name]
    tried = prove_separate(engine, model(), loss_fn, data())
    assert tried[:2] == (3, 4)


def test_half_precision_and_a_bf16_engine_pass():
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    prove_separate(fast_grad_sum, model.bfloat16(), loss, floats(5))
    prove_separate(bf16_engine(fast_grad_sum), model.float(), loss, floats(5))


class CastsInside(nn.Module):
    "Insists on float32."
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(5, 3)

    def forward(self, x):
        return F.linear(x.float(), self.w.weight.float(), self.w.bias.float()) + 0*self.w(x)


class Float32Only(nn.Module):
    def __init__(self, mix=False):
        super().__init__()
        self.w, self.mix = nn.Linear(5, 3), mix

    def forward(self, x):
        return self.w((x - x.mean(0) if self.mix else x).float())


def test_a_model_that_insists_on_its_precision_is_proved_in_that():
    data = floats(5)
    assert prove_separate(vmap_grad_sum, CastsInside(), loss, data)
    assert prove_separate(fast_grad_sum, Float32Only(), loss, data)
    with pytest.raises(ValueError, match="mixes examples"):
        prove_separate(fast_grad_sum, Float32Only(mix=True), loss, data)


@pytest.mark.slow
def test_it_costs_about_a_second_at_most():
    data = Examples(torch.randint(256, (9, 3, 32, 32), dtype=torch.uint8), torch.arange(9))
    model = resnet20(10)
    prove_separate(fast_grad_sum, model, loss, data)  # warm
    clock = time.process_time()
    prove_separate(fast_grad_sum, model, loss, data)
    assert time.process_time() - clock < 2  # .9 on an idle core; 3 and 4 alone take .4


# What an outside tester found in the second version


def beyond(k):
    "Rows that are centred as soon as there are more than k."
    return lambda rows: rows - rows.mean(0) if len(rows) > k else rows


class Large(nn.Module):
    def forward(self, x):
        return beyond(50)(x)


def large_loss(output, y):
    return loss(beyond(50)(output), y)


def large_augment(x, y, generator):
    return beyond(50)(x), y


@pytest.mark.parametrize("model, options", [
    (nn.Sequential(nn.Linear(5, 3), Large()), {}),
    (nn.Linear(5, 3), {"loss_fn": large_loss}),
    (nn.Linear(5, 3), {"augment": large_augment}),
    (nn.Linear(5, 3), {"normalize": beyond(50)}),
])
def test_the_batches_of_the_run_are_tried_too(model, options):
    plan = PrivacyPlan(n=200, batch_size=60, steps=2, eps=3., delta=1e-5, accountant=RDPAccountant)
    some = floats(5, n=200)
    data = Examples(some.train_x, some.train_y, normalize=options.pop("normalize", None))
    with pytest.raises(ValueError, match="mixes examples|not its own: at a batch of 60"):
        Trainer(model, data, plan, **options)
    if "augment" in options:  # that works on blocks of 128, whatever the micro-batch
        options["augment"] = lambda x, y, generator: (beyond(130)(x), y)
    Trainer(model, data, plan, **options, micro_batch=40)  # never gets more


def cutmix(x, y, generator):
    "Every example gets a piece of another one, drawn from the generator."
    other = torch.randperm(len(x), generator=generator, device=x.device)
    return torch.cat([x[:, :3], x[other, 3:]], 1), y


def winsorized(x, y, generator):
    "Large numbers are cut, where that is depends on the batch."
    return x.clamp(max=x.mean() + x.std()), y


@pytest.mark.parametrize("augment", [cutmix, winsorized])
def test_drawn_partners_and_a_cut_by_the_batch_are_noticed(augment):
    with pytest.raises(ValueError, match="augment mixes examples"):
        prove_separate(fast_grad_sum, nn.Linear(5, 3), loss, floats(5), augment=augment)


class LargeMedian(FlatClip):
    "Looks at the median of large batches."
    def __call__(self, norms):
        factors = super().__call__(norms)
        return factors*(factors > factors.median()) if norms.shape[1] > 50 else factors


def test_a_clip_is_tried_on_a_large_batch():
    with pytest.raises(ValueError, match="mixes examples"):
        refuse_mixed_clip(LargeMedian(1.), 3)


class Bank(nn.Module):
    "Remembers the batch before in a plain attribute."
    def __init__(self):
        super().__init__()
        self.inner, self.out, self.bank = nn.Linear(5, 8), nn.Linear(8, 3), 0.

    def forward(self, x):
        h = self.inner(x).tanh()
        before, self.bank = self.bank, h.detach().mean(0)
        return self.out(h + before)


@pytest.mark.parametrize("engine", [*TAPED, vmap_grad_sum, loop_grad_sum])
def test_memory_outside_of_buffers_is_refused(engine):
    with pytest.raises(ValueError, match="Bank. remembers examples of an earlier batch"):
        prove_separate(engine, Bank(), loss, floats(5))


class Anneals(nn.Module):
    "Counts its calls, which is no secret."
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(5, 3), 0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        return self.inner(x)*(1 + x.new_tensor(self.calls > 10**6))


def test_counting_calls_is_innocent():
    assert prove_separate(fast_grad_sum, Anneals(), loss, floats(5))


def test_a_model_that_cannot_be_copied_is_refused_by_name():
    with pytest.warns(FutureWarning):
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 3)))
    with pytest.raises(ValueError, match="cannot be copied.*parametrizations"):
        prove_separate(fast_grad_sum, model, loss, floats(5))


def nothing_counts(output, y):
    return 0*output.sum(1)


def hinge(output, y):
    "No made-up row is beyond the margin."
    return (output[:, 0] - 1e3).relu()


@pytest.mark.quick(4)
@pytest.mark.parametrize("engine", [*TAPED, vmap_grad_sum])
@pytest.mark.parametrize("flat", [nothing_counts, hinge])
def test_losses_without_slope_are_innocent_and_hide_nothing(engine, flat):
    assert 4 in prove_separate(engine, nn.Linear(5, 3), flat, floats(5))
    if engine is not vmap_grad_sum:
        with pytest.raises(ValueError, match="not its own"):
            prove_separate(engine, Sorted(), flat, floats(5))


def forgets_zero(model, loss_fn, x, y, clip):
    grads, norms = loop_grad_sum(model, loss_fn, x, y, clip)
    return grads, norms + 1e-3


def test_a_zero_that_is_none_is_noticed():
    with pytest.raises(ValueError, match="not its own"):
        prove_separate(forgets_zero, nn.Linear(5, 3), nothing_counts, floats(5))


def test_a_dead_network_proves_nothing():
    with pytest.raises(ValueError, match="no parameter has a gradient.*probe"):
        prove_separate(fast_grad_sum, nn.Sequential(nn.Linear(5, 3), nn.Threshold(1e6, 0.)), loss,
                       floats(5))


class Aside(nn.Module):
    "Gives layers before rows, and one number for the whole batch, beside the rows."
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.inner(x).tanh()
        return self.out(h), torch.stack([h, 2*h]), h.mean().square()


@pytest.mark.parametrize("engine", [*TAPED, vmap_grad_sum])
def test_outputs_that_are_no_rows_matter_to_the_loss_alone(engine):
    prove_separate(engine, Aside(), lambda output, y: loss(output[0], y), floats(5))
    if engine is not vmap_grad_sum:  # there the whole batch is one row
        with pytest.raises(ValueError, match="not its own"):
            prove_separate(engine, Aside(), lambda output, y: loss(output[0], y) + output[2],
                           floats(5))


@pytest.mark.parametrize("labels", [np.uint16, np.int32])
def test_labels_in_arrays_are_looked_at(labels):
    y = floats(5, n=30).train_y.numpy().astype(labels)
    data = Examples(floats(5, n=30).train_x.numpy(), y)
    for some in (data, data.split(10)):
        prove_separate(fast_grad_sum, nn.Linear(5, 3), loss, some)
        with pytest.raises(ValueError, match="label 2 is out of range"):
            prove_separate(fast_grad_sum, nn.Linear(5, 2), loss, some)


def test_labels_to_ignore_are_made_up_as_they_are_seen():
    y = torch.randint(3, (9, 4, 4), generator=gen())
    y[:, 0] = 255

    def each_pixel(output, y):
        return F.cross_entropy(output, y, reduction="none", ignore_index=255).mean((1, 2))

    data = Examples(torch.randn(9, 2, 4, 4, generator=gen(1)), y)
    prove_separate(fast_grad_sum, nn.Conv2d(2, 3, 1), each_pixel, data)


@pytest.mark.parametrize("plan", [None, {"n": 9}])
def test_what_is_no_plan_is_refused(plan):
    with pytest.raises(ValueError, match="is no plan: pass PrivacyPlan"):
        Trainer(nn.Linear(5, 3), floats(5), plan)


def test_what_is_no_clip_is_refused():
    plan = PrivacyPlan(n=9, batch_size=4, steps=2, eps=3., delta=1e-5, accountant=RDPAccountant)
    with pytest.raises(ValueError, match=r"1.0 is no clip: pass FlatClip\(1.0\)"):
        Trainer(nn.Linear(5, 3), floats(5), plan, clip=1.)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_told_what_to_use_instead(layer):
    model = layer(4, 4)  # time first, torch's default
    data = Examples(torch.randn(20, 6, 4), torch.zeros(20, dtype=torch.long))
    words = rf"time.*batch_first=True.*opacus.layers.DP{layer.__name__}"
    with pytest.raises(ValueError, match=words):
        prove_separate(fast_grad_sum, model, lambda output, y: output[0].sum((1, 2)), data)


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][:, -1])


def test_a_recurrent_layer_with_the_batch_first_is_for_the_loop():
    data = Examples(torch.randn(20, 6, 4), torch.arange(20) % 2)
    with pytest.raises(ValueError, match="opacus.layers.DPLSTM there, or pass loop_grad_sum"):
        prove_separate(fast_grad_sum, LastState(), loss, data)
    prove_separate(loop_grad_sum, LastState(), loss, data)


# Attacks on the proof itself: whatever mixes must be refused, wherever it hides


def attacked(model=None, data=None, loss_fn=loss, engine=fast_grad_sum, **options):
    "A trainer of batches of 60 from 200 examples."
    plan = PrivacyPlan(n=200, batch_size=60, steps=2, eps=3., delta=1e-5, accountant=RDPAccountant)
    data = data or floats(5, n=200, classes=10)
    return Trainer(model or nn.Linear(5, 10), data, plan, loss_fn=loss_fn, engine=engine, **options)


def every(k, f):
    "Only in batches of a multiple of k."
    return lambda rows: f(rows) if len(rows) % k == 0 else rows


def centre(rows):
    return rows - rows.mean(0)


class Smoothed:
    "A loss that adds a running mean, from its 1000th call on."
    def __init__(self, late=0):
        self.mean, self.calls, self.late = 0., 0, late

    def __call__(self, output, y):
        each = loss(output, y)
        self.calls += 1
        self.mean = .9*self.mean + .1*each.detach().mean().item()
        return each*(1 + self.mean) if self.calls > self.late else each


class Before:
    "A loss against the outputs of the former batch."
    def __init__(self):
        self.last = 0.

    def __call__(self, output, y):
        last, self.last = self.last, output.detach().mean(0)
        return loss(output - last, y)


def same_label(output, y):
    near_by = torch.cdist(output, output)*(y[:, None] == y)
    return loss(output, y) + near_by.sum(1)


def own_share(each, output, y):
    return each/torch.bincount(y, minlength=10)[y]


def of_label_7(each, output, y):
    return torch.where(y == 7, each/each[y == 7].detach().sum().clamp(min=1e-3), each)


def of_the_mean(each, output, y):
    "No value moves, only gradients."
    mean = output.mean(0)
    return each + ((mean - mean.detach())*output.detach()).sum(1)


def in_batch_negatives(output, y):
    rows = F.normalize(output, dim=1)
    return F.cross_entropy(10*rows @ rows.T, torch.arange(len(y)), reduction="none")


def hardest(each, output, y):
    kept = torch.zeros_like(each)
    kept[each.topk(max(1, len(each)//4)).indices] = 1
    return each*kept


LOSSES = {
    "by_largest": of_losses(lambda each, *_: each/each.max()),
    "by_largest_detached": of_losses(lambda each, *_: each/each.detach().max()),
    "above_median": of_losses(lambda each, *_: each*(each > each.median())),
    "softmax": of_losses(lambda each, *_: each*F.softmax(each.detach(), 0)),
    "covariance": of_losses(lambda each, output, y: each + torch.cov(output.T).square().sum()),
    "deviation": of_losses(lambda each, output, y: each + (1 - output.std(0)).relu().mean()),
    "sorted": of_losses(lambda each, *_: each*each.argsort().argsort()),
    "cumsum": of_losses(lambda each, *_: each.cumsum(0)),
    "cumsum_from_below": of_losses(lambda each, *_: each.flip(0).cumsum(0).flip(0)),
    "class_weights": of_losses(own_share),
    "random": of_losses(lambda each, *_: each*torch.rand(len(each))),
    "same_label": same_label,
    "label_7": of_losses(of_label_7),
    "gradient_only": of_losses(of_the_mean),
    "in_batch_negatives": in_batch_negatives,
    "hardest": of_losses(hardest),
    "next_label": lambda output, y: loss(output, y.roll(1, 0)),
    "mixup": lambda output, y: .5*loss(output, y) + .5*loss(output, y.flip(0)),
    "above_50": of_losses(lambda each, *_: beyond(50)(each)),
    "eights": of_losses(lambda each, *_: every(8, centre)(each)),
    "sevens": of_losses(lambda each, *_: every(7, centre)(each)),
    "large": of_losses(lambda each, *_: each*(1 + (each.detach().max() > 20))),
    "running_mean": Smoothed(),
    "running_mean_later": Smoothed(late=1000),
    "former_batch": Before(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_that_mixes_gets_through(name):
    with pytest.raises(ValueError, match="loss_fn (mixes|keeps)|not its own"):
        attacked(loss_fn=LOSSES[name])


def whole(norms):
    return torch.linalg.vector_norm(norms, dim=0)


class HardlyNoised(FlatClip):
    def update(self, norms, generator=None):
        noise = torch.randn((), generator=generator).item()
        self.max_norm = whole(norms).median().item()*(1 + 1e-6*noise)


class Unpaid(FlatClip):
    "Noised as it should be, but `std` does not pay for it."
    def update(self, norms, generator=None):
        above = (whole(norms) > self.max_norm).double().sum()
        noised = (above + 3*torch.randn((), generator=generator))/60
        self.max_norm *= (.2*(noised - .5)).exp().item()


class LearnsWhenCalled(FlatClip):
    def __call__(self, norms):
        factors = super().__call__(norms)
        self.next = norms.mean().item()
        return factors

    def update(self, norms, generator=None):
        self.max_norm = getattr(self, "next", 1.)


class KeepsAList(FlatClip):
    def __post_init__(self):
        super().__post_init__()
        self.seen = {"medians": []}

    def update(self, norms, generator=None):
        self.seen["medians"].append(whole(norms).median())


class FifthTime(FlatClip):
    calls = 0

    def update(self, norms, generator=None):
        self.calls += 1
        if self.calls == 5:
            self.max_norm = whole(norms).median().item()


CLIPS = {
    "hardly_noised": HardlyNoised(1.), "unpaid": Unpaid(1.), "in_call": LearnsWhenCalled(1.),
    "list": KeepsAList(1.), "fifth": FifthTime(1.),
    "mean": Weighed(lambda f, norms: torch.minimum(f, f.mean(1, keepdim=True))),
    "sevens": Weighed(lambda f, norms: f*f.mean() if f.shape[1] % 7 == 0 else f),
    "at_60": Weighed(lambda f, norms: f*f.mean() if f.shape[1] == 60 else f),
    "long": Weighed(lambda f, norms: f*(.5 if (whole(norms) > 1e4).any() else 1)),
    "nan": Weighed(lambda f, norms: f if norms.isfinite().all() else 0*f),
    "first": Weighed(lambda f, norms: torch.cat([f[:, :1]*f.mean(), f[:, 1:]], 1)),
    "budget": Weighed(lambda f, norms: f*(whole(f*norms).cumsum(0) < 5)),
}


@pytest.mark.parametrize("name", CLIPS)
def test_no_clip_that_mixes_or_learns_for_nothing_gets_through(name):
    with pytest.raises(ValueError, match="mixes examples|without noise|too little noise"):
        attacked(clip=CLIPS[name])


@pytest.mark.quick(4)
@pytest.mark.parametrize("clip", [
    FlatClip(1.), AutoClip(1.), AdaptiveClip(60.), AdaptiveClip(60., lr=2., quantile=.9),
    AdaptiveClip(60., bit_sigma=30.), LayerClip(1.), LayerClip([1., 2.]),
    LayerClip(1., groups=[0, 1], batch_size=60.),
    LayerClip([.1, 3.], groups=[0, 1], batch_size=60., own_noise=True), Jitters(1.)])
def test_learning_that_is_paid_for_gets_through(clip):
    for sigma in (.7, 1., 3.):
        refuse_unbounded(clip, sigma, 2)
    attacked(clip=clip)


class Follows(AdaptiveClip):
    "An adaptive clip that pays for a part of its noise only."
    part = 1.

    def std(self, sigma):
        return self.part*super().std(sigma) + (1 - self.part)*sigma*self.max_norm


def test_learning_that_is_paid_for_in_part_does_not():
    clip = Follows(60.)
    refuse_unbounded(clip, 1., 2)
    clip.part = .25
    with pytest.raises(ValueError, match="learns max_norm with too little noise"):
        refuse_unbounded(clip, 1., 2)


def bytes_of(n=200):
    x = torch.randint(256, (n, 1, 8, 8), dtype=torch.uint8, generator=gen())
    return Examples(x, torch.arange(n) % 10)


def scaled(by):
    return lambda x: x.float()/by(x.float())


NORMALIZATIONS = {
    "maximum": scaled(torch.amax), "median": scaled(lambda x: 1 + x.median()),
    "range": lambda x: (x.float() - x.amin())/(1 + x.amax() - x.amin()),
    "quantile": scaled(lambda x: 1 + x.flatten().quantile(.999)),
    "maximum_above_4": lambda x: x.float()/(x.amax() if len(x) > 4 else 255),
    "eights": lambda x: every(8, centre)(x.float()),
    "large": scaled(lambda x: x.amax().clamp(min=200)),
}


@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_no_normalization_that_mixes_gets_through(name):
    data = bytes_of().replace(normalize=NORMALIZATIONS[name])
    with pytest.raises(ValueError, match="normalize mixes examples"):
        attacked(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), data)


def every_seventh(x, y, generator):
    return every(7, lambda rows: .5*rows + .5*rows.roll(1, 0))(x), y


def with_its_class(x, y, generator):
    own = (y[:, None] == y).to(x)
    return .5*x + .5*own @ x/own.sum(1, keepdim=True), y


def drawn_after_counting(x, y, generator):
    torch.rand(int((x > 0).sum()), generator=generator)
    return x + .1*torch.randn(x.shape, generator=generator), y


def other_labels(x, y, generator):
    return x, y[torch.randperm(len(y), generator=generator)]


class FormerBatch:
    "Mixes with the batch before."
    last = 0.

    def __call__(self, x, y, generator):
        last, self.last = self.last, x.mean(0)
        return .9*x + .1*last, y


@pytest.mark.parametrize("augment", [every_seventh, with_its_class, drawn_after_counting,
                                     other_labels, FormerBatch()])
def test_no_augmentation_that_mixes_gets_through(augment):
    with pytest.raises(ValueError, match="augment (mixes|keeps)"):
        attacked(augment=augment)


@pytest.mark.parametrize("sizes", [(1, 4, 1, 1, 1), (1, 128), (4, 4), (128, 1)])
def test_a_draw_for_many_rows_has_no_other_size_that_is_larger(sizes):
    "One row of an image has many sizes of one: a draw of 128**4 numbers took 17 s and 4 GB."
    with _WideDraws(sizes[0], 128) as draws:
        drawn = torch.rand(sizes)
    assert drawn.shape == sizes
    assert draws.thrown == [([["b", *sizes[1:]]], ["b", *sizes[1:]])]


class Counted(nn.Module):
    "Centres the rows after some calls."
    def __init__(self, calls):
        super().__init__()
        self.out, self.left = nn.Linear(5, 10), calls

    def forward(self, x):
        self.left -= 1
        return self.out(x if self.left >= 0 else centre(x))


class ForEvaluation(nn.Module):
    "Learns a mean that it subtracts in eval mode only, and keeps it where BatchNorm does not."
    def __init__(self, where):
        super().__init__()
        self.out, self.where, self.kept = nn.Linear(5, 10), where, torch.zeros(5)
        if where == "parameter":
            del self.kept
            self.kept = nn.Parameter(torch.zeros(5), requires_grad=False)

    def get_extra_state(self):
        return self.kept if self.where == "extra state" else None

    def set_extra_state(self, state):
        pass

    def forward(self, x):
        if self.training:
            mean = .1*x.detach().mean(0)
            if self.where == "parameter":
                self.kept.data.add_(mean.to(self.kept))
            else:
                self.kept = self.kept.to(x) + mean
            return self.out(x)
        return self.out(x if self.where == "extra state" else x - self.kept)


class StartsFromData(nn.Module):
    "Sets its scale from the first batch, as ActNorm does."
    def __init__(self):
        super().__init__()
        self.scale, self.out, self.set = nn.Parameter(torch.ones(5)), nn.Linear(5, 10), False

    def forward(self, x):
        if not self.set:
            self.scale.data.copy_(1/(.1 + x.detach().std(0)))
            self.set = True
        return self.out(x*self.scale)


class OneWord(nn.Module):
    "Rows that hold word 7 see each other."
    def __init__(self):
        super().__init__()
        self.word, self.out = nn.Embedding(11, 8), nn.Linear(8, 10)

    def forward(self, x):
        h = self.word(x).mean(1)
        seven = (x == 7).any(1)
        return self.out(torch.where(seven[:, None], h - h[seven].sum(0), h))


MODELS = {
    "above_4": Inside(beyond(4)), "above_50": Inside(beyond(50)),
    "eights": Inside(every(8, centre)), "sevens": Inside(every(7, centre)),
    "large": OfInput(lambda x: x*(1 + (x.abs().amax() > 6))),
    "very_large": OfInput(lambda x: x*(1 + (x.abs().amax() > 1000))),
    "after_1": Counted(1), "after_3": Counted(3),
    "parameter": ForEvaluation("parameter"), "attribute": ForEvaluation("attribute"),
    "extra": ForEvaluation("extra state"), "from_data": StartsFromData(),
    "half": Inside(lambda h: h*(h[:, 0].argsort().argsort() >= len(h)//2)[:, None]),
    "gradient": Inside(lambda h: h + h.mean(0) - h.mean(0).detach()),
    "threshold": Inside(lambda h: h*(h.abs() > .3*h.abs().amax())),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_no_model_that_mixes_gets_through(name):
    words = "mixes examples|not its own|keeps statistics|remembers examples"
    with pytest.raises(ValueError, match=words):
        attacked(MODELS[name])


def test_mixing_for_one_word_is_noticed():
    with pytest.raises(ValueError, match="mixes examples"):
        attacked(OneWord(), tokens(6, n=200))


def by_another_norm(model, loss_fn, x, y, clip):
    "Returns the norms, but clips by others."
    return loop_grad_sum(model, loss_fn, x, y, lambda norms: clip(norms/2))


def for_some(model, loss_fn, x, y, clip):
    "Some examples are not clipped at all."
    grads, norms = loop_grad_sum(model, loss_fn, x, y, torch.ones_like)
    clip(norms[:, 1:])
    return grads, norms


def trains(model, loss_fn, x, y, clip):
    "Takes a step of its own."
    grads, norms = loop_grad_sum(model, loss_fn, x, y, clip)
    with torch.no_grad():
        for name, p in trainable(model).items():
            p.sub_(1e-3*grads[name].to(p))
    return grads, norms


def doubles_above_50(model, loss_fn, x, y, clip):
    grads, norms = loop_grad_sum(model, loss_fn, x, y, clip)
    return {name: g*(1 + (len(x) > 50)) for name, g in grads.items()}, norms


def doubles_at(b):
    def engine(model, loss_fn, x, y, clip):
        grads, norms = fast_grad_sum(model, loss_fn, x, y, clip)
        return {name: g*(1 + (len(x) == b)) for name, g in grads.items()}, norms
    return engine


@pytest.mark.parametrize("engine, words", [
    (by_another_norm, "not its own"), (for_some, "asked its clip about"),
    (trains, "changes parameters"), (doubles_above_50, "not its own: at a batch of (60|107)"),
    (lambda model, x: None, "An engine is")])
def test_engines_that_only_look_right_are_refused(engine, words):
    with pytest.raises(ValueError, match=words):
        attacked(engine=engine)


def test_what_outwaits_the_proof_is_not_seen():
    "The stated limit, so that nobody believes in more."
    attacked(Counted(10**4))
    attacked(engine=doubles_at(57))  # of some seventy sizes, not one
    with pytest.raises(ValueError, match="in a batch of 37 than"):
        attacked(engine=doubles_at(37))
    with pytest.raises(ValueError, match="moves with its place, or with the number"):
        attacked(Inside(lambda h: centre(h) if len(h) == 61 else h))  # small: all sizes are tried


# Normalizations, and weights that are computed


def frozen(layer):
    for p in layer.parameters():
        p.requires_grad_(False)
    return layer


@pytest.mark.parametrize("layer, idle", [
    (nn.BatchNorm1d(5), False), (nn.BatchNorm1d(5).eval(), False),
    (frozen(nn.BatchNorm1d(5)), False), (frozen(nn.BatchNorm1d(5)).eval(), True),
    (frozen(nn.BatchNorm1d(5, track_running_stats=False)).eval(), False),
    (frozen(nn.SyncBatchNorm(5)), False), (nn.SyncBatchNorm(5).eval(), False),
    (nn.InstanceNorm1d(5, track_running_stats=True).eval(), True),
    (nn.InstanceNorm1d(5, track_running_stats=True), False),
    (nn.InstanceNorm1d(5, affine=True, track_running_stats=True).eval(), False)])
def test_statistics_pass_an_engine_only_where_they_are_fixed(layer, idle):
    "Frozen *and* in eval mode it is a scale and a shift; a trainer would switch it on."
    if idle:
        refuse_statistics(layer, "layer")
    else:
        with pytest.raises(ValueError, match="layer computes .*running statistics"):
            refuse_statistics(layer, "layer")
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        model = nn.Sequential(nn.Linear(5, 5), layer, nn.Linear(5, 10))
        why = "training would wake it" if idle else "the whole batch or keeps running"
        with pytest.raises(ValueError, match=why):
            attacked(model)


class Drifts(nn.Module):
    "A parametrization that adds up what it has computed."
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, w):
        self.calls += 1
        return w*(1 + .1*self.calls)


def computed(how):
    layer = nn.Linear(5, 10)
    if how == "weight_norm":
        return nn.utils.parametrizations.weight_norm(layer)
    if how == "orthogonal":
        return nn.utils.parametrizations.orthogonal(layer)
    nn.utils.parametrize.register_parametrization(layer, "weight", Drifts())
    return layer


@pytest.mark.parametrize("engine", [fast_grad_sum, vmap_grad_sum, loop_grad_sum])
@pytest.mark.parametrize("how", ["weight_norm", "orthogonal"])
def test_computed_weights_without_state_are_innocent(how, engine):
    if engine is vmap_grad_sum and how == "orthogonal":
        pytest.skip("vmap has no rule for it, and says so")
    prove_separate(engine, computed(how), loss, floats(5))


def test_computed_weights_that_drift_are_refused():
    with pytest.raises(ValueError, match="not its own"):
        prove_separate(fast_grad_sum, computed("drift"), loss, floats(5))


# Errors in the caller's words, before anything is charged


def weighted(model):
    return lambda output, y: loss(output, y) + .01*model.weight.square().sum()


@pytest.mark.parametrize("engine", [fast_grad_sum, vmap_grad_sum, loop_grad_sum])
def test_weight_decay_inside_the_loss_is_refused(engine):
    model = nn.Linear(5, 10)
    with pytest.raises(ValueError, match="loss_fn uses parameter weight itself.*weight_decay"):
        attacked(model, loss_fn=weighted(model), engine=engine)


def long(*shape, most=3):
    return torch.randint(most, shape, generator=gen())


@pytest.mark.parametrize("y, words", [
    (long(200, most=11), "label 10 is out of range"), (long(200) - 1, "label -1 is out of range"),
    (long(200).float(), r"labels are \(4,\) float32 .*y.long\(\)"),
    (long(200, 1), r"labels are \(4, 1\) int64 .*whole numbers of shape \(n,\)"),
    (long(200).bool(), r"labels are \(4,\) bool .*y.long\(\)")])
@pytest.mark.parametrize("known", [loss, nn.CrossEntropyLoss(reduction="none")],
                         ids=["function", "module"])
def test_labels_that_do_not_fit_are_refused(y, words, known):
    data = Examples(torch.randn(200, 5), y)
    with pytest.raises(ValueError, match=words):
        attacked(data=data, loss_fn=known)
    with pytest.raises(ValueError, match="out of range|loss_fn fails on made-up rows"):
        attacked(data=data, loss_fn=lambda output, y: loss(output, y))


def test_the_last_class_and_probabilities_are_labels():
    check_labels(Examples(torch.randn(9, 5), torch.full((9,), 9)), loss, torch.zeros(4, 10))
    attacked(data=Examples(torch.randn(200, 5), torch.full((200,), 9)))
    attacked(data=Examples(torch.randn(200, 5), torch.rand(200, 10).softmax(1)))


def small_table(*names):
    x = {names[0]: torch.randn(200, 5), names[1]: torch.arange(200) % 4}
    return Examples(x, torch.arange(200) % 3)


class Row(NamedTuple):
    image: torch.Tensor
    numbers: torch.Tensor


def test_misspelt_names_are_listed_and_named_tuples_kept():
    attacked(Table(), small_table("numbers", "kind"))
    with pytest.raises(ValueError, match="has 'numbers', 'kinds', the model takes numbers, kind"):
        attacked(Table(), small_table("numbers", "kinds"))
    x = Row(torch.randn(200, 1, 6, 6), torch.randn(200, 5))
    trainer = attacked(Two(), Examples(x, torch.arange(200) % 3))
    assert isinstance(trainer.step().data.rows(torch.arange(2))[0], Row)


@pytest.mark.parametrize("model, data, words", [
    (nn.Linear(6, 10), floats(5, n=200), r"model fails on made-up rows \(4, 5\) float32"),
    (nn.Linear(6, 10), tokens(6, n=200), r"model fails on made-up rows \(4, 6\) int64.*ids"),
    (nn.Conv2d(3, 3, 3), floats(5, n=200), "model fails on made-up rows"),
    (frozen(nn.Linear(5, 10)), floats(5, n=200), "no trainable parameter"),
    (nn.Identity(), floats(5, n=200), "no trainable parameter"),
    (nn.LazyLinear(10), floats(5, n=200), "weight has no values yet"),
    (nn.Linear(5, 10, device="meta"), floats(5, n=200), "weight has no values yet"),
    (nn.Linear(5, 10, dtype=torch.cfloat), floats(5, n=200), "only real numbers"),
    ("resnet", floats(5, n=200), "the model is a str: pass an nn.Module")])
def test_models_that_cannot_be_trained_are_refused(model, data, words):
    with pytest.raises(ValueError, match=words):
        prove_separate(fast_grad_sum, model, loss, data)


def test_a_model_that_can_be_trained_is_not():
    check_model(nn.Linear(5, 3))


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        Examples(torch.zeros(0, 5), torch.zeros(0))


@pytest.mark.parametrize("augment, words", [
    (lambda x: x, "augment fails on made-up rows .*TypeError"),
    (lambda x, y, generator: x, r"augment returned \(4, 5\) float32"),
    (lambda x, y, generator: (x, 1), "as many rows"),
    (lambda x, y, generator: (x[:2], y), "as many rows")])
def test_augmentations_that_fail_say_so(augment, words):
    with pytest.raises(ValueError, match=words):
        attacked(augment=augment)


def test_normalizations_and_losses_that_fail_say_so():
    data = floats(5, n=200, classes=10)
    with pytest.raises(ValueError, match="normalize fails on made-up rows .*TypeError"):
        attacked(data=data.replace(normalize=lambda: 1))
    with pytest.raises(ValueError, match="loss_fn fails on made-up rows .* and .*TypeError"):
        attacked(loss_fn=lambda output: 1)
    with pytest.raises(ValueError, match=r"loss_fn returned \(\) for 4 rows"):
        attacked(loss_fn=F.cross_entropy)


# How the proof is done


def test_the_proof_is_exact_and_changes_nothing_for_others():
    "The engine is compared in float64, then as it will run, and no default dtype is touched."
    seen = []

    def spy(model, loss_fn, x, y, clip):
        seen.append((model.weight.dtype, x.dtype, torch.get_default_dtype()))
        return fast_grad_sum(model, loss_fn, x, y, clip)

    prove_separate(spy, nn.Linear(5, 3), loss, floats(5))
    assert seen[0] == (torch.float64, torch.float64, torch.float32)
    assert set(seen) == {(dtype, dtype, torch.float32) for dtype in (torch.float64, torch.float32)}


def test_what_a_model_makes_has_its_precision():
    seen = []

    class Makes(nn.Linear):
        def forward(self, x):
            seen.append(torch.zeros(1).dtype)
            return torch.cat([super().forward(x) + torch.ones(3), torch.zeros(len(x), 1)], 1)

    prove_separate(vmap_grad_sum, Makes(5, 3), loss, floats(5))
    assert set(seen) == {torch.float64, torch.float32}


def test_several_threads_may_prove_at_once():
    found, threads = [], torch.get_num_threads()

    def prove(mix):
        try:
            found.append((mix, prove_separate(fast_grad_sum, Float32Only(mix), loss, floats(5))))
        except ValueError as error:
            found.append((mix, str(error)))

    running = [threading.Thread(target=prove, args=(i % 2 == 1,)) for i in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert all(isinstance(said, str) == mix for mix, said in found) and len(found) == 4
    assert torch.get_num_threads() == threads and torch.get_default_dtype() == torch.float32
