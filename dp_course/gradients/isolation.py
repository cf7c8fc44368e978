"""A model, a loss, a clip see one example at a time; nothing that they compute outlives the call."""
import gc
import traceback
import weakref
from contextlib import contextmanager
from functools import reduce
from operator import is_
from pathlib import Path

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..data import Views, count, leaves, take, tree_map

# functions of `torch.func` that look under its hood
_functorch = torch._C._functorch


@contextmanager
def forgetting(
    *modules,  # `nn.Module`s
):
    "Undo at the end whatever was assigned to attributes, parameters and buffers of modules."
    places = [vars(m) for module in modules for m in module.modules()]
    for held in list(places):
        places += [held["_parameters"], held["_buffers"], held["_modules"]]
    before = [place.copy() for place in places]
    try:
        yield
    finally:
        for place, old in zip(places, before):
            if place.keys() != old.keys() or not all(map(is_, place.values(), old.values())):
                place.clear()
                place.update(old)


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
        lasting=None,  # ids of the tensors that are copied; None: of any from outside
    ):
        super().__init__()
        self.of_example, self.lasting = of_example, lasting
        self.copied, self.by_rule, self.noted, self.composed = copied, by_rule, noted, composed

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ABOUT:
            return func(*args, **kwargs)
        if func in _HOOKS and self.of_example(args[0]):
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
            if not self._is_plain(args, kwargs):
                args, kwargs = self._with_copies(tuple(args), kwargs)
            result = func(*args, **kwargs)
        if self.noted is not None:
            self.noted((args, kwargs), result)
        return result

    def _is_plain(self, args, kwargs):
        "Is nothing among the arguments that a copy stands for? Most calls are so, and many."
        if self.lasting is None:
            return False
        for v in (*args, *kwargs.values()):
            if id(v) in self.lasting or type(v) in (tuple, list, dict):
                return False
        return True

    def _with_copies(self, args, kwargs):
        if self.copied is None:
            return args, kwargs
        copies = replaced(self.copied, (args, kwargs))
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            same = all(map(is_, tensors_of(copies), tensors_of((args, kwargs))))
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
    return ValueError(f"a tensor {tuple(t.shape)} that was computed from an example was kept"
                      f"{_place_of(t)} after the call, where later examples could read it: let "
                      "forward return it instead")


def batched_tensors():  # ids
    "Which tensors of an example the garbage collector knows, wherever they are."
    return {id(t) for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and is_batched(t)}


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


def beneath():
    "A context without any transform, in which tensors are made that outlive the call."
    return temporarily_clear_interpreter_stack()


def logical(
    value,  # (rows,...)
    level,
):          # tensor inside vmap
    "Hide the values of all examples behind a tensor of one."
    return _functorch._add_batch_dim(value, 0, level)


@contextmanager
def outside():
    "A context in which torch computes with the values of all examples."
    layer = _functorch.pop_dynamic_layer_stack()
    try:
        yield
    finally:
        _functorch.push_dynamic_layer_stack(layer)


def examples_apart(
    f,               # function of trees: is called once, for every example at the same time
    *trees,          # of tensors (b,...)
    who="the model",
    copied=None,     # tensor -> its copy, or the tensor itself
    by_rule=None,    # as for `Isolation`
    composed=(),
    lasting=(),      # ids of the tensors that are copied
    modules=(),      # whose attributes are put back
):                   # what `f` returns, with b in front
    "Run a function for every example under vmap; nothing that it computes is there afterwards."
    # ValueError: what vmap cannot run; what keeps a tensor
    kept = Kept()

    def one(*parts):
        with Isolation(copied, by_rule, kept, composed, lasting=lasting):
            return f(*parts)

    hooks = disable_saved_tensors_hooks("vmap runs no saved tensors hooks")
    with explained(who), forgetting(*modules), hooks:
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
    f,        # function of batches
    *trees,   # of tensors (b,...)
    who="a function",
):            # what `f` returns for each row alone, put together
    "Call a function of batches for one row at a time: all under vmap, or one after the other."
    # ValueError: it returns another number of rows, or keeps a tensor
    def one(*rows):
        made = f(*[tree_map(lambda v: v[None], row) for row in rows])
        return pytree.tree_map(_row_of_one, made)

    if not count(trees[0]):
        return f(*trees)
    try:
        return examples_apart(one, *trees, who=who)
    except VmapStops:
        pass
    rows = [alone(lambda copied, *row: f(*row), (), *take(trees, slice(i, i + 1)))
            for i in range(count(trees[0]))]
    return pytree.tree_map(lambda *parts: torch.cat(parts), *rows)


class _Copies:
    "What one example alone gets: a copy of every tensor that was there before it."
    def __init__(self):
        self.copies = {}      # id of a tensor from outside -> its copy
        self.inside = {}      # id -> tensor of this call, or one from outside that was copied
        self.touched = set()  # storages that hold numbers of the example

    def note_input(self, t):
        self.inside[id(t)] = t
        self.touched.add(_storage(t))

    def copied(self, t):
        "The copy of a tensor from outside; a tensor of this call as it is."
        if id(t) in self.inside:
            return self.copies.get(id(t), t)
        copy = t.detach().clone().requires_grad_(t.requires_grad)
        self.copies[id(t)] = copy
        self.inside |= {id(t): t, id(copy): copy}
        return copy

    def noted(self, given, result):
        found, sources = tensors_of(result), tensors_of(given)
        self.inside |= {id(t): t for t in found}
        if any(_storage(t) in self.touched for t in sources):
            self.touched.update(map(_storage, found or sources[:1]))  # `t[0] = x` returns nothing

    def of_example(self, t):
        return id(t) in self.inside and id(t) not in self.copies

    def refuse_kept(self, result):
        "Refuse code that has kept a tensor with numbers of the example, and not returned it."
        # ValueError
        returned = tensors_of(result)
        known = {id(t) for t in (*self.copies.values(), *returned, *(t._base for t in returned))}
        born = [weakref.ref(t) for t in self.inside.values()
                if self.of_example(t) and id(t) not in known and _storage(t) in self.touched]
        self.inside = {}
        if any(ref() is not None for ref in born):
            gc.collect()
        for t in filter(lambda t: t is not None, (ref() for ref in born)):
            raise _kept_error(t)


def _storage(t):
    return t.untyped_storage()._cdata


def alone(
    f,        # (copied, *trees) -> result; `copied(p)` is what the call uses in the place of `p`
    modules,  # `nn.Module`s whose attributes are put back
    *trees,   # of tensors of one example
):            # what `f` returns
    "Run a function for one example, with copies of all other tensors; nothing of it stays."
    # ValueError: what keeps a tensor of the example
    copies = _Copies()
    devices = [v.device for v in leaves(trees)[:1] if v.is_cuda]
    seed = torch.randint(2**62, ()).item()  # one draw an example, however many it takes itself
    with forgetting(*modules), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        result = _called(f, copies, trees)
    copies.refuse_kept(result)
    return result


def _called(f, copies, trees):
    trees = [tree_map(torch.clone, tree) for tree in trees]
    for t in leaves(trees):
        copies.note_input(t)
    with Isolation(copies.copied, noted=copies.noted, of_example=copies.of_example):
        return f(copies.copied, *trees)
