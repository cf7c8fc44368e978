"""What is looked at before the first step: two made-up rows, and whether the parts fit together."""
import inspect
import warnings

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ..basics import check_kind
from ..data import call_model, count, leaves, losses_of, take, tree_map
from ..gradients import (
    FlatClip, bookkeeping_grad_sum, fast_grad_sum, forgetting, ghost_grad_sum, hook_grad_sum,
    loop_grad_sum, noise_std, tensors_of, trainable, vmap_grad_sum)
from ..privacy import PrivacyPlan
from .metrics import accuracy

# %% model
def check_model(
    model,
):
    "Refuse what cannot be trained at all, or not privately, by name."
    # ValueError
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("a model of torch.jit keeps its layers to itself: pass the nn.Module that "
                         "it was made from")
    check_kind("is no network: pass an nn.Module", nn.Module, model=model)
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p) or p.is_meta:
            raise ValueError(f"parameter {name} has no values yet: call the model once on a batch, "
                             "or load its weights, before you train it")
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise ValueError(f"parameter {name} has a hook, which would never be called: change "
                             "the noised gradient in an optimizer or a callback instead")
    params = trainable(model)
    if not params:
        raise ValueError(f"{type(model).__name__} has nothing to train: set requires_grad where it "
                         "shall learn")
    devices = sorted({str(p.device) for p in params.values()})
    if len(devices) > 1:
        raise ValueError(f"the model is on {', '.join(devices)}: move it to one device")
    for name, p in params.items():
        if not p.is_floating_point():
            raise ValueError(f"parameter {name} is {p.dtype}: only real numbers are clipped")
    modes = {m: m.training for m in model.modules()}
    asleep = [m for m in modes if is_frozen_norm(m)]
    model.train()
    try:
        for path, m in model.named_modules():
            _check_layer(f"{path or 'the model'} ({type(m).__name__})", m, m in asleep)
    finally:
        for m, training in modes.items():
            m.training = training


def _check_layer(who, m, was_frozen):
    "Refuse a layer that behaves otherwise for a batch than for one example, in training."
    if m._backward_hooks or m._backward_pre_hooks:
        raise ValueError(f"{who} has a backward hook, which would see the gradients of all "
                         "examples at once: remove it")
    tracks = getattr(m, "track_running_stats", False)
    if is_frozen_norm(m):  # the model's own `train` keeps it so
        return
    if was_frozen:
        raise ValueError(f"{who} is frozen and in eval mode, and training would wake it: put "
                         "torchvision.ops.FrozenBatchNorm2d there, with the same numbers, or let "
                         "fix(model) do it")
    if tracks or isinstance(m, nn.modules.batchnorm._BatchNorm):
        raise ValueError(f"{who} computes with the whole batch or keeps running statistics of "
                         "private data: put nn.GroupNorm there, or let fix(model) do it")
    if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and (m.max_norm or m.scale_grad_by_freq):
        raise ValueError(f"{who}: max_norm and scale_grad_by_freq let one example change another's "
                         "gradient; leave them out, or let fix(model) do it")


def is_frozen_norm(m):
    "Is it a batch normalization that is used as a fixed scale and shift?"
    fixed = isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    learns = any(p.requires_grad for p in m.parameters(recurse=False))
    return fixed and not learns and not m.training

# %% parts
def check_parts(
    callbacks,
    micro_batch,
    **functions,  # loss_fn, engine, metric, augment
):
    "Refuse what is no list of callbacks, no number of examples, no function."
    # ValueError
    for name, f in functions.items():
        if f is not None and not callable(f):
            raise ValueError(f"{name}={f!r:.80} is no function: help(Trainer) says what it gets "
                             "and returns")
    if not isinstance(callbacks, (list, tuple)) or not all(map(callable, callbacks)):
        raise ValueError(f"{callbacks=}: pass a list of functions f(trainer), such as [print]")
    for f in (f for f in callbacks if isinstance(f, type)):
        raise ValueError(f"callbacks hold the class {f.__name__}: pass an object of it, as in "
                         f"callbacks=[{f.__name__}(...)]")
    if micro_batch is not None and (type(micro_batch) is not int or micro_batch < 1):
        raise ValueError(f"{micro_batch=} is no number of examples: pass a positive int, or "
                         "None for the whole batch at once")


