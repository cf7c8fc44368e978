"What moves an example's neighbours, and what only looks as if it did: options of a `Trainer`."
import copy
import math
from collections import deque
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from toys import generator as gen
from toys import loss

from dp_course.data import Examples, Views, call_model, flatten_views, take, tree_map
from dp_course.gradients import FlatClip, fast_grad_sum, loop_grad_sum, trainable
from dp_course.privacy import PrivacyPlan, RDPAccountant
from dp_course.training import Trainer

N = 200
PLAN = PrivacyPlan(n=N, batch_size=60, steps=2, eps=3., delta=1e-5, accountant=RDPAccountant)


def noise(*shape, classes=10):
    return Examples(torch.randn(N, *shape, generator=gen()),
                    torch.randint(classes, (N,), generator=gen(1)))


def numbers(d=1):
    "Something to be predicted that is no class."
    return Examples(torch.randn(N, 5, generator=gen()), torch.randn(N, d, generator=gen(1)))


def words(t=6, many=11):
    return Examples(torch.randint(many, (N, t), generator=gen()), torch.arange(N) % 10)


def trained(model=None, data=None, loss_fn=None, **options):
    "A trainer whose proof has been held."
    torch.manual_seed(0)
    model = model() if callable(model) and not isinstance(model, nn.Module) else model
    data = data() if callable(data) else data
    own = loss_fn or partial(loss)  # some tests change it
    return Trainer(model or nn.Linear(5, 10), data or noise(5), PLAN, loss_fn=own, **options)


class OfInput(nn.Module):
    "Whatever `f` does to the rows before the only layer."
    def __init__(self, f, d=5):
        super().__init__()
        self.out, self.f = nn.Linear(d, 10), f

    def forward(self, x):
        return self.out(self.f(x))


class Inside(nn.Module):
    "Whatever `f` does to the rows between two layers."
    def __init__(self, f, d=5):
        super().__init__()
        self.inner, self.out, self.f = nn.Linear(d, 8), nn.Linear(8, 10), f

    def forward(self, x):
        return self.out(self.f(self.inner(x).tanh()))


# --- what a model may do to its rows


def seeded_by_the_batch(x):
    return x + torch.randn(x.shape, generator=gen(int(1000*x.double().nan_to_num().sum()) % 2**31))


def seeded_for_all(x):
    torch.manual_seed(int(1000*x.double().nan_to_num().sum()) % 2**31)
    return x + torch.randn_like(x)


def in_place(x):
    x = x.clone()
    x[1:] += x[:-1]
    return x


def whitened(x):
    centred = x - x.mean(0)
    cov = centred.T @ centred/len(x) + torch.eye(x.shape[1]).to(x)
    return torch.linalg.solve(cov, x.T).T


def fake_quantized(x):
    scale = x.detach().abs().amax()/127 + 1e-9
    return x + ((x/scale).round()*scale - x).detach()


def without_the_longest(x):
    return x*(x.norm(dim=1) < x.norm(dim=1).max())[:, None]


def in_ghost_batches(x):
    return torch.cat([part - part.mean(0) for part in x.split(16)])


def by_its_neighbour(x):
    near = torch.cdist(x, x) + 1e9*torch.eye(len(x)).to(x)
    return x - x[near.argmin(1)]


def only_if(says, f):
    return lambda x: f(x) if says(x) else x


def centre(x):
    return x - x.mean(0)


ROWS = {  # (b,5) -> (b,5), after the rows before they meet a layer
    "standardized": lambda x: (x - x.mean(0))/(x.std(0) + 1e-3),
    "whitened": whitened,
    "sorted": lambda x: x.sort(0).values,
    "ranks": lambda x: x*x.argsort(0).argsort(0)/len(x),
    "unique": lambda x: x/x[:, 0].round().unique(return_inverse=True, return_counts=True)[2][
        x[:, 0].round().unique(return_inverse=True)[1]][:, None],
    "number of signs": lambda x: x*len(x.sign().unique(dim=0)),
    "top of the batch": lambda x: x*(x >= x.topk(max(1, len(x)//2), 0).values[-1]),
    "kernel": lambda x: torch.softmax(-torch.cdist(x, x), 1) @ x,
    "nearest": by_its_neighbour,
    "gram": lambda x: torch.einsum("bi,ci,cj->bj", x, x, x)/10,
    "cumulated": lambda x: x.cumsum(0),
    "rolled": lambda x: x.roll(1, 0),
    "in place": in_place,
    "turned": lambda x: x.T.reshape(len(x), -1),
    "convolved": lambda x: F.conv1d(x.T[:, None], torch.ones(1, 1, 3).to(x), padding=1)[:, 0].T,
    "softmax": lambda x: x*x.softmax(0),
    "unit columns": lambda x: F.normalize(x, dim=0),
    "norm of all": lambda x: F.layer_norm(x, x.shape),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "first": lambda x: x - x[:1],
    "last": lambda x: x - x[-1:],
    "middle": lambda x: x - x[len(x)//2],
    "sign of the sum": lambda x: x*(1 + (x.sum() > 0)),
    "parity": lambda x: x*(1 + (x.sum()*100).long() % 2),
    "seeded by the batch": seeded_by_the_batch,
    "seeded for all": seeded_for_all,
    "odd sizes": only_if(lambda x: len(x) % 2, centre),
    "pairs": only_if(lambda x: len(x) == 2, centre),
    "batches of ten": only_if(lambda x: len(x) == 10, centre),
    "float32 only": only_if(lambda x: x.dtype == torch.float32, centre),
    "float64 only": only_if(lambda x: x.dtype == torch.float64, centre),
    "more rows, less": lambda x: x/len(x),
    "detached": lambda x: x*(1 + x.detach().mean()),
    "quantized": fake_quantized,
    "the longest goes": without_the_longest,
    "ghost batches": in_ghost_batches,
    "root of a product": lambda x: x*(1 + x.prod(0).abs().sqrt()),
    "median": lambda x: x - x.median(0).values,
    "maximum": lambda x: x/x.amax(0).clamp(min=1),
    "quantile": lambda x: x.clamp(max=x.flatten().nanquantile(.9)),
    "a thousandth": lambda x: x + 1e-3*x.mean(0),
    "a trillionth": lambda x: x + 1e-12*x.mean(0),
    "a hundred thousandth": lambda x: x + 1e-5*x.mean(0),
    "over the square root": lambda x: x/x.square().mean().sqrt().clamp(min=1e-3),
    "logsumexp": lambda x: x - x.logsumexp(0),
    "two groups": lambda x: x - torch.where((x[:, :1] > 0), x[x[:, 0] > 0].sum(0), 0*x),
    "index_add": lambda x: x.index_add(0, torch.arange(len(x)).flip(0), x),
    "interpolated": lambda x: F.interpolate(x.T[None], len(x) + 1, mode="linear")[0].T[1:],
    "fourier": lambda x: torch.fft.fft(x, dim=0).real,
    "any huge": lambda x: x/(1 + (x.abs() > 1e4).any()),
    "all whole": lambda x: x/(1 + (x == x.round()).all()),
    "all positive": lambda x: x*(1 + (x > 0).all()),
    "all negative": lambda x: x*(1 + (x < 0).all()),
    "an outlier": lambda x: x/(1 + (x.abs() > 4).any()),
    "even count": lambda x: x*(1 + (x[:, 0] > 0).sum() % 2),
    "as bytes": lambda x: x/255 if x.max() > 1 else x,
    "centred if dark": lambda x: x - .5 if x.min() >= 0 else x,
    "one quiet": lambda x: x*(1 + (x.norm(dim=1) < .1).any()),
    "ends of the batch": lambda x: torch.cat([x[:-1], x[-1:] + x[:1]]),
    "three equal": lambda x: x*(1 + ((x == x[:1]).all(1).sum() >= 3)),
}


# --- on the way back


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.how(g), None


def hooked(h, how):
    if h.requires_grad:
        h.register_hook(how)
    return h


BACK = {
    "reversal, normalized": lambda g: -g/(g.norm() + 1e-9),
    "mean": lambda g: g + g.mean(0),
    "flipped": lambda g: g.flip(0),
    "clamped": lambda g: g.clamp(max=g.detach().flatten().quantile(.9)),
    "centred": lambda g: g - g.mean(0),
    "times the count": lambda g: g*len(g),
    "rolled": lambda g: g.roll(1, 0),
    "largest only": lambda g: g*(g.norm(dim=-1, keepdim=True) >= g.norm(dim=-1).max()),
    "where one is zero": lambda g: g*(2 if (g.flatten(1) == 0).all(1).any() else 1),
}


# --- modules


class Across(nn.Module):
    "Attention that takes the batch for time."
    def __init__(self, kind):
        super().__init__()
        self.out = nn.Linear(8, 10)
        self.inner = nn.MultiheadAttention(8, 2) if kind == "attention" else (
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.))

    def forward(self, x):
        h = self.inner(x, x, x)[0] if isinstance(self.inner, nn.MultiheadAttention) else (
            self.inner(x))
        return self.out(h.mean(1))


class Stateful(nn.Module):
    "A cell whose hidden state lives on from batch to batch."
    def __init__(self):
        super().__init__()
        self.cell, self.out, self.h = nn.Linear(13, 8), nn.Linear(8, 10), None

    def forward(self, x):
        h = self.h if self.h is not None and len(self.h) == len(x) else x.new_zeros(len(x), 8)
        h = self.cell(torch.cat([x, h.to(x)], 1)).tanh()
        self.h = h.detach()
        return self.out(h)


class Queue(nn.Module):
    "MoCo's queue of the rows of earlier batches."
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 10)
        self.inner = nn.Linear(5, 8)
        self.register_buffer("queue", torch.zeros(6, 8))

    def forward(self, x):
        h = self.inner(x)
        kept = self.queue.to(h)
        self.queue = torch.cat([h.detach(), self.queue.to(h)])[:6]
        return self.out(h + (h @ kept.T).softmax(1) @ kept)


class Codebook(nn.Module):
    "A codebook that follows the rows which it stands for."
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 4), nn.Linear(4, 10)
        self.register_buffer("codes", torch.randn(3, 4))

    def forward(self, x):
        h = self.inner(x)
        near = torch.cdist(h, self.codes.to(h)).argmin(1)
        if self.training:
            for i in near.unique():
                self.codes[i] = .9*self.codes[i] + .1*h[near == i].mean(0).detach().to(self.codes)
        return self.out(h + (self.codes.to(h)[near] - h).detach())


class Capacity(nn.Module):
    "Experts that take so many rows and no more."
    def __init__(self, engine="loop"):
        super().__init__()
        self.gate, self.one, self.two = nn.Linear(5, 2), nn.Linear(5, 10), nn.Linear(5, 10)

    def forward(self, x):
        score = self.gate(x).softmax(1)
        best = score.argmax(1)
        place = F.one_hot(best, 2).cumsum(0).gather(1, best[:, None]).squeeze(1)
        room = place <= max(1, len(x)//3)
        outs = torch.stack([self.one(x), self.two(x)], 1)
        return (outs*score[..., None]).gather(
            1, best[:, None, None].expand(-1, 1, 10)).squeeze(1)*room[:, None]


class Longest(nn.Module):
    "Words, padded with zeros, cut to the longest row of the batch, and averaged."
    def __init__(self):
        super().__init__()
        self.word, self.out = nn.Embedding(11, 8), nn.Linear(8, 10)

    def forward(self, x):
        longest = int((x != 0).flip(1).int().cumsum(1).clamp(max=1).sum(1).max().clamp(min=1))
        return self.out(self.word(x[:, :longest]).mean(1))


KEPT = {"mean": 0.}


class Globally(nn.Module):
    "A running mean that no copy of the model takes along."
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 10)

    def forward(self, x):
        old, KEPT["mean"] = KEPT["mean"], x.detach().double().mean(0)
        return self.out(x + torch.as_tensor(old).to(x))


class OfItsClass(nn.Module):
    mean = 0.

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 10)

    def forward(self, x):
        kind = type(self)
        old, kind.mean = kind.mean, .5*kind.mean + .5*x.detach().mean().item()
        return self.out(x*(1 + old))


