"An exact spy on the private step: the rate, the noise and what the optimizer gets, to the bit."
import hashlib
import math
import os
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import Plan, behind, jitter, linear, loss, same, toy

from dp_course.data import Examples, Views
from dp_course.gradients import ROUNDING, AdaptiveClip, FlatClip, LayerClip, loop_grad_sum
from dp_course.privacy import (
    PrivacyPlan,
    RDPAccountant,
    SecretSeed,
    Stream,
    in_digits,
    normal,
    poisson_indices,
    step_generator,
)
from dp_course.training import Trainer
from dp_course.training.checkpoints import Journal

SIGMA, Q = 1.3, 1/3


def three_views(x, y, g):
    return Views(torch.stack([x, jitter(x, y, g)[0], x - .1], 1)), y


class Scaled(nn.Module):
    "A parameter without dimensions, and a frozen one."
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(.7))
        self.shift = nn.Parameter(torch.tensor(.1), requires_grad=False)
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.scale*x + self.shift)


def scaled():
    torch.manual_seed(0)
    return Scaled().double()


def half():
    return linear().bfloat16()


CASES = {
    "plain": {},
    "momentum": dict(optimizer=partial(torch.optim.SGD, lr=.3, momentum=.9)),
    "adam": dict(optimizer=partial(torch.optim.Adam, lr=.01)),
    "augmented": dict(augment=jitter),
    "views": dict(augment=three_views),
    "scalar": dict(model=scaled),
    "bfloat16": dict(model=half),
    "float32": dict(model=lambda: linear(torch.float32)),
    "loop": dict(engine=loop_grad_sum),
    "micro-batches": dict(micro_batch=2),
    "adaptive": dict(clip=lambda: AdaptiveClip(4., .5, bit_sigma=2.)),
    "layers": dict(clip=lambda: LayerClip([.5, .2], groups=[0, 1])),
    "own noise": dict(clip=lambda: LayerClip([.5, .2], groups=[0, 1], own_noise=True)),
    "learnt layers": dict(clip=lambda: LayerClip([.5, .2], groups=[0, 1], batch_size=4.,
                                                 bit_sigma=3.)),
    "validation split": dict(n_val=4),
}


def made(model=linear, clip=lambda: FlatClip(.5), n_val=0, **options):
    "A trainer of 12 examples, and what it is not asked: the optimizer's inputs, rates, sums."
    data = toy(12 + n_val, dtype=torch.float64)
    data = data.split(n_val) if n_val else data
    plan = Plan(12, 4, 8, SIGMA)
    net = model()
    first = next(p for p in net.parameters() if p.requires_grad)
    if first.dtype != torch.float64:
        data = data.replace(train_x=data.train_x.float())
    return Trainer(net, data, plan, clip=clip(), seed="spy", **options)


