"The audits accuse the guilty, acquit the innocent, and keep their stated rates of false alarms."
import math
import re
from functools import partial

import pytest
import torch
from scipy import stats
from torch import nn

from dp_course import (
    MUTANTS,
    FlatClip,
    PrivacyPlan,
    Trainer,
    noise_audit,
    one_run_audit,
    replay_sensitivity,
    sampler_audit,
)
from dp_course.audit import (
    AUDITS,
    FullTrainer,
    SmallTrainer,
    audit_all,
    canary_distance,
    dirac_canaries,
    dirac_model,
    fresh,
    guesses_epsilon,
    linear_loss,
    replay_release,
    torch_step,
    trainer_step,
)
from dp_course.data import Views
from dp_course.privacy import correlated, poisson_indices
from dp_course.training import squared_error
from dp_course.training import trainer as trainers

CLAIM = dict(q=1/25, sigma=1.6138, steps=625)
NOBODY = torch.zeros(4, 20), torch.zeros(4)


def two_views(x):
    return torch.stack([x, x], 1)


def augment(x, y, generator):
    return Views(two_views(x)), y


CORRECT = {
    "small": SmallTrainer,
    "small, views": partial(SmallTrainer, see=two_views),
    "full": FullTrainer,
    "full, views": partial(FullTrainer, options={"augment": augment}),
}


# --- the bug lab


DEAR = {("full", "release"), ("small", "release"), ("full", "one run"), ("full, views", "sampler"),
        ("full", "sampler"), ("full", "replay")}
PAIRS = [  # the views change nothing between steps; the dear ones take two to twenty seconds
    pytest.param(name, layer, marks=[pytest.mark.slow]*((name, layer) in DEAR))
    for layer in AUDITS for name in CORRECT
    if not ("views" in name and layer in ("one run", "release"))]


@pytest.mark.quick(5)
@pytest.mark.parametrize("name, layer", PAIRS)
def test_a_correct_trainer_passes(name, layer):
    finding = audit_all(CORRECT[name], [layer])[layer]
    assert finding, finding


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow]*(name == "pear")) for name in MUTANTS])
def test_a_mutant_is_caught_where_it_should_be(name):
    mutant = MUTANTS[name]

    def make(**kinds):
        return mutant.of(SmallTrainer(**kinds))
    assert not audit_all(make, [mutant.layer])[mutant.layer], mutant.wrong


# --- replay


def summed(x, y, generator, scale=1.):
    noise = torch.randn(x.shape[1], generator=generator)
    return {"gradient": {"sum": scale*x.clamp(-1, 1).sum(0) + noise}}


def test_replay_measures_to_a_thousandth():
    people = torch.randn(5, 4), torch.zeros(5)
    found = replay_sensitivity(summed, people, bound=2.)  # sqrt(4) in the corners
    assert found and 1 - 1e-3 < found.numbers["ratio"] < 1.001
    assert not replay_sensitivity(partial(summed, scale=1.01), people, bound=2.)


def test_replay_compares_side_values_and_counts_nan_as_infinite():
    def counted(x, y, generator):
        return {**summed(x, y, generator), "rows": len(x)}
    people = torch.randn(5, 4), torch.zeros(5)
    assert "rows moves by 1" in str(replay_sensitivity(counted, people, bound=2.))
    assert replay_sensitivity(counted, people, bound=2., allowed={"rows": 1})

    def step(x, y, generator):
        return {"gradient": {"sum": (x/x.mean().clamp(max=0)).sum(0)}}
    people = torch.ones(3, 2), torch.zeros(3)
    assert replay_sensitivity(step, people, bound=1.).numbers["ratio"] == math.inf


def clipped_by_hand(clips):
    "No line of ours: a loop over rows, `clip_grad_norm_`, noise, a division by nine."
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)

    def train(x, y):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for row, label in zip(x, y):
            optimizer.zero_grad()
            (model(row)[0] - label).square().backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.)
            total = [t + p.grad for t, p in zip(total, model.parameters())]
        for t, p in zip(total, model.parameters()):
            p.grad = (t + torch.randn(t.shape))/9
        optimizer.step()
    return model, optimizer, train