def with_a_default(x, kept=deque(maxlen=1)):
    old = kept[0] if kept else 0.
    kept.append(x.detach().double().mean().item())
    return x + old


class Once(nn.Module):
    "Centres by the mean of the first batch that it sees."
    def __init__(self):
        super().__init__()
        self.out, self.mean = nn.Linear(5, 10), None

    def forward(self, x):
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return self.out(x - self.mean.to(x))


class ByWeight(nn.Module):
    "A parametrization that looks at the last batch."
    def __init__(self):
        super().__init__()
        self.seen = [1.]

    def forward(self, w):
        return w*self.seen[0]


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 10)
        self.by = ByWeight()
        parametrize.register_parametrization(self.out, "weight", self.by)

    def forward(self, x):
        self.by.seen[0] = 1 + x.detach().abs().mean().item()
        return self.out(x)


def forward_hooked():
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 10))
    model[0].register_forward_hook(lambda m, args, out: out - out.mean(0))
    return model


def before_hooked():
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 10))
    model[1].register_forward_pre_hook(lambda m, args: (args[0].roll(1, 0),))
    return model


def backward_hooked():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 10))
    model[1].register_full_backward_hook(lambda m, into, out: (into[0] - into[0].mean(0),))
    return model


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 8), nn.Linear(8, 10)

    def forward(self, x):
        h = checkpoint(lambda x: centre(self.inner(x)).tanh(), x, use_reentrant=False)
        return self.out(h)


class ByMode(nn.Module):
    "What training does not see, evaluation shows: a mean that eval mode subtracts."
    def __init__(self):
        super().__init__()
        self.out, self.mean = nn.Linear(5, 10), [torch.zeros(5)]

    def forward(self, x):
        if self.training:
            self.mean[0] = x.detach().mean(0)
            return self.out(x)
        return self.out(x - self.mean[0].to(x))


class TwoOutputs(nn.Module):
    "One head per row, and one for the batch, which the loss uses."
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 10)

    def forward(self, x):
        out = self.out(x)
        return out, out.mean(0, keepdim=True)


def against_the_mean(output, y):
    out, mean = output
    return loss(out - mean, y)


class WeightOfBatch(nn.Module):
    "A hyper-network whose weight is made from the whole batch."
    def __init__(self):
        super().__init__()
        self.make, self.out = nn.Linear(5, 25), nn.Linear(5, 10)

    def forward(self, x):
        return self.out(x @ self.make(x.mean(0)).view(5, 5))


class RowAverage(nn.Module):
    "A trainable mixture of the rows, switched off at the start."
    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Parameter(torch.tensor(-20.)), nn.Linear(5, 10)

    def forward(self, x):
        return self.out(x + self.gate.exp()*1e6*x.mean(0))


class Picture(nn.Module):
    "A layer between two convolutions."
    def __init__(self, between):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.between, self.out = between, nn.Linear(4, 10)

    def forward(self, x):
        return self.out(self.two(self.between(self.one(x))).relu().mean((2, 3)))


