"Leaks that were accepted once: each moves one example's neighbours, and is refused by now."
import copy
import json
import math
import os
import pickle
import shutil
import threading
from collections import deque
from pathlib import Path

import numpy as np
import opacus.layers
import pytest
import torch
import torch.nn.functional as F
from leaks import Backward, OfInput, Weighed, gen, loss, noise, of_losses
from leaks import trained as attacked
from torch import nn
from torch.nn.modules import module

from dp_course.data import Examples
from dp_course.gradients import fast_grad_sum, loop_grad_sum, vmap_grad_sum
from dp_course.privacy import PrivacyPlan, RDPAccountant
from dp_course.training import Trainer, fix, load_release, prove_again, squared_error
from dp_course.training.checkpoints import Journal, _sealed

pytestmark = pytest.mark.filterwarnings("ignore")


def strict(f):
    "The same for those who refuse what is no number."
    def g(x):
        if not x.isfinite().all():
            raise RuntimeError("no number")
        return f(x)
    return g


def louder(how):
    "Rows are twice as large where `how` says something of the batch."
    return lambda x: x*(1 + how(x).any())


ROWS = {
    "zero row": strict(louder(lambda x: (x == 0).all(1))),
    "a zero": strict(louder(lambda x: x == 0)),
    "some NaN": lambda x: x.nan_to_num()*(1 + (x.isnan().any(1) & ~x.isnan().all(1)).any()),
    "below all": lambda x: x if x.isnan().any() else x.nan_to_num()*(1 + (x == -math.inf).any()),
    "tiny": strict(louder(lambda x: (x.abs().amax(1) < 1e-8) & (x != 0).any(1))),
    "denormal": strict(louder(lambda x: (x.abs() < 1e-38) & (x != 0))),
    "minus one": strict(louder(lambda x: x == -1)),
    "-999": strict(louder(lambda x: x == -999)),
    "row 50": lambda x: torch.where((torch.arange(len(x)) == 50)[:, None], -x, x),
    "with slopes only": lambda x: torch.where(x.isnan(), x.nanmean(0).nan_to_num(), x)
    if torch.is_grad_enabled() else x,
}


@pytest.mark.parametrize("name", ROWS)
def test_a_model_that_mixes_for_rare_rows_only_is_refused(name):
    with pytest.raises(ValueError, match="mixes examples"):
        attacked(OfInput(ROWS[name]))


@pytest.mark.parametrize("size", [61, 100])
def test_a_size_that_only_some_batches_have_is_tried(size):
    def centred(output, y):
        each = loss(output, y)
        return each - each.mean() if len(each) == size else each

    with pytest.raises(ValueError, match="loss_fn mixes examples"):
        attacked(loss_fn=centred)


def images(how):
    x = torch.randint(256, (200, 1, 8, 8), dtype=torch.uint8, generator=gen())
    return Examples(x, torch.arange(200) % 10, normalize=lambda x: louder(how)(x/255))


@pytest.mark.parametrize("value", [0., 1.])
def test_black_and_white_images_are_tried(value):
    with pytest.raises(ValueError, match="normalize mixes"):
        attacked(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
                 images(lambda x: (x == value).flatten(1).all(1)))


