"What would move an example's neighbours in a batch: parts of a `Trainer` that try to."
import copy
import json
import math
import re
import tempfile
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from toys import Picture, Plan, loss, two_views
from toys import generator as gen

from dp_course.data import Examples, tree_map
from dp_course.gradients import FlatClip, fast_grad_sum, loop_grad_sum
from dp_course.training import Trainer

N = 12


def noise(*shape, classes=10):
    return Examples(torch.randn(N, *shape, generator=gen()),
                    torch.randint(classes, (N,), generator=gen(1)))


def numbers(d=1):
    "Something to be predicted that is no class."
    return Examples(torch.randn(N, 5, generator=gen()), torch.randn(N, d, generator=gen(1)))


def words(t=6, many=11):
    return Examples(torch.randint(many, (N, t), generator=gen()), torch.arange(N) % 10)


class Net(nn.Module):
    "Two layers, a `forward` that is given, and places where something could be kept."
    def __init__(self, forward, d=5):
        super().__init__()
        self.inner, self.out, self.how = nn.Linear(d, 8), nn.Linear(8, 10), forward
        self.kept, self.number, self.plain = [], 0., torch.zeros(8)
        self.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, *x, **named):
        return self.how(self, *x, **named)


def of_rows(f):
    "A network that does something to its rows before its first layer."
    return lambda: Net(lambda net, x: net.out(net.inner(f(x)).tanh()))


def inside(f):
    "One that does it between its layers."
    return lambda: Net(lambda net, x: net.out(f(net.inner(x).tanh())))


def centre(x):
    return x - x.mean(0)


# --- what a model may do to its rows

def seeded_by_the_batch(x):
    return x + torch.randn(x.shape, generator=gen(int(1000*x.double().nan_to_num().sum()) % 2**31))


def in_place(x):
    x = x.clone()
    x[1:] += x[:-1]
    return x


ROWS = {  # (b,5) -> (b,5), after the rows before they meet a layer
    "standardized": lambda x: (x - x.mean(0))/(x.std(0) + 1e-3),
    "sorted": lambda x: x.sort(0).values,
    "unique": lambda x: x/x[:, 0].round().unique(return_inverse=True, return_counts=True)[2][
        x[:, 0].round().unique(return_inverse=True)[1]][:, None],
    "cumulated": lambda x: x.cumsum(0),
    "in place": in_place,
    "convolved": lambda x: F.conv1d(x.T[:, None], torch.ones(1, 1, 3).to(x), padding=1)[:, 0].T,
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "first": lambda x: x - x[:1],
    "parity": lambda x: x*(1 + (x.sum()*100).long() % 2),
    "seeded by the batch": seeded_by_the_batch,
    "more rows, less": lambda x: x/len(x),
    "interpolated": lambda x: F.interpolate(x.T[None], len(x) + 1, mode="linear")[0].T[1:],
    "fourier": lambda x: torch.fft.fft(x, dim=0).real,
}

# --- on the way back


class Backward(torch.autograd.Function):
    "Nothing on the way there, and on the way back what `how` does to the gradient."
    generate_vmap_rule = True

    @staticmethod
    def forward(x, how):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.how = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return ctx.how(g), None


class Node(Backward):
    "What its `ctx` lets it do: it is a node of the graph, through which all examples go."
    @staticmethod
    def setup_context(ctx, inputs, output):
        inputs[1](ctx)

    @staticmethod
    def backward(ctx, g):
        return g, None


class Old(torch.autograd.Function):
    "The same in the form that vmap does not run."
    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.how(g), None


BACK = {
    "reversal, normalized": lambda g: -g/(g.norm() + 1e-9),
    "centred": lambda g: g - g.mean(0),
    "rolled": lambda g: g.roll(1, 0),
}


def centred_each(grads, *_):
    return tuple(None if g is None else centre(g) for g in grads)


NODES = {"hook": lambda ctx: ctx.register_hook(centred_each),
         "pre-hook": lambda ctx: ctx.register_prehook(centred_each)}