class Function(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def pictures():
    return noise(3, 6, 6)


def sequence():
    return noise(4, 8)


MODELS = {  # name -> options of the trainer
    "attention across": dict(model=lambda: Across("attention"), data=sequence),
    "transformer across": dict(model=lambda: Across("transformer"), data=sequence),
    "hidden state": dict(model=Stateful), "queue": dict(model=Queue), "codebook": dict(
        model=Codebook),
    "capacity": dict(model=Capacity), "capacity, loop": dict(model=Capacity, engine=loop_grad_sum),
    "longest": dict(model=Longest, data=words), "global": dict(model=Globally),
    "class attribute": dict(model=OfItsClass), "default": dict(
        model=lambda: OfInput(with_a_default)),
    "first batch": dict(model=Once), "parametrization": dict(model=Parametrized),
    "forward hook": dict(model=forward_hooked), "pre-hook": dict(model=before_hooked),
    "backward hook": dict(model=backward_hooked), "checkpoint": dict(model=Checkpointed),
    "eval mode": dict(model=ByMode), "two outputs": dict(
        model=TwoOutputs, loss_fn=against_the_mean),
    "weight of the batch": dict(model=WeightOfBatch), "switched off": dict(model=RowAverage),
    **{f"picture, {name}": dict(model=lambda f=f: Picture(Function(f)), data=pictures)
       for name, f in {
           "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
           "shuffled channels": lambda h: h.permute(1, 0, 2, 3).reshape(h.shape),
           "pooled over the batch": lambda h: h - F.avg_pool3d(
               h.transpose(0, 1), (3, 1, 1), 1, (1, 0, 0)).transpose(0, 1),
           "shifted in the batch": lambda h: torch.cat(
               [h.roll(1, 0)[:, :2], h[:, 2:]], 1),
           "contrast": lambda h: h/h.amax((0, 2, 3), keepdim=True).clamp(min=1e-3),
           "running": nn.BatchNorm2d(4, affine=False).forward}.items()},
    **{f"back, {name}": dict(model=lambda f=f: Inside(lambda h: Backward.apply(h, f)))
       for name, f in BACK.items()},
    **{f"tensor hook, {name}": dict(model=lambda f=f: Inside(partial(hooked, how=f)))
       for name, f in list(BACK.items())[:3]},
}


# --- more networks


class AfterStep(nn.Module):
    "Does nothing wrong before its weight has changed."
    def __init__(self):
        super().__init__()
        self.out, self.old = nn.Linear(5, 10), None

    def forward(self, x):
        now = self.out.weight.detach().double().clone()
        self.old = now if self.old is None else self.old
        return self.out(x if torch.equal(now, self.old) else centre(x))


class Gated(nn.Module):
    "A gate that is closed at the start, and a mean behind it."
    def __init__(self):
        super().__init__()
        self.out, self.gate = nn.Linear(5, 10), nn.Parameter(torch.tensor(0.))

    def forward(self, x):
        return self.out(x + self.gate*x.mean(0))


class OverTheBatch(nn.Module):
    "A recurrent network that takes the batch for time."
    def __init__(self):
        super().__init__()
        self.inner, self.state, self.out = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x):
        h, said = x.new_zeros(8), []
        for row in x:
            h = (self.inner(row) + self.state(h)).tanh()
            said.append(h)
        return self.out(torch.stack(said))


class ExpertsChoose(nn.Module):
    "Each expert takes the third of the rows that it likes best."
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(5, 3)
        self.experts = nn.ModuleList(nn.Linear(5, 10) for _ in range(3))

    def forward(self, x):
        score = self.gate(x).softmax(1)
        said = x.new_zeros(len(x), 10)
        for i, expert in enumerate(self.experts):
            own = score[:, i].topk(max(1, len(x)//3)).indices
            said = said.index_add(0, own, expert(x[own])*score[own, i, None])
        return said


class TwoHooks(nn.Module):
    "One hook keeps the mean of the slopes, the next one multiplies by it."
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 8), nn.Linear(8, 10)

    def forward(self, x):
        h, kept = self.inner(x), []
        later = h.tanh()
        if h.requires_grad:
            h.register_hook(lambda g: g*(1 + kept[0]))
            later.register_hook(lambda g: kept.append(g.abs().mean().detach()))
        return self.out(later)


class Narrow(nn.Module):
    "Does something to the rows between two layers only where the numbers are of one type."
    def __init__(self, f, dtype):
        super().__init__()
        self.inner, self.out, self.f, self.dtype = nn.Linear(5, 8), nn.Linear(8, 10), f, dtype

    def forward(self, x):
        h = self.inner(x)
        return self.out((self.f(h) if h.dtype == self.dtype else h).tanh())


class InPlace(nn.Module):
    "Centres the rows that it was given, where they lie."
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 10)

    def forward(self, x):
        with torch.no_grad():
            x.sub_(x.mean(0))
        return self.out(x)


class Inward(nn.Module):
    "A gradient of the whole batch's output, added to the rows."
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 1), nn.Linear(5, 10)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            slope, = torch.autograd.grad(self.inner(x).sum()**2, x, create_graph=True)
        return self.out(x + slope)


class HoldsItself(nn.Module):
    "A parametrization that reaches the model by a closure: in a copy it looks at the original."
    def __init__(self):
        super().__init__()
        self.out, self.seen = nn.Linear(5, 10), [0.]
        outer = self

        class Louder(nn.Module):
            def forward(self, weight):
                return weight*(1 + outer.seen[0])

        parametrize.register_parametrization(self.out, "weight", Louder())

    def forward(self, x):
        self.seen[0] = x.detach().abs().mean().item()
        return self.out(x)


class LoadBalance(nn.Module):
    "Experts, and a term for the loss that says how evenly the batch is spread over them."
    def __init__(self):
        super().__init__()
        self.gate, self.aux = nn.Linear(5, 3), 0.
        self.experts = nn.ModuleList(nn.Linear(5, 10) for _ in range(3))

    def forward(self, x):
        share = self.gate(x).softmax(1)
        busy = F.one_hot(share.argmax(1), 3).to(share).mean(0)
        self.aux = 3*(busy*share.mean(0)).sum()
        return (torch.stack([expert(x) for expert in self.experts], 1)*share[..., None]).sum(1)


def with_balance():
    model = LoadBalance()
    return dict(model=model, loss_fn=lambda output, y: loss(output, y) + model.aux)


class Waits(nn.Module):
    "Begins to mix at its sixtieth call."
    def __init__(self):
        super().__init__()
        self.inner, self.out, self.calls = nn.Linear(5, 8), nn.Linear(8, 10), 0

    def forward(self, x):
        self.calls += 1
        h = self.inner(x)
        return self.out(centre(h) if self.calls > 60 else h)


MORE = {
    "holds itself": dict(model=HoldsItself), "balance": with_balance(),
    "waits": dict(model=Waits),
    "autograd.grad inside": dict(model=Inward),
    "after a step": dict(model=AfterStep), "closed gate": dict(model=Gated),
    "time is the batch": dict(model=OverTheBatch), "experts choose": dict(model=ExpertsChoose),
    "two hooks": dict(model=TwoHooks), "where they lie": dict(model=InPlace),
    "bfloat16 only": dict(model=lambda: Narrow(centre, torch.bfloat16), precision="bf16"),
    "bfloat16, twenty rows": dict(precision="bf16", model=lambda: Narrow(
        only_if(lambda h: len(h) > 20, centre), torch.bfloat16)),
    "back, float32 only": dict(model=lambda: Narrow(
        lambda h: Backward.apply(h, BACK["centred"]), torch.float32)),
    "batches of 59": dict(model=lambda: OfInput(only_if(lambda x: len(x) == 59, centre))),
    "vmap": dict(model=lambda: OfInput(
        lambda x: torch.vmap(lambda row, mean=x.mean(0): row - mean)(x))),
    "instance norm": dict(model=lambda: Inside(lambda h: F.instance_norm(h.T[None])[0].T)),
    "response norm": dict(model=lambda: Inside(lambda h: h*h.norm(dim=0)/h.norm(dim=0).mean())),
    "compiled": dict(model=lambda: Rows(
        nn.Identity(), torch.compile(OfInput(centre), backend="eager"))),
}


# --- losses


def of_losses(f):
    return lambda output, y: f(loss(output, y), output, y)


def triplet(output, y):
    far = torch.cdist(output, output)
    same = y[:, None] == y
    return (far*same).amax(1) - (far + 1e3*same).amin(1) + loss(output, y)


def supervised_contrast(output, y):
    rows = F.normalize(output, dim=1)
    logs = (rows @ rows.T - 1e9*torch.eye(len(y)).to(rows)).log_softmax(1)
    same = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
    return loss(output, y) - (logs*same).sum(1)/same.sum(1).clamp(min=1)


def smoothed_by_frequency(output, y):
    share = torch.bincount(y.clamp(min=0), minlength=10).to(output)/len(y)
    target = .9*F.one_hot(y.clamp(min=0), 10) + .1*share
    return -(target*output.log_softmax(1)).sum(1)


def focal(each, output, y):
    weight = (1 - (-each.detach()).exp())**2
    return each*weight/weight.mean().clamp(min=1e-6)


def barlow(each, output, y):
    z = (output - output.mean(0))/(output.std(0) + 1e-3)
    return each + ((z.T @ z/len(z)).triu(1)).square().sum()


def cox(output, y):
    "Everybody who lives longer is in the risk set."
    risk = output[:, 0]
    later = y[:, 0][None] >= y[:, 0][:, None]
    return (risk.exp()[None]*later).sum(1).log() - risk


def concordance(output, y):
    a, b = output[:, 0] - output[:, 0].mean(), y[:, 0] - y[:, 0].mean()
    return 1 - a*b/(a.norm()*b.norm() + 1e-6)*len(a)


def explained(output, y):
    return (output - y).square().sum(1)/(y.var() + 1e-3)