def check_clip(
    clip,
    sigma:float,  # of the plan
):
    "Refuse what is no clip, or one whose counts the plan does not pay for."
    # ValueError
    if not callable(clip) or not hasattr(clip, "sensitivity"):
        raise ValueError(f"{clip=!r:.80} is no clip: pass FlatClip(1.), or an object with a "
                         "`sensitivity` that turns norms (l,b) into factors (l,b)")
    std = torch.as_tensor(noise_std(clip, sigma), dtype=torch.float64)
    scale = torch.as_tensor(clip.sensitivity, dtype=torch.float64)
    if not ((std >= 0) & (std <= 1e25)).all() or not ((scale > 0) & (scale < 1e100)).all():
        raise ValueError(f"{clip} promises sensitivity {clip.sensitivity!r:.60}, which is no "
                         "positive finite number")

# %% plan
def _check_unit(plan, data):
    "Refuse a plan that protects another unit than the one by which the data are drawn."
    # ValueError
    unit = getattr(plan, "unit", "example")
    if data.groups is None and unit != "example":
        raise ValueError(f"the plan protects one {unit}, and the data don't say whose their "
                         f"examples are: pass Examples(..., groups=ids), one {unit}'s id per row")
    if data.groups is not None and unit == "example":
        raise ValueError(f"the plan protects single examples, and these have owners ({len(data)} "
                         f"of {data.units}): make a PrivacyPlan(n={data.units}, unit='patient', "
                         "...), or whatever one unit is; n and batch_size count units")


def check_plan(
    plan,  # `PrivacyPlan`, or anything with its fields
    data,  # `Examples`
):
    "Refuse a plan that does not fit the data or whose numbers do not add up."
    # ValueError. A `PrivacyPlan` calibrates itself; the eps of anything else is computed again
    if not hasattr(plan, "n"):
        raise ValueError(f"{plan!r} is no plan: pass PrivacyPlan(n=..., batch_size=..., steps=..., "
                         "eps=..., delta=...)")
    _check_unit(plan, data)
    n = data.units
    if plan.n != n:
        whose = "examples" if data.groups is None else "units (groups=)"
        part = "; several processes get the whole set each, and a plan for all of it"
        raise ValueError(f"the plan is for n={plan.n}, the data has {n} {whose}: make a "
                         f"PrivacyPlan(n={n}, ...){part*(n < plan.n)}")
    if type(plan) is PrivacyPlan:  # a subclass could say anything
        return
    eps = plan.accountant().step(plan.q, plan.sigma, plan.steps).epsilon(plan.delta)
    if plan.q != plan.batch_size/plan.n or not eps <= plan.eps:
        raise ValueError(f"use PrivacyPlan: this says q={plan.q:.6g} and eps={plan.eps}; "
                         f"batch_size/n is {plan.batch_size/plan.n:.6g}, sigma={plan.sigma} costs "
                         f"eps={eps:.4g}")


def in_units(
    plan,  # `PrivacyPlan`
    data,  # `Examples`
):         # str; empty where every example is a unit
    "Describe the privacy unit."
    if data.groups is None:
        return ""
    return (f" Each {plan.unit} ({len(data)/data.units:.3g} examples on average, a nonprivate "
            "number) is drawn whole, and its examples' gradients are added before the clip.")


def refuse_units(
    plan,
    what:str,  # that counts examples
):
    "Refuse what would count examples where a plan protects more than one."
    # ValueError
    unit = getattr(plan, "unit", "example")
    if unit != "example":
        raise ValueError(f"{what} is noised for one example, and one {unit} may have many: use "
                         f"trainer.noisy(..., sensitivity=what one {unit} moves it by, at most)")

# %% rows
def _words(tree):
    "Shapes and types of a tree."
    found = [f"{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" if torch.is_tensor(v)
             else type(v).__name__ for v in leaves(tree)]
    return ", ".join(found)


def _tried(who, advice, f, *args):
    "Call what a user passed, and say in the user's words where it fails."
    try:
        return f(*args)
    except Exception as error:
        if isinstance(error, ValueError) and "pass engine=" in str(error):
            raise
        shown = [a for a in args if any(map(torch.is_tensor, leaves(a)))]
        given = " and ".join(map(_words, shown))
        first = (str(error).strip().splitlines() or [""])[0][:200]
        raise ValueError(f"{who} fails on made-up rows {given}: {type(error).__name__}: {first}. "
                         f"{advice}") from error