# --- networks


class Codebook(nn.Module):
    "Codes that follow the rows next to them; a code that nobody uses becomes the first row."
    def __init__(self, every=1):
        super().__init__()
        self.inner, self.out, self.every = nn.Linear(5, 4), nn.Linear(4, 10), every
        self.calls = [0]
        self.register_buffer("codes", torch.randn(3, 4))

    def forward(self, x):
        self.calls[0] += 1
        h = self.inner(x)
        near = torch.cdist(h, self.codes.to(h)).argmin(1)
        with torch.no_grad():
            own = F.one_hot(near, 3).to(h)
            if self.training and self.calls[0] % self.every == 0:
                self.codes.lerp_((own.T @ h).to(self.codes), .1)
                self.codes.copy_(torch.where(own.sum(0)[:, None] > 0, self.codes, h[0]))
        return self.out(h + (self.codes.to(h)[near] - h).detach())


class Experts(nn.Module):
    "Experts that are told how many rows they may take, and a bias that balances them."
    def __init__(self, choose):
        super().__init__()
        self.gate, self.choose = nn.Linear(5, 3), choose
        self.experts = nn.ModuleList(nn.Linear(5, 10) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.counts, self.aux = [], 0.

    def forward(self, x):
        share = (self.gate(x) + self.bias).softmax(1)
        taken = self.choose(self, share)
        return (torch.stack([expert(x) for expert in self.experts], 1)*taken[..., None]).sum(1)


def counted(net, share):
    net.counts.append(F.one_hot(share.argmax(1), 3).sum(0))
    return share


def balanced():
    "DeepSeek's bias, moved by a hook of the optimizer from counts of the batch."
    model = Experts(counted)

    def optimizer(params):
        made = torch.optim.SGD(params, lr=.1)
        made.register_step_post_hook(lambda *args: model.bias.data.sub_(
            .1*torch.stack([v.float() for v in model.counts]).sum(0).sign()))
        return made
    return dict(model=model, optimizer=optimizer)


class Switched(nn.Module):
    "An overridden `train()` writes into a buffer what forward has kept."
    def __init__(self):
        super().__init__()
        self.out, self.kept = nn.Linear(5, 10), []
        self.register_buffer("mean", torch.zeros(5))

    def train(self, mode=True):
        if self.kept:
            self.mean.add_(self.kept.pop())
        return super().train(mode)

    def forward(self, x):
        self.kept.append(x.detach().mean(0))
        return self.out(x - self.mean)


class Teacher(nn.Module):
    "A teacher inside follows the weights and, by centring, the batches."
    def __init__(self):
        super().__init__()
        self.pupil = nn.Linear(5, 10)
        self.teacher = nn.Linear(5, 10).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(10))

    def forward(self, x):
        with torch.no_grad():
            for t, p in zip(self.teacher.parameters(), self.pupil.parameters()):
                t.lerp_(p, .1)
            said = self.teacher(x) - self.centre
            self.centre.lerp_(said.mean(0), .5)
        return self.pupil(x) + said.softmax(1)


FACTORS_OF_LAYERS = {}


def kfac():
    "Hooks that add up the products of inputs, and forward is told of them."
    net = Net(lambda net, x: net.out(net.inner(x @ FACTORS_OF_LAYERS.get("A", torch.eye(5)))))

    def add(layer, args, out):
        a = args[0].detach()
        FACTORS_OF_LAYERS["A"] = .9*FACTORS_OF_LAYERS.get("A", torch.eye(5)) + .1*a.mT @ a

    net.inner.register_forward_hook(add)
    return net


def with_hook(register):
    def make():
        net = Net(lambda net, x: net.out(net.inner(x).tanh()))
        register(net)
        return net
    return make


def pictures():
    return noise(3, 6, 6)


def sequence():
    return noise(4, 8)


def of_bag(net, x):
    "Words, cut to the longest row of the batch."
    longest = (x != 0).sum(1).max().clamp(min=1)
    return net.out((net.word(x)*(torch.arange(x.shape[1]) < longest)[:, None]).mean(1))


