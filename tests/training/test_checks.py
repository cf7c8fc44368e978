"What is refused before the first step, in the caller's words, and what is left as it was."
import math
import pickle
from functools import partial, wraps
from typing import NamedTuple

import numpy as np
import opacus.layers
import pytest
import torch
import torch.nn.functional as F
from innocents import Table, Two
from leaks import noise
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from toys import generator as gen
from toys import loss

from dp_course.data import Examples
from dp_course.gradients import (
    FlatClip,
    bf16_engine,
    fast_grad_sum,
    fixed_shape,
    loop_grad_sum,
)
from dp_course.privacy import PrivacyPlan, RDPAccountant
from dp_course.training import Trainer, fix

pytestmark = pytest.mark.filterwarnings("ignore")


def trainer(model=None, data=None, n=12, **options):
    torch.manual_seed(0)
    plan = PrivacyPlan(n=n, batch_size=6, steps=2, eps=3., delta=1e-5, accountant=RDPAccountant)
    return Trainer(model or nn.Linear(5, 10), data or noise(5), plan, **options)


# --- plan, data, labels


@pytest.mark.parametrize("plan", [None, {"n": 12}])
def test_what_is_no_plan_is_refused(plan):
    with pytest.raises(ValueError, match="is no plan: pass PrivacyPlan"):
        Trainer(nn.Linear(5, 10), noise(5), plan)


def whole(*shape, most=3):
    return torch.randint(most, shape, generator=gen())


@pytest.mark.parametrize("y, why", [
    (torch.arange(12), "label 10 is out of range: the model has 10 outputs"),
    (torch.arange(12) % 4 - 1, "label -1 is out of range"),
    (whole(12).float(), r"labels are \(2,\) float32 .*y.long\(\)"),
    (whole(12, 1), r"labels are \(2, 1\) int64 .*whole numbers of shape \(n,\)"),
    (whole(12).bool(), r"labels are \(2,\) bool .*y.long\(\)")])
@pytest.mark.parametrize("known", [loss, nn.CrossEntropyLoss(), F.cross_entropy],
                         ids=["per row", "module", "mean"])
def test_labels_that_do_not_fit_are_refused(y, why, known):
    with pytest.raises(ValueError, match=why):
        trainer(data=Examples(torch.randn(12, 5), y), loss_fn=known)


@pytest.mark.parametrize("kind", [np.uint16, np.int32])
def test_labels_in_arrays_are_looked_at(kind):
    data = noise(5, classes=3)
    data = Examples(data.train_x.numpy(), data.train_y.numpy().astype(kind))
    trainer(nn.Linear(5, 3), data)
    with pytest.raises(ValueError, match="label 2 is out of range"):
        trainer(nn.Linear(5, 2), data)


def some(ignored):
    return torch.arange(12).where(torch.arange(12) < 10, ignored)


@pytest.mark.parametrize("y, known", [
    (torch.full((12,), 9), loss), (torch.rand(12, 10).softmax(1), loss), (some(-100), loss),
    (some(255), nn.CrossEntropyLoss(ignore_index=255)),
    (some(255), partial(F.cross_entropy, ignore_index=255))],
    ids=["the last class", "probabilities", "to ignore", "255", "255 by a function"])
def test_labels_of_every_kind_are_taken(y, known):
    trainer(data=Examples(torch.randn(12, 5), y), loss_fn=known)


# --- models


class Counts(nn.Module):
    "Counts its calls in an attribute or a buffer."
    def __init__(self, where):
        super().__init__()
        self.out, self.calls, self.where = nn.Linear(5, 10), 0, where
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.where == "buffer":
            self.seen += 1
        else:
            self.calls += 1
        return self.out(x)


def around(layer):
    return nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Tanh(), layer), nn.Linear(5, 10))


def frozen(layer):
    return layer.requires_grad_(False)


def with_hook(kind):
    model = around(nn.Identity())
    if kind == "parameter":
        model[0].weight.register_hook(lambda g: 2*g)
    else:
        getattr(model[0], f"register_full_{kind}_hook")(lambda *args: None)
    return model