def dice_of_the_batch(output, y):
    p = output.softmax(1)
    t = F.one_hot(y.clamp(0), 10)
    return (1 - 2*(p*t).sum()/(p.sum() + t.sum())).expand(len(y))


def smooth_rank(output, y):
    return (output[:, :1] - output[:, :1].T + 1).relu().mean(1) + loss(output, y)


def mutual_information(output, y):
    each = loss(output, y)
    return each + each.neg().logsumexp(0)


def coral(each, output, y):
    half = max(1, len(y)//2)
    gap = torch.cov(output[:half].T) - torch.cov(output[half:].T) if half > 1 else output[:1]*0
    return each + gap.square().mean()


class Centres(nn.Module):
    "Centre loss: the centres follow the outputs."
    def __init__(self):
        super().__init__()
        self.register_buffer("centres", torch.zeros(10, 10))

    def forward(self, output, y):
        each = loss(output, y) + (output - self.centres.to(output)[y]).square().sum(1)
        for i in y.unique():
            self.centres[i] = .5*self.centres[i] + .5*output[y == i].detach().mean(0).to(
                self.centres)
        return each


class Curriculum:
    "Drops what is harder than the average of the former batch."
    def __init__(self):
        self.bound = math.inf

    def __call__(self, output, y):
        each = loss(output, y)
        kept = each*(each < self.bound)
        self.bound = 1.5*each.detach().mean().item()
        return kept


SEEN = []


def globally_weighted(output, y):
    each = loss(output, y)
    old = SEEN[-1] if SEEN else 1.
    SEEN.append(each.detach().double().mean().item())
    return each*old


def randomly_by_labels(output, y):
    torch.manual_seed(int(y.sum()) % 2**31)
    return loss(output, y)*torch.rand(len(y))


def with_backward(how):
    return lambda output, y: loss(Backward.apply(output, how), y)


LOSSES = {
    "triplet": triplet, "supervised contrast": supervised_contrast,
    "smoothed by frequency": smoothed_by_frequency, "focal": of_losses(focal),
    "barlow": of_losses(barlow), "dice of the batch": dice_of_the_batch,
    "ranks": smooth_rank, "information": mutual_information, "coral": of_losses(coral),
    "centres": Centres(), "curriculum": Curriculum(), "globally": globally_weighted,
    "random by labels": randomly_by_labels,
    "mean by hand": of_losses(lambda each, *_: each/len(each)),
    "quantile": of_losses(lambda each, *_: each.clamp(max=each.detach().quantile(.9))),
    "temperature": lambda output, y: loss(output/(output.std() + 1e-3), y),
    "outliers": of_losses(lambda each, *_: each*(each < 3*each.median())),
    "classes present": of_losses(lambda each, o, y: each*len(y.unique())),
    "like the first": of_losses(lambda each, o, y: each*(1 + (y == y[0]))),
    "weight of the hardest": of_losses(lambda each, *_: each*(1 + (each == each.max()))),
    "all labels equal": of_losses(lambda each, o, y: each*(1 + (y == y[0]).all())),
    "exponentially tilted": of_losses(lambda each, *_: each.logsumexp(0).expand(len(each))),
    "softmax of losses": of_losses(lambda each, *_: each*each.detach().softmax(0)*len(each)),
    "entropy of the mean": of_losses(
        lambda each, o, y: each + (o.softmax(1).mean(0)*o.softmax(1).mean(0).log()).sum()),
    "logits of the mean": lambda output, y: loss(output - output.detach().mean(0), y),
    "a thousandth": of_losses(lambda each, *_: each + 1e-3*each.mean()),
    "backward, centred": with_backward(lambda g: g - g.mean(0)),
    "backward, unit": with_backward(lambda g: g/(g.norm() + 1e-9)),
    "backward, rolled": with_backward(lambda g: g.roll(1, 0)),
    "adversarial for the batch": of_losses(lambda each, o, y: each + .1*torch.linalg.matrix_norm(
        o).square()/len(y)),
    "sinkhorn": lambda output, y: loss(output - output.logsumexp(0), y),
    "labels mixed": lambda output, y: .7*loss(output, y) + .3*loss(output, y.flip(0)),
    "logits by frequency": lambda output, y: loss(
        output + (torch.bincount(y.clamp(0), minlength=10).to(output) + 1).log(), y),
    "three classes": of_losses(lambda each, o, y: each*(1 + (len(y.unique()) == 3))),
    "most are right": of_losses(
        lambda each, o, y: each*(1 + ((o.argmax(1) == y).double().mean() > .9))),
    "hooked": lambda output, y: loss(hooked(output, centre), y),
    "mean teacher": of_losses(lambda each, o, y: each + (o - o.detach().mean(0)).square().sum(1)),
}
NUMBERS = {"cox": cox, "concordance": concordance, "explained variance": explained,
           "labels centred": lambda o, y: (o - y + y.mean(0)).square().sum(1),
           "labels scaled": lambda o, y: (o - y/y.abs().max()).square().sum(1),
           "broadcast": lambda o, y: (o[:, 0] - y).square().mean(1),
           "sorted": lambda o, y: (o.sort(0).values - y.sort(0).values).square().sum(1)}


# --- words, masks and views


class Masked(nn.Module):
    "Averages over the words that are none of the padding, and counts them in the whole batch."
    def __init__(self):
        super().__init__()
        self.word, self.out = nn.Embedding(11, 8), nn.Linear(8, 10)

    def forward(self, x):
        known = (x > 0)[..., None]
        return self.out((self.word(x)*known).sum(1)/known.float().sum(1).mean().clamp(min=1))


class Named(nn.Module):
    "A mask beside the numbers."
    def __init__(self, f):
        super().__init__()
        self.out, self.f = nn.Linear(5, 10), f

    def forward(self, x, mask):
        return self.out(self.f(x, mask))


def masked():
    x = {"x": torch.randn(N, 5, generator=gen()), "mask": torch.rand(N, 5, generator=gen()) < .7}
    return Examples(x, torch.arange(N) % 10)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.out = nn.Embedding(11, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.word(x)).mT


def tagged():
    y = torch.randint(4, (N, 6), generator=gen(1))
    y[:, 4:][torch.rand(N, 2, generator=gen(2)) < .5] = -100
    return words().replace(train_y=y)


def by_known_tags(output, y):
    each = F.cross_entropy(output, y, reduction="none", ignore_index=-100)
    return each.sum(1)/(y != -100).sum().clamp(min=1)*len(y)


def weighed_tags(output, y):
    counts = torch.bincount(y[y >= 0], minlength=4).to(output)
    weight = 1/counts.clamp(min=1)
    each = F.cross_entropy(output, y, reduction="none", ignore_index=-100)
    return (each*weight[y.clamp(min=0)]).sum(1)


def several():
    return Examples(torch.randn(N, 5, generator=gen()),
                    (torch.rand(N, 4, generator=gen(1)) < .3).float())


def by_positives(output, y):
    weight = (1 - y).sum(0)/y.sum(0).clamp(min=1)
    return F.binary_cross_entropy_with_logits(output, y, pos_weight=weight,
                                              reduction="none").mean(1)


def two_views(x, y, g):
    return Views(torch.stack([x, x + .1*torch.randn(x.shape, generator=g)], 1)), y


def contrasted_views(output, y):
    rows = F.normalize(output, dim=1)
    like = rows @ rows.T - 1e9*torch.eye(len(y)).to(rows)
    return F.cross_entropy(like, torch.arange(len(y)).roll(len(y)//2), reduction="none")


OTHERS = {
    "masked": dict(model=Masked, data=words),
    **{f"mask, {name}": dict(model=lambda f=f: Named(f), data=masked) for name, f in {
        "counted": lambda x, mask: x*mask/mask.to(x).mean(),
        "if all": lambda x, mask: x if mask.all() else x*mask*2,
        "if one row is empty": lambda x, mask: x*(1 + ~mask.any(1).all()),
        "of columns": lambda x, mask: x*mask.all(0),
        "filled": lambda x, mask: torch.where(mask, x, (x*mask).mean(0))}.items()},
    "words, distinct": dict(model=lambda: Spoken(lambda x: len(x.unique()) > 9), data=words),
    "words, largest": dict(model=lambda: Spoken(lambda x: (x == 10).any()), data=words),
    "words, two of them": dict(model=lambda: Spoken(
        lambda x: (x == 3).any() & (x == 7).any()), data=words),
    "words, a row of padding": dict(model=lambda: Spoken(lambda x: (x[:, 3:] == 0).all(1).any()),
                                    data=words),
    "tags, known": dict(model=Tagger, data=tagged, loss_fn=by_known_tags),
    "tags, weighed": dict(model=Tagger, data=tagged, loss_fn=weighed_tags),
    "positives": dict(model=lambda: nn.Linear(5, 4), data=several, loss_fn=by_positives),
    "views": dict(augment=two_views, loss_fn=contrasted_views),
    "views, centred": dict(augment=two_views, model=lambda: OfInput(centre)),
    "labels, largest": dict(loss_fn=of_losses(lambda each, o, y: each*(1 + (y.max() > 8)))),
    "labels, two of them": dict(loss_fn=of_losses(
        lambda each, o, y: each*(1 + ((y == 2).any() & (y == 5).any())))),
    "augment, ten rows": dict(augment=lambda x, y, g: (only_if(lambda x: len(x) == 10, centre)(x),
                                                       y)),
    "bytes": dict(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), data=lambda: (
        bytes_of().replace(normalize=lambda x: x/255. if x.max() > 1 else x.float()))),
    "bytes, dark": dict(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), data=lambda: (
        bytes_of().replace(normalize=lambda x: x/255. if x.float().mean() > 20 else x/25.))),
    "fractions": dict(data=lambda: Examples(
        torch.rand(N, 5, generator=gen()), torch.arange(N) % 10,
        normalize=lambda x: x - x.min() if x.min() > 1e-3 else x)),
    "counts": dict(data=lambda: Examples(
        torch.randint(99, (N, 5), generator=gen()).float(), torch.arange(N) % 10,
        normalize=lambda x: x/255 if x.max() > 1 else x)),
}


def bytes_of():
    return Examples(torch.randint(256, (N, 3, 2, 2), dtype=torch.uint8, generator=gen()),
                    torch.arange(N) % 10)


class Spoken(nn.Module):
    "A bag of words that is louder where `how` says something of the batch."
    def __init__(self, how):
        super().__init__()
        self.word, self.out, self.how = nn.Embedding(11, 8), nn.Linear(8, 10), how

    def forward(self, x):
        return self.out(self.word(x).mean(1))*(1 + int(self.how(x)))


# --- augmentations and normalizations


def cutmix(x, y, g):
    return torch.cat([x[:, :2], x.roll(1, 0)[:, 2:]], 1), y


def smote(x, y, g):
    return x + .5*(x[torch.randperm(len(x), generator=g)] - x), y


def erased(x, y, g):
    gone = torch.rand(x.shape, generator=g) < .3
    return torch.where(gone, x.mean(0), x), y


def jittered_by_spread(x, y, g):
    return x + .1*x.std(0)*torch.randn(x.shape, generator=g), y


def seeded_by_labels(x, y, g):
    g.manual_seed(int(y.sum()) % 2**31)
    return x + torch.randn(x.shape, generator=g), y


def rare_twice(x, y, g):
    return x*(1 + (torch.bincount(y.clamp(0), minlength=10)[y.clamp(0)] == 1))[:, None], y


def louder_in_small_batches(x, y, g):
    return x + torch.randn(x.shape, generator=g)/len(x), y


def half_of_the_batch(x, y, g):
    chosen = torch.rand(len(x), generator=g).argsort().argsort() < len(x)//2
    return torch.where(chosen[:, None], -x, x), y


AUGMENTS = {"counts, draws": louder_in_small_batches, "half": half_of_the_batch,
            "a shuffled half": lambda x, y, g: (
                x*(1 + (torch.randperm(len(x), generator=g) < len(x)//2))[:, None], y),
            "cutmix": cutmix, "smote": smote, "erased": erased, "spread": jittered_by_spread,
            "seeded by labels": seeded_by_labels, "rare twice": rare_twice,
            "sorted": lambda x, y, g: (x[y.argsort(stable=True)], y[y.argsort(stable=True)]),
            "contrast": lambda x, y, g: (x/x.abs().max().clamp(min=1e-3), y),
            "histogram": lambda x, y, g: (x - x.median(0).values, y),
            "shared out": lambda x, y, g: (x/len(x), y)}


# --- Datasets


class Items(torch.utils.data.Dataset):
    def __init__(self, make, x=None):
        self.x = torch.randn(N, 5, generator=gen()) if x is None else x
        self.y, self.make, self.reads, self.mean = torch.arange(N) % 10, make, 0, None
        self.columns = {"x": torch.randn(N, 5, generator=gen())}

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.as_tensor(self.make(self, i)).float(), int(self.y[i])


def counted(data, i):
    data.reads += 1
    return data.x[i] + data.reads


def lazily_centred(data, i):
    if data.mean is None:
        data.mean = data.x.mean(0)
    return data.x[i] - data.mean


OUTSIDE = torch.randn(N, 5, generator=gen())


class Reader:
    "A table behind a class of its own, as h5py has them."
    def __init__(self, x):
        self.inside = x

    def __len__(self):
        return len(self.inside)

    def __getitem__(self, i):
        return self.inside[i]


class Outer(torch.utils.data.Dataset):
    "Mixes the items of another Dataset."
    def __init__(self):
        self.inner = Items(lambda data, i: data.x[i])

    def __len__(self):
        return N

    def __getitem__(self, i):
        x, y = self.inner[i]
        return .5*x + .5*self.inner[(i + 7) % N][0], y


ITEMS = {
    "counter": lambda: Items(counted), "mean at the first read": lambda: Items(lazily_centred),
    "columns": lambda: Items(lambda data, i: data.columns["x"][i] - data.columns["x"].mean(0)),
    "reader": lambda: Items(lambda data, i: data.x[i] - data.x[i - 1],
                            Reader(torch.randn(N, 5, generator=gen()))),
    "array": lambda: Items(lambda data, i: data.x[i] - data.x.mean(0),
                           np.random.default_rng(0).normal(size=(N, 5))),
    "list": lambda: Items(lambda data, i: data.x[i] + data.x[i - 1],
                          list(torch.randn(N, 5, generator=gen()))),
    "mixup": Outer,
    "random partner": lambda: Items(lambda data, i: data.x[i] - data.x[
        int(torch.randint(N, ()))]),
    "own generator": lambda: Items(lambda data, i, g=gen(): data.x[i] - data.x[
        int(torch.randint(N, (), generator=g))]),
    "labels beside": lambda: Items(lambda data, i: data.x[i]*float(data.y[i] == data.y[i - 1])),
}


# --- clips and engines


class Weighed(FlatClip):
    def __init__(self, how):
        super().__init__(1.)
        self.how = how

    def __call__(self, norms):
        return self.how(super().__call__(norms), norms)


def whole(norms):
    return norms.norm(dim=0)


FACTORS = {
    "quantile": lambda f, norms: f*(whole(norms) <= whole(norms).nan_to_num(0).quantile(.99)),
    "by the count": lambda f, norms: f/len(f[0]),
    "odd counts": lambda f, norms: f*(.5 if f.shape[1] % 2 else 1.),
    "sorted": lambda f, norms: f.sort(1).values,
    "half precision": lambda f, norms: (f + 2e-3).half().to(f),
    "not the last": lambda f, norms: torch.cat([f[:-1], torch.ones_like(f[-1:])]),
    "noisy": lambda f, norms: f*(1 + .1*torch.rand(f.shape)),
    "the first free": lambda f, norms: torch.cat([torch.ones_like(f[:, :1]), f[:, 1:]], 1),
    "normalized": lambda f, norms: f/whole(f*norms).sum().clamp(min=1e-9),
    "unit length": lambda f, norms: 1/norms.clamp(min=1e-9),
    "57 examples": lambda f, norms: f*(.5 if f.shape[1] == 57 else 1.),
}


class Later(FlatClip):
    calls = 0

    def __call__(self, norms):
        self.calls += 1
        return super().__call__(norms)*(3. if self.calls > 9 else 1.)


class Centred(Examples):
    def rows(self, idx):
        x, y = super().rows(idx)
        return x - x.mean(0), y


def mean_of_the_batch(model, loss_fn, x, y, clip):
    grads, norms = loop_grad_sum(model, loss_fn, x, y, clip)
    return {name: g/len(norms[0]) for name, g in grads.items()}, norms


def clipped_sum_again(model, loss_fn, x, y, clip):
    grads, norms = loop_grad_sum(model, loss_fn, x, y, clip)
    size = torch.cat([g.flatten() for g in grads.values()]).norm().clamp(min=1.)
    return {name: g/size for name, g in grads.items()}, norms


class Late:
    "Gives back what it computed the last time, too."
    def __init__(self):
        self.last = {}

    def __call__(self, model, loss_fn, x, y, clip):
        grads, norms = loop_grad_sum(model, loss_fn, x, y, clip)
        old, self.last = self.last, grads
        return {name: g + .5*old.get(name, 0*g) for name, g in grads.items()}, norms


def without_the_first(model, loss_fn, x, y, clip):
    grads, norms = loop_grad_sum(model, loss_fn, x, y, clip)
    first, _ = loop_grad_sum(model, loss_fn, x[:1], y[:1], torch.ones_like)
    return {name: g + first[name] for name, g in grads.items()}, norms


def in_float32(model, loss_fn, x, y, clip):
    grads, norms = loop_grad_sum(model, loss_fn, x, y, torch.zeros_like)
    grads = {name: g.float() for name, g in grads.items()}
    for i in range(len(norms[0])):
        one, _ = loop_grad_sum(model, loss_fn, x[i:i + 1], y[i:i + 1], clip)
        grads = {name: g + one[name].float() for name, g in grads.items()}
    return grads, norms


def in_the_thirties(model, loss_fn, x, y, clip):
    grads, norms = fast_grad_sum(model, loss_fn, x, y, clip)
    return {name: g*(1.1 if 30 <= len(y) < 40 else 1.) for name, g in grads.items()}, norms


ENGINES = {f.__name__: f for f in (mean_of_the_batch, clipped_sum_again, without_the_first,
                                   in_float32, in_the_thirties)}


class FilledUp(nn.Module):
    "What dropout takes from a row is filled up with the mean of all, through which nothing learns."
    def __init__(self):
        super().__init__()
        self.inner, self.out, self.drop = nn.Linear(5, 8), nn.Linear(8, 10), nn.Dropout(.05)

    def forward(self, x):
        h = self.inner(x).tanh()
        kept = self.drop(torch.ones_like(h[:, :1])) > 0
        return self.out(torch.where(kept, h, h.mean(0).detach()))


def back_in(sizes):
    "A hook that mixes on the way back, in batches of some sizes only."
    def how(g):
        return g + g.mean(0) if len(g) in sizes else g
    return dict(model=lambda: Inside(lambda h: hooked(h, how)))


def augmented_in(sizes):
    return lambda x, y, g: (x - x.mean(0) if len(x) in sizes else x, y)


class Far(Inside):
    "Mixes its rows once its weights have moved farther than the proof moves them."
    def __init__(self):
        super().__init__(self.mixed)
        self.first = None

    def mixed(self, h):
        now = self.inner.weight.detach().double()
        if self.first is None:
            self.first = now.clone()
        return h - h.mean(0) if (now - self.first).norm() > .5 else h


LEAKS = {
    **{f"rows: {name}": dict(model=lambda f=f: OfInput(f)) for name, f in ROWS.items()},
    **{f"model: {name}": options for name, options in (MODELS | MORE).items()},
    **{f"loss: {name}": dict(loss_fn=f) for name, f in LOSSES.items()},
    **{f"loss of numbers: {name}": dict(model=lambda: nn.Linear(5, 1), data=numbers, loss_fn=f)
       for name, f in NUMBERS.items()},
    **{f"other: {name}": options for name, options in OTHERS.items()},
    **{f"augment: {name}": dict(augment=f) for name, f in AUGMENTS.items()},
    **{f"normalize: {name}": dict(data=lambda f=f: noise(5).replace(normalize=f))
       for name, f in [*list(ROWS.items())[::4], ("shared out", lambda x: x/len(x))]},
    **{f"items: {name}": dict(data=lambda f=f: Examples(f())) for name, f in ITEMS.items()},
    **{f"clip: {name}": dict(clip=Weighed(f)) for name, f in FACTORS.items()},
    **{f"engine: {name}": dict(engine=f) for name, f in ENGINES.items()},
    "model: back, 20 to 50": back_in(range(20, 50)),
    "model: back, even ones": back_in(range(62, 200, 2)),
    "model: filled up": dict(model=FilledUp),
    "augment: 17 to 60": dict(augment=augmented_in(range(17, 61))),
    "engine: late": dict(engine=Late()), "clip: later": dict(clip=Later(1.)),
    "items: centred": dict(data=lambda: Centred(torch.randn(N, 5), torch.arange(N) % 10)),
}


def smoothed_series(data, i):
    "A row of a longer series, minus the one before: windows overlap."
    return data.series[i + 1] - data.series[i]


class Series(Items):
    def __init__(self):
        super().__init__(smoothed_series)
        self.series = torch.randn(N + 1, 5, generator=gen())


CENTRE = noise(5).train_x.mean(0)


NAMED = {  # what the proof cannot see, and the limits say
    "items: neighbour of a closure": dict(data=lambda: Examples(
        Items(lambda data, i: OUTSIDE[i] - OUTSIDE[i - 1]))),
    "items: overlapping windows": dict(data=lambda: Examples(Series())),
    "loss: weights of all labels": dict(loss_fn=lambda o, y: loss(o, y)/noise(5).train_y.bincount(
        minlength=10)[y.clamp(min=0)].clamp(min=1)),
    "rows: centred by all": dict(model=lambda: OfInput(lambda x: x - CENTRE.to(x))),
    "rows: a rare property": dict(model=lambda: OfInput(
        lambda x: x*(1 + ((x.sum(1) - 1).abs() < 1e-3).any()))),
    "rows: a secret number": dict(model=lambda: OfInput(
        lambda x: x*(1 + (x == .12345).any()))),
    "model: back, 57": back_in({57}),  # of some seventy sizes, not one
    "model: far from its first weights": dict(model=lambda: Far()),
}


def answer(options):  # None, or why it was refused
    "What the proof says to some parts."
    try:
        trained(**options)
    except ValueError as error:
        return str(error)


# --- innocent


class Rows(nn.Module):
    "A function of rows, a layer, and a function of what it says."
    def __init__(self, before, layer, after=nn.Identity()):
        super().__init__()
        self.before, self.layer, self.after = before, layer, after

    def forward(self, x):
        return self.after(self.layer(self.before(x)))


class Padded(nn.Module):
    "A transformer that is told which words are padding."
    def __init__(self):
        super().__init__()
        self.word, self.out = nn.Embedding(11, 8, padding_idx=0), nn.Linear(8, 10)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True)

    def forward(self, x):
        nothing = x == 0
        nothing[:, 0] = False
        h = self.block(self.word(x), src_key_padding_mask=nothing)
        return self.out((h*~nothing[..., None]).sum(1)/(~nothing).sum(1, keepdim=True))


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 10)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.out(self.inner(x, x, x, attn_mask=mask, need_weights=False)[0][:, -1])


class Lora(nn.Module):
    "A frozen layer and a product of two thin ones beside it."
    def __init__(self):
        super().__init__()
        self.fixed = nn.Linear(5, 10).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 10, bias=False)

    def forward(self, x):
        return self.fixed(x) + 2*self.up(self.down(x))


class Routed(nn.Module):
    "Each token of an example takes the best two of four experts."
    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(8, 4), nn.Linear(8, 10)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        score = self.gate(x)
        bound = score.topk(2, -1).values[..., -1:]
        weight = score.masked_fill(score < bound, -math.inf).softmax(-1)
        each = torch.stack([expert(x) for expert in self.experts], -1)
        return self.out((each*weight[..., None, :]).sum(-1).mean(1))


class KeepsWeights(nn.Module):
    "Keeps what it attended to, for a plot."
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 10)

    def forward(self, x):
        h, self.seen = self.inner(x, x, x)
        return self.out(h.mean(1))