def bag():
    net = Net(of_bag)
    net.word = nn.Embedding(11, 8)
    return net


def slope_of_all(net, x):
    "A gradient of the whole batch's output, added to the rows."
    return net.out(net.inner(x + torch.func.grad(lambda v: net.inner(v).sum()**2)(x)))


NETWORKS = {  # name -> options of the trainer
    "codebook": dict(model=Codebook), "balanced": balanced(),
    "train()": dict(model=Switched),
    "teacher": dict(model=Teacher), "K-FAC": dict(model=kfac),
    "forward hook": dict(model=with_hook(lambda net: net.inner.register_forward_hook(
        lambda m, args, out: out - out.mean(0)))),
    "pre-hook": dict(model=with_hook(lambda net: net.out.register_forward_pre_hook(
        lambda m, args: (args[0].roll(1, 0),)))),
    "backward hook": dict(model=with_hook(lambda net: net.out.register_full_backward_hook(
        lambda m, into, out: (into[0] - into[0].mean(0),)))),
    "backward pre-hook": dict(model=with_hook(
        lambda net: net.out.register_full_backward_pre_hook(lambda m, out: (centre(out[0]),)))),
    "hook of a parameter": dict(model=with_hook(
        lambda net: net.out.bias.register_hook(lambda g: g*g.norm()))),
    "longest": dict(model=bag, data=words), "slope of all": dict(model=lambda: Net(slope_of_all)),
    "checkpoint": dict(model=lambda: Net(lambda net, x: net.out(checkpoint(
        lambda x: centre(net.inner(x)), x, use_reentrant=False)))),
    "two outputs": dict(model=lambda: Net(lambda net, x: (net.out(net.inner(x)), net.inner(x))),
                        loss_fn=lambda output, y: loss(output[0] - output[1].mean(), y)),
    "compiled": dict(model=lambda: torch.compile(of_rows(centre)(), backend="eager")),
    "bfloat16 only": dict(precision="bf16", model=inside(
        lambda h: centre(h) if h.dtype == torch.bfloat16 else h)),
    "inner vmap": dict(model=of_rows(
        lambda x: torch.vmap(lambda row, mean=x.mean(0): row - mean)(x))),
    **{f"picture, {name}": dict(model=lambda f=f: Picture(f), data=pictures) for name, f in {
        "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
        "running": nn.BatchNorm2d(4, affine=False),
        "channels turned": lambda h: h.transpose(0, 1)[:, :1]}.items()},
    **{f"back, {name}": dict(model=inside(
        lambda h, f=f: Backward.apply(h, f))) for name, f in BACK.items()},
    **{f"node, {name}": dict(model=inside(lambda h, f=f: Node.apply(h, f)))
       for name, f in NODES.items()},
    "back in the old form": dict(model=inside(lambda h: Old.apply(h, centre))),
}


# --- what is kept for the next call


HELD = []


def keeps(keep):
    "A network that is told what was kept, and keeps what it computes."
    def forward(net, x):
        h = net.inner(x)
        old = keep(net, h.detach())
        return net.out(h if old is None else h + old)
    return lambda: Net(forward)


def last_of(held, h):
    old = held[-1].sum() if held else None
    held.append(h)
    return old


def in_place(write):
    "What was in an attribute before forward writes into it."
    def keep(net, h):
        old = net.plain.sum()*1
        write(net.plain, h[0])
        return old
    return keep


def as_attribute(name):
    def keep(net, h):
        old = getattr(net, name)
        setattr(net, name, h.mean(0))
        return old if isinstance(old, float) else old.sum()
    return keep


def as_gradient(net, h):
    old = net.plain.grad
    net.plain.grad = h[0]
    return None if old is None else old.sum()


def as_number(net, h):
    old, net.number = net.number, h.sum().item()
    return old


def if_item(net, h):
    return 1. if h.sum() > 0 else None


def by_registration(net, h):
    old = net.late.sum() if hasattr(net, "late") else None
    net.register_buffer("late", h[0])
    return old