MODELS = {
    "batch norm": (around(nn.BatchNorm1d(5)), r"1\.1 \(BatchNorm1d\) computes.*GroupNorm"),
    "in eval mode": (around(nn.BatchNorm1d(5)).eval(), r"1\.1 \(BatchNorm1d\).*GroupNorm"),
    "of processes": (around(nn.SyncBatchNorm(5)), r"1\.1 \(SyncBatchNorm\).*GroupNorm"),
    "no statistics": (around(nn.BatchNorm1d(5, track_running_stats=False)), "BatchNorm1d"),
    "frozen": (around(frozen(nn.BatchNorm1d(5).eval())), "would wake it.*FrozenBatchNorm2d"),
    "frozen, awake": (around(frozen(nn.BatchNorm1d(5))), "computes with the whole batch"),
    "instance": (nn.Sequential(nn.Unflatten(1, (5, 1)), nn.InstanceNorm1d(
        5, track_running_stats=True), nn.Flatten(), nn.Linear(5, 10)), r"1 \(InstanceNorm1d\)"),
    "words by the batch": (nn.Embedding(9, 4, max_norm=1.), "max_norm and scale_grad_by_freq"),
    "counts": (Counts("attribute"), "calls of the model changes when the model is called"),
    "counts in a buffer": (Counts("buffer"), "buffer seen of the model changes"),
    "backward hook": (with_hook("backward"), r"0 \(Linear\) has a backward hook"),
    "backward pre-hook": (with_hook("backward_pre"), r"0 \(Linear\) has a backward hook"),
    "hook of a parameter": (with_hook("parameter"), r"parameter 0\.weight has a hook"),
    "other rows": (nn.Linear(6, 10), r"the model fails on made-up rows \(2, 5\) float32"),
    "nothing to train": (frozen(nn.Linear(5, 10)), "nothing to train"),
    "no parameters": (nn.Identity(), "nothing to train"),
    "lazy": (nn.LazyLinear(10), "weight has no values yet"),
    "meta": (nn.Linear(5, 10, device="meta"), "weight has no values yet"),
    "complex": (nn.Linear(5, 10, dtype=torch.cfloat), "only real numbers"),
    "text": ("resnet", "the model is a str: pass an nn.Module|is no network"),
    "script": (torch.jit.script(nn.Linear(5, 10)), "torch.jit"),
    "script inside": (around(torch.jit.script(nn.Tanh())), r"1\.1 .* is of torch.jit"),
    "trace": (torch.jit.trace(nn.Linear(5, 10), torch.zeros(2, 5)), "torch.jit"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_trained_are_refused_by_name(name):
    model, why = MODELS[name]
    with pytest.raises(ValueError, match=why):
        trainer(model)


@pytest.mark.parametrize("layer", [nn.LayerNorm(5), nn.Dropout(.5), nn.PReLU()])
def test_nothing_is_left_behind(layer):
    model = around(layer).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    torch.manual_seed(0)  # as `trainer` does
    seeded = torch.get_rng_state()
    trainer(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(seeded, torch.get_rng_state()) and torch.get_default_dtype() == torch.float32
    assert not model.training and all(p.grad is None for p in model.parameters())
    torch.set_rng_state(state)


class Row(NamedTuple):
    image: torch.Tensor
    numbers: torch.Tensor


class Remembers(nn.Module):
    "What the first call sees stays: how large the inputs are, and a table."
    def __init__(self):
        super().__init__()
        self.out, self.largest = nn.Linear(5, 10), None

    def forward(self, x):
        if self.largest is None:
            self.largest = x.abs().amax(0)
            self.register_buffer("places", torch.arange(5.))
        return self.out(x/self.largest + self.places)


def test_made_up_rows_which_know_the_range_of_private_ones_are_forgotten():
    rows = Examples(torch.randint(1, 100, (12, 5)), torch.arange(12) % 10,
                    normalize=lambda x: x.float())
    model = Remembers()
    trainer(model, rows).fit(1)
    assert model.largest is None and "places" not in dict(model.named_buffers())


def test_misspelt_names_are_listed_and_named_tuples_kept():
    def table(*names):
        x = {names[0]: torch.randn(12, 5), names[1]: torch.arange(12) % 4}
        return Examples(x, torch.arange(12) % 3)

    trainer(Table(), table("numbers", "kind"))
    with pytest.raises(ValueError, match="has 'numbers', 'kinds', the model takes numbers, kind"):
        trainer(Table(), table("numbers", "kinds"))
    x = Row(torch.randn(12, 1, 6, 6), torch.randn(12, 5))
    run = trainer(Two(), Examples(x, torch.arange(12) % 3))
    assert isinstance(run.step().data.rows(torch.arange(2))[0], Row)


# --- loss, augmentation, normalization, clip, engine, metric


class Silent:
    sensitivity = -1.

    def __call__(self, norms):
        return norms


def half(model, loss_fn, x, y, clip):
    sums, norms = loop_grad_sum(model, loss_fn, x, y, clip)
    return {name: v/2 for name, v in sums.items()}, norms


def without_bias(model, loss_fn, x, y, clip):
    sums, norms = loop_grad_sum(model, loss_fn, x, y, clip)
    return {name: v for name, v in sums.items() if "bias" not in name}, norms


@pytest.mark.parametrize("options, why", [
    (dict(loss_fn=lambda output: 1), "fails on made-up rows .*TypeError"),
    (dict(loss_fn=lambda output, y: output), "one loss per row|one number"),
    (dict(augment=lambda x: x), "augment fails on made-up rows .*TypeError"),
    (dict(augment=lambda x, y, generator: x), r"augment returned \(2, 5\) float32"),
    (dict(augment=lambda x, y, generator: (x[:0], y)), "must count the examples"),
    (dict(data=noise(5).replace(normalize=lambda: 1)), "normalize fails on made-up .*TypeError"),
    (dict(clip=1.), r"1.0 is no clip: pass FlatClip\(1"), (dict(clip=FlatClip), "is no clip"),
    (dict(clip=Silent()), "sensitivity -1.0, which is no positive"),
    (dict(clip=FlatClip(1e30)), "no positive finite number"),
    (dict(engine=half), "the engine is off the loop by 0.5 of the"),
    (dict(engine=without_bias), "sums of weight .*one sum for each of weight, bias"),
    (dict(engine=lambda model, x: None), "It gets .model, loss_fn, x, y, clip"),
    (dict(engine=lambda *parts: None), "the engine returned None"), (dict(engine=None), "no funct"),
    (dict(precision="half"), "precision=.half. is unknown"),
    (dict(metric="acc"), "no function"), (dict(augment=3), "no function"),
    (dict(seed=[]), "no seed"), (dict(seed=1.5), "no seed"), (dict(seed=True), "no seed"),
    (dict(callbacks=print), "pass a list of functions"), (dict(callbacks=[3]), "pass a list"),
    (dict(micro_batch=0), "micro_batch=0 is no number of examples")])
def test_options_that_make_no_sense_are_answered(options, why):
    with pytest.raises(ValueError, match=why):
        trainer(**options)


class Renamed(nn.Linear):
    def state_dict(self, *args, **kwargs):
        return {f"my {name}": v for name, v in super().state_dict(*args, **kwargs).items()}


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"seen": 1}


def made_in_inference_mode(*sizes):
    with torch.inference_mode():
        return nn.Linear(*sizes)


@pytest.mark.parametrize("kind, why", [
    (Renamed, "holds no weight, bias, and neither would a release"),
    (Extra, "_extra_state of state_dict.. is no tensor"),
    (made_in_inference_mode, "inference_mode counts no writes")])
def test_a_model_that_no_release_could_hold_is_refused(kind, why):
    with pytest.raises(ValueError, match=why):
        trainer(kind(5, 10))


class Caches(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.rows, self.by_name, self.kinds = [], {"old": 1}, set()

    def forward(self, x):
        if not self.training:
            self.rows.append(x)
            self.by_name["last"] = x
            self.kinds.add(x)
        return super().forward(x)


def test_made_up_rows_leave_nothing_in_a_model():
    "They know the range of private ones."
    model = trainer(Caches(5, 10)).model
    assert (model.rows, model.by_name, model.kinds) == ([], {"old": 1}, set())


def test_an_engine_of_ones_own_is_compared_and_named():
    def mine(*given):
        return fast_grad_sum(*given)

    with_dropout = nn.Sequential(nn.Linear(5, 30), nn.Dropout(.5), nn.Linear(30, 10))
    said = trainer(with_dropout, engine=mine).step().statement()
    assert "engine mine" in said and "author's word" in said
    assert "author's word" not in trainer().statement()


def test_our_engines_in_another_precision_or_shape_are_ours():
    "bfloat16 is further off the loop than the comparison with an engine of one's own allows."
    ours = fixed_shape(bf16_engine(fast_grad_sum), 4)

    @wraps(ours)
    def mine(*parts):
        return fast_grad_sum(*parts)

    assert "author's word" not in trainer(engine=ours).statement()
    assert "author's word" in trainer(engine=mine).statement()


def test_calls_that_make_no_sense_are_answered_and_cost_nothing():
    run = trainer(seed=1)
    for why, call in {
            "not finite": lambda: run.noisy("mean", math.nan, sensitivity=1., sigma=10.),
            "sigma=0": lambda: run.noisy("mean", 1., sensitivity=1., sigma=0),
            "copied or pickled": lambda: pickle.dumps(run)}.items():
        with pytest.raises(ValueError, match=why):
            call()
    assert run.computed == 0 and run.epsilon() == 0


# --- optimizers, and what writes weights


def test_an_optimizer_holds_the_model_and_nothing_else():
    net, other = nn.Linear(5, 10), [*nn.Linear(5, 10).parameters()]
    for held, why in ((other, "lacks weight, bias"),
                      ([*net.parameters(), *other], "2 parameters that are not the model's")):
        with pytest.raises(ValueError, match=why):
            trainer(net, optimizer=torch.optim.SGD(held, lr=1.))


@pytest.mark.parametrize("change", [
    lambda run: run.model.weight.add_(1.), lambda run: run.model.requires_grad_(False),
    lambda run: setattr(run.model, "weight", nn.Parameter(torch.zeros(10, 5))),
    lambda run: run.model.load_state_dict(nn.Linear(5, 10).state_dict())],
    ids=["data", "frozen", "exchanged", "loaded"])
def test_weights_change_in_the_optimizers_step_only(change):
    run = trainer(seed=1).step()
    with torch.no_grad():
        change(run)
    with pytest.raises(ValueError, match="changed outside of the optimizer's step|frozen flag"):
        run.step()
    assert run.computed == 1


def test_a_buffer_that_an_optimizer_writes_is_not_released(tmp_path):
    model = nn.Sequential(nn.Linear(5, 10))
    model.register_buffer("bias", torch.zeros(10))
    run = trainer(model)
    run.optimizer.register_step_post_hook(lambda *args: model.bias.add_(1.))
    run.step()
    with pytest.raises(ValueError, match="bias is not what it was when the run began"):
        run.release(tmp_path/"c")


# --- what it costs


class Calls(TorchFunctionMode):
    number = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Calls, Kernels])
def test_a_mode_around_a_step_would_see_all_rows(mode):
    run = trainer()
    with mode(), pytest.raises(ValueError, match=f"{mode.__name__}: a mode would be told"):
        run.step()
    with torch.device("cpu"):  # torch's own
        assert run.step().t == 1


def test_a_linear_model_is_looked_at_with_few_calls_of_torch():
    data, plan = noise(5), trainer().plan
    with Calls() as calls:
        Trainer(nn.Linear(5, 10), data, plan)
    assert 100 < calls.number < 3000


# --- layers that have a replacement


def test_a_network_that_is_refused_can_be_fixed():
    images = Examples(torch.randn(12, 3, 8, 8, generator=gen()), torch.arange(12) % 10)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout2d(.2),
                        nn.Conv2d(6, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True),
                        nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(ValueError, match="BatchNorm2d"):
        trainer(net, images)
    said = fix(net)
    assert [text.split(" (")[0] for text in said] == [
        "1: BatchNorm2d -> GroupNorm", "5: InstanceNorm2d -> InstanceNorm2d"]
    trainer(net, images).step()


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 10)

    def forward(self, x):
        return self.out(self.rnn(x)[0].mean(1))