def spied(run, monkeypatch):
    "Take a step; return what was drawn, summed and handed to the optimizer."
    seen = {"rates": []}

    def poisson(n, q, generator):
        seen["rates"].append((n, q))
        seen["idx"] = poisson_indices(n, q, generator)
        return seen["idx"]

    clipped, step = run._clipped_sum, run.optimizer.step

    def summing(idx, t, scale):
        total, norms = clipped(idx, t, scale)
        seen["sum"] = {k: v.clone() for k, v in total.items()}
        seen["std"] = run.clip.std(run.plan.sigma)
        return total, norms

    def stepping():
        seen["grad"] = {k: p.grad.clone() for k, p in run.params.items()}
        return step()

    monkeypatch.setattr("dp_course.privacy.correlated.poisson_indices", poisson)
    run._clipped_sum, run.optimizer.step = summing, stepping
    run.step()
    return seen


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", CASES)
def test_the_optimizer_gets_the_sum_plus_the_noise_over_the_batch_and_nothing_else(
        name, monkeypatch):
    run, by_hand = made(**CASES[name]), made(**CASES[name])
    for t in range(3):
        before = {k: p.detach().clone() for k, p in run.params.items()}
        seen = spied(run, monkeypatch)
        # the rate is the plan's, of the examples that are trained on; the batch is the seed's
        assert seen["rates"] == [(12, Q)] and len(run.data) == 12
        coins = torch.rand(12, dtype=torch.float64, generator=step_generator("spy", "sample", t))
        assert torch.equal(seen["idx"], (coins < Q).nonzero().flatten())
        # the noise is the entry's, in float64, one number for every number of the sum
        entry = run._ledger.entries()[-1]
        assert (entry.what, entry.t) == ("training steps", t)
        noise = Stream("spy", "noise", "training steps", t, entry.digest)
        stds = torch.as_tensor(seen["std"], dtype=torch.float64).expand(len(before)).tolist()
        assert list(seen["sum"]) == list(run.params)
        flat = isinstance(run.clip, FlatClip)
        assert stds == [SIGMA*.5]*len(stds) if flat else min(stds) >= SIGMA*.2
        for (key, total), std in zip(seen["sum"].items(), stds):
            z = normal(total.shape, noise)
            wanted = ((total.double() + std*(1 + ROUNDING)*z)/4).to(run.params[key].dtype)
            assert torch.equal(seen["grad"][key], wanted), key
        # and the weights are what the optimizer makes of it
        for p, g in zip(by_hand.params.values(), seen["grad"].values()):
            p.grad = g.clone()
        by_hand.optimizer.step()
        for p, q in zip(run.params.values(), by_hand.params.values()):
            assert torch.equal(p, q)
        monkeypatch.undo()
        del run._clipped_sum, run.optimizer.step


# --- keys