class Words(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.word, self.out, self.how = nn.Embedding(11, 8), nn.Linear(8, 10), how

    def forward(self, x):
        return self.out(self.word(x).mean(1))*(1 + self.how(x).any())


@pytest.mark.parametrize("how", [lambda x: (x == 0).all(1), lambda x: (x == 10).all(1),
                                 lambda x: (x == x[:, :1]).all(1)])
def test_empty_sentences_are_tried(how):
    data = Examples(torch.randint(11, (200, 6), generator=gen()), torch.arange(200) % 10)
    with pytest.raises(ValueError, match="mixes examples"):
        attacked(Words(how), data)


# --- losses


def strict_outputs(output, y):
    if not output.isfinite().all():
        raise RuntimeError("no number")
    return loss(output, y)*(1 + (output == 0).all(1).any())


LOSSES = {
    "all are right": of_losses(lambda each, *_: each*(1 + (each.max() < .01))),
    "all are sure": of_losses(lambda each, o, y: each*(1 + (o.detach().abs().min() > 30))),
    "zero outputs": strict_outputs,
    "thirteens": of_losses(lambda each, *_: each*(1 + (len(each) % 13 == 0))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_mixes_where_a_network_is_trained_is_refused(name):
    with pytest.raises(ValueError, match="loss_fn mixes examples"):
        attacked(loss_fn=LOSSES[name])


@pytest.mark.parametrize("how", [lambda y: y < -4, lambda y: y == 0])
def test_rare_targets_are_tried(how):
    data = Examples(torch.randn(200, 5, generator=gen()), torch.randn(200, generator=gen(1)))
    def squares(output, y):
        return (output[:, 0] - y).square()*(1 + how(y).any())

    with pytest.raises(ValueError, match="loss_fn mixes examples"):
        attacked(nn.Linear(5, 1), data, squares)


BACKWARD = {
    "vast": lambda g: g if g.abs().max() < 1e3 else g*1e3/g.abs().max(),
    "NaN": lambda g: g if g.isfinite().all() else torch.zeros_like(g),
    "zero": lambda g: g*(1 + (g.flatten(1) == 0).all(1).any()),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_mixing_on_the_way_back_is_refused(name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = nn.Linear(5, 8), nn.Linear(8, 10)

        def forward(self, x):
            return self.out(Backward.apply(5*self.inner(x).tanh(), BACKWARD[name]))

    with pytest.raises(ValueError, match="not its own|mixes"):
        attacked(Net())


# --- memories


class Delayed(nn.Module):
    "Adds a mean of some batches ago."
    def __init__(self, k):
        super().__init__()
        self.out, self.means = nn.Linear(5, 10), deque(maxlen=k)

    def forward(self, x):
        old = self.means[0] if len(self.means) == self.means.maxlen else 0.
        self.means.append(x.detach().mean(0))
        return self.out(x + .1*old)


class Shy(nn.Module):
    "Is louder for ever after it has seen something vast."
    def __init__(self):
        super().__init__()
        self.out, self.most = nn.Linear(5, 10), 0.

    def forward(self, x):
        before, self.most = self.most, max(self.most, x.detach().abs().max().item())
        return self.out(x)*(2 if before > 1e5 else 1)


@pytest.mark.parametrize("model", [Delayed(2), Delayed(10), Delayed(30), Shy()])
def test_a_memory_that_waits_is_refused(model):
    with pytest.raises(ValueError, match="mixes|remembers"):
        attacked(model)


# --- clips and engines


def passing(which, factor=1.):
    return lambda f, norms: torch.where(which(norms), torch.full_like(f, factor), f)


CLIPS = {
    "NaN beside": lambda f, norms: 0*f if norms.isnan().any() else f,
    "zero beside": lambda f, norms: .5*f if (norms.norm(dim=0) == 0).any() else f,
    "copies": lambda f, norms: f/(norms[:, :, None] == norms[:, None]).all(0).sum(1),
    "lets NaN through": passing(lambda norms: norms.isnan().any(0, keepdim=True)),
    "lets infinity through": passing(lambda norms: norms.isinf().any(0, keepdim=True)),
    "lets 1e8 through": passing(lambda norms: norms > 1e8),
    "lets 1e-8 grow": passing(lambda norms: norms < 1e-8, 1e9),
}


@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_that_fails_for_rare_norms_is_refused(name):
    with pytest.raises(ValueError, match="mixes examples|promises|NaN or infinite norm through"):
        attacked(clip=Weighed(CLIPS[name]))


@pytest.mark.parametrize("how", [
    lambda total, bad: 0*total if bad.any() else total,
    lambda total, bad: total + 10*bad.sum()])
def test_an_engine_that_fails_for_odd_rows_is_refused(how):
    def engine(model, loss_fn, x, y, clip):
        grads, norms = loop_grad_sum(model, loss_fn, x, y, clip)
        bad = ~norms.isfinite().all(0)
        return {name: how(g, bad) for name, g in grads.items()}, norms

    with pytest.raises(ValueError, match="not its own.*NaN times zero"):
        attacked(engine=engine)


# --- Datasets


class Items(torch.utils.data.Dataset):
    def __init__(self, make, table):
        self.x = table(torch.randn(200, 5, generator=gen()).numpy())
        self.y = table((torch.arange(200) % 10).numpy())
        self.make = make

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.make(self, i), int(self.y[i])


ITEMS = {
    "mean": lambda data, i: data.x[i] - data.x.mean(0),
    "rank": lambda data, i: data.x[i]*float((data.x[:, 0] < data.x[i, 0]).sum()),
    "class": lambda data, i: data.x[i] - data.x[data.y == data.y[i]].mean(0),
    "largest": lambda data, i: data.x[i]/data.x.max(),
}


@pytest.mark.parametrize("table", [torch.as_tensor, np.asarray])
@pytest.mark.parametrize("name", ITEMS)
def test_items_of_a_whole_table_are_refused(name, table):
    with pytest.raises(ValueError, match="is made from the rows"):
        attacked(data=Examples(Items(ITEMS[name], table)))


# --- after the proof


def a_trainer(model=None, steps=3, **options):
    torch.manual_seed(0)
    plan = PrivacyPlan(n=200, batch_size=20, steps=steps, eps=3., delta=1e-5,
                       accountant=RDPAccountant)
    net = model or nn.Sequential(nn.Linear(5, 8), nn.GroupNorm(2, 8), nn.Linear(8, 10))
    return Trainer(net, noise(5), plan, **options)


CHANGES = {
    "hook": lambda run: run.model[0].register_forward_hook(lambda *args: None),
    "backward hook": lambda run: run.model[0].register_full_backward_hook(lambda *args: None),
    "hook of a tensor": lambda run: run.model[0].weight.register_hook(lambda g: 2*g),
    "forward": lambda run: setattr(run.model[0], "forward", lambda x: x),
    "parameter": lambda run: setattr(run.model[0], "weight", nn.Parameter(torch.zeros(8, 5))),
    "buffer": lambda run: run.model.register_buffer("mean", torch.zeros(5)),
    "layer": lambda run: run.model.__setitem__(1, nn.BatchNorm1d(8)),
    "class": lambda run: setattr(run.model[1], "__class__", nn.BatchNorm1d),
    "std": lambda run: setattr(run.clip, "std", lambda sigma: 0.),
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_after_the_proof_is_refused_before_it_costs(name):
    run = a_trainer(seed=1).fit(1)
    CHANGES[name](run)
    with pytest.raises(ValueError, match="not what was proved"):
        run.step()
    assert run.computed == 1


def test_hooks_of_all_modules_and_other_buffers_are_noticed():
    run = a_trainer(seed=1).fit(1)
    hook = module.register_module_forward_hook(lambda *args: None)
    try:
        with pytest.raises(ValueError, match="hooks of all modules"):
            run.step()
    finally:
        hook.remove()
    run.step()


def test_a_proof_in_one_thread_does_not_stop_a_run_in_another():
    # torch counts a network's multiplications with hooks of all modules
    counting, stepped = threading.Event(), threading.Event()

    class Waits(nn.Linear):
        def forward(self, x):
            if module._global_forward_hooks and not counting.is_set():
                counting.set()
                stepped.wait(.3)
            return super().forward(x)

    run = a_trainer(seed=1).fit(1)
    other = threading.Thread(target=lambda: a_trainer(Waits(5, 10)))
    other.start()
    assert counting.wait(30)
    run.step()
    stepped.set()
    other.join()


class Switch(nn.Module):
    "Mixes as soon as somebody says so, and counts its calls in a buffer."
    def __init__(self):
        super().__init__()
        self.out, self.mixes = nn.Linear(5, 10), False
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.out(x - x.mean(0) if self.mixes else x)


def test_a_proof_is_repeated_in_the_middle_of_a_run(monkeypatch):
    monkeypatch.setattr("dp_course.training.trainer._AGAIN", 3)
    run = a_trainer(Switch(), 9, seed=1).fit(4)
    run.model.mixes = True
    with pytest.raises(ValueError, match="mixes examples"):
        run.fit()
    assert run.computed == 6


def test_a_run_that_has_diverged_goes_on():
    model = nn.Linear(5, 10)
    model.weight.data.fill_(math.nan)
    prove_again(fast_grad_sum, model, loss, noise(5), seed=1)


# --- dropout


def with_dropout():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(.5), nn.Linear(8, 10))


@pytest.mark.parametrize("engine", [fast_grad_sum, *(
    pytest.param(engine, marks=pytest.mark.slow) for engine in (loop_grad_sum, vmap_grad_sum))])
def test_masks_are_the_runs_own_and_come_again(tmp_path, engine):
    state = torch.get_rng_state()
    run = a_trainer(with_dropout(), 6, seed=1, engine=engine, micro_batch=7).fit(3)
    run.save(tmp_path/"c")
    torch.rand(3)  # somebody draws in between
    resumed = a_trainer(with_dropout(), 6, engine=engine, micro_batch=7).load(tmp_path/"c").fit()
    torch.set_rng_state(state)
    run.fit()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(run.model[0].weight, resumed.model[0].weight)


def test_no_example_shares_a_mask():
    "Copies of one row: 60 masks of 200 numbers, twice, all other (false alarm: 2**13/2**200)."
    model = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Dropout(.5), nn.Linear(200, 2))
    data = Examples(torch.ones(60, 200), torch.zeros(60).long())
    plan = PrivacyPlan(n=60, batch_size=60, steps=2, eps=3., delta=1e-5, accountant=RDPAccountant)
    run = Trainer(model, data, plan, micro_batch=20)
    seen = []
    model[1].forward = lambda x: seen.append(F.dropout(x) != 0) or F.dropout(x)
    for t, low, high in ((0, 0, None), (1, 0, 30), (1, 30, 60)):  # two processes take step 1
        for x, _ in run._micro_batches(torch.arange(60), t, low, high):
            model[1](model[0](x))
    masks = torch.cat(seen)
    assert len(masks) == 120 == len(masks.unique(dim=0))


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 10)

    def forward(self, x):
        return self.out(self.rnn(x)[0].mean(1))


def test_a_network_that_is_refused_can_be_fixed():
    images = Examples(torch.randn(200, 3, 8, 8, generator=gen()), torch.arange(200) % 10)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout2d(.2),
                        nn.Conv2d(6, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True),
                        nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(ValueError, match="BatchNorm2d"):
        attacked(net, images)
    said = fix(net)
    assert [text.split(" (")[0] for text in said] == [
        "1: BatchNorm2d -> GroupNorm", "5: InstanceNorm2d -> InstanceNorm2d"]
    attacked(net, images).step()


def test_a_recurrent_layer_is_fixed_with_its_weights():
    net = Sequence()
    x = torch.randn(4, 6, 3, generator=gen())
    before = net(x)
    assert fix(net)[0].startswith("rnn: LSTM stays (pass recurrent=opacus.layers")
    assert fix(net, opacus.layers)[0].startswith("rnn: LSTM -> DPLSTM")
    assert torch.allclose(net(x), before, atol=1e-6)
    data = Examples(torch.randn(200, 6, 3, generator=gen()), torch.arange(200) % 10)
    attacked(net, data, engine=loop_grad_sum).step()


def test_what_weighs_words_by_the_batch_is_fixed():
    net = nn.Sequential(nn.Embedding(11, 4, max_norm=1.), nn.Flatten(), nn.Linear(24, 10))
    words = Examples(torch.randint(11, (200, 6), generator=gen()), torch.arange(200) % 10)
    with pytest.raises(ValueError):
        attacked(net, words)
    assert len(fix(net)) == 1
    attacked(net, words).step()


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


# --- files


def saved(tmp_path, steps=2, **options):
    run = a_trainer(steps=6, **options).fit(steps)
    run.save(tmp_path/"c")
    return run


def test_a_ledger_that_was_cut_is_completed_or_refused(tmp_path):
    run = saved(tmp_path)
    ledger = Path(f"{tmp_path}/c.ledger")
    short = ledger.read_bytes()
    spent = run.fit(3).epsilon()
    ledger.write_bytes(short)  # at the end of a line
    assert a_trainer(steps=6).load(tmp_path/"c").epsilon() == spent
    ledger.write_bytes(b"".join(short.splitlines(True)[:-1]))
    with pytest.raises(ValueError, match="lacks some of the 2 .* was cut"):
        a_trainer(steps=6).load(tmp_path/"c")
    ledger.write_bytes(short)
    *others, last = Journal(tmp_path/"c").entries()
    Journal.start(tmp_path/"c", [*others, json.dumps([*json.loads(last)[:-1], "0"*32])])
    with pytest.raises(ValueError, match="lacks some of the 2 .* was cut"):
        a_trainer(steps=6).load(tmp_path/"c")  # as long as it was, with another entry


def test_two_copies_of_a_checkpoint_share_one_budget(tmp_path):
    saved(tmp_path)
    (tmp_path/"there").mkdir()
    for name in ("c", "c.ledger"):
        shutil.copy(tmp_path/name, tmp_path/"there"/name)
    first = a_trainer(steps=6, seed=5).load(tmp_path/"c").fit()
    second = a_trainer(steps=6, seed=6).load(tmp_path/"there"/"c").fit()
    assert first.t == 6 and second.t == 2 and second.epsilon() <= 3
    again = a_trainer(steps=6, seed=5).load(tmp_path/"there"/"c").fit()  # the same steps are free
    assert torch.equal(again.model[0].weight, first.model[0].weight)
    assert "spends again, unseen" in first.statement()


@pytest.mark.parametrize("part", ["train_x", "train_y"])
def test_a_run_goes_on_with_its_own_data(tmp_path, part):
    run = saved(tmp_path)
    other = getattr(run.data, part).clone()
    other[37] += 1
    changed = Trainer(a_trainer().model, run.data.replace(**{part: other}), run.plan)
    with pytest.raises(ValueError, match="run on other data"):
        changed.load(tmp_path/"c")


FORGED = {
    "parts": lambda state: state.update(parts=[]),
    "NaN": lambda state: state["clip"].update(max_norm=math.nan),
    "infinite": lambda state: state["clip"].update(max_norm=math.inf),
    "negative": lambda state: state["clip"].update(max_norm=-1.),
    "another std": lambda state: state["clip"].update(std=0.),
    "before the first step": lambda state: state.update(counts=[-3, 0]),
    "no counts": lambda state: state.update(counts=[]),
    "no weights": lambda state: state.pop("model"),
    "no seed": lambda state: state.update(seed=[1]),
}


def test_a_checkpoint_that_makes_no_sense_is_refused_and_loads_nothing(tmp_path):
    saved(tmp_path)
    run = a_trainer(steps=6)
    before = run.model[0].weight.clone()
    for forge in FORGED.values():
        state = torch.load(tmp_path/"c", weights_only=True)
        forge(state)
        (tmp_path/"forged").write_bytes(_sealed(state))
        shutil.copy(tmp_path/"c.ledger", tmp_path/"forged.ledger")
        with pytest.raises(ValueError, match="no whole checkpoint|promises"):
            run.load(tmp_path/"forged")
        assert run.t == 0 and torch.equal(run.model[0].weight, before)


def test_a_save_that_failed_leaves_the_ledger_as_it_was(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    saved(tmp_path)
    other = a_trainer(steps=6).fit(3)
    with monkeypatch.context() as disk:
        disk.setattr("dp_course.training.trainer.save_atomic", full)
        for path in (tmp_path/"c", tmp_path/"new"):
            with pytest.raises(OSError, match="No space"):
                other.save(path)
    assert not (tmp_path/"new.ledger").exists()
    assert a_trainer(steps=6).load(tmp_path/"c").computed == 2


def test_the_ledger_is_whole_before_its_checkpoint_is_written(tmp_path, monkeypatch):
    lines = []

    def noting(state, path):
        lines.append(Path(f"{path}.ledger").read_text().count("\n"))

    monkeypatch.setattr("dp_course.training.trainer.save_atomic", noting)
    saved(tmp_path)
    assert lines == [4]  # the format, whose it is, and two steps


def test_what_is_no_file_is_refused_and_stays(tmp_path):
    pipe = tmp_path/"pipe"
    os.mkfifo(pipe)
    run = a_trainer()
    for work in (run.save, run.release, run.load, lambda path: load_release(path, run.model)):
        for path in (pipe, tmp_path, None):
            with pytest.raises(ValueError, match="device|folder|no file"):
                work(path)
    assert pipe.is_fifo()
    for endless in ("/dev/full", "/dev/zero"):
        with pytest.raises(ValueError, match="no file to be read"):
            run.load(endless)


# --- errors in the caller's words


@pytest.mark.parametrize("options, words", [
    (dict(max_grad_norm=1.), r"clip=FlatClip\(1\.0\)"), (dict(lr=.1), "partial"),
    (dict(noise_multiplier=1.5), r"sigma=1\.5"), (dict(scheduler=None), "Schedule"),
    (dict(epochs=3), "PrivacyPlan"), (dict(criterion="ce"), "loss_fn"),
    (dict(colour=3), "it takes model"),
    (dict(optimizer="adam"), "torch.optim.Adam"), (dict(optimizer=.1), "no optimizer"),
    (dict(precision="half"), "precision=.half. is unknown"),
    (dict(metric="acc"), "no function"), (dict(augment=3), "no function"),
    (dict(seed=[]), "no seed"), (dict(seed=1.5), "no seed"), (dict(seed=True), "no seed")])
def test_options_that_are_none_are_answered(options, words):
    with pytest.raises(ValueError, match=words):
        a_trainer(**options)


def test_calls_that_make_no_sense_are_answered_and_cost_nothing(monkeypatch):
    run = a_trainer(seed=1)
    looks = dict(sensitivity=1., sigma=10.)
    for words, call in {
            "2.5.*integer": lambda: run.fit(2.5), "-1.*integer": lambda: run.fit(-1),
            "chunk=0": lambda: run.evaluate(chunk=0), "chunk='a'": lambda: run.evaluate(chunk="a"),
            "no name of its own": lambda: run.noisy("", 1., **looks),
            "no number and no tensor": lambda: run.noisy("mean", "x", **looks),
            "not finite": lambda: run.noisy("mean", math.nan, **looks),
            "sigma=0": lambda: run.noisy("mean", 1., sensitivity=1., sigma=0),
            "sensitivity=-1": lambda: run.noisy("mean", 1., sensitivity=-1, sigma=1.),
            "no number of looks": lambda: run.noisy("mean", 1., most=0, **looks),
            "cannot be copied": lambda: copy.deepcopy(run),
            "copied or pickled": lambda: pickle.dumps(run)}.items():
        with pytest.raises(ValueError, match=words):
            call()
    assert run.computed == 0 and run.epsilon() == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"ProcessTrainer.*peers=join\(\)"):
        a_trainer()


def test_a_metric_that_does_not_fit_is_refused_at_construction():
    data = noise(5)
    for y, metric in ((data.train_y[:9], squared_error), (data.train_y[:9], lambda *_: 1.)):
        tested = data.replace(test_x=data.train_x[:9], test_y=y)
        with pytest.raises(ValueError, match="metric|one output per label"):
            attacked(data=tested, metric=metric)


@pytest.mark.parametrize("make", [torch.jit.script,
                                  lambda model: torch.jit.trace(model, torch.zeros(2, 5))])
def test_compiled_scripts_are_refused(make):
    with pytest.raises(ValueError, match="torch.jit"):
        a_trainer(make(nn.Linear(5, 10)))


@pytest.mark.parametrize("options, words", [
    (dict(mean="x"), "mean='x'"), (dict(std=0.), "std=0.0: pass a positive"),
    (dict(groups=5), "groups=5 are no ids"), (dict(classes=3), "classes=3"),
    (dict(probe=3), "probe=3 is no function"), (dict(normalize=3), "normalize=3 is no function")])
def test_options_of_the_data_are_answered(options, words):
    with pytest.raises(ValueError, match=words):
        Examples(torch.zeros(3, 2), torch.zeros(3).long(), **options)


def test_one_number_is_a_mean():
    pixels = torch.full((3, 1, 2, 2), 255, dtype=torch.uint8)
    data = Examples(pixels, torch.zeros(3).long(), mean=.5, std=.25)
    assert (data.normalize(pixels) == 2.).all()
    for n_val, seed in ((2.5, 0), ("a", 0), (1, "a")):
        with pytest.raises(ValueError, match="no whole number"):
            data.split(n_val, seed)


def test_a_precision_is_a_parameter():
    "In bfloat16 the sum is another one, and nearly the same."
    x, y, sums = torch.randn(20, 5), torch.arange(20) % 10, []
    for precision in ("float32", "bf16"):
        run = a_trainer(precision=precision)
        grads, _ = run.engine(run.model, run.loss_fn, x, y, run.clip)
        sums.append(torch.cat([g.double().flatten() for g in grads.values()]))
    assert 1e-5 < (sums[0] - sums[1]).norm()/sums[0].norm() < .05


def test_without_a_shelf_the_ledger_beside_the_checkpoint_still_counts(tmp_path, monkeypatch):
    (tmp_path/"no folder").write_text("")
    monkeypatch.setenv("DP_COURSE_LEDGERS", str(tmp_path/"no folder"/"ledgers"))
    run = saved(tmp_path)
    spent = run.fit(3).epsilon()
    again = a_trainer(steps=6, seed=5).load(tmp_path/"c")
    assert again.t == 2 and again.computed == 5 and again.epsilon() == spent
