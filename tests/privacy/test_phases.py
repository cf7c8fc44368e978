"Several phases under one budget: composed once, never less than was spent."
import pytest
import torch
from toys import linear, toy

from dp_course import Budget, PrivacyPlan, Search, Trainer, noise_multiplier
from dp_course.gradients import falling_noise
from dp_course.privacy import PLDAccountant, RDPAccountant
from dp_course.training import NoisyAccuracy, composed_epsilon

N = 40


def a_plan(**options):
    return PrivacyPlan(**dict(n=N, batch_size=10, steps=3, delta=1e-3, eps=2.) | options)


def a_search():
    return Search(n=N, batch_size=10, steps=3, eps=3., delta=1e-3, runs=5)


def run(plan):
    return Trainer(linear(), toy(N), plan)


@pytest.mark.parametrize("accountant", [PLDAccountant, RDPAccountant])
@pytest.mark.parametrize("taken", [0, 2, 3])
def test_two_phases_cost_what_one_accountant_says(accountant, taken):
    first = run(a_plan(accountant=accountant, releases=(9.,))).fit(taken)
    first.noisy("mean", 1., sensitivity=1., sigma=9.)
    second = run(a_plan(accountant=accountant, eps=3., batch_size=20, after=first.budget)).fit()
    account = accountant().step(1., 9., 1).step(second.plan.q, second.plan.sigma, 3)
    if taken:
        account.step(first.plan.q, first.plan.sigma, taken)
    assert second.epsilon() == pytest.approx(account.epsilon(1e-3), rel=1e-3)
    assert first.epsilon() < second.epsilon() <= 3.
    assert "1 x mean (phase 1)" in second.statement()


def test_a_phase_that_another_counts_on_is_over():
    first = run(a_plan()).fit(1)
    before = first.epsilon()
    with pytest.raises(ValueError, match="nothing is left"):
        a_plan(eps=before, after=first.budget)
    first.noisy("mean", 0., sensitivity=1., sigma=1e6)  # a plan that was never made closes nothing
    a_plan(eps=3., after=first.budget)
    for spend in (first.step, lambda: first.noisy("mean", 1., sensitivity=1., sigma=99.),
                  lambda: first.budget.post("mean", sigma=99.)):
        with pytest.raises(ValueError, match="a later plan"):
            spend()
    assert first.left() == 0 and first.epsilon() == pytest.approx(before, rel=1e-3)


def test_a_saved_phase_is_over_for_whoever_loads_it(tmp_path):
    plan = a_plan()
    first = run(plan).fit(1)
    first.save(tmp_path/"run")
    other = run(plan).load(tmp_path/"run")
    second = a_plan(eps=3., after=first.budget)
    again = run(plan).load(tmp_path/"run")  # as a new process would
    for trainer in (other, again):
        for spend in (trainer.step, trainer.fit, lambda: trainer.budget.post("mean", sigma=99.),
                      lambda: trainer.noisy("mean", 1., sensitivity=1., sigma=99.)):
            with pytest.raises(ValueError, match="a later plan"):
                spend()
        assert trainer.epsilon() == pytest.approx(first.epsilon(), rel=1e-9)
    again.save(tmp_path/"later")
    later = run(plan).load(tmp_path/"later")
    assert later.left() == 0 and a_plan(eps=3., after=later.budget).earlier == second.earlier


def test_a_phase_repeats_the_steps_that_are_counted(tmp_path):
    plan = a_plan()
    first = run(plan).fit(1)
    first.save(tmp_path/"run")
    first.fit(1)
    a_plan(eps=3., after=first.budget)
    again = run(plan).load(tmp_path/"run")
    assert again.left() == 1 and torch.equal(again.step().model.weight, first.model.weight)
    with pytest.raises(ValueError, match="a later plan"):
        again.step()


def test_a_plan_counts_the_steps_that_another_trainer_took(tmp_path):
    plan = a_plan()
    first = run(plan).fit(1)
    first.save(tmp_path/"run")
    run(plan).load(tmp_path/"run").fit(1)
    with pytest.raises(ValueError, match="make the plan again"):
        a_plan(eps=3., after=first.budget)
    assert a_plan(eps=3., after=first.budget).earlier[0][-1] == 2