def twins(bits, start):
    "Two names whose SHAKE-256 begins with the same bits."
    seen = {}
    for t in range(2**22):
        key = hashlib.shake_256(start(t).encode()).digest(bits//8)
        if key in seen:
            return seen[key], t
        seen[key] = t


def test_all_bits_of_a_key_count():
    # about 80,000 names suffice for two with the same 32 bits; they must have nothing in common
    a, b = twins(32, lambda t: repr(("dp_course", "s", "sample", t)))
    draws = [torch.rand(4, generator=step_generator("s", "sample", t)) for t in (a, b)]
    assert not (draws[0] == draws[1]).any()
    key = hashlib.shake_256(repr(("dp_course", "s", "sample", a)).encode()).digest(4*624)
    state = step_generator("s", "sample", a).get_state()[24:24 + 8*624]
    assert state.numpy().view("<u8").tolist() == [
        int.from_bytes(key[4*i:4*i + 4], "little") for i in range(624)]
    a, b = twins(32, lambda t: repr(("dp_course stream", "s", t, 0)))
    assert not set(Stream("s", a).words(4).tolist()) & set(Stream("s", b).words(4).tolist())


# --- released weights


def linear_loss(output, y):
    "Its gradient does not depend on the weights: what one person adds stays what it is."
    return output[torch.arange(len(y)), y]


def final_weights(rows, monkeypatch, **options):
    "Weights after a whole run, with noise that depends on the step only."
    torch.manual_seed(0)
    model = nn.Linear(500, 40, bias=False).double()
    data = Examples(rows, torch.arange(len(rows)) % 40)
    monkeypatch.setattr(SecretSeed, "noise", lambda self, entry: Stream(self.key, entry.t))
    run = Trainer(model, data, Plan(len(rows), 10, 30, SIGMA), loss_fn=linear_loss, seed="known",
                  clip=FlatClip(.5), optimizer=partial(torch.optim.SGD, lr=2.), **options)
    start = model.weight.detach().clone()
    return (start - run.fit().model.weight.detach())*10/2, run


@pytest.mark.parametrize("augment", [None, jitter, three_views])
def test_a_released_run_holds_one_person_and_the_noise_that_the_plan_says(augment, monkeypatch):
    rows = torch.zeros(40, 500, dtype=torch.float64)
    noise, _ = final_weights(rows, monkeypatch)
    # 20,000 numbers, each the sum of 30: the std within 5.5 standard errors (2e7 runs)
    assert abs(noise.std()/(SIGMA*.5*math.sqrt(30)) - 1) < 5.5/math.sqrt(40_000)
    rows[7] = 3 + torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    joined, run = final_weights(rows, monkeypatch, augment=augment and quiet(augment))
    moved = joined - noise
    times = sum(7 in poisson_indices(40, .25, step_generator("known", "sample", t)).tolist()
                for t in range(30))
    assert 0 < times < 20 and moved.norm() <= .5*times*(1 + 1e-9)
    assert moved.norm() > .5*times*(1 - 1e-2)
    assert run.computed == 30


def quiet(augment):
    "The same, but it leaves empty rows empty."
    def of_people(x, y, g):
        views, labels = augment(x, y, g)
        there = (x != 0).any(1)
        if isinstance(views, Views):
            return Views(views.tree*there[:, None, None]), labels
        return views*there[:, None], labels
    return of_people


# --- nothing is released twice, and nothing unpaid


def paying(seed=7, lr=.5, data=None, steps=10, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(300, 3, bias=False)).double()
    plan = PrivacyPlan(n=12, batch_size=6, steps=steps, eps=3., delta=1e-5,
                       accountant=RDPAccountant)
    options = {"clip": FlatClip(1.), "optimizer": partial(torch.optim.SGD, lr=lr), **options}
    return Trainer(model, data or people(), plan, seed=seed, **options)


def people(change=None):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(255, (12, 1, 10, 30), generator=g, dtype=torch.uint8)
    y = torch.arange(12) % 3
    if change:
        change(x, y)
    return Examples(x, y, x, y)


def test_fifteen_gradients_cannot_be_had_for_ten(tmp_path):
    gradients = []

    def note(run):
        gradients.append(run.model[1].weight.grad.clone())

    paying(callbacks=[note]).fit(5).save(tmp_path/"c")
    assert paying(callbacks=[note]).load(tmp_path/"c").fit().t == 10
    for lr in (.1, .05):
        slow = paying(callbacks=[note]).load(tmp_path/"c")
        slow.optimizer.param_groups[0]["lr"] = lr
        slow.fit()  # its first step was seen before; what comes after is not paid for
        assert slow.computed == 10 and slow.t == 6 and slow.epsilon() <= 3
        with pytest.raises(ValueError, match="step 11 is not paid for"):
            slow.step()
    assert len({g.numpy().tobytes() for g in gradients}) == 10


def relabel(x, y):
    y[:] = (y + 1) % 3


def repaint(x, y):
    x[4] += 1  # who is drawn in step 1


def other_loss(output, y):
    return loss(output, y)*(1 + .01*(y == 0))


CHANGES = {
    "loss": dict(loss_fn=other_loss),
    "augment": dict(augment=jitter),
    "normalize": dict(data=people().replace(mean=(.1,), std=(1.,))),
    "clip": dict(),
    "seed": dict(seed=8),
}


OTHER_DATA = {
    "one label": people(lambda x, y: y[4:5].add_(1).remainder_(3)),
    "all labels": people(relabel),
    "one image": people(repaint),
}


@pytest.mark.parametrize("what", OTHER_DATA)
def test_a_step_on_other_data_is_refused(what, tmp_path):
    paying().fit(1).save(tmp_path/"c")
    with pytest.raises(ValueError, match="run on other data"):
        paying(data=OTHER_DATA[what]).load(tmp_path/"c")


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_step_has_noise_of_its_own_and_is_billed(what, tmp_path):
    # 900 numbers: a cosine of two unrelated vectors is below 5.5/30 but once in 2e7 cases
    first = paying().fit(1)
    first.save(tmp_path/"c")
    calm = paying().load(tmp_path/"c").step()
    changed = paying(**CHANGES[what]).load(tmp_path/"c")
    if what == "clip":
        changed.clip.max_norm = .9
    idx = poisson_indices(12, .5, step_generator(7, "sample", 1))
    sums = []
    for run in (paying().load(tmp_path/"c"), changed):
        sums.append(run._clipped_sum(idx, 1, run.clip.sensitivity)[0]["1.weight"])
    changed.step()
    true = (sums[0] - sums[1]).flatten()
    seen = (calm.model[1].weight.grad - changed.model[1].weight.grad).flatten()*6
    assert changed.computed == 3, "billed"
    assert seen.norm() > 10, "no noise has cancelled"
    if true.norm() > 0:
        assert abs(F.cosine_similarity(seen, true, dim=0)) < 5.5/30 + true.norm()/seen.norm()
    again = paying(**CHANGES[what]).load(tmp_path/"c")
    if what == "clip":
        again.clip.max_norm = .9
    if what != "seed":  # the same change again is free, and the same
        assert same(again.step().model, changed.model)
        assert again.computed == 3


def test_a_batch_never_serves_for_two_sums(tmp_path, monkeypatch):
    drawn = []

    def noting(n, q, generator):
        drawn.append(tuple(poisson_indices(n, q, generator).tolist()))
        return torch.tensor(drawn[-1], dtype=torch.int64)

    monkeypatch.setattr("dp_course.privacy.correlated.poisson_indices", noting)
    paying().fit(1).save(tmp_path/"c")
    paying().load(tmp_path/"c").step()
    paying(loss_fn=other_loss).load(tmp_path/"c").step()
    first, second, tried, taken = drawn
    assert second == tried != taken


def test_refused_is_refused_before_anything_is_drawn(tmp_path, monkeypatch):
    run = paying(steps=2).fit()
    run.save(tmp_path/"c")
    before = run.model[1].weight.detach().clone()
    ledger = (tmp_path/"c.ledger").read_bytes()

    def never(*args):
        raise AssertionError("noise was drawn")

    monkeypatch.setattr(SecretSeed, "noise", never)
    for refused in (run.step, partial(run.noisy, "mean", 1., sensitivity=1., sigma=.1)):
        with pytest.raises(ValueError, match="not paid for|would bring the run to"):
            refused()
    assert torch.equal(run.model[1].weight, before) and run.t == run.computed == 2
    assert (tmp_path/"c.ledger").read_bytes() == ledger


def test_an_entry_is_on_the_disk_before_its_noise_is_drawn(tmp_path, monkeypatch):
    run = paying(seed=None)
    run.save(tmp_path/"c")
    draw, lines = SecretSeed.noise, []

    def watched(self, entry):
        lines.append((tmp_path/"c.ledger").read_text().count("training steps"))
        return draw(self, entry)

    monkeypatch.setattr(SecretSeed, "noise", watched)
    run.fit(3)
    assert lines == [1, 2, 3]
    assert run._seed not in (tmp_path/"c.ledger").read_text()
    assert (tmp_path/"c.ledger").stat().st_mode & 0o077 == 0


def test_a_full_disk_stops_the_step_before_its_noise(tmp_path, monkeypatch):
    run = paying()
    run.save(tmp_path/"c")
    before = run.model[1].weight.detach().clone()
    fsync = os.fsync

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run.step()
    assert torch.equal(run.model[1].weight, before) and run.t == run.computed == 0
    monkeypatch.setattr(os, "fsync", fsync)
    assert same(run.step().model, paying().step().model)
    assert len(Journal(tmp_path/"c").entries()) == 2  # the run's name, and this step
    assert run.computed == 1 == paying().load(tmp_path/"c").computed


def test_what_was_computed_after_a_checkpoint_is_found_again(tmp_path):
    run = paying(steps=6).fit(2)
    run.save(tmp_path/"c")
    old = (tmp_path/"c").read_bytes()
    run.fit(2).save(tmp_path/"c")
    (tmp_path/"c").write_bytes(old)  # an old checkpoint is copied back over a new one
    back = paying(steps=6).load(tmp_path/"c")
    assert (back.t, back.computed) == (2, 4)
    assert back.fit().computed == 6
    assert same(back.model, paying(steps=6).fit().model)
    assert paying(steps=6).load(tmp_path/"c.prev").computed == 6  # it has the ledger of c
    changed = paying(steps=6, loss_fn=other_loss).load(tmp_path/"c")
    assert changed.fit().t == 2 and changed.computed == 6
    (tmp_path/"c.ledger").unlink()
    with pytest.raises((ValueError, FileNotFoundError), match="ledger"):
        paying(steps=6).load(tmp_path/"c")


def test_two_trainers_on_one_checkpoint_see_each_other(tmp_path):
    paying(steps=6).fit(2).save(tmp_path/"c")
    a, b = paying(steps=6).load(tmp_path/"c"), paying(steps=6).load(tmp_path/"c")
    behind(b, loss_fn=other_loss)
    a.step()
    b.step()  # learns of a's step when it writes its own: with a's batch it may do nothing
    a.step()
    assert b.t == 3 and a.t == 4 and a.computed == 6
    for run in (a, b):
        with pytest.raises(ValueError, match="was faster|not paid for"):
            run.step()
    assert paying(steps=6).load(tmp_path/"c").computed >= 6
    assert same(a.model, paying(steps=6).fit(4).model)


def test_who_hears_of_the_last_step_too_late_releases_nothing(tmp_path):
    paying(steps=6).fit(5).save(tmp_path/"c")
    a, b = paying(steps=6).load(tmp_path/"c"), paying(steps=6, seed=8).load(tmp_path/"c")
    before = b.model[1].weight.clone()
    a.step()
    with pytest.raises(ValueError, match="another trainer on this checkpoint was faster"):
        b.step()  # with batches of its own: nothing but the bill stops it
    assert torch.equal(b.model[1].weight, before) and b.t == 5
    with pytest.raises(ValueError, match="step 8 is not paid for"):
        b.step()  # nor when it asks again
    again = paying(steps=6, seed=8).load(tmp_path/"c")
    with pytest.raises(ValueError, match="is not paid for"):
        again.step()  # nor after a restart
    first = paying(steps=6).load(tmp_path/"c")
    first.step()  # which was paid for: free once more
    assert same(a.model, first.model)


def test_an_answer_that_came_too_late_is_not_given_later(tmp_path):
    def looking():
        plan = PrivacyPlan(n=12, batch_size=6, steps=2, eps=3., delta=1e-5, releases=(4.,),
                           accountant=RDPAccountant)
        model = nn.Sequential(nn.Flatten(), nn.Linear(300, 3, bias=False)).double()
        return Trainer(model, people(), plan, seed=7)
    looking().fit().save(tmp_path/"c")
    a, b = looking().load(tmp_path/"c"), looking().load(tmp_path/"c")
    a.noisy("one", 1., sensitivity=1., sigma=4.)
    for why in ("was faster", "nothing was released"):
        with pytest.raises(ValueError, match=why):
            b.noisy("two", 1., sensitivity=1., sigma=4., asked={"question": 1})


@pytest.mark.parametrize("name", ["std", "norms", "batch size", "what", "sigma", "sum std"])
def test_no_name_of_a_parameter_hides_its_sum_from_the_noise(name):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.zeros(3, 5).double()))

        def forward(self, x):
            return x@next(self.parameters()).T
    g = torch.Generator().manual_seed(0)
    data = Examples(torch.randn(40, 5, generator=g).double(), torch.arange(40) % 3)
    plan = PrivacyPlan(n=40, batch_size=20, steps=3, eps=3., delta=1e-5, accountant=RDPAccountant)
    run = Trainer(Named(), data, plan, seed=0)
    one = entry_of(run)
    data.train_x.mul_(-1)  # the same norms, another sum
    other = entry_of(run)
    assert one.digest != other.digest