@pytest.mark.parametrize("clips", [True, False])
def test_anybodys_torch_program_can_be_audited(clips):
    step = torch_step(partial(clipped_by_hand, clips))
    found = replay_sensitivity(step, (torch.randn(9, 4), torch.randn(9)), bound=1/9)
    assert bool(found) == clips


# --- whole runs


def some_run(x, y, seed, sigma=1.6138, rate=1/25, forgotten=1.):
    g, m = fresh(seed), len(x)
    drawn = torch.binomial(torch.full((m,), 625.), torch.tensor(rate), generator=g)
    noise = 25*sigma*torch.randn(m + 3, generator=g)
    return {"weight": .1*(y*drawn + noise[:m]), "bias": .1*forgotten*noise[m:]}


def released(m=1000, **kwargs):
    rows, silent = dirac_canaries(m), (torch.zeros(m, m), torch.zeros(m))
    return replay_release(partial(some_run, **kwargs), silent, rows, **CLAIM)


def test_released_weights_are_read_to_a_few_per_cent():
    found = released()
    assert found and abs(found.numbers["eps at that movement"] - 2.985) < .2
    assert not released(sigma=.9*1.6138) and not released(rate=.048)
    assert "bias has 0 of" in str(released(forgotten=0.))
    none = released(sigma=0.)
    assert not none and none.numbers["eps at that movement"] == math.inf


def test_a_release_without_the_canaries_is_refused():
    with pytest.raises(ValueError, match="one for each canary"):
        replay_release(lambda x, y, seed: {"w": torch.zeros(3)}, NOBODY, NOBODY, **CLAIM)


# --- noise


def mechanism(x, y, generator, sigma=1.6138):
    "Each canary its own coordinate; the noise is as claimed, or not."
    return {"gradient": {"sum": x.sum(0) + sigma*torch.randn(x.shape[1], generator=generator)}}


def noise_of(sigma, **kwargs):
    canaries = torch.eye(20), torch.zeros(20)
    step = partial(mechanism, sigma=sigma)
    return noise_audit(step, NOBODY, canaries, bound=1., **CLAIM | kwargs)


def test_2500_observations_catch_sigma_over_root_2():
    found = noise_of(1.6138/2**.5)
    assert any("sigma is at most" in said for said in found.objections)  # the guesses alone
    assert found.numbers["eps at least"] > found.numbers["eps claimed"]
    assert abs(found.numbers["eps claimed"] - 2.985) < 1e-3


def test_noise_audit_keeps_its_false_alarm_rate():
    "Forty correct mechanisms at alpha = .2: at most 8 alarms expected, 20 with probability 5e-5."
    alarms = sum(not noise_of(1.6138, observations=400, alpha=.2, seed=10**7*s) for s in range(40))
    assert alarms <= stats.binom.isf(1e-4, 40, .2)


def test_one_silent_tensor_is_enough():
    def step(x, y, generator):
        said = mechanism(x, y, generator)["gradient"]
        return {"gradient": {**said, "scalar": x.sum()/1000}}
    canaries = torch.eye(20), torch.zeros(20)
    found = noise_audit(step, NOBODY, canaries, bound=1., **CLAIM)
    assert "scalar has 0 of the claimed noise" in str(found)


def test_a_canary_must_sing():
    with pytest.raises(ValueError, match="does not move the release"):
        noise_audit(mechanism, NOBODY, NOBODY, bound=1., sigma=1.)


# --- sampler


def coins(rate=.04, draws=625, n=1000, seed=0):
    g = fresh(seed)
    return [poisson_indices(n, rate, g) for _ in range(draws)]


def test_sampler_audit_acquits_coins_and_notices_five_per_cent():
    assert sampler_audit(coins(), n=1000, q=.04)
    assert "another rate" in str(sampler_audit(coins(.042), n=1000, q=.04))


def test_sampler_audit_names_the_last_example():
    batches = [idx[idx < 999] for idx in coins()]
    assert "example 999" in str(sampler_audit(batches, n=1000, q=.04))


