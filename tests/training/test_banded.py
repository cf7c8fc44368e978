"A trainer whose noise is correlated: the noise, who takes part, what is charged, resume, refusals."
from functools import partial

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz
from toys import generator as gen
from toys import linear, same, toy

from dp_course.audit import trainer_step
from dp_course.data import Examples
from dp_course.gradients import AdaptiveClip, LayerClip, falling_noise
from dp_course.privacy import (
    PrivacyPlan,
    RDPAccountant,
    banded_coefficients,
    charged,
    normal,
    participations,
)
from dp_course.training import DPAdam, NoisyAccuracy, Peers, ProcessTrainer, Trainer
from dp_course.training.records import composed_epsilon, start_line

N, STEPS, BANDS = 40, 11, 4


def plan(bands=BANDS, **more):
    more = {"n": N, "batch_size": 8, "steps": STEPS, "sigma": 1., "delta": 1e-3,
            "accountant": RDPAccountant} | more
    return PrivacyPlan(noise="banded", bands=bands, **more)


def run(bands=BANDS, lr=.3, seed=7, kind=Trainer, more={}, **options):
    optimizer = partial(torch.optim.SGD, lr=lr, momentum=.9)
    return kind(linear(), toy(N), plan(bands, **more),
                **{"optimizer": optimizer, "seed": seed} | options)


def grads_of(trainer, steps):
    "The noisy mean of each step, as a vector."
    for _ in range(steps):
        trainer.step()
        yield torch.cat([p.grad.flatten() for p in trainer.params.values()]).double()


# --- the noise

def test_what_is_added_is_the_matrix_applied_to_noise_named_after_the_sums():
    silent = run(loss_fn=lambda output, y: 0*output.sum(1))  # all gradients are 0
    noise = torch.stack(list(grads_of(silent, STEPS)))*8/(1 + 1e-6)
    c = np.append(banded_coefficients(STEPS, BANDS), np.zeros(STEPS - BANDS))
    fresh = []
    for entry in silent._ledger.entries():
        stream = silent._secret.noise(entry)
        fresh.append(torch.cat([normal(p.shape, stream).flatten()
                                for p in silent.params.values()]))
    z = torch.from_numpy(toeplitz(c, np.zeros(STEPS))) @ noise
    assert torch.allclose(z, torch.stack(fresh), atol=1e-10)


def test_one_band_is_the_ordinary_run_bit_for_bit():
    ordinary = PrivacyPlan(n=N, batch_size=8, steps=STEPS, sigma=1., delta=1e-3,
                           accountant=RDPAccountant)
    assert plan(1).eps == ordinary.eps and plan(1).statement() == ordinary.statement()
    one = run(1).fit()
    other = Trainer(linear(), toy(N), ordinary, seed=7,
                    optimizer=partial(torch.optim.SGD, lr=.3, momentum=.9)).fit()
    assert same(one.model, other.model) and one.epsilon() == other.epsilon()
    assert one._config() == other._config()


# --- who takes part, and what is charged

def test_nobody_takes_part_twice_within_the_bands_whatever_the_seed(tmp_path):
    first = run()
    first.fit(5)
    first.save(tmp_path/"run.pt")
    later = run(seed=8).load(tmp_path/"run.pt")
    drawn = [first._draw(t) for t in range(5)] + [later._draw(t) for t in range(5, 400)]
    taken = torch.zeros(400, N)
    for t, idx in enumerate(drawn):
        taken[t, idx] = 1
    assert all(taken[t:t + BANDS].sum(0).max() <= 1 for t in range(400 - BANDS))
    # 400 batches of 8 on average, of groups of about 10: off by six standard errors once in 10^8
    sizes = [(taken[g::BANDS].sum(0) > 0).sum().item() for g in range(BANDS)]
    rate = charged(later.plan, 1)[0]
    assert sum(sizes) == N and rate == BANDS*8/N
    assert abs(taken.sum().item() - 100*N*rate) < 6*(100*N*rate*(1 - rate))**.5


@pytest.mark.parametrize("bands", [1, 2, 4, 5])
def test_each_step_is_charged_as_the_plan_says_and_none_more(bands):
    trainer = run(bands)
    for t in range(STEPS):
        assert trainer.left() == STEPS - t
        assert trainer.epsilon() == (trainer.plan.epsilon_after(t) if t else 0.)
        trainer.step()
    assert trainer.epsilon() == trainer.plan.epsilon_after(STEPS) <= trainer.plan.eps
    assert sum(n for _, _, n in trainer.budget.posts["training steps"]) == participations(
        STEPS, bands)
    with pytest.raises(ValueError, match="step 12 is not paid for"):
        trainer.step()


def test_another_release_takes_whole_rounds_of_steps():
    trainer = run()
    trainer.fit(2)
    trainer.noisy("a count", 3., sensitivity=1., sigma=2.)
    left = trainer.left()
    assert left < STEPS - 2 and (2 + left) % BANDS == 0
    trainer.fit()
    assert trainer.t == 2 + left and trainer.epsilon() <= trainer.plan.eps


def test_the_statement_and_the_record_say_who_takes_part():
    trainer = run()
    said = trainer.statement()
    assert "takes part once in 4 steps, and 3 times in all, at most" in said
    assert "rate 4 x 8/40 = 0.8 from one of 4 groups" in said and "matrix of 4 bands" in said
    told = start_line({"preset": "none"}, trainer, 7, 0)["plan"]
    assert told["noise"] == "banded" and told["bands"] == 4


def test_several_runs_are_charged_by_their_own_turns():
    ends = [{"step": 5}, {"step": 5}]  # two turns each: four, and not the three of ten steps
    one = RDPAccountant().step(.8, 1., 4).epsilon(1e-3)
    assert composed_epsilon(ends, plan()) == one