def by_parameter(net, h):
    old = net.out.bias.sum()
    net.out.bias = nn.Parameter(net.out.bias + h.mean())
    return old


def swapped(net, h):
    old = net.plain.sum()*1
    torch.utils.swap_tensors(net.plain, h[0].clone())
    return old


def with_inner(transform):
    "Keeps what a transform of `torch.func` hands to a function inside."
    def keep(net, h):
        def inner(v):
            HELD.append(v)
            return v.square().sum()
        old = HELD[-1].sum() if HELD else None
        transform(inner, h)
        return old
    return keep


def in_backward(function, held, after=0):
    "Keeps the gradient that an autograd.Function is given on the way back."
    seen = []

    def forward(net, x):
        def how(g):
            seen.append(0)
            if len(seen) > after:
                held.append(g)
            return g
        h = function.apply(net.inner(x), how)
        return net.out(h if not held else h + held[-1].sum())
    return lambda: Net(forward)


class Lingers:
    "In a ring of its own, so that the collector ends it: then it hands on what it holds."
    def __init__(self, h):
        self.h, self.ring = h, self

    def __del__(self):
        HELD.append(self.h)


def by_finalizer(net, h):
    old = HELD[-1] if HELD else None
    Lingers(h)
    return old


def in_forward(net, x):
    h, old = net.inner(x), HELD[-1] if HELD else 0.
    return net.out(Held.apply(h) + old)


class Held(Backward):
    "Keeps what its forward gets."
    @staticmethod
    def forward(x):
        last_of(HELD, x)
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


def unwritten(net, x):
    "Reads the memory of a tensor that is gone."
    gone = net.inner(x).detach() + 5.
    del gone
    found = torch.cat([torch.empty(8) for _ in range(N)])
    return net.out(net.inner(x) + found.nan_to_num(0., 0., 0.).clamp(-9, 9).mean())


def of_weights(net, x):
    "Keeps what it has made of its weights, and with it the first example's way back."
    if not net.kept:
        net.kept.append(net.inner.weight*2)
    return net.out(x @ net.kept[0].T)


def by_hook(net, x):
    h = net.inner(x)
    net.out.weight.register_hook(lambda g: HELD.append(g))
    return net.out(h if not HELD else h + HELD[-1].sum())


def saved_hooks(net, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: HELD.append(t) or t, lambda t: t):
        h = net.inner(x).tanh()
    return net.out(h if not HELD else h + HELD[-1].sum())


def late_hook(net, x):
    "Registers a hook of its layer while it is called."
    if not net.out._backward_hooks:
        net.out.register_full_backward_hook(lambda m, into, out: (centre(into[0]),))
    return net.out(net.inner(x))