def test_a_recurrent_layer_is_fixed_with_its_weights():
    net = Sequence()
    x = torch.randn(4, 6, 3, generator=gen())
    before = net(x)
    assert fix(net)[0].startswith("rnn: LSTM stays (pass recurrent=opacus.layers")
    assert fix(net, opacus.layers)[0].startswith("rnn: LSTM -> DPLSTM")
    assert torch.allclose(net(x), before, atol=1e-6)
    data = Examples(torch.randn(12, 6, 3, generator=gen()), torch.arange(12) % 10)
    trainer(net, data, engine=loop_grad_sum).step()


def test_what_weighs_words_by_the_batch_is_fixed():
    net = nn.Sequential(nn.Embedding(11, 4, max_norm=1.), nn.Flatten(), nn.Linear(24, 10))
    words = Examples(torch.randint(11, (12, 6), generator=gen()), torch.arange(12) % 10)
    with pytest.raises(ValueError):
        trainer(net, words)
    assert len(fix(net)) == 1
    trainer(net, words).step()


@pytest.mark.parametrize("norm", [
    nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False),
    nn.InstanceNorm1d(8, affine=True, track_running_stats=True)])
def test_what_replaces_a_layer_has_its_precision(norm):
    net = nn.Sequential(nn.Conv1d(3, 8, 1), norm, nn.Flatten(), nn.Linear(32, 2)).double()
    assert len(fix(net)) == 1
    assert net(torch.randn(5, 3, 4, dtype=torch.float64)).dtype == torch.float64
    assert all(v.dtype == torch.float64 for v in net.state_dict().values())


