"""One forward pass and one backward pass, in which the rules of the layers note every example's gradient."""
import math
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch._functorch.autograd_function import custom_function_call

from ..basics import check_kind
from ..data import call_model, count, flatten_views, leaves, losses_of, tree_map
from .dpsgd import trainable
from .isolation import (
    current_level, examples_apart, is_batched, logical, outside, physical, refusing_batched,
    replaced, tensors_of)
from .kernels import COMPOSED, KERNELS
from .layers import RULES, GhostNorm, KeptGradients, at_least_float32


class Tape:
    "What one engine call knows."
    def __init__(
        self,
        model,        # with at least one trainable parameter
        b,            # examples
        views,        # of each example
        method=None,  # weight of a layer -> piece
    ):
        self.b, self.views, self.rows = b, views, b*views
        self.method = method
        self.params = trainable(model)
        self.uses = Counter()  # id of a parameter -> how many calls used it
        self.pieces = {}       # id of a parameter -> piece
        first = next(iter(self.params.values()))
        self.dtype = at_least_float32(first.dtype)
        self.anchor = torch.zeros((), device=first.device, requires_grad=True)

    def once(self, p):
        return self.uses[id(p)] < 2

    def add(self, p, piece):
        "Note a piece of the gradient of `p`."
        old = self.pieces.get(id(p))
        if old is None:
            self.pieces[id(p)] = piece
            if self.once(p):
                piece.squared_norms()  # now, while it lies in a cache
        else:
            old.flat, old.squared = old.flat + piece.flat, None

    def add_weight(self, p, weight):
        "Note a weight's piece, made by the engine's method where that may be."
        if self.once(p):
            self.add(p, self.method(weight))
        else:
            self.add(p, weight.keep(weight.gradients(), once=False))

    def norms(self):  # (l,b) float64
        "Norms per parameter and example, zero where a parameter was not used."
        pieces = [self.pieces.get(id(p)) for p in self.params.values()]
        squares = [torch.zeros(self.b, dtype=torch.float64, device=self.anchor.device)
                   if q is None else q.squared_norms().double() for q in pieces]
        return torch.stack(squares).sqrt_()

    def total(self, factors, bad):  # (l,b), (b) or None -> dict name -> sum
        "Weighted sums of all gradients, in float64."
        sums = {}
        for (name, p), f in zip(self.params.items(), factors):
            if id(p) in self.pieces:
                sums[name] = self.pieces[id(p)].weighted_sum(f, bad).view(p.shape)
            else:
                sums[name] = torch.zeros_like(p, dtype=torch.float64)
        return sums


class Call:
    "One call of a layer: what its rule knows of it."
    def __init__(self, tape):
        self.tape, self.b, self.views, self.anchor = tape, tape.b, tape.views, tape.anchor
        self.add, self.add_weight, self.once = tape.add, tape.add_weight, tape.once


class Substitutes:
    "What stands in the place of a model's own tensors while it runs for all examples."
    def __init__(self, model, tape, rules):
        self.tape, self.rules, self.level = tape, rules, None
        self.params = {id(p): p for p in tape.params.values()}
        self.copies = {key: p.detach().expand(tape.rows, *p.shape).requires_grad_()
                       for key, p in self.params.items()}  # views: no memory
        self.buffers = {id(v): v for v in model.buffers()}
        self.seen = {}  # id -> what the model gets
        self.own_backward = False  # does the model use an autograd.Function of its own?

    def copied(self, t):
        "An example's own copy of a parameter, a copy of a buffer, any other tensor as it is."
        key = id(t)
        if key in self.copies:
            self.tape.uses[key] += 1
            if key not in self.seen:
                self.seen[key] = logical(self.copies[key], self.level)
        elif key in self.buffers and key not in self.seen:
            self.seen[key] = t.clone()
        return self.seen.get(key, t)

    def by_rule(self, func, args, kwargs):
        "The result of a layer that has a rule, from the rows of all examples at once."
        self.own_backward = self.own_backward or func is custom_function_call
        if current_level() != self.level:  # a transform of the model's own
            return NotImplemented
        if func in KERNELS:
            return self._for_all(KERNELS[func], args, kwargs)
        if func in self.rules:
            return self._by_rule(self.rules[func], *args, **kwargs)
        return NotImplemented

    def _values(self, t):
        return physical(t, self.level, self.tape.rows)

    def _for_all(self, kernel, args, kwargs):
        "Hand the rows of all examples to a function that keeps rows apart by itself."
        if not any(is_batched(t) for t in tensors_of((args, kwargs))):
            return NotImplemented
        args, kwargs = replaced(self.copied, (args, kwargs))
        with outside():
            result = kernel(*replaced(self._values, args), **replaced(self._values, kwargs))
        if result is NotImplemented:
            return result
        return replaced(lambda t: logical(t, self.level), result)

    def _by_rule(self, rule, input, *args, **kwargs):
        others = tensors_of((args, kwargs))
        learnt = [id(t) for t in others if id(t) in self.copies]
        if not learnt or any(is_batched(t) for t in others):
            return NotImplemented
        self.tape.uses.update(learnt)
        x = self._values(self.copied(input))
        with outside():
            y = rule(Call(self.tape), x, *args, **kwargs)
        return logical(y, self.level)