def test_a_look_may_be_as_sensitive_as_a_pixel():
    run, x = paying(), torch.full((10_000,), 255, dtype=torch.uint8)
    noisy = run.noisy("pixels", torch.zeros(10_000), sensitivity=x.max(), sigma=50)
    assert noisy.std() > .9*50*255


def test_what_was_asked_hides_nothing_of_a_look():
    run = paying()
    run.noisy("r", 5., sensitivity=1., sigma=50., asked={"weight 1.weight": torch.zeros(3)})
    run.noisy("r", 5., sensitivity=1., sigma=50., asked={"weight 1.weight": torch.ones(3)})
    run.noisy("r", 5., sensitivity=1., sigma=50., asked={"look": 3})
    run.noisy("r", 5., sensitivity=1., sigma=50.)
    assert run.budget.posts["r"] == [(1., 50., 4)]


def entry_of(run, sums=None):
    "What the ledger would say of a step's sum, without a step."
    sensitivity = run._sensitivity()
    total, norms = sums or run._clipped_sum(run._draw(0), 0, sensitivity.scale)
    return run._step_entry(total, norms, run._std(sensitivity), 0)


def other_norms(run, total, norms):
    return total, norms*(1 + 1e-6)


def other_sum(run, total, norms):
    return {name: g*(1 + 1e-15) for name, g in total.items()}, norms


