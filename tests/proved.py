"""A proof that is not repeated, for tests and notebooks that are about something else.

The same means: the same engine, loss, clip and augmentation, and a network and data of the same
form. Numbers count only in part: whether any are odd or below zero, and which whole ones there are.
"""
from functools import partial
from types import FunctionType

import torch


def _form(tensor):
    "What a proof on made-up rows can see of a tensor."
    form = tensor.shape, tensor.dtype, tensor.requires_grad
    tensor = tensor.detach()
    if not tensor.numel():
        return form
    if tensor.is_floating_point():
        return *form, bool(tensor.isfinite().all()), bool((tensor < 0).any()), bool(tensor.any())
    return *form, tensor.min().item(), tensor.max().item()


def contents(value, seen=()):
    "What a thing consists of, as something to compare."
    if isinstance(value, torch.Tensor):
        return _form(value)
    if id(value) in seen:
        return "itself"
    seen = (*seen, id(value))
    if isinstance(value, dict):
        return tuple((key, contents(v, seen)) for key, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), *(contents(v, seen) for v in value)
    if isinstance(value, partial):
        return partial, contents([value.func, value.args, value.keywords], seen)
    if hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType)):
        return type(value), contents(vars(value), seen)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def once(prove, proved):
    "`prove`, but what it has accepted before it accepts at once; `proved` is its memory."
    def remembering(*parts, **more):
        told = contents([parts, more])
        if told not in proved:
            prove(*parts, **more)
            proved.add(told)
    return remembering
