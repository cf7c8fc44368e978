"""A model, a loss, a clip see one example at a time; nothing that they compute outlives the call."""
import gc
import operator
import traceback
import warnings
import weakref
from contextlib import contextmanager
from functools import reduce
from pathlib import Path

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..data import Views, count, leaves, take, tree_map

# functions of `torch.func` that look under its hood
_functorch = torch._C._functorch


def _attributes(thing):
    "The dicts in which an object keeps its attributes, a module those of its layers, too."
    if not isinstance(thing, torch.nn.Module):
        return [vars(thing)] if type(getattr(thing, "__dict__", None)) is dict else []
    held = [vars(m) for m in thing.modules()]
    return held + [of[name] for of in held for name in ("_parameters", "_buffers", "_modules")]


@contextmanager
def forgetting(
    *things,  # `nn.Module`s, and functions or objects that are called
):
    "Undo at the end whatever was assigned to attributes, parameters and buffers."
    places = [place for thing in things for place in _attributes(thing)]
    before = [dict(place) for place in places]
    try:
        yield
    finally:
        for place, old in zip(places, before):
            for name in place.keys() - old.keys():
                del place[name]
            for name, value in old.items():
                if place.get(name, place) is not value:
                    place[name] = value


def is_batched(t):
    "Does a tensor stand for one of every example, inside vmap?"
    return _functorch.is_batchedtensor(t)


def tensors_of(
    tree,  # arguments or result of a function
):         # list of tensors
    "List the tensors in lists, tuples and dicts."
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [v for part in tree for v in tensors_of(part)]


def replaced(f, tree):
    "Call `f` on every tensor of a tree of arguments."
    if isinstance(tree, torch.Tensor):
        return f(tree)
    if type(tree) in (tuple, list):
        return type(tree)([replaced(f, part) for part in tree])
    if type(tree) is dict:
        return {key: replaced(f, part) for key, part in tree.items()}
    return tree


_HOOKS = {torch.Tensor.register_hook, torch.Tensor.grad_fn.__get__,
          torch.Tensor.register_post_accumulate_grad_hook}


_T = torch.Tensor
_ABOUT = {  # what a tensor says of itself without its numbers
    _T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.ndim.__get__, _T.requires_grad.__get__,
    _T.is_cuda.__get__, _T.is_leaf.__get__, _T.layout.__get__, _T.size, _T.dim, _T.numel, _T.stride,
    _T.is_floating_point, _T.is_complex, _T.is_contiguous, _T.__len__, _T.element_size}


class Isolation(TorchFunctionMode):
    "See every torch function that is called for one example, and keep it from what lasts."
    # ValueError: a hook, which would see the gradients of all examples at once
    def __init__(
        self,
        copied,        # tensor -> what this call gets in its place, or the tensor itself
        by_rule=None,  # (func, args, kwargs) -> result, or NotImplemented
        noted=None,    # (args, result), told of every call
        composed=(),   # dict: function of torch -> the same, made of others
        of_example=is_batched,  # does a tensor belong to the example?
    ):
        super().__init__()
        self.of_example = of_example
        self.copied, self.by_rule, self.noted, self.composed = copied, by_rule, noted, composed

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ABOUT:
            return func(*args, **kwargs)
        if func in _HOOKS and self.of_example(self.copied(args[0])):
            raise ValueError("a hook inside the model (register_hook, grad_fn) would be handed the "
                             "gradients of all examples at once: take it out; what it was to read "
                             "can be returned by forward")
        result = NotImplemented
        if self.by_rule is not None:
            result = self.by_rule(func, args, kwargs)
        if result is NotImplemented and func in self.composed:
            with self:
                result = self.composed[func](*args, **kwargs)
        if result is NotImplemented:
            args, kwargs = self._with_copies(tuple(args), kwargs)
            result = func(*args, **kwargs)
        if self.noted is not None:
            self.noted((args, kwargs), result)
        return result

    def _with_copies(self, args, kwargs):
        copies = replaced(self.copied, (args, kwargs))
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            same = all(map(operator.is_, tensors_of(copies), tensors_of((args, kwargs))))
            copies = copies if same else _widened(copies)
        return copies