def other_weights(run, *sums):
    next(run.model.parameters()).data[0, 0] += 1e-9
    return sums


OTHER = {"norms": other_norms, "sum": other_sum, "weights": other_weights,
         "threshold": lambda run, *sums: setattr(run.clip, "max_norm", 1 + 1e-9) or sums,
         "noise of the count": lambda run, *sums: setattr(run.clip, "bit_sigma", 5.1) or sums,
         "speed": lambda run, *sums: setattr(run.clip, "lr", .3) or sums}


@pytest.mark.parametrize("what", OTHER)
def test_whatever_is_noised_or_how_names_the_noise(what):
    "Else two steps that differ in it alone have one noise, of gradient or count, and one price."
    run = paying(clip=AdaptiveClip(6., bit_sigma=5.))
    sums = run._clipped_sum(torch.arange(6), 0, run.clip.sensitivity)
    before = entry_of(run, sums)
    assert entry_of(run, sums) == before
    assert entry_of(run, OTHER[what](run, *sums)).digest != before.digest


class Coins(AdaptiveClip):
    "Keeps what it is told."
    told = 0.

    def update(self, fractions):
        self.told = fractions.item()


def test_the_noise_of_a_count_belongs_to_one_step_and_one_batch():
    coins = []
    for t, seed, norm in ((0, 7, .1), (0, 7, .1), (0, 7, .2), (1, 7, .1), (0, 8, .1)):
        run = paying(clip=Coins(6., bit_sigma=5.), seed=seed)
        total, norms = run._clipped_sum(torch.arange(6), 0, run.clip.sensitivity)
        run._clipped_sum = lambda idx, t, scale, said=(total, norms.sign()*norm): said
        run._t = t
        coins.append(run.step().clip.told)
    assert coins[0] == coins[1] and len(set(coins)) == 4