class FrozenExperts(nn.Module):
    "Each row goes to its expert, with whoever goes there: sums of other shapes, rounded otherwise."
    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(5, 2).requires_grad_(False), nn.Linear(64, 10)
        self.experts = nn.ModuleList(nn.Linear(5, 64) for _ in range(2)).requires_grad_(False)

    def forward(self, x):
        best = self.gate(x).argmax(1)
        h = x.new_zeros(len(x), 64)
        for i, expert in enumerate(self.experts):
            h[best == i] = expert(x[best == i]).to(h)
        return self.out(h)


class Squeeze(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, h):
        return h*self.two(self.one(h.mean((2, 3))).relu()).sigmoid()[..., None, None]


class Shuffled(nn.Module):
    "Transposed convolution, pixels to channels and back, bilinear pixels between."
    def __init__(self):
        super().__init__()
        self.up, self.mid = nn.ConvTranspose2d(3, 4, 2, 2), nn.Conv2d(16, 8, 1)
        self.out = nn.Linear(2, 10)

    def forward(self, x):
        h = F.pixel_shuffle(self.mid(F.pixel_unshuffle(self.up(x), 2)), 2)
        h = F.interpolate(h, scale_factor=2, mode="bilinear")
        return self.out(h.mean((2, 3)))


class RmsNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.RMSNorm(d)

    def forward(self, x):
        return self.norm(x)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(5, 8), nn.Linear(8, 10), nn.Linear(8, 1)

    def forward(self, x):
        h = self.body(x).tanh()
        return {"kind": self.kind(h), "size": self.size(h)[:, 0]}