def _of_classes(loss_fn, output):
    "Is this a cross-entropy of tensors, and which label does it ignore?"
    known = (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)
    function = getattr(loss_fn, "func", loss_fn)
    keywords = getattr(loss_fn, "keywords", {})
    ignored = keywords.get("ignore_index", getattr(loss_fn, "ignore_index", -100))
    if function not in known and type(function) not in known:
        return False, ignored
    return isinstance(output, torch.Tensor) and output.dim() > 1, ignored


def _check_label_kind(loss_fn, output, y):
    "Refuse labels of a type or shape that cross-entropy does not take."
    known, _ = _of_classes(loss_fn, output)
    if not known or not isinstance(y, torch.Tensor):
        return
    probabilities = y.is_floating_point() and y.shape == output.shape
    whole = not y.is_floating_point() and y.dtype != torch.bool
    if probabilities or whole and y.shape[1:] == output.shape[2:]:
        return
    places = "".join(f",{size}" for size in output.shape[2:]) or ","
    raise ValueError(f"labels are {_words(y)} beside outputs {_words(output)}: cross-entropy takes "
                     f"whole numbers of shape (n{places}): pass y.long(), without further "
                     "dimensions, or another loss_fn")


def _check_labels(data, loss_fn, output):
    "Refuse labels that the model has no output for."
    known, ignored = _of_classes(loss_fn, output)
    labels = data.train_y
    if not known or labels is None or isinstance(labels, (dict, tuple, list)):
        return
    if not isinstance(labels, torch.Tensor):
        labels = np.asarray(labels[np.arange(len(labels))])  # of a memmap, or chosen rows
        labels = torch.from_numpy(labels if labels.dtype.kind == "f" else labels.astype(np.int64))
    if labels.is_floating_point():
        return
    labels = labels.long()
    bad = labels[((labels < 0) | (labels >= output.shape[1])) & (labels != ignored)]
    if len(bad):
        raise ValueError(f"label {bad.flatten()[0].item()} is out of range: the model has "
                         f"{output.shape[1]} outputs, for labels 0 to {output.shape[1] - 1}")

# %% calls
def _numbers_of(model):
    "Numbers among a model's attributes, and copies of its buffers."
    kept = {f"buffer {name}": v.detach().clone() for name, v in model.named_buffers()}
    for path, m in model.named_modules():
        kept |= {f"{path}.{name}".lstrip("."): v for name, v in vars(m).items()
                 if isinstance(v, (int, float, complex)) and name != "training"}
    return kept


def _same(v, w):
    return torch.equal(v, w) if torch.is_tensor(v) else v == w


def _output_of(model, x):
    "What the model says of two rows; refuse one that changes by being called."
    # A counter would count micro-batches, and a running mean would hold un-noised numbers
    buffers = {name: v.detach().clone() for name, v in model.named_buffers()}
    with forgetting(model), torch.no_grad():
        call_model(model, tree_map(torch.clone, x))
        first = _numbers_of(model)
        output = call_model(model, tree_map(torch.clone, x))
        second = _numbers_of(model)
    for name, v in model.named_buffers():
        v.copy_(buffers[name])
    for name in [name for name, v in first.items() if not _same(v, second.get(name))]:
        raise ValueError(f"{name} of the model changes when the model is called: it would count "
                         "micro-batches or keep statistics of private rows. Keep nothing in "
                         "forward; an average of weights is a callback, EMA()")
    return output


def _warn_of_mixing(model, x):
    "Say that a model answers otherwise for three rows at once than for one: it mixes examples."
    three = tree_map(lambda v: v[torch.arange(3) % len(v)], x)
    with torch.no_grad():
        together = tensors_of(call_model(model, tree_map(torch.clone, three)))
        alone = [tensors_of(call_model(model, take(three, slice(i, i + 1)))) for i in range(3)]
    for v, *each in zip(together, *alone):
        apart = torch.cat(each) if all(w.dim() and len(w) == 1 for w in each) else v
        if v.shape == apart.shape and not torch.allclose(v, apart, 1e-2, 1e-3, equal_nan=True):
            warnings.warn("the model answers otherwise for three rows at once than for each alone: "
                          "it mixes examples. Training shows it one example at a time, so this "
                          "run is private, but evaluation in batches will look different",
                          stacklevel=6)
            return