def test_a_layer_that_stands_twice_is_fixed_twice():
    norm = nn.BatchNorm1d(6)
    net = nn.Sequential(norm, nn.Linear(6, 6), norm)
    assert [text.split(":")[0] for text in fix(net)] == ["0", "2"]
    assert net[0] is net[2] and type(net[0]) is nn.GroupNorm


@pytest.mark.parametrize("layer", [
    nn.LSTM(3, 4, proj_size=2), nn.RNN(3, 4, nonlinearity="relu")])
def test_a_recurrent_layer_that_opacus_does_not_have_stays(layer):
    net = nn.Sequential(layer)
    said, = fix(net, opacus.layers)
    assert net[0] is layer and "stays (train with" in said


# --- who writes weights, and whose word an engine is


class WritesWhileEvaluated(nn.Module):
    "A forward that keeps a row in its weights, when it is on, in eval mode."
    def __init__(self, frozen=False):
        super().__init__()
        self.l, self.on = nn.Linear(5, 10), [False]
        self.kept = nn.Parameter(torch.zeros(5), requires_grad=not frozen)

    def forward(self, x):
        if self.on[0] and not self.training:
            with torch.no_grad():
                self.kept.copy_(x[0])
        return self.l(x) + 0*self.kept.sum()


@pytest.mark.parametrize("frozen", [False, True])
def test_an_evaluation_that_writes_weights_is_refused(frozen, tmp_path):
    data = noise(5)
    data = data.replace(test_x=data.train_x, test_y=data.train_y)
    run = trainer(WritesWhileEvaluated(frozen), data).fit(1)
    run.evaluate()
    run.model.on[0] = True
    for go_on in (run.evaluate, run.step, lambda: run.release(tmp_path/"r")):
        with pytest.raises(ValueError, match="kept: changed outside of the optimizer's step"):
            go_on()


def test_a_model_that_writes_its_weights_on_made_up_rows_is_refused_at_once():
    model = WritesWhileEvaluated()
    model.on[0] = True
    with pytest.raises(ValueError, match="kept: changed outside"):
        trainer(model)