# --- other releases


def test_noisy_is_noised_charged_once_and_said(tmp_path):
    def run(**options):
        made = paying(**options)
        vars(made._ledger.budget)["eps"] = math.inf
        return made

    value = torch.arange(50_000, dtype=torch.float64)
    one = run()
    rows = {"x": value + 1}
    told = one.noisy("a column", value, sensitivity=.5, sigma=3., asked=rows)
    assert abs((told - value).std()/1.5 - 1) < 5.5/math.sqrt(1e5)
    assert torch.equal(told, one.noisy("a column", value, sensitivity=.5, sigma=3., asked=rows))
    spent = RDPAccountant().step(1., 3., 1).epsilon(1e-5)
    assert one.epsilon() == pytest.approx(spent) and one.computed == 0
    assert f"eps = {in_digits(spent, 4)}" in one.statement()
    assert "1 x a column (multiplier 3)" in one.statement()
    other = one.noisy("a column", value + 1, sensitivity=.5, sigma=3.)
    louder = one.noisy("a column", value, sensitivity=.5, sigma=4.)
    renamed = one.noisy("another", value, sensitivity=.5, sigma=3.)
    z = [told - value, other - value - 1, (louder - value)*3/4, renamed - value]
    assert (torch.corrcoef(torch.stack(z)) - torch.eye(4)).abs().max() < 5.5/math.sqrt(50_000)
    assert sum(n for _, _, n in one.accountant.history) == 4
    one.save(tmp_path/"c")
    assert run().load(tmp_path/"c").epsilon() == one.epsilon()