# %% all
KNOWN_ENGINES = (fast_grad_sum, loop_grad_sum, hook_grad_sum, ghost_grad_sum, bookkeeping_grad_sum,
                 vmap_grad_sum)


def is_known(engine):
    "Is it one of the course's engines, perhaps in bfloat16?"
    return engine in KNOWN_ENGINES or getattr(engine, "inner", None) in KNOWN_ENGINES


def _check_engine(engine, model, loss_fn, x, y):
    "Compare an engine of the user's own with the loop, on made-up rows."
    clip = FlatClip(1e-2)
    want, _ = loop_grad_sum(model, loss_fn, x, y, clip)
    got, norms = _tried("the engine", "It gets (model, loss_fn, x, y, clip) and returns a dict of "
                        "clipped sums and norms (l,b)", engine, model, loss_fn, x, y, clip)
    if list(got) != list(want) or tuple(norms.shape) != (len(want), count(y)):
        raise ValueError(f"the engine returned sums of {', '.join(got)} and norms "
                         f"{tuple(norms.shape)}: return one sum for each of {', '.join(want)}, in "
                         f"this order, and norms ({len(want)},{count(y)})")
    off = sum((got[name].double() - want[name]).square().sum() for name in want).sqrt().item()
    length = sum(v.square().sum() for v in want.values()).sqrt().item()
    if not off <= .05*max(length, 1e-2):
        raise ValueError(f"the engine is off the loop by {off/max(length, 1e-300):.2g} of the "
                         "clipped sum, on made-up rows: compare it with loop_grad_sum")


def check_run(
    trainer,  # `Trainer` whose parts are there
):
    "Try all parts together on two made-up rows, before anything is drawn."
    # ValueError: what fails, in the words of whoever passed it
    model, reader = trainer.model, trainer._reader()
    modes = {m: m.training for m in model.modules()}
    devices = [reader.like.device] if reader.like.is_cuda else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        try:
            _try_rows(trainer, model, reader)
            _try_metric(trainer)
        finally:
            for m, training in modes.items():
                m.training = training


def _try_rows(trainer, model, reader):
    data, loss_fn, augment = trainer.data, trainer.loss_fn, trainer.augment
    x, y = data.made_up(2, torch.Generator().manual_seed(0))
    x = _tried("normalize", "It gets raw rows (b,...)", reader.input, x)
    y = tree_map(lambda v: v.to(reader.like.device), y)
    model.eval()
    _tried("the model", "It gets rows (b,...) as normalize makes them", _warn_of_mixing, model, x)
    model.train()
    output = _tried("the model", "It gets rows (b,...) as normalize makes them", _output_of,
                    model, x)
    _check_label_kind(loss_fn, output, y)
    _check_labels(data, loss_fn, output)
    if augment is not None:
        made = _tried("augment", "It gets (x, y, generator) and returns (x, y) with as many rows; "
                      "several views of an example are Views", reader.augmented, x, y, 0)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise ValueError(f"augment returned {_words(made)}: return a pair (x, y)")
        x, y = made
    if not is_known(trainer.engine):
        _check_engine(trainer.engine, model, loss_fn, x, y)
    else:
        _tried("the gradient", "Model and loss get one example, a batch of one", trainer.engine,
               model, loss_fn, x, y, FlatClip(1.))


def _one_number(output):
    "Whether each row has one output: a regression, or a yes or no."
    return isinstance(output, torch.Tensor) and output.numel() == len(output)


def _try_metric(trainer):
    "Refuse a metric that does not fit, on two rows of the test part."
    data, metric = trainer.data, trainer.metric
    if data.test_x is None:
        return
    rows = [(x, y) for x, y in data.test_rows(2) if len(leaves(y)[0])][:1]
    try:
        for output, y in trainer.outputs(rows):
            if metric is not accuracy or _one_number(output):
                trainer._scores(output, y)
    except (TypeError, RuntimeError, LookupError, AttributeError) as error:
        if metric is accuracy:  # the default: not all evaluate
            return
        raise ValueError(f"metric={metric!r:.80} does not fit the model's outputs on the test "
                         f"part: {error}") from error