def _widened(tree):
    "All floating numbers in the widest precision among them: kernels under vmap mix none."
    dtypes = {t.dtype for t in tensors_of(tree) if t.is_floating_point()}
    if len(dtypes) < 2:
        return tree
    wide = reduce(torch.promote_types, dtypes)
    return replaced(lambda t: t.to(wide) if t.is_floating_point() else t, tree)


def _place_of(t):
    "Say who holds a tensor, as far as the garbage collector knows."
    for holder in gc.get_referrers(t):
        if isinstance(holder, dict):
            names = [name for name, value in holder.items() if value is t and isinstance(name, str)]
            if names:
                return f" as {names[0]}"
    return ""


def _kept_error(t):
    what = "a tensor" if t is None else f"a tensor {tuple(t.shape)}"
    place = "" if t is None else _place_of(t)
    return ValueError(f"{what} that was computed from an example was kept{place} after the call, where later examples could read it: let "
                      "forward return it instead")


def _collections():
    return [generation["collections"] for generation in gc.get_stats()]


def batched_tensors(
    generation=None,  # of the garbage collector; default: all
):                    # ids
    "Which tensors of an example the garbage collector knows, wherever they are."
    objects = gc.get_objects(generation)
    return {id(t) for t in objects if type(t) is torch.Tensor and is_batched(t)}


@contextmanager
def refusing_batched():
    "Refuse an autograd.Function whose backward keeps a tensor of an example."
    # ValueError. No function of torch makes what a backward gets, so that `Kept` does not know it;
    # where no garbage was collected, all that is new is in the youngest generation
    gc.collect(0)
    enabled, before = gc.isenabled(), _collections()
    gc.disable()
    try:
        yield
        kept = _collections() != before or batched_tensors(0)
    finally:
        if enabled:
            gc.enable()
    if kept:
        gc.collect()
        if batched_tensors():
            raise _kept_error(None)


class Kept:
    "Notes what is computed inside `vmap`, and refuses what is still there afterwards."
    def __init__(self):
        self.born = []

    def __call__(self, args, result):
        for t in tensors_of(result):
            self.born.append(weakref.ref(t))

    def _alive(self):
        found = [ref() for ref in self.born]
        return [t for t in found if t is not None and is_batched(t)]

    def refuse(self):
        "Refuse code that has kept a tensor of an example: in a list, a closure, a global."
        # ValueError
        if self._alive():
            gc.collect()  # of a ring of objects that nobody holds
        for t in self._alive():
            raise _kept_error(t)


_HERE = Path(__file__).resolve().parent.parent  # dp_course
_TORCH = Path(torch.__file__).resolve().parent

_FUNCTION = "give the autograd.Function a setup_context and generate_vmap_rule = True"
_GRADIENT = "use torch.func.grad where it calls torch.autograd.grad"
_FUSED = "put opacus.layers.DPLSTM (DPGRU, DPRNN) there"
_NEW = "compute a new tensor instead of writing into one that all examples share"
_WHERE = "use torch.where for an if that looks at numbers"
_OTHER = "build it from other functions"
_WAYS_OUT = (  # words in a message of torch, and what to do; the first that fits counts
    ("saved tensors hooks", "use micro_batch= instead of activation checkpoints"),
    ("setup_context", _FUNCTION), ("generate_vmap_rule", _FUNCTION),
    ("does not require grad and does not have a grad_fn", _GRADIENT),
    ("requires_grad_()", _GRADIENT), ("Batch norm", "put nn.GroupNorm there"),
    ("aten::lstm", _FUSED), ("aten::gru", _FUSED), ("aten::rnn", _FUSED),
    ("inplace", _NEW), ("broadcast shape", _NEW), ("written-to tensor", _NEW),
    ("data-dependent", _WHERE), (".item()", _WHERE),
    ("data pointer", "use functions of torch, not of NumPy"),
    ("vmap", _OTHER), ("functorch", _OTHER), ("atching rule", _OTHER))