def test_what_was_posted_to_the_budget_itself_is_remembered(tmp_path):
    "Statistics that a script drew anew at each start were paid for once."
    for starts in (1, 2, 3):
        run = paying()
        run.budget.post("statistics", sigma=40., steps=2)
        if starts > 1:
            run.load(tmp_path/"c")
        run.step().save(tmp_path/"c")
        run.budget.post("lost", sigma=40.)  # and a crash
        assert run.budget.posts["statistics"] == [(1., 40., 2*starts)]
        assert run.budget.posts["lost"] == [(1., 40., starts)]
    with pytest.raises(ValueError, match="would bring the run"):
        run.budget.post("too much", sigma=1.)
    with pytest.raises(ValueError, match="trainer's own"):
        run.budget.post("training steps", sigma=40.)
    assert "too much" not in run.budget.posts and run.computed == 3


def test_equal_answers_to_different_questions_share_no_noise():
    "Equal bins of a histogram were equal in what was told, too, and paid for once."
    run = paying()
    told = [run.noisy("a bin", 4., sensitivity=1., sigma=30.).item() for _ in range(3)]
    assert len(set(told)) == 3 and run.budget.posts["a bin"] == [(1., 30., 3)]


LONG = torch.arange(2000.)
UNLIKE = LONG.where(LONG != 1000, -7)


@pytest.mark.parametrize("one, other", [
    (LONG.numpy(), UNLIKE.numpy()), ([LONG], [UNLIKE]), ({"a": (1, LONG)}, {"a": (1, UNLIKE)}),
    (np.array(["a"]), np.array(["b"])), (np.int64(2**60), np.int64(2**60 + 1)),
    ([LONG, 3], [LONG]), ([1, 2], [[1, 2]]), (torch.arange(3), torch.arange(3.))])
def test_whatever_a_value_came_from_names_its_noise(one, other):
    "A long array was looked at as it is printed: with dots in its middle."
    run = paying()
    told = [run.noisy("a count", 4., sensitivity=1., sigma=30., asked={"x": x}).item()
            for x in (one, other, one)]
    assert told[0] == told[2] != told[1] and run.budget.posts["a count"] == [(1., 30., 2)]


@pytest.mark.parametrize("asked, why", [
    ({"value": 3}, "names its value"), ({"sigma": 1.}, "names its sigma"),
    ({"x": toy(9)}, "is a Examples"), ({"x": np.array([{}])}, "is a ndarray")])
def test_what_cannot_name_a_value_is_refused(asked, why):
    run = paying()
    with pytest.raises(ValueError, match=why):
        run.noisy("a count", 4., sensitivity=1., sigma=30., asked=asked)
    assert not run.budget.posts


@pytest.mark.parametrize("taken", [0, 2])
def test_what_other_releases_cost_is_taken_from_the_steps(taken):
    run = paying().fit(taken)
    before = run.left()
    run.noisy("a mean", 1., sensitivity=1., sigma=4.)
    assert 0 < run.left() < before
    assert run.fit().epsilon() <= 3 and run.t == run.computed < 10
    with pytest.raises(ValueError, match="less what a mean cost"):
        run.step()