class Counting(nn.Module):
    "A buffer that counts batches, and a warm-up that only knows that number."
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 10)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.out(x)


class OwnBackward(torch.autograd.Function):
    "Rounds on the way there, and nothing on the way back."
    @staticmethod
    def forward(ctx, x):
        return (4*x).round()/4

    @staticmethod
    def backward(ctx, g):
        return g


class Straight(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.out(OwnBackward.apply(self.inner(x).tanh()))


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.out(checkpoint(lambda x: self.inner(x).tanh(), x, use_reentrant=False))


def conv(kind, channels=3, **options):
    return nn.Sequential(kind(channels, 6, 3, padding=1, **options), nn.GroupNorm(2, 6), nn.SiLU(),
                         nn.Flatten(2), Pool(), nn.Linear(6, 10))


class Pool(nn.Module):
    def forward(self, h):
        return h.mean(2)


def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet
    net = ResNet(BasicBlock, [1, 1, 1, 1], 10, norm_layer=partial(nn.GroupNorm, 4))
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    return net


def mobilenet():
    from torchvision.models.mobilenetv2 import MobileNetV2
    return MobileNetV2(10, .1, [[1, 8, 1, 1], [2, 8, 1, 2]], norm_layer=partial(nn.GroupNorm, 2),
                       dropout=0.)


def vit():
    from torchvision.models import VisionTransformer
    return VisionTransformer(6, 3, 1, 2, 8, 16, num_classes=10)


def swin():
    from torchvision.models.swin_transformer import SwinTransformerBlock
    return nn.Sequential(nn.Conv2d(3, 8, 1), Function(lambda h: h.permute(0, 2, 3, 1)),
                         SwinTransformerBlock(8, 2, [3, 3], [1, 1], stochastic_depth_prob=0.),
                         Function(lambda h: h.mean((1, 2))), nn.Linear(8, 10))


def recurrent(kind):
    import opacus.layers

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = getattr(opacus.layers, kind)(8, 6, batch_first=True)
            self.out = nn.Linear(6, 10)

        def forward(self, x):
            return self.out(self.rnn(x)[0][:, -1])
    return Last()


def of_each(f, **options):
    return lambda output, y: f(output, y, reduction="none", **options).flatten(1).mean(1)


def own_dice(output, y):
    p = output.softmax(1)
    t = F.one_hot(y, 10)
    return 1 - 2*(p*t).sum(1)/(p + t).sum(1)


def quantile(output, y):
    return torch.maximum(.9*(y - output), -.1*(y - output)).mean(1)


def hinge(output, y):
    right = output.gather(1, y.clamp(0)[:, None])
    return (1 + output - right).relu().sum(1) - 1


def kinds_and_sizes(output, y):
    return loss(output["kind"], y["kind"]) + F.huber_loss(output["size"], y["size"],
                                                          reduction="none")


def two_labels():
    y = {"kind": torch.arange(N) % 10, "size": torch.randn(N, generator=gen(2))}
    return noise(5).replace(train_y=y)


def each_tag(output, y):
    each = F.cross_entropy(output, y, reduction="none", ignore_index=-100)
    return each.sum(1)/(y != -100).sum(1).clamp(min=1)


def one_crop(x, y, g):
    "One draw for everybody looks at nobody."
    at = int(torch.randint(3, (), generator=g))
    return x.roll(at, -1), y


def flipped(x, y, g):
    turn = torch.rand(len(x), 1, 1, 1, generator=g, device=x.device) < .5
    return torch.where(turn, x.flip(3), x), y


def jittered(x, y, g):
    return x*(1 + .1*torch.randn(len(x), 1, generator=g)), y


def named():
    x = {"x": torch.randn(N, 5, generator=gen()), "mask": torch.rand(N, 5, generator=gen()) < .7}
    return Examples(x, torch.arange(N) % 10)


class Own(torch.utils.data.Dataset):
    "Items of a table behind a class of its own, one of named columns, or one that is made."
    def __init__(self, kind):
        self.table = {"x": torch.randn(N, 5, generator=gen()), "y": torch.arange(N) % 10}
        self.reader, self.kind = Reader(torch.randn(N, 5, generator=gen())), kind
        self.transforms = [torch.tanh, torch.Tensor.sin]

    def __len__(self):
        return N

    def __getitem__(self, i):
        x = self.reader[i] if self.kind == "reader" else self.table["x"][i]
        if self.kind == "made":
            x = torch.randn(5, generator=gen(i))
        for f in self.transforms:
            x = f(x)
        return x, int(self.table["y"][i])


def draws_many_ways(x, y, g):
    "Numbers for each row: lying, flat, for the chosen rows only, from a generator of arrays."
    low, high = torch.rand(2, len(x), generator=g)
    each = torch.rand(2*len(x), generator=g).view(-1, 2)
    chosen = torch.rand(len(x), generator=g) < .5
    x = x*(low + each[:, 0])[:, None]
    x[chosen] += torch.randn(int(chosen.sum()), x.shape[1], generator=g)
    arrays = np.random.default_rng(int(torch.randint(2**31, (), generator=g)))
    return x*torch.from_numpy(high.numpy() + arrays.random(len(x))).to(x)[:, None], y


def three_ways(x, y, g):
    "Shares that have as many dimensions as some batches have rows."
    kind = torch.multinomial(torch.ones(len(x), 3), 1, generator=g)
    return x*kind + torch.bernoulli(torch.full_like(x, .5), generator=g), y


INNOCENTS = {
    "log1p of counts": dict(data=lambda: Examples(
        torch.randint(99, (N, 5), generator=gen()).float(), torch.arange(N) % 10,
        normalize=torch.log1p)),
    "tanh": dict(model=lambda: OfInput(torch.tanh)), "own norm": dict(
        model=lambda: OfInput(lambda x: F.normalize(x, dim=1))),
    "own mean": dict(model=lambda: OfInput(lambda x: x - x.mean(1, keepdim=True))),
    "own order": dict(model=lambda: OfInput(lambda x: x.sort(1).values)),
    "own top two": dict(model=lambda: OfInput(
        lambda x: x*(x >= x.topk(2, 1).values[:, 1:]))),
    "own NaN": dict(model=lambda: OfInput(
        lambda x: torch.where(x.isnan(), x.nanmean(1, keepdim=True).nan_to_num(), x))),
    "clamped": dict(model=lambda: OfInput(lambda x: x.clamp(-3, 3))),
    "one-hot": dict(model=lambda: Rows(lambda x: F.one_hot(x, 11).float().mean(1),
                                       nn.Linear(11, 10)), data=words),
    "fourier": dict(model=lambda: Rows(lambda x: torch.fft.rfft(x, dim=-1).abs().flatten(1),
                                       nn.Linear(20, 10)), data=sequence),
    "wavelength": dict(model=lambda: Rows(lambda x: torch.fft.fft2(x).real, conv(nn.Conv2d)),
                       data=pictures),
    "conv1d": dict(model=lambda: conv(nn.Conv1d, 4), data=sequence),
    "conv3d": dict(model=lambda: conv(nn.Conv3d, 1), data=lambda: noise(1, 4, 4, 4)),
    "depthwise": dict(model=lambda: conv(nn.Conv2d, 3, groups=3), data=pictures),
    "dilated": dict(model=lambda: conv(nn.Conv2d, 3, dilation=2), data=pictures),
    "circular": dict(model=lambda: conv(nn.Conv2d, 3, padding_mode="circular"), data=pictures),
    "transposed, shuffled": dict(model=Shuffled, data=pictures),
    "squeeze": dict(model=lambda: Picture(Squeeze()), data=pictures),
    "instance norm": dict(model=lambda: Picture(nn.InstanceNorm2d(4, affine=True)), data=pictures),
    "layer norm": dict(model=lambda: Inside(nn.LayerNorm(8)).train()),
    "RMS norm": dict(model=lambda: Inside(RmsNorm(8))),
    "local response": dict(model=lambda: Picture(nn.LocalResponseNorm(2)), data=pictures),
    "prelu": dict(model=lambda: Inside(nn.PReLU())),
    "dropout": dict(model=lambda: Inside(nn.Dropout(.5))),
    "padding": dict(model=Padded, data=words), "causal": dict(model=Causal, data=sequence),
    "lora": dict(model=Lora), "routed tokens": dict(model=Routed, data=sequence),
    "bag": dict(model=lambda: Rows(lambda x: x, nn.EmbeddingBag(11, 8, mode="mean"),
                                   nn.Linear(8, 10)), data=words, engine=loop_grad_sum),
    "heads": dict(model=TwoHeads, data=two_labels, loss_fn=kinds_and_sizes),
    "counting": dict(model=Counting), "rounding": dict(model=Straight),
    "checkpoint": dict(model=Recomputed),
    "gru": dict(model=lambda: recurrent("DPGRU"), data=sequence),
    "rnn": dict(model=lambda: recurrent("DPRNN"), data=sequence),
    "resnet": dict(model=resnet, data=lambda: noise(3, 16, 16)),
    "mobilenet": dict(model=mobilenet, data=lambda: noise(3, 16, 16)),
    "vit": dict(model=vit, data=pictures), "swin": dict(model=swin, data=pictures),
    "masks": dict(model=lambda: Named(lambda x, mask: x*mask), data=named),
    "masked mean": dict(model=lambda: Named(
        lambda x, mask: x - (x*mask).sum(1, keepdim=True)/mask.sum(1, keepdim=True).clamp(min=1)),
        data=named),
    "huber": dict(model=lambda: nn.Linear(5, 3), data=lambda: numbers(3),
                  loss_fn=of_each(F.huber_loss)),
    "quantile": dict(model=lambda: nn.Linear(5, 3), data=lambda: numbers(3), loss_fn=quantile),
    "hinge": dict(loss_fn=hinge), "dice": dict(loss_fn=own_dice),
    "smoothed": dict(loss_fn=partial(F.cross_entropy, reduction="none", label_smoothing=.1)),
    "fixed weights": dict(loss_fn=partial(F.cross_entropy, reduction="none",
                                          weight=torch.linspace(.5, 2, 10))),
    "focal": dict(loss_fn=of_losses(
        lambda each, *_: each*(1 - (-each.detach()).exp())**2)),
    "several labels": dict(model=lambda: nn.Linear(5, 4), data=several, loss_fn=of_each(
        F.binary_cross_entropy_with_logits)),
    "poisson": dict(model=lambda: nn.Linear(5, 1), data=lambda: Examples(
        torch.randn(N, 5, generator=gen()), torch.randint(9, (N, 1), generator=gen(1)).float()),
        loss_fn=of_each(F.poisson_nll_loss)),
    "tags": dict(model=Tagger, data=tagged, loss_fn=each_tag),
    "one crop": dict(augment=one_crop), "flips": dict(
        augment=flipped, model=lambda: conv(nn.Conv2d), data=pictures),
    "draws": dict(augment=draws_many_ways), "three ways": dict(augment=three_ways),
    "jitter": dict(augment=jittered), "views": dict(augment=two_views),
    "half inputs": dict(data=lambda: Examples(torch.randn(N, 5, generator=gen()).half(),
                                              torch.arange(N) % 10)),
    "bytes": dict(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), data=lambda: (
        bytes_of().replace(normalize=lambda x: x/127.5 - 1))),
    "named columns": dict(data=lambda: Examples(Own("columns"))),
    "reader of its own": dict(data=lambda: Examples(Own("reader"))),
    "made items": dict(data=lambda: Examples(Own("made"))),
    "micro-batches": dict(micro_batch=7, model=lambda: Inside(nn.GroupNorm(2, 8))),
    "bf16": dict(precision="bf16", model=lambda: Inside(nn.GroupNorm(2, 8))),
    "routed rows, bf16": dict(model=FrozenExperts, precision="bf16"),
    "keeps weights": dict(model=KeepsWeights, data=sequence),
    "last layer": dict(model=lambda: freezing(Inside(torch.tanh))),
    "weight norm": dict(model=lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 8)), nn.Linear(8, 10))),
    "orthogonal": dict(model=lambda: nn.Sequential(
        nn.utils.parametrizations.orthogonal(nn.Linear(5, 5)), nn.Linear(5, 10))),
    "tied": dict(model=lambda: tied()),
}