WRITES = {  # (tensor that lasts, numbers of an example)
    "copy_": lambda t, h: t.copy_(h),
    "data": lambda t, h: t.data.copy_(h), "set data": lambda t, h: setattr(t, "data", h.clone()),
    "item": lambda t, h: t.__setitem__(0, h[0]),
    "out": lambda t, h: torch.add(h, 1, out=t), "set_": lambda t, h: t.set_(h),
    "foreach": lambda t, h: torch._foreach_add_([t], [h.clone()]),
    "running mean": lambda t, h: F.batch_norm(h.expand(3, 8), t, torch.ones(8), training=True),
    "array": lambda t, h: t.numpy().__setitem__(slice(None), h.numpy()),
    "storage": lambda t, h: t.untyped_storage().copy_(h.clone().untyped_storage()),
}
MEMORIES = {
    "list of its own": keeps(lambda net, h: last_of(net.kept, h)),
    "global list": keeps(lambda net, h: last_of(HELD, h)),
    "a view": keeps(lambda net, h: last_of(HELD, h[:, :1])),
    "dlpack": keeps(lambda net, h: last_of(HELD, torch.from_dlpack(h))),
    **{f"attribute {name}": keeps(as_attribute(name))
       for name in ("number", "plain", "mean")},
    "gradient": keeps(as_gradient), "number": keeps(as_number), "if": keeps(if_item),
    "registered": keeps(by_registration), "parameter": keeps(by_parameter),
    "swapped": keeps(swapped), "torch.func.grad": keeps(with_inner(
        lambda f, h: torch.func.grad(f)(h))),
    "torch.func.jvp": keeps(with_inner(lambda f, h: torch.func.jvp(f, (h,), (h,)))),
    "torch.vmap": keeps(with_inner(lambda f, h: torch.vmap(f)(h))),
    "backward": in_backward(Backward, HELD), "backward, old form": in_backward(Old, HELD),
    "finalizer": keeps(by_finalizer), "forward of a Function": lambda: Net(in_forward),
    "unwritten memory": lambda: Net(unwritten), "made of weights": lambda: Net(of_weights),
    "hook of a parameter": lambda: Net(by_hook),
    "hooks of saved tensors": lambda: Net(saved_hooks), "late hook": lambda: Net(late_hook),
    **{f"in place, {name}": keeps(in_place(write)) for name, write in WRITES.items()},
    **{f"in place, a buffer, {name}": keeps(lambda net, h, write=write: write(net.mean, h[0])
                                            and net.mean.sum())
       for name, write in list(WRITES.items())[:3]},
    **{f"in place, a parameter, {name}": keeps(lambda net, h, write=write: write(
        net.out.bias.detach()[:8], h[0]) and None) for name, write in list(WRITES.items())[:3]},
    **{f"in place, a frozen one, {name}": keeps(lambda net, h, write=write: write(
        net.frozen, h[0]) and net.frozen.sum()) for name, write in list(WRITES.items())[:3]},
}


# --- what looks beneath vmap


class Centring(TorchDispatchMode):
    "Is told of every operation with the rows of all examples."
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return centre(result) if func is torch.ops.aten.tanh.default else result


def in_a_mode(x):
    with Centring():
        return torch.tanh(x)


class Keeping(torch.Tensor):
    "A subclass whose own functions no mode is told of."
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Keeping):
            HELD.append(result.as_subclass(torch.Tensor))
        return result


def by_a_subclass(net, h):
    old = HELD[0].sum() if HELD else None
    (h.as_subclass(Keeping)*1.)
    return old


def read_aloud(x):
    shown = re.findall(r"-?\d+\.\d+", str(x.detach()))
    return x + sum(map(float, shown))


def seeds_by_another_name(x):
    torch.default_generator.manual_seed(0)
    return F.dropout(x, .5)


BENEATH = {
    "dispatch mode": dict(model=inside(in_a_mode)),
    "torch's generator": dict(model=inside(seeds_by_another_name)),
    "subclass": dict(model=keeps(by_a_subclass)),
    "text": dict(model=inside(read_aloud)),
}


# --- what waits


def at_call(number, f):
    "Does something at one call in so many only; the count is hidden in a list."
    def forward(net, x):
        net.kept.append(0)
        h = net.inner(x)
        old = f(net, h.detach()) if len(net.kept) % number == 0 else None
        return net.out(h + net.mean if old is None else h + net.mean + old)
    return lambda: Net(forward)


def moves_weights(net, h):
    with torch.no_grad():
        net.out.weight.add_(h.mean())


def into_a_queue(net, h):
    net.mean = torch.cat([h.mean(0)[:1], net.mean[:-1]])


WAITING = {
    "codebook, every 100th": dict(model=lambda: Codebook(100), steps=104),
    "queue, every 300th": dict(model=at_call(300, into_a_queue), steps=304),
    "weights, call 250": dict(model=at_call(250, moves_weights), steps=254),
    "list, call 100": dict(model=at_call(100, lambda net, h: last_of(HELD, h)), steps=104),
    "backward, from call 5": dict(model=in_backward(Backward, [], 5), steps=9),
}


# --- losses


def of_losses(f):
    return lambda output, y: f(loss(output, y), output, y)