def _way_out(text):
    "Say what to do about an error of vmap; None: it is another error."
    return next((way for word, way in _WAYS_OUT if word in text), None)


def _users_line(error):
    "The last line of a traceback that is neither torch's nor ours, with its file."
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        ours = _HERE in path.parents and _HERE/"models" not in path.parents
        if not ours and _TORCH not in path.parents:
            found = f" at {path.name}, line {frame.lineno} ({frame.line})"
    return found


class VmapStops(ValueError):
    "Something that vmap cannot run."


@contextmanager
def explained(
    who,  # what is called, for the message
):
    "Say in one message what vmap cannot run, on which line, and what to do."
    # ValueError
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        way = _way_out(str(error))
        if way is None:
            raise
        why = str(error).strip().splitlines()[0][:160].rstrip(".")
        raise VmapStops(f"vmap, which calls {who} for one example, stops{_users_line(error)}: "
                        f"{why}. Either {way}, or pass engine=loop_grad_sum, which runs "
                        "anything, slowly") from None


def current_level():
    "How many transforms of `torch.func` are at work."
    return _functorch.maybe_current_level()


def physical(
    x,         # tensor inside vmap
    level,     # of this vmap
    rows:int,  # how many examples it runs
):             # (rows,...)
    "Look at the values of all examples behind a tensor."
    value, dim = _functorch._unwrap_batched(x, level)
    return value.expand(rows, *value.shape) if dim is None else value.movedim(dim, 0)


def logical(
    value,  # (rows,...)
    level,
):          # tensor inside vmap
    "Hide the values of all examples behind a tensor of one."
    return _functorch._add_batch_dim(value, 0, level)


def outside():
    "A context in which torch computes with the values of all examples."
    return retrieve_current_functorch_interpreter().lower()


def examples_apart(
    f,               # function of trees: is called once, for every example at the same time
    *trees,          # of tensors (b,...)
    who="the model",
    copied=None,     # tensor -> copy; default: all tensors as they are
    by_rule=None,
    composed=(),
    things=(),       # modules and other objects whose attributes are put back
):                   # what `f` returns, with b in front
    "Run a function for every example under vmap; nothing that it computes is there afterwards."
    # ValueError: what vmap cannot run; what keeps a tensor
    kept = Kept()

    def one(*parts):
        with Isolation(copied or (lambda v: v), by_rule, kept, composed):
            return f(*parts)

    hooks = disable_saved_tensors_hooks("vmap runs no saved tensors hooks")
    with explained(who), forgetting(*things), hooks:
        result = vmap(one, randomness="different")(*trees)
    kept.refuse()
    return result


def _views_apart(views):
    return [views.tree], views.k


def _views_again(parts, k):
    views = object.__new__(Views)
    views.tree, views.k = parts[0], k
    return views


pytree.register_pytree_node(Views, _views_apart, _views_again)


def _row_of_one(v):
    "Take the batch dimension from what a function returns for a batch of one."
    if not v.dim() or len(v) != 1:
        raise ValueError(f"got {tuple(v.shape)} for a batch of one: the first dimension of all "
                         "that it returns must count the examples")
    return v.squeeze(0)


def row_by_row(
    f,               # function of batches
    *trees,          # of tensors (b,...)
    who="a function",
    things=(),       # objects whose attributes are put back, beside `f`
    generator=None,  # is handed on as the last argument; alone, a row gets one of its own
):                   # what `f` returns for each row alone, put together
    "Call a function of batches for one row at a time: all under vmap, or one after the other."
    # ValueError: it returns another number of rows, or keeps a tensor
    more = () if generator is None else (generator,)

    def one(*rows):
        made = f(*[tree_map(lambda v: v[None], row) for row in rows], *more)
        return pytree.tree_map(_row_of_one, made)

    if not count(trees[0]):
        return f(*trees, *more)
    try:
        return examples_apart(one, *trees, who=who, things=(f, *things))
    except VmapStops:
        pass
    rows = [_one_row(f, take(trees, slice(i, i + 1)), (f, *things), generator)
            for i in range(count(trees[0]))]
    return pytree.tree_map(lambda *parts: torch.cat(parts), *rows)