def test_a_closed_budget_stays_closed_when_it_is_loaded():
    budget = Budget(eps=3., delta=1e-5).post("my loop", sigma=4., q=.1, steps=10)
    assert budget.state_dict().keys() == {"posts"}
    again = Budget(eps=3., delta=1e-5).load_state_dict(budget.close().state_dict())
    with pytest.raises(ValueError, match="a later plan"):
        again.post("my loop", sigma=4., q=.1)


def test_three_phases_keep_their_numbers():
    first = run(a_plan()).fit()
    second = run(a_plan(eps=3., after=first.budget)).fit()
    third = a_plan(eps=4., after=second.budget)
    assert [what for what, *_ in third.earlier] == ["training steps (phase 1)",
                                                    "training steps (phase 2)"]
    assert third.epsilon_after(0) == pytest.approx(second.epsilon(), rel=1e-3)


def test_a_checkpoint_knows_its_earlier_phases(tmp_path):
    plan = a_plan(eps=3., after=run(a_plan()).fit().budget)
    second = run(plan).fit(1)
    second.save(tmp_path/"run")
    assert run(plan).load(tmp_path/"run").epsilon() == second.epsilon()
    alone = a_plan(eps=3., sigma=plan.sigma)
    with pytest.raises(ValueError, match="plan.earlier"):
        run(alone).load(tmp_path/"run")


@pytest.mark.parametrize("why, plan", {
    "is no budget": lambda: a_plan(after=3.),
    "different units": lambda: a_plan(unit="person", after=Budget(delta=1e-3)),
    "falling noise": lambda: a_plan(accountant=falling_noise([1., .9, .8]),
                                    after=Budget(delta=1e-3)),
    "nothing is left": lambda: a_plan(after=Budget(delta=1e-3).post("a", sigma=.5)),
    "one run of a Search": lambda: a_plan(eps=9., after=run(a_search().plan).budget),
    "are no looks": lambda: a_plan(earlier=(3.,)),
    "counts all of them": lambda: NoisyAccuracy(torch.ones(3, 5), torch.zeros(3).long(), 9., 1)
        .epsilon(a_plan(after=Budget(delta=1e-3).post("a", sigma=9.))),
}.items())
def test_what_cannot_be_added_up_is_refused(why, plan):
    with pytest.raises(ValueError, match=why):
        plan()


def test_equal_looks_are_added_up():
    plan = a_plan(eps=3., earlier=(("a", 1., 9., 1), ("a", 1., 9., 2)))
    assert plan.earlier == (("a", 1., 9., 3),)
    assert plan.budget().epsilon() == pytest.approx(plan.epsilon_after(0), rel=1e-3)


def test_whoever_composes_a_plan_counts_the_earlier_phases():
    plan = a_plan(eps=3., after=Budget(delta=1e-3).post("a", sigma=2.))
    assert plan.budget().epsilon() == pytest.approx(plan.epsilon_after(0), rel=1e-3)
    assert composed_epsilon([{"step": 3}], plan) == pytest.approx(plan.epsilon_after(3), rel=1e-3)
    assert composed_epsilon([{"step": 0}], plan) > 0
    asked = dict(eps=3., delta=1e-3, q=.25, steps=3)
    assert noise_multiplier(**asked, earlier=plan.earlier) > noise_multiplier(**asked)


@pytest.mark.parametrize("first, second", [(4, 1), (1, 4), (4, 4)])
def test_phases_of_banded_noise_are_charged_by_their_turns(first, second):
    def plan(bands, **more):
        noise = {"noise": "banded", "bands": bands} if bands > 1 else {}
        return PrivacyPlan(n=40, batch_size=8, delta=1e-3, **noise, **more)

    def turns(bands, steps):
        return .2*bands, -(-steps//bands)

    before = plan(first, steps=11, sigma=2.)
    q, n = turns(first, 6)
    budget = before.budget().post("training steps", q=q, sigma=2., steps=n)
    later = plan(second, steps=9, eps=12., after=budget)
    q_later, n_later = turns(second, 9)
    exact = PLDAccountant().step(q, 2., n).step(q_later, later.sigma, n_later).epsilon(1e-3)
    assert later.epsilon_after(9) == pytest.approx(exact, rel=1e-9) and exact <= 12