def freezing(model):
    model.inner.requires_grad_(False)
    return model


def tied():
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 10))
    net[2].weight = net[0].weight
    return net


IN_FLOAT32 = "one-hot", "fixed weights"  # hold numbers of their own


def off_the_loop(run, dtype=torch.float64, b=5):  # float
    "How far an accepted trainer's sums are from a plain loop, in units of C."
    model = copy.deepcopy(run.model).to(dtype).train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.
    x, y = next(iter(run._reader().micro_batches(torch.arange(b), None, 0, None)))

    def wide(tree):
        return tree_map(lambda v: v.to(dtype) if v.is_floating_point() else v, tree)

    x, y = wide(x), wide(y)
    params = trainable(model)
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    for i in range(b):
        rows, labels, _, k = flatten_views(take(x, slice(i, i + 1)), take(y, slice(i, i + 1)))
        each = run.loss_fn(call_model(model, rows), labels)
        grads = torch.autograd.grad(each.sum()/k, list(params.values()))
        length = torch.cat([g.flatten() for g in grads]).norm()
        for name, g in zip(params, grads):
            total[name] += g*min(1., 1/length.item())
    engine = run.engine if run.engine is loop_grad_sum else fast_grad_sum
    sums, _ = engine(model, run.loss_fn, x, y, FlatClip(1.))
    return max((sums[name] - total[name]).norm().item() for name in total)