def _losses(model, loss_fn, rows, labels, substitutes):
    "The loss of every row, computed for one row at a time; a graph of autograd hangs on it."
    def one(x, y):
        substitutes.level = current_level()
        x, y = (tree_map(lambda v: v[None], tree) for tree in (x, y))
        loss = losses_of(loss_fn, call_model(model, x), y, 1).sum()
        substitutes.seen.clear()  # what is still alive after the call was kept by the model
        return loss

    return examples_apart(one, rows, labels, copied=substitutes.copied,
                          by_rule=substitutes.by_rule, composed=COMPOSED,
                          things=(model, loss_fn))


@contextmanager
def eager(model):
    "Run the compiled parts of a model uncompiled."
    compiled = any(m._compiled_call_impl or "_orig_mod" in m._modules for m in model.modules())
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield


def without_autocast(tape):
    "A context in which nothing is cast."
    device = tape.anchor.device.type
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def _backward(tape, losses, copies):
    "Let the gradient pass by all layers; gradients of copies are examples' own, too."
    wanted = [tape.anchor, *copies.values()]
    if not losses.requires_grad:  # no parameter matters
        return
    each = torch.full_like(losses, 1/tape.views)
    with without_autocast(tape):
        _, *found = torch.autograd.grad(losses, wanted, each, allow_unused=True)
    for p, gradient in zip(tape.params.values(), found):
        if gradient is not None:
            of_views = gradient.view(tape.views, tape.b, *p.shape)
            tape.add(p, KeptGradients(of_views[0] if tape.views == 1 else of_views.sum(0)))


def forward_backward(
    model,
    loss_fn,     # (output, y) -> one loss per row, or one number
    x,           # batch, or `Views`
    y,           # labels
    method,      # weight of a layer -> piece, see `kept_or_ghost`
    tape_of=Tape,
    rules=RULES, # none: every parameter is used by way of copies
):               # `Tape` with the pieces of every gradient
    "Take one forward pass, in which model and loss see one example, and one backward pass."
    rows, labels, b, views = flatten_views(x, y)
    tape = tape_of(model, b, views, method)
    substitutes = Substitutes(model, tape, rules)
    with eager(model), torch.enable_grad():
        losses = _losses(model, loss_fn, rows, labels, substitutes)
        with refusing_batched() if substitutes.own_backward else nullcontext():
            _backward(tape, losses, substitutes.copies)
    return tape


def clip_factors(
    tape,
    clip,  # norms (l,b) -> factors (l,b)
):         # factors (l,b) float64, norms (l,b) float64, bad (b) or None
    "Turn norms into factors; an example with a NaN or an infinity anywhere counts nothing."
    if not callable(clip):
        raise ValueError(f"{clip=!r:.80} is no clip: pass FlatClip({clip!r:.80})")
    with without_autocast(tape):
        norms = tape.norms()
        if math.isfinite(norms.sum()):  # then all of them are
            return clip(norms), norms, None
        finite = norms.isfinite().all(0)
        return torch.where(finite, clip(norms), 0.), norms, None if finite.all() else ~finite


def clipped(tape, clip):
    "Give the clipped sum, in float64, and the norms that decided on it."
    factors, norms, bad = clip_factors(tape, clip)
    with without_autocast(tape):
        return tape.total(factors, bad), norms.to(tape.dtype)


def empty_sum(model, x):
    "Give zeros and norms (l,b): what an empty batch or a frozen model contributes."
    params = trainable(model)
    sums = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in params.items()}
    first = next(iter(params.values()), leaves(x)[0])
    dtype = at_least_float32(first.dtype) if sums else torch.float32
    return sums, torch.zeros(len(sums), count(x), dtype=dtype, device=leaves(x)[0].device)


@torch.no_grad()
def one_pass(
    model,
    loss_fn,
    x,
    y,
    clip,
    method,      # weight of a layer -> piece
    rules=RULES,
):               # dict name -> clipped sum; norms (l,b)
    "Clip and add up in one forward and one backward pass."
    check_kind("is no network: pass an nn.Module", nn.Module, model=model)
    if not count(x) or not any(p.requires_grad for p in model.parameters()):
        return empty_sum(model, x)
    return clipped(forward_backward(model, loss_fn, x, y, method, rules=rules), clip)


def kept_or_ghost(weight):
    "Take norms from products where these are cheaper, and keep the gradients elsewhere."
    if weight.ghost_pays():
        squared = weight.ghost_norms()
        return GhostNorm(squared, partial(weight.weighted_sum, squared=squared))
    return weight.kept()


def fast_grad_sum(
    model,    # `nn.Module`, left exactly as it was; frozen parameters don't count, tied ones once
    loss_fn,  # (output, y) -> one loss per row, or one number
    x,        # tensor (b,...), dict or tuple of them, or `Views` (b,k,...); b may be 0
    y,        # (b,...)
    clip,     # norms (l,b) -> factors (l,b)
):            # dict name -> clipped sum; norms (l,b), before clipping
    "Clip and add up in one pass that never computes the unclipped batch gradient."
    # ValueError: what vmap cannot run, and what to use instead
    return one_pass(model, loss_fn, x, y, clip, kept_or_ghost)


def vmap_grad_sum(model, loss_fn, x, y, clip):  # as `fast_grad_sum`
    "Clip and add up the gradients of one copy of the parameters per example: no rule is used."
    return one_pass(model, loss_fn, x, y, clip, None, rules={})