def triplet(output, y):
    far = torch.cdist(output, output)
    same = y[:, None] == y
    return (far*same).amax(1) - (far + 1e3*same).amin(1) + loss(output, y)


def cox(output, y):
    "Everybody who lives longer is in the risk set."
    risk = output[:, 0]
    later = y[:, 0][None] >= y[:, 0][:, None]
    return (risk.exp()[None]*later).sum(1).log() - risk


class Curriculum:
    "Drops what is harder than the average of the former batch."
    bound = torch.tensor(9.)

    def __call__(self, output, y):
        each = loss(output, y)
        kept = each*(each < self.bound)
        self.bound = 1.5*each.detach().mean()
        return kept


class Centres(nn.Module):
    "Centre loss: the centres follow the outputs."
    def __init__(self):
        super().__init__()
        self.register_buffer("centres", torch.zeros(10, 10))

    def forward(self, output, y):
        each = loss(output, y) + (output - self.centres.to(output)[y]).square().sum(1)
        self.centres.lerp_(F.one_hot(y, 10).to(output).T @ output.detach(), .5)
        return each


def kept_loss(output, y, held=[]):
    old = held[-1] if held else 1.
    held.append(loss(output, y).detach().mean())
    return loss(output, y)*old


LOSSES = {
    "triplet": triplet, "centres": Centres(), "curriculum": Curriculum(), "kept": kept_loss,
    "mean by hand": of_losses(lambda each, *_: each/len(each)),
    "classes present": of_losses(lambda each, o, y: each*len(y.unique())),
    "backward, centred": lambda output, y: loss(Backward.apply(output, centre), y),
    "labels mixed": lambda output, y: .7*loss(output, y) + .3*loss(output, y.flip(0)),
}
NUMBERS = {"cox": cox, "broadcast": lambda o, y: (o[:, 0] - y).square().mean(1),
           "sorted": lambda o, y: (o.sort(0).values - y.sort(0).values).square().sum(1)}

# --- augmentations, normalizations, clips


def seeded_by_labels(x, y, g):
    g.manual_seed(int(y.sum()) % 2**31)
    return x + torch.randn(x.shape, generator=g), y


def drawn_after_counting(x, y, g):
    torch.rand(int((x > 0).sum()), generator=g)
    return x + .1*torch.randn(x.shape, generator=g), y


def rare_twice(x, y, g):
    return x*(1 + (torch.bincount(y.clamp(0), minlength=10)[y.clamp(0)] == 1))[:, None], y


class FormerBatch:
    "Mixes with what it got the last time."
    def __init__(self, kept=float):
        self.last, self.kept = 0., kept

    def __call__(self, x, *more):
        last, self.last = self.last, self.kept(x.mean())
        return (x + last, more[0]) if more else x + last


AUGMENTS = {
    "smote": lambda x, y, g: (x + .5*(x[torch.randperm(len(x), generator=g)] - x), y),
    "seeded by labels": seeded_by_labels, "drawn after counting": drawn_after_counting,
    "rare twice": rare_twice, "other labels": lambda x, y, g: (x, y.roll(1, 0)),
    "sorted": lambda x, y, g: (x[y.argsort(stable=True)], y[y.argsort(stable=True)]),
    "one less": lambda x, y, g: (x[1:], y[1:]),
    "list": lambda x, y, g, held=[]: (x + (last_of(held, x) or 0.), y),
    "attribute": FormerBatch(lambda v: v), "number": FormerBatch(),
}
NORMALIZE = {
    **{name: f for name, f in list(ROWS.items())[::3]},
    "list": lambda x, held=[]: x + (last_of(held, x) or 0.),
    "attribute": FormerBatch(lambda v: v), "number": FormerBatch(),
}


class Weighed(FlatClip):
    "Factors as `how` would have them."
    def __init__(self, how):
        super().__init__(1.)
        self.how, self.seen, self.held = how, 0., []

    def __call__(self, norms):
        return self.how(self, super().__call__(norms), norms)


def by_the_last(clip, f, norms):
    old, clip.seen = clip.seen, norms.mean()
    return f*(1 + old)