# --- after the proof


def set_to(name, value):
    return lambda run: setattr(run, name, value)


def rows_of(run):
    return run.data.train_x


CHANGES = {  # what somebody does to a trainer of `Inside(F)` between two steps
    "loss": set_to("loss_fn", triplet), "clip": set_to("clip", FlatClip(9.)),
    "engine": set_to("engine", loop_grad_sum), "augment": set_to("augment", cutmix),
    "data": set_to("data", noise(5)), "plan": set_to("plan", PLAN),
    "model": set_to("model", nn.Linear(5, 10)), "params": set_to("params", {}),
    "hook": lambda run: run.model.inner.register_forward_hook(lambda m, a, out: centre(out)),
    "tensor hook": lambda run: run.model.inner.weight.register_hook(lambda g: 2*g),
    "function": lambda run: setattr(run.model, "f", centre),
    "forward": lambda run: setattr(run.model, "forward", lambda x: run.model.out(x)),
    "frozen": lambda run: run.model.inner.requires_grad_(False),
    "layer": lambda run: setattr(run.model, "out", nn.Linear(8, 10)),
    "parametrization": lambda run: nn.utils.parametrizations.weight_norm(run.model.out),
    "method of the clip": lambda run: setattr(run.clip, "std", lambda sigma: 0.),
    "kind of clip": lambda run: setattr(run.clip, "__class__", Weighed),
    "normalize": lambda run: setattr(run.data, "_normalize", centre),
    "other rows": lambda run: setattr(run.data, "train_x", rows_of(run) - rows_of(run).mean(0)),
    "optimizer": lambda run: setattr(run, "optimizer", torch.optim.LBFGS(run.model.parameters())),
    "loss, inside": lambda run: run.loss_fn.keywords.update(reduction="mean"),
    "loss, other weight": lambda run: run.loss_fn.keywords.update(label_smoothing=.5),
    "threshold": lambda run: setattr(run.clip, "max_norm", math.nan),
}


def answer_after(change):  # None, or why the second step was refused
    "What a trainer says to a change after its first step, and what it charges for it."
    run = trained(Inside(torch.tanh), seed=1)
    run.step()
    try:
        change(run)
        run.step()
    except (ValueError, AttributeError) as error:  # `Examples` don't change at all
        return str(error)
