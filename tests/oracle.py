"One example at a time by autograd alone: what every engine is compared with."
import pytest
import torch
from torch import nn
from toys import doubles, loss

from dp_course import gradients
from dp_course.data import Views, call_model, count, flatten_views, losses_of, take, tree_map
from dp_course.gradients import FlatClip

NAMES = ["loop_grad_sum", "hook_grad_sum", "vmap_grad_sum", "ghost_grad_sum",
         "bookkeeping_grad_sum", "fast_grad_sum"]
ENGINES = {name: getattr(gradients, name) for name in NAMES}
every = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
every_but_the_loop = pytest.mark.parametrize("engine", [*ENGINES.values()][1:], ids=NAMES[1:])


class PerLayer:
    "Another factor for every tensor: norms are clipped row by row."
    def __init__(self, bound):
        self.bound = bound

    def __call__(self, norms):
        factors = (self.bound/norms).clamp(max=1)
        return torch.where(norms.isfinite().all(0), factors, 0.)


class Net(nn.Module):
    "A forward that is given, and the modules and parameters that it uses."
    def __init__(self, forward, **parts):
        super().__init__()
        self.how = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.how(self, x)


def call(f):
    "A layer without parameters."
    return Net(lambda net, x: f(x))


def parameter(*shape):
    return nn.Parameter(torch.randn(shape))


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
        views = [take((rows, labels), slice(v, v + 1)) for v in range(k)]
        losses = [losses_of(loss, call_model(model, row), label, 1) for row, label in views]
        found = torch.autograd.grad(torch.cat(losses).mean(), list(params.values()),
                                    materialize_grads=True)
        norms.append(torch.stack([g.norm() for g in found]))
        for n, g, f in zip(params, found, clip(norms[-1][:, None])[:, 0]):
            total[n] += f*g
    return total, torch.stack(norms, 1) if norms else torch.zeros(len(params), 0)


def same(engine, model, x, y, clip=None, tol=1e-12, loss=loss):
    "An engine agrees with the oracle, in float64."
    clip = clip or FlatClip(.5)
    want, norms = one_at_a_time(model, loss, tree_map(torch.clone, x), y, clip)
    got, got_norms = engine(model, loss, x, y, clip)
    assert list(got) == list(want) and got_norms.shape == (len(want), count(x))
    for n in want:
        assert got[n].shape == want[n].shape and not got[n].requires_grad
        assert (got[n] - want[n]).abs().max() <= tol*max(1, want[n].abs().max()), n
    if count(x):
        assert (got_norms - norms).abs().max() <= tol*max(1, norms.max())
        assert norms.norm() > 0


def refuses(engine, model, x, y, match, loss=loss):
    with pytest.raises(ValueError, match=match):
        engine(model, loss, x, y, FlatClip(1.))


def head(*layers, d=8):
    "Layers on (b,t,d), the mean over t, three classes."
    return nn.Sequential(*layers, call(lambda x: x.mean(1)), nn.Linear(d, 3))