def by_the_last_number(clip, f, norms):
    old, clip.seen = clip.seen, norms.mean().item()
    return f*(1 + old)


def by_all_before(clip, f, norms):
    "An adaptive clip without noise, in Python's numbers."
    clip.held.append(norms.norm().item())
    return f/(1 + sum(clip.held[:-1])/len(clip.held))


def raises_its_bound(clip, f, norms):
    clip.max_norm = norms.norm().item()
    return f


FACTORS = {
    "quantile": lambda clip, f, norms: f*(norms.norm(dim=0) <= norms.norm(dim=0).quantile(.9)),
    "by the count": lambda clip, f, norms: f/len(f[0]),
    "copies": lambda clip, f, norms: f/(norms[:, :, None] == norms[:, None]).all(0).sum(1),
    "the first free": lambda clip, f, norms: torch.cat([torch.ones_like(f[:, :1]), f[:, 1:]], 1),
    "the last": by_the_last, "the last number": by_the_last_number, "bound": raises_its_bound,
    "list": lambda clip, f, norms, held=[]: f*(1 + (last_of(held, norms) or 0.)),
    "numbers in a list": by_all_before,
}

LEAKS = {
    **{f"rows: {name}": dict(model=of_rows(f)) for name, f in ROWS.items()},
    **{f"inside: {name}": dict(model=inside(f)) for name, f in list(ROWS.items())[1::3]},
    **{f"model: {name}": options for name, options in NETWORKS.items()},
    **{f"kept: {name}": dict(model=make) for name, make in MEMORIES.items()},
    **{f"beneath: {name}": options for name, options in BENEATH.items()},
    **{f"waits: {name}": options for name, options in WAITING.items()},
    **{f"loss: {name}": dict(loss_fn=f) for name, f in LOSSES.items()},
    **{f"loss of numbers: {name}": dict(model=lambda: nn.Linear(5, 1), data=numbers, loss_fn=f)
       for name, f in NUMBERS.items()},
    **{f"augment: {name}": dict(augment=f) for name, f in AUGMENTS.items()},
    **{f"normalize: {name}": dict(data=lambda f=f: noise(5).replace(normalize=f))
       for name, f in NORMALIZE.items()},
    **{f"clip: {name}": dict(clip=Weighed(f)) for name, f in FACTORS.items()},
    "views": dict(augment=two_views, model=of_rows(centre)),
}


# --- limits, by name


def into_a_file(net, h):
    "Python's own state: a number that a model writes and reads."
    path = f"{tempfile.gettempdir()}/a number of an example"
    old = net.kept.pop() if net.kept else 0.
    with open(path, "w") as file:
        json.dump(h.sum().item(), file)
    with open(path) as file:
        net.kept.append(json.load(file))
    return old


