"A run that is killed goes on to the bit, and a file is all there or not there."
import os
import pickle
from functools import partial

import pytest
import torch
from toys import Plan, same, trainer

from dp_course.accounting import PrivacyPlan, RDPAccountant
from dp_course.checkpoints import load_checked, save_atomic
from dp_course.dpsgd import FlatClip
from dp_course.trainer import step_generator


class Average:
    "An average of the weights, with a state."
    def __init__(self):
        self.weights = {}

    def __call__(self, run):
        for n, p in run.params.items():
            old = self.weights.get(n, p.detach().clone())
            self.weights[n] = old.lerp(p.detach(), .3)

    def state_dict(self):
        return self.weights

    def load_state_dict(self, state):
        self.weights = dict(state)


class Learnt(FlatClip):
    "A threshold with a history."
    def update(self, norms, generator=None):
        self.max_norm *= 1 + .1*torch.rand(1, generator=generator).item()


def run(seed=7, plan=None, lr=.5):
    return trainer(plan or Plan(12, 4, 8, .7), seed=seed, clip=Learnt(1.),
                   optimizer=partial(torch.optim.SGD, lr=lr, momentum=.9),
                   callbacks=[Average(), lambda run: None])


def noise(seed, t):
    return torch.randn(3, generator=step_generator(seed, "noise", t))