def test_sampler_audit_sees_fixed_sizes_and_old_batches():
    g = fresh(1)
    fixed = [torch.randperm(1000, generator=g)[:40] for _ in range(625)]
    assert "sizes do not vary" in str(sampler_audit(fixed, n=1000, q=.04))
    again = coins(draws=300)*2
    assert "lag 300" in str(sampler_audit(again, n=1000, q=.04))


# --- one run


def scores_of(sigma, distance_noise=0):
    "Dirac canaries under Poisson sampling and Gaussian noise, without a network."
    q, steps = CLAIM["q"], CLAIM["steps"]

    def train(inside, seed):
        g = fresh(seed + 10**9)
        drawn = torch.binomial(torch.full((len(inside),), float(steps)),
                               torch.full((len(inside),), q), generator=g)
        noise = torch.randn(len(inside), generator=g)
        return inside*drawn + sigma*steps**.5*noise
    return train


def test_one_run_reads_what_it_should():
    "FACTS: .92 at the true eps 2.985, 5.5 without noise, 1.4 at sigma/sqrt(2), d' = .617."
    right = one_run_audit(scores_of(1.6138), **CLAIM)
    assert right and .6 < right.numbers["eps read (95 %)"] < 1.3
    assert abs(right.numbers["eps read by theory"] - .92) < .01
    assert abs(canary_distance(**CLAIM) - .617) < .001
    less = one_run_audit(scores_of(1.6138/2**.5), **CLAIM)
    assert not less and 1.1 < less.numbers["eps read (95 %)"] < 2.
    assert one_run_audit(scores_of(0.), **CLAIM).numbers["eps read (95 %)"] > 5


@pytest.mark.slow
def test_one_run_keeps_its_false_alarm_rate():
    alarms = sum(not one_run_audit(scores_of(1.6138), alpha=.2, seed=s, **CLAIM) for s in range(60))
    assert alarms <= stats.binom.isf(1e-4, 60, .1)  # d' has half of alpha, eps hardly any


def test_guesses_epsilon_is_a_bound():
    "Without delta it is Clopper and Pearson's for a coin; more right guesses prove more."
    share = stats.beta.ppf(.05, 80, 100 - 80 + 1)
    assert abs(guesses_epsilon(80, 100, 2000, 0., .05) - math.log(share/(1 - share))) < 1e-4
    readings = [guesses_epsilon(right, 100, 2000, 1e-5, .05) for right in range(40, 101)]
    assert readings == sorted(readings) and readings[0] == 0
    assert guesses_epsilon(80, 100, 2000, 1e-3, .05) < guesses_epsilon(80, 100, 2000, 0., .05)


# --- our own trainer


def test_auditing_a_trainer_leaves_it_alone():
    plan = PrivacyPlan(n=40, batch_size=4, steps=5, eps=3, delta=1e-5)
    x, y = torch.randn(40, 6), torch.zeros(40)
    trainer = Trainer(dirac_model(6), (x, y), plan, loss_fn=linear_loss, clip=FlatClip(.5),
                      metric=squared_error)
    rows = dirac_canaries(6)
    found = replay_sensitivity(trainer_step(trainer), rows, bound=.5/4)
    assert found, found
    assert trainer.t == 0 and trainer.computed == 0
    assert not trainer.model[0].weight.any()
    assert not {"_draw", "_noise"} & vars(trainer).keys()


# --- the real trainer, broken on purpose: the doors let its bugs through


def half(grads, std, batch_size, generator):
    return NOISY_MEAN(grads, .5*std, batch_size, generator)


def longer(grads, std, batch_size, generator):
    return NOISY_MEAN({name: 1.1*g for name, g in grads.items()}, std, batch_size, generator)


def more_often(n, q, generator):
    return poisson_indices(n, 1.06*q, generator)


def silent_scalars(grads, std, batch_size, generator):
    stds = [std if g.dim() else 0. for g in grads.values()]
    return NOISY_MEAN(grads, stds, batch_size, generator)