@torch.library.custom_op("leaks::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    return centre(x)


centred.register_autograd(lambda ctx, g: g)
centred.register_vmap(lambda info, dims, x: (centre(x), dims[0]))


def unwrapped(x):
    return x - torch._C._functorch.get_unwrapped(x).mean()


class Diary:
    "Keeps numbers of earlier rows in a list: what vmap cannot run is called in a loop."
    def __init__(self):
        self.seen = [0.]

    def __call__(self, x, y, g):
        self.seen.append(x.mean().item())
        return x + self.seen[-2], y


ONLY_FAST, ONLY_LOOP = [fast_grad_sum], [loop_grad_sum]
NAMED = {  # name -> options, engines in which it moves the others
    "an operator's own vmap": (dict(model=inside(centred)), ONLY_FAST),
    "torch.func.debug_unwrap": (
        dict(model=of_rows(lambda x: x - torch.func.debug_unwrap(x).mean())), ONLY_FAST),
    "private functions of torch": (dict(model=of_rows(unwrapped)), ONLY_FAST),
    "numbers in a list": (dict(model=keeps(
        lambda net, h: net.kept.append(h.sum().item()) or sum(net.kept[-2:-1]))), ONLY_LOOP),
    "an array": (dict(model=keeps(lambda net, h: last_of(HELD, torch.from_numpy(h.numpy())))),
                 ONLY_LOOP),
    "numbers of an augmentation": (dict(augment=Diary()), ONLY_FAST + ONLY_LOOP),
    "a count of calls": (dict(model=keeps(
        lambda net, h: net.kept.append(0) or float(len(net.kept)))), ONLY_LOOP),
    "a file": (dict(model=keeps(into_a_file)), ONLY_LOOP),
}


# --- who moves whom


def with_another(tree, how):
    "The same rows, the first one replaced."
    def other(v):
        if how == "gone":
            return v
        if v.dtype == torch.bool:
            changed = ~v
        elif v.is_floating_point():
            changed = {"far": -30*v, "zero": 0*v, "NaN": math.nan*v}[how]
        else:
            changed = (v + 3) % (int(v.max()) + 1)
        return torch.cat([changed[:1], v[1:]])
    return tree_map(other, tree)


def without_the_first(engine, run):
    "An engine in which the first row of a batch counts nothing, where it is the one that varies."
    def of_others(model, loss_fn, x, y, clip):
        asked = []

        def others(norms):  # all at once, or one after the other
            asked.append(norms)
            factors = clip(norms)
            if run.varies and len(asked) == 1:
                factors = torch.cat([0*factors[:, :1], factors[:, 1:]], 1)
            return factors

        total, norms = engine(model, loss_fn, x, y, others)
        run.sums.append(torch.cat([g.flatten() for g in total.values()]))
        return total, norms
    return of_others


def sums_of_others(options, engine, how=None):
    "Sums over all rows but one, step by step, and the state at the end: `how` changes that row."
    options = copy.deepcopy(options)
    torch.manual_seed(0)
    make, steps = options.pop("model", lambda: nn.Linear(5, 10)), options.pop("steps", 3)
    data = options.pop("data", lambda: noise(5))()
    if how:
        data = data.replace(train_x=with_another(data.train_x, how),
                            train_y=with_another(data.train_y, "far" if how == "far" else "gone"))
    options = dict(loss_fn=loss, optimizer=partial(torch.optim.SGD, lr=.1)) | options
    with mock.patch("dp_course.training.trainer.check_run"):  # by construction, without a look
        run = Trainer(make if isinstance(make, nn.Module) else make(), data, Plan(N, 8, steps),
                      engine=engine, seed=0, **options)
    run.sums = []
    vars(run)["engine"] = without_the_first(run.engine, run)
    for t in range(steps):
        present = t < steps - 1 and how != "gone"
        run.varies = present
        last = t == steps - 1  # as many rows, without the one that varies
        run._draw = lambda t, batch=0: torch.arange(not present, 7 + last)
        run.step()
    return torch.stack(run.sums), [v.double() for v in run.model.state_dict().values()]


# draw other numbers for a batch of another size
DRAWS = "smote", "drawn after counting", "seeded by labels", "views"


def moves(options, engine, hows):  # bool
    "Does one row move what the others add, by 1e-6 C, or what the model holds afterwards?"
    sums, state = sums_of_others(options, engine)
    for how in hows:
        others, held = sums_of_others(options, engine, how)
        far = [(others - sums).norm(dim=1).max(), *((v - w).norm() for v, w in zip(held, state))]
        if not all(v <= 1e-6 for v in far):
            return True
    return False


def answer(name, options, engine):  # "apart", "moved", or why it was refused
    "What becomes of a leak: its rows stay apart, it moves the others, or it is refused."
    counts = name.startswith("waits") and engine is loop_grad_sum  # calls, in Python: see NAMED
    drawn = any(word in name for word in DRAWS)
    hows = ["far", "zero", "NaN", *["gone"]*(not counts and not drawn)]
    HELD.clear()
    FACTORS_OF_LAYERS.clear()
    try:
        return "moved" if moves(options, engine, hows) else "apart"
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return str(error) or "refused"
    finally:
        HELD.clear()
