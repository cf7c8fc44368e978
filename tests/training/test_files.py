"Masks that come again, files that were cut, forged or copied, and what does not fit on a disk."
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import generator as gen

from dp_course.data import Examples
from dp_course.gradients import fast_grad_sum, loop_grad_sum, vmap_grad_sum
from dp_course.privacy import PrivacyPlan, RDPAccountant
from dp_course.training import Trainer, load_release
from dp_course.training.checkpoints import Journal, _sealed


def noise(*shape):
    return Examples(torch.randn(200, *shape, generator=gen()),
                    torch.randint(10, (200,), generator=gen(1)))


def a_trainer(model=None, steps=3, **options):
    torch.manual_seed(0)
    plan = PrivacyPlan(n=200, batch_size=20, steps=steps, eps=3., delta=1e-5,
                       accountant=RDPAccountant)
    net = model or nn.Sequential(nn.Linear(5, 8), nn.GroupNorm(2, 8), nn.Linear(8, 10))
    return Trainer(net, noise(5), plan, **options)


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
    a_trainer(steps=6).fit(2).save(tmp_path/"other")
    shutil.copy(tmp_path/"other.ledger", ledger)
    with pytest.raises(ValueError, match="of another run"):
        a_trainer(steps=6).load(tmp_path/"c")


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
