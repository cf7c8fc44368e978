"A search within a budget: what it costs, what leaves it, and what is refused."
import dataclasses
import math
import pickle

import pytest
from torch import nn

from dp_course import PrivacyPlan, Search
from dp_course.privacy import (
    RandomStopping,
    RDPAccountant,
    in_digits,
    rdp_to_epsilon,
    search_epsilon,
    search_noise_multiplier,
)

NUMBERS = dict(n=50_000, batch_size=2000, steps=625, eps=3., delta=1e-5, runs=10.)


def of_search(search, sigma):
    "eps written out by hand: Theorem 2 of Papernot & Steinke on steps and score."
    run = RDPAccountant().step(search.plan.q, sigma, search.steps)
    if search.score_sigma is not None:
        run.step(1, search.score_sigma)
    return rdp_to_epsilon(search.tries.rdp(run), run.orders, search.delta)


@pytest.mark.parametrize("score_sigma", [None, 10., 200.])
@pytest.mark.parametrize("eta", [0., 1.])
def test_the_whole_search_spends_eps_and_no_more(eta, score_sigma):
    search = Search(**NUMBERS, eta=eta, score_sigma=score_sigma)
    assert of_search(search, search.plan.sigma) <= 3 < of_search(search, search.plan.sigma*.999)
    assert search.plan.eps < 3  # of one run: not what left
    assert search.plan.releases == (() if score_sigma is None else (score_sigma,))


def test_a_score_that_counts_people_costs():
    free, cheap, dear = (Search(**NUMBERS, score_sigma=s).plan.sigma for s in (None, 200., 5.))
    assert free <= cheap < dear
    assert search_epsilon(Search(**NUMBERS).tries, q=.04, sigma=free, steps=625, delta=1e-5,
                          releases=(5.,)) > 3


def test_the_best_run_leaves_and_their_number_is_random():
    search, counts = Search(**NUMBERS | {"runs": 4.}), []
    for seed in range(300):
        seen = []

        def train(candidate, plan):
            assert plan is search.plan
            seen.append(candidate)
            return f"model {candidate}", candidate
        assert search.best(train, range(50), seed=seed) == f"model {max(seen)}"
        counts.append(len(seen))
    assert abs(sum(counts)/300 - 4) < 1  # geometric, mean 4: five standard errors
    assert min(counts) == 1 and len(set(counts)) > 5


def test_a_network_of_an_earlier_run_is_refused():
    search, net = Search(**NUMBERS | {"runs": 4.}), nn.Linear(2, 1)
    made = [search.best(lambda c, plan: (nn.Linear(2, 1), 0.), [1], seed=s) for s in range(9)]
    assert all(isinstance(model, nn.Linear) for model in made)
    with pytest.raises(ValueError, match="parameters of an earlier run"):
        for seed in range(9):
            search.best(lambda c, plan: (net, 0.), [1], seed=seed)


def test_a_paid_score_is_noisy_and_a_seed_repeats_it():
    search = Search(**NUMBERS | {"runs": 20.}, score_sigma=1e3)
    picks = [search.best(lambda c, plan: (c, c), range(10), seed=seed) for seed in range(40)]
    assert sum(pick == 9 for pick in picks) < 30  # noise 1e3 drowns a lead of 1
    assert picks == [search.best(lambda c, plan: (c, c), range(10), seed=s) for s in range(40)]


def test_one_statement():
    words = Search(**NUMBERS, score_sigma=10.).statement()
    for said in ("(3, 1e-05)-differential", "a search", "10 on average", "drawn at random",
                 "noise 10", "stay secret", "a second search"):
        assert said in words
    assert "looks at no private example" in Search(**NUMBERS).statement()
    assert "one run of a Search" in Search(**NUMBERS).plan.statement()


@pytest.mark.parametrize("bad, words", [
    (dict(runs=.5), "is no search"), (dict(eta=math.inf), "eta=inf is a Poisson"),
    (dict(eta=-1.), "no shape"), (dict(score_sigma=0.), "score_sigma=0.0 is no noise multiplier"),
    (dict(eps=0), "eps=0 is no budget"), (dict(delta=.5), "delta=0.5 is above 1/n"),
    (dict(n=1.5), "n=1.5 is not a count"), (dict(batch_size=60_000), "more than all n=50,000"),
    (dict(eps=1e-3, runs=1e6), "does not pay for")])
def test_bad_numbers_are_refused_at_once(bad, words):
    with pytest.raises(ValueError, match=words):
        Search(**NUMBERS | bad)


# a plan by epochs, or by its noise

PLAN = dict(n=50_000, batch_size=4096, delta=1e-5)


def test_epochs_beside_steps():
    assert PrivacyPlan(**PLAN, epochs=50, eps=3) == PrivacyPlan(**PLAN, steps=610, eps=3)
    assert PrivacyPlan(**PLAN, epochs=.01, eps=3, sigma=9.).steps == 1
    longer = dataclasses.replace(PrivacyPlan(**PLAN, epochs=50, eps=3, sigma=9.), steps=700)
    assert longer.steps == 700


def test_eps_follows_from_sigma():
    plan = PrivacyPlan(**PLAN, steps=610, sigma=2.)
    assert plan.epsilon_after(610) <= plan.eps <= plan.epsilon_after(610)*(1 + 2e-4)
    assert plan.budget().post("steps", q=plan.q, sigma=2., steps=610).epsilon() <= plan.eps
    assert f"({in_digits(plan.eps, 6)}, 1e-05)" in plan.statement()
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize("given, words", [
    (dict(eps=3), "steps=None and epochs=None: pass one of them"),
    (dict(eps=3, steps=5, epochs=2), "steps=5 and epochs=2: pass one of them"),
    (dict(eps=3, epochs=0), "epochs=0 is not a number of epochs"),
    (dict(eps=3, epochs="two"), "epochs='two' is not a number of epochs"),
    (dict(steps=5), "pass eps, the budget, and sigma follows"),
    (dict(steps=5, sigma=0.), "sigma=0.0 spends eps = inf"),
    (dict(steps=5, sigma=-1.), "sigma=-1.0 is not a noise multiplier")])
def test_a_plan_says_what_is_missing(given, words):
    with pytest.raises(ValueError, match=words):
        PrivacyPlan(**PLAN, **given)


@pytest.mark.parametrize("steps, sigma, eps", [(0, 1., .5), (100, .3, 3.)])
def test_releases_that_are_too_dear_are_named(steps, sigma, eps):
    "Also where no step is taken: the releases alone cost more than eps."
    asked = dict(q=.1, steps=steps, delta=1e-5, releases=(sigma,))
    with pytest.raises(ValueError, match=r"and releases=\(.*more noise"):
        search_noise_multiplier(RandomStopping(5.), eps=eps, **asked)
    assert search_epsilon(RandomStopping(5.), sigma=1e3, **asked) > eps


def test_a_search_that_looks_at_nothing_needs_no_noise():
    asked = dict(eps=3., delta=1e-5, q=.1, steps=0)
    assert search_noise_multiplier(RandomStopping(5.), **asked) == 0