def _one_row(f, row, things, generator):
    "Call a function for one row, whose random numbers no other row decides on."
    if generator is None:
        return alone(lambda copied, *trees: f(*trees), things, *row)
    seed = torch.randint(2**62, (), generator=generator, device=generator.device).item()
    own = torch.Generator(generator.device).manual_seed(seed)
    return alone(lambda copied, *trees: f(*trees, own), things, *row)


def _storage(t):
    "Where a tensor keeps its numbers; None if it does so otherwise."
    if t.layout is not torch.strided or _functorch.is_functorch_wrapped_tensor(t):
        return None
    return t.untyped_storage()


class _Storages:
    "A set of storages that keeps none of them alive."
    def __init__(self):
        self.found = {}  # address -> weak reference: torch gives an address away again

    def add(self, t):
        storage = _storage(t)
        if storage is not None:
            self.found[storage._cdata] = weakref.ref(storage)

    def __contains__(self, t):
        storage = _storage(t)
        ref = None if storage is None else self.found.get(storage._cdata)
        return ref is not None and ref() is not None

    def alive(self):  # set of addresses
        return {address for address, ref in self.found.items() if ref() is not None}


class _Numbers(TorchDispatchMode):
    "See every kernel that runs for one example, backwards as well, and where its numbers go."
    def __init__(self):
        super().__init__()
        self.made = _Storages()     # in this call
        self.touched = _Storages()  # of these, what was computed from the example
        self.copies = {}            # id of a tensor from outside -> the tensor, its copy

    def note_input(self, t):
        self.made.add(t)
        self.touched.add(t)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = tensors_of((args, kwargs))
        found = tensors_of(result) or given[:1]  # what works in place may return nothing
        touched = any(t in self.touched for t in given)
        for t in found:
            self.made.add(t)
            if touched:
                self.touched.add(t)
        return result

    def copied(self, t):
        "The copy of a tensor from outside; a tensor of this call as it is."
        if id(t) in self.copies:
            return self.copies[id(t)][1]
        if t in self.made or _functorch.is_functorch_wrapped_tensor(t):
            return t
        copy = t.detach().clone().requires_grad_(t.requires_grad)
        self.made.add(copy)
        self.copies[id(t)] = t, copy
        return copy

    def refuse_kept(self, result):
        "Refuse code that has kept numbers of the example, and not returned them."
        # ValueError
        self.copies = {}
        returned = {v._cdata for v in map(_storage, tensors_of(result)) if v is not None}
        if self.touched.alive() - returned:
            gc.collect()
        left = self.touched.alive() - returned
        if left:
            raise _kept_error(_tensor_at(left))


def _tensor_at(addresses):
    "A tensor that keeps its numbers at one of some addresses."
    with warnings.catch_warnings(action="ignore"):
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    for t in tensors:
        storage = _storage(t)
        if storage is not None and storage._cdata in addresses:
            return t


def alone(
    f,        # (copied, *trees) -> result; `copied(p)` is what the call uses in the place of `p`
    things,   # modules and other objects whose attributes are put back
    *trees,   # of tensors of one example
):            # what `f` returns
    "Run a function for one example, with copies of all other tensors; nothing of it stays."
    # ValueError: what keeps a tensor of the example
    numbers = _Numbers()
    devices = [v.device for v in leaves(trees)[:1] if v.is_cuda]
    seed = torch.randint(2**62, ()).item()  # one draw an example, however many it takes itself
    with forgetting(*things), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        result = _called(f, numbers, trees)
    numbers.refuse_kept(result)
    return result


def _called(f, numbers, trees):
    trees = [tree_map(torch.clone, tree) for tree in trees]
    for t in leaves(trees):
        numbers.note_input(t)
    with Isolation(numbers.copied, of_example=numbers.made.__contains__), numbers:
        return f(numbers.copied, *trees)