NOISY_MEAN = trainers.noisy_mean
BREAKS = {
    "half the noise": ("noise", trainers, "noisy_mean", half),
    "a tenth too long": ("replay", trainers, "noisy_mean", longer),
    "drawn more often": ("sampler", correlated, "poisson_indices", more_often),
    "no noise on scalars": ("noise", trainers, "noisy_mean", silent_scalars),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow]*(name == "drawn more often")) for name in BREAKS])
def test_the_full_trainer_broken_is_caught(name, monkeypatch):
    layer, where, what, instead = BREAKS[name]
    monkeypatch.setattr(where, what, instead)
    assert not audit_all(FullTrainer, [layer])[layer]


# --- an audit that could not object clears nobody


def unbounded(x, y, generator):
    return {"gradient": {"w": 10*x.sum(0)}}


def of_rows(**changed):
    examples = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(8)
    usual = {"bound": .1, "tries": 2, "climbs": 1}
    return replay_sensitivity(unbounded, examples, **usual | changed)


def of_batches(**changed):
    batches = [range(40)]*50
    return sampler_audit(**{"sampler": batches, "n": 1000, "q": .04} | changed)


def of_one_run(train=None, **changed):
    train = train or (lambda inside, seed: 10*inside.double())
    claim = {"q": .04, "sigma": 1.6138, "steps": 625, "canaries": 100}
    return one_run_audit(train, **claim | changed)


def of_noise(**changed):
    rows, nobody = (torch.eye(5), torch.ones(5)), (torch.zeros(8, 5), torch.zeros(8))
    claim = {"bound": 10., "sigma": 1.6138, "observations": 20}
    return noise_audit(unbounded, nobody, rows, **claim | changed)


def of_release(**changed):
    rows, nobody = (torch.eye(9), torch.ones(9)), (torch.zeros(9, 9), torch.zeros(9))
    def train(x, y, seed):
        return {"w": 9*y + torch.randn(9, generator=torch.Generator().manual_seed(seed))}
    return replay_release(train, nobody, rows, **{"q": .5, "sigma": 1., "steps": 20} | changed)


@pytest.mark.parametrize("audit, bad", [
    *((of_rows, bad) for bad in ({"bound": 0}, {"bound": float("nan")}, {"bound": float("inf")},
                                 {"tries": 0}, {"climbs": "1"}, {"allowed": []}, {"seed": "1"})),
    *((audit, {"alpha": alpha}) for audit in (of_batches, of_one_run, of_noise, of_release)
      for alpha in (0, float("nan"))),
    (of_batches, {"q": 1}), (of_batches, {"n": 0}), (of_batches, {"noise": 5}),
    (of_one_run, {"canaries": 0}), (of_one_run, {"q": 2}), (of_noise, {"sigma": float("inf")}),
    (of_noise, {"observations": 0}), (of_release, {"runs": 1}), (of_release, {"q": None})])
def test_a_setting_with_which_nothing_could_be_found_is_refused(audit, bad):
    "A broken trainer was cleared at alpha = 0, -1 and nan, and with a bound of infinity."
    assert audit().objections, "a broken trainer"
    (name, value), = bad.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        audit(**bad)


def test_no_numbers_are_no_all_clear():
    "A run that ends in NaN was cleared by its scores."
    lost = of_one_run(lambda inside, seed: torch.full((len(inside),), float("nan")))
    assert any("100 of 100 scores are not finite" in said for said in lost.objections)
    rows, nobody = (torch.eye(9), torch.ones(9)), (torch.zeros(9, 9), torch.zeros(9))
    nan = replay_release(lambda x, y, seed: {"w": torch.full((9,), float("nan"))}, nobody, rows,
                         q=.5, sigma=1., steps=20)
    assert nan.objections
    for scores in (None, [1.]*100, torch.zeros(3)):
        with pytest.raises(ValueError, match="one score for each of the 100 canaries"):
            of_one_run(lambda inside, seed: scores)
    with pytest.raises(ValueError, match="no batches"):
        of_batches(sampler=[])
    with pytest.raises(ValueError, match="1 batch has no neighbour: pass"):
        of_batches(sampler=[range(40)])