def weights_of(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def unchanged(model, before):
    return all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_resumed_run_is_bit_identical(tmp_path):
    whole = run().fit()
    first = run().fit(3)
    first.save(tmp_path/"c")
    rest = run(lr=99.)
    torch.manual_seed(123)
    rest.load(tmp_path/"c")
    assert rest.t == rest.computed == 3
    rest.fit()
    assert same(rest.model, whole.model) and rest.clip == whole.clip
    assert rest.t == rest.computed == 8
    for k, v in whole.callbacks[0].weights.items():
        assert torch.equal(rest.callbacks[0].weights[k], v)
    assert first.fit().load(tmp_path/"c").computed == 8 and first.t == 3
    again = first.fit()  # back in time in one process: the same steps, not charged twice
    assert same(again.model, whole.model) and again.computed == 8


def test_secret_seed_survives(tmp_path):
    a = run(seed=None).fit(3)
    a.save(tmp_path/"c")
    b = run(seed=None).load(tmp_path/"c")
    assert same(a.fit().model, b.fit().model) and b.seed_policy == "secret"
    assert (tmp_path/"c").stat().st_mode & 0o077 == 0


def test_ledger_holds_steps_with_other_randomness(tmp_path):
    run(seed=7).fit(5).save(tmp_path/"c")
    other = run(seed=8).load(tmp_path/"c")
    assert other.t == other.computed == 5
    with pytest.raises(ValueError, match="not paid"):
        other.fit(4)
    assert other.computed == 8 and not same(other.model, run(seed=7).fit().model)
    mine = run(seed=8).fit(2).load(tmp_path/"c")  # two steps of its own before
    assert mine.computed == 7 and mine.left() == 1
    assert mine.accountant.history[0][2] == 7
    mine.step()
    with pytest.raises(ValueError, match="step 9"):
        mine.step()
    mine.save(tmp_path/"d")
    assert run(seed=8).load(tmp_path/"d").computed == 8
    assert run(seed=None).load(tmp_path/"d").seed_policy.startswith("reproducible")


def test_new_seed_never_repeats_noise_it_has_used(tmp_path):
    run(seed=7).fit(1).save(tmp_path/"c")
    a = run(seed=8).fit(2)  # its step 1 had other weights before it
    used = a.model.weight.grad.clone()
    a.load(tmp_path/"c").step()
    fresh = run(seed=8).load(tmp_path/"c").step()
    assert torch.equal(a.model.weight, fresh.model.weight)  # repeatable
    assert not torch.equal(noise(a._seed, 1), noise(8, 1))
    assert not torch.equal(used, a.model.weight.grad)
    a.save(tmp_path/"d")
    assert same(run(seed=8).load(tmp_path/"d").fit().model, a.fit().model)


class Bomb:
    went_off = False

    def __reduce__(self):
        return setattr, (Bomb, "went_off", True)


@pytest.mark.parametrize("kind", ["cut", "text", "empty", "pickle", "other"])
def test_bad_checkpoint_is_named_and_the_one_before_loads(tmp_path, kind):
    path, first = tmp_path/"run.checkpoint", run().fit(2)
    first.save(path)
    first.step().save(path)
    raw = path.read_bytes()
    broken = {"cut": raw[:len(raw)*2//3], "text": b"hello", "empty": b"",
              "pickle": pickle.dumps(Bomb(), 2)}
    if kind == "other":
        torch.save({"weights": torch.zeros(2)}, path)
    else:
        path.write_bytes(broken[kind])
    fresh = run()
    before = weights_of(fresh.model)
    message = "run.checkpoint .*the one before it is .*run.checkpoint.prev"
    with pytest.raises(ValueError, match=message):
        fresh.load(path)
    assert fresh.t == 0 and unchanged(fresh.model, before)
    assert fresh.load(f"{path}.prev").t == 2 and not Bomb.went_off
    with pytest.raises(FileNotFoundError, match="there is no"):
        fresh.load(tmp_path/"nothing")


@pytest.mark.parametrize("where", ["fsync", "replace", "link"])
def test_crash_while_saving_leaves_the_old_checkpoint(tmp_path, monkeypatch, where):
    path, first = tmp_path/"c", run().fit(2)
    first.save(path)
    first.step()

    def crash(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, where, crash)
    with pytest.raises(KeyboardInterrupt):
        first.save(path)
    monkeypatch.undo()
    assert run().load(path).t == 2
    first.save(path)
    assert run().load(path).t == 3


def test_disk_without_hard_links_still_keeps_two(tmp_path, monkeypatch):
    def no_links(*args):
        raise PermissionError

    monkeypatch.setattr(os, "link", no_links)
    for v in range(3):
        save_atomic({"kind": "x", "v": v}, tmp_path/"c")
    assert load_checked(tmp_path/"c", "x")["v"] == 2
    assert load_checked(tmp_path/"c.prev", "x")["v"] == 1


def test_state_that_would_not_load_is_not_written(tmp_path):
    save_atomic({"kind": "x", "v": 1}, tmp_path/"c")
    with pytest.raises(ValueError, match="not written"):
        save_atomic({"kind": "x", "v": Bomb()}, tmp_path/"c")
    assert load_checked(tmp_path/"c", "x")["v"] == 1 and not Bomb.went_off
    with pytest.raises(ValueError, match="not a y"):
        load_checked(tmp_path/"c", "y")


def test_checkpoint_of_another_plan_is_refused(tmp_path):
    run().fit(2).save(tmp_path/"c")
    others = {r"plan.steps: 8 there, 9 here": Plan(12, 4, 9, .7),
              "plan.batch_size: 4 there, 6 here": Plan(12, 6, 8, .7),
              "plan.sigma: 0.7 there, 0.8 here": Plan(12, 4, 8, .8)}
    for words, plan in others.items():
        fresh = run(plan=plan)
        with pytest.raises(ValueError, match=words):
            fresh.load(tmp_path/"c")
        assert fresh.t == 0
    with pytest.raises(ValueError, match="parts"):
        trainer(Plan(12, 4, 8, .7), clip=Learnt(1.)).load(tmp_path/"c")


def test_release_holds_weights_and_statement_only(tmp_path):
    plan = PrivacyPlan(n=12, batch_size=4, steps=5, eps=3., delta=1e-5, accountant=RDPAccountant)
    secret = trainer(plan, seed=None).fit(2)
    secret.release(tmp_path/"r")
    got = torch.load(tmp_path/"r", weights_only=True)
    assert set(got) == {"kind", "weights", "statement"}
    assert torch.equal(got["weights"]["weight"], secret.model.weight)
    assert "by 2 of 5 steps" in got["statement"]
    assert secret._seed.encode() not in (tmp_path/"r").read_bytes()
    average = Average()
    averaged = trainer(plan, callbacks=[average]).fit(3)
    averaged.release(tmp_path/"r")
    got = torch.load(tmp_path/"r", weights_only=True)["weights"]
    assert torch.equal(got["weight"], average.weights["weight"])
    assert not torch.equal(got["weight"], averaged.model.weight)