@pytest.mark.parametrize("clip", [AdaptiveClip(20.), LayerClip([.5, .7])])
def test_thresholds_of_other_kinds_are_paid_for_as_before(clip):
    trainer = run(clip=clip).fit()
    assert trainer.epsilon() <= trainer.plan.eps and trainer.left() == 0


def test_a_planned_look_is_paid_for_together_with_the_turns():
    x, y = toy(N).test_x, toy(N).test_y
    metric = NoisyAccuracy(x, y, sigma=20., measurements=2)
    asked = plan(sigma=None, eps=9., releases=(20., 20.))
    trainer = Trainer(linear(), toy(N), asked, seed=7).fit(6)
    metric(trainer)
    assert trainer.fit().t == STEPS
    metric(trainer)
    assert trainer.epsilon() <= 9. and metric.epsilon(asked) <= 9.


# --- crash, resume, repetition

def test_steps_that_repeat_others_are_free_and_the_same(tmp_path):
    trainer = run()
    trainer.fit(3)
    trainer.save(tmp_path/"run.pt")
    trainer.fit()
    again = run().load(tmp_path/"run.pt").fit()
    assert again.computed == STEPS and same(trainer.model, again.model)
    assert again.epsilon() == trainer.epsilon()


@pytest.mark.parametrize("seed, lr", [(7, .2), (8, .3)])
def test_a_step_is_not_taken_twice_with_two_sums(tmp_path, seed, lr):
    trainer = run()
    trainer.fit(3)
    trainer.save(tmp_path/"run.pt")
    trainer.fit(3)
    other = run(seed=seed).load(tmp_path/"run.pt")
    other.optimizer.param_groups[0]["lr"] = lr
    before = other.epsilon()
    with pytest.raises(ValueError, match="was taken before, and its sum was another one"):
        other.fit()
    assert other.t < 6 and other.epsilon() == before and other.computed == 6


def test_another_seed_goes_on_where_nothing_was_taken(tmp_path):
    trainer = run()
    trainer.fit(3)
    trainer.save(tmp_path/"run.pt")
    other = run(seed=8).load(tmp_path/"run.pt").fit()
    assert other.t == STEPS and not same(other.model, trainer.fit(0).model)


def test_an_interrupted_step_has_the_same_noise_once_more():
    trainer, whole = run(), run().fit()
    trainer.fit(5)
    step = trainer.optimizer.step

    def bomb(*args):
        trainer.optimizer.step = step
        raise KeyboardInterrupt
    trainer.optimizer.step = bomb
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    assert same(trainer.fit().model, whole.model) and trainer.computed == STEPS


def test_the_same_sum_after_another_past_has_other_noise():
    # all gradients are 0 and nothing moves: from step 1 on, the sums of both are the same
    silent = partial(run, loss_fn=lambda output, y: 0*output.sum(1),
                     optimizer=partial(torch.optim.SGD, lr=0.))
    one, other = silent().fit(1), silent()
    other.clip.max_norm = 2.
    other.step().clip.max_norm = 1.
    names = [[e.digest for e in t.fit(3)._ledger.entries()] for t in (one, other)]
    assert len(names[0]) == 4 and not set(names[0]) & set(names[1])


def test_a_checkpoint_of_other_bands_is_refused(tmp_path):
    trainer = run()
    trainer.fit(3)
    trainer.save(tmp_path/"run.pt")
    with pytest.raises(ValueError, match="plan.bands: 4 there, 5 here"):
        run(5).load(tmp_path/"run.pt")


def test_several_processes_share_the_noise():
    together = run(kind=ProcessTrainer, peers=Peers()).fit()
    assert same(together.model, run().fit().model)


# --- audits and refusals

def test_an_auditor_who_chooses_the_noise_sees_it_behind_the_matrix():
    x, y = toy(20).train_x, toy(20).train_y
    audited = Trainer(linear(), Examples(x, y), plan(n=20, batch_size=4), seed=3,
                      loss_fn=lambda output, y: 0*output.sum(1))
    seen = trainer_step(audited)(x, y, gen(5))["gradient"]["weight"]
    fresh = normal((3, 5), gen(5))*(1 + 1e-6)/4
    assert torch.allclose(seen, fresh/banded_coefficients(STEPS, BANDS)[0])


@pytest.mark.parametrize("fails, says", [
    (lambda: PrivacyPlan(n=N, batch_size=8, steps=9, eps=3, delta=1e-3, bands=4),
     "pass noise='banded'"),
    (lambda: PrivacyPlan(n=N, batch_size=8, steps=9, eps=3, delta=1e-3, noise="banded"),
     "needs bands="),
    (lambda: PrivacyPlan(n=N, batch_size=8, steps=9, eps=3, delta=1e-3, noise="pink"),
     "no kind of noise"),
    (lambda: plan(6), "bands=5 at most"),
    (lambda: plan(12, batch_size=1), "as many bands as steps"),
    (lambda: plan(steps=2*10**6), "1,000,000 steps at most"),
    (lambda: plan(accountant=falling_noise([1., .9])), "cannot be banded"),
    (lambda: DPAdam.from_plan(plan(), AdaptiveClip(20.)), "independent noise")])
def test_what_cannot_be_kept_is_refused(fails, says):
    with pytest.raises(ValueError, match=says):
        fails()


def test_the_report_says_how_batches_and_noise_are_drawn():
    report = run().report()
    assert report["plan"]["bands"] == BANDS and "cyclic" in report["guarantee"]["sampling"]
    assert "bands" not in run(1).report()["plan"]
