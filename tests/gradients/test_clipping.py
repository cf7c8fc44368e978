"Clips that learn, split and follow a schedule: what they let through, cost and remember."
import math
import random
import types
from fractions import Fraction as Q
from functools import partial

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant as GooglePLD
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toys import generator as gen
from toys import same

from dp_course.gradients import (
    AdaptiveClip,
    AutoClip,
    FlatClip,
    LayerClip,
    ScheduledClip,
    bounded,
    decay,
    falling_noise,
    noise_std,
    noised_fraction,
    sensitivity_of,
    split_sigma,
    which_are_short,
)
from dp_course.privacy import PLDAccountant, PrivacyPlan, RDPAccountant
from dp_course.training import Trainer

float64 = partial(torch.tensor, dtype=torch.float64)


def toy(dtype=torch.float64):
    x = torch.randn(60, 5, generator=gen(), dtype=dtype)
    return x, torch.randint(3, (60,), generator=gen(1))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_plan(accountant=PLDAccountant, **other):
    numbers = dict(n=60, batch_size=12, steps=30, eps=3., delta=1e-5) | other
    return PrivacyPlan(**numbers, accountant=accountant)


PLAN = make_plan()
FALL = make_plan(falling_noise(decay(1, .5, 30)))
CLIPS = {
    "auto": lambda: AutoClip(.5),
    "normalized": lambda: AutoClip(2., 1e-9),
    "adaptive": lambda: AdaptiveClip(100, .5),
    "equal": lambda: LayerClip(.5),
    "given": lambda: LayerClip([.1, .2, .3, .4]),
    "groups": lambda: LayerClip(.5, [0, 0, 1, 1]),
    "own noise": lambda: LayerClip([.1, .9], [0, 1, 0, 1], own_noise=True),
    "learnt": lambda: LayerClip(.5, [0, 0, 1, 1], batch_size=100),
    "learnt, own noise": lambda: LayerClip(.5, range(4), own_noise=True, batch_size=100),
    "scheduled C": lambda: ScheduledClip(decay(1, .1, 30), PLAN),
    "scheduled": lambda: ScheduledClip(decay(1, .1, 30), FALL),
}
every_clip = pytest.mark.parametrize("name", CLIPS)


def plan_of(name):
    return FALL if name == "scheduled" else PLAN


def trainer(clip, plan=PLAN, **kwargs):
    return Trainer(net(), toy(), plan, clip=clip, **kwargs)


def named(name, **kwargs):
    return trainer(CLIPS[name](), plan_of(name), **kwargs)


def state(clip):
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in vars(clip).items()}


def learn(clip, norms, g=None):
    "What a trainer does after a step: it notes who is short, noised."
    if not getattr(clip, "counts", 0):
        return clip.update()
    return clip.update(noised_fraction(clip.short(norms), clip.batch_size, clip.bit_sigma, g))


# --- what every clip owes

def joint_move(clip, norms, sigma):
    "Length, in units of noise, of what an example of these norms (l,) moves: gradients and bits."
    stds = torch.as_tensor(clip.std(sigma), dtype=torch.float64).expand(len(norms))
    moved = [*(clip(norms[:, None])[:, 0]*norms/stds)]
    if getattr(clip, "batch_size", None):
        k = 1 if isinstance(clip, AdaptiveClip) else len(clip.max_norms)
        moved += k*[float64(.5/clip.bit_sigma)]  # every bit is 1/2 or -1/2
    return torch.stack(moved).norm().item()


@every_clip
def test_one_example_costs_at_most_a_step_of_the_planned_sigma_at_any_time(name):
    clip, g, sigma = CLIPS[name](), gen(), plan_of(name).sigma
    for t in range(30):
        paid = sigma*clip.ratios[t].item() if name == "scheduled" else sigma
        for _ in range(6):
            norms = 10**(6*torch.rand(4, generator=g, dtype=torch.float64) - 3)
            assert joint_move(clip, norms, sigma) <= 1/paid*(1 + 1e-9)
        learn(clip, norms[:, None].expand(4, 12), g)
    everywhere_too_long = torch.full((4,), 1e9, dtype=torch.float64)  # uses all of the budget
    assert joint_move(clip, everywhere_too_long, sigma) == pytest.approx(1/paid, rel=1e-6)


@pytest.mark.quick(4)
@every_clip
def test_resume_is_bit_identical(name, tmp_path):
    whole = named(name, seed=5).fit(12)
    named(name, seed=5).fit(7).save(tmp_path/"c")
    resumed = named(name).load(tmp_path/"c").fit(5)
    assert state(whole.clip) == state(resumed.clip)
    assert whole.clip.sensitivity == resumed.clip.sensitivity
    stds = [torch.as_tensor(run.clip.std(2.)) for run in (whole, resumed)]
    assert torch.equal(*stds)
    assert same(whole.model, resumed.model)
    third = named(name, seed=5).fit(7).fit(5)
    assert same(resumed.model, third.model)


@pytest.mark.quick(4)
@every_clip
def test_a_whole_private_run_with_float32_and_an_empty_batch(name):
    tiny = make_plan(plan_of(name).accountant, batch_size=.5)  # most batches are empty
    scheduled = name.startswith("scheduled")
    clip = ScheduledClip(decay(1, .1, 30), tiny) if scheduled else CLIPS[name]()
    run = Trainer(net().float(), toy(torch.float32), tiny, clip=clip, seed=0,
                  optimizer=partial(torch.optim.SGD, lr=.01)).fit()
    assert run.computed == 30 and run.epsilon() <= 3.
    assert all(p.isfinite().all() for p in run.model.parameters())
    if scheduled:
        assert clip.t == 30  # an empty batch moves a schedule on, too
    if name == "adaptive":
        assert clip.max_norm != .5  # and a learnt threshold


# --- the split between gradient and count

@given(st.floats(1e-3, 1e3), st.floats(1.0001, 1e9))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_split_costs_exactly_sigma(sigma, ratio):
    bit_sigma = sigma/2*ratio
    z = split_sigma(sigma, bit_sigma)
    cost = z**-2 + (2*bit_sigma)**-2
    assert z >= sigma and cost == pytest.approx(sigma**-2, rel=1e-9)
    assert 1/Q(z)**2 + 1/(2*Q(bit_sigma))**2 <= 1/Q(sigma)**2  # exactly, never overspent


REFUSED = [  # what is called, with what, and words of the refusal
    *((FlatClip, (bad,), "no bound") for bad in (0, -1, math.inf, math.nan)),
    *((split_sigma, numbers, "bit_sigma|noise") for numbers in (
        (2., 1.), (2., .5), (2., 0.), (-1., 1.), (1., -1.), (math.nan, 1.), (1., math.nan),
        (math.inf, 1.))),
    *((AdaptiveClip, numbers, None) for numbers in (
        (0,), (math.nan,), (100, 0.), (100, math.inf), (100, 1., 1.1), (100, 1., .5, -1.),
        (100, 1., .5, math.inf), (100, 1., .5, .2, -1.), (100, 1., .5, .2, math.nan))),
    *((LayerClip, given, None) for given in (
        ([],), ([1., 0.],), (math.inf,), ([[1.]],), ([1., 1.], [0, 0]), (1., [0, 2]),
        (1., None, False, 10), (1., [0, 1], False, -1), (1., [0, 1], False, 10, .5, -1))),
    *((AutoClip, numbers, None) for numbers in ((0.,), (math.inf,), (1., -1.), (1., math.nan))),
    # without gamma a gradient of 1e-22, whose squares underflow in float32, is stretched past C
    *((AutoClip, (1., gamma), "gamma >= 1e-9") for gamma in (0., 1e-30)),
    *((decay, numbers, None) for numbers in (
        (0, 1, 5), (1, math.inf, 5), (1, .5, 5, 6), (1, .5, 5, 0))),
    *((falling_noise, (ratios,), "must not rise") for ratios in (
        [], [1., 1.1], [1., .5, .6], [1., 0.], [1., -1.], [math.nan], [math.inf, 1.])),
    *((ScheduledClip, (C, PLAN), "one positive finite number per step") for C in (
        [1.]*29, [1.]*29 + [0.], [1.]*29 + [math.nan], 1.)),
    (ScheduledClip, ([1.]*30, make_plan(falling_noise(decay(1, .5, 40)))), "40 noise ratios")]


@pytest.mark.parametrize("call, given, words", REFUSED)
def test_settings_that_make_no_sense_are_refused(call, given, words):
    with pytest.raises(ValueError, match=words):
        call(*given)


def test_eight_bits_are_enough_for_a_sigma():
    assert split_sigma(2, np.int8(100)) == split_sigma(2., 100.)
    assert FlatClip(np.uint8(200)).std(2) == 400


@pytest.mark.parametrize("clip", [
    AdaptiveClip(12, bit_sigma=.3), LayerClip(1., range(4), batch_size=12, bit_sigma=.9)])
def test_trainer_refuses_a_count_that_costs_too_much(clip):
    with pytest.raises(ValueError, match="bit_sigma"):
        trainer(clip)


def test_a_plan_without_noise_is_defined():
    open_plan = types.SimpleNamespace(n=60, batch_size=12, steps=5, q=.2, sigma=0., eps=math.inf,
                                      delta=1e-5, accountant=RDPAccountant)
    clips = [AdaptiveClip(12), LayerClip(1., range(4), batch_size=12),
             ScheduledClip([1.]*5, open_plan)]
    for clip in clips:
        run = trainer(clip, open_plan, seed=0).fit()
        assert run.epsilon() == math.inf and (torch.as_tensor(clip.std(0.)) == 0).all()
    assert AdaptiveClip(12, bit_sigma=0.).std(0.) == 0


# --- the threshold that is learnt

def test_update_is_algorithm_1_by_hand():
    "11 of 20 norms are at most 1: (11-9)/2 centred, plus noise, over the constant 100, plus 1/2."
    norms = torch.tensor([.5]*10 + [1.] + [1.001]*9)[None]
    for seed in range(5):
        clip = AdaptiveClip(100, 1., quantile=.3, lr=.2, bit_sigma=7.)
        learn(clip, norms, gen(seed))
        noise = 7*torch.randn(1, generator=gen(seed), dtype=torch.float64).item()
        want = math.exp(-.2*((1 + noise)/100 + .5 - .3))
        assert clip.max_norm == pytest.approx(want, rel=1e-12)
    default = AdaptiveClip(4096)
    assert (default.bit_sigma, default.quantile, default.lr) == (204.8, .5, .2)


@pytest.mark.parametrize("make", [
    lambda: AdaptiveClip(50, 1.), lambda: LayerClip([1.], batch_size=50)])
def test_nothing_but_the_noised_count_survives_the_batch(make):
    "Two batches with nothing in common but the centred count leave the same clip, to the last bit."
    few = torch.tensor([[.1, .2, 5., 6., 7.]])  # 2-3 = 8-9 = -1
    many = torch.tensor([[math.nan, 1e30]*3 + [math.inf]*3 + [1e-9]*8])
    a, b = make(), make()
    learn(a, few, gen())
    learn(b, many, gen())
    assert state(a) == state(b) and state(a) != state(make())


@pytest.mark.parametrize("quantile", [.2, .5, .8])
def test_threshold_finds_the_quantile(quantile):
    norms = torch.rand(1, 1000, generator=gen())*3
    clip = AdaptiveClip(1000, .01, quantile=quantile)
    for t in range(400):
        learn(clip, norms, gen(t))
    # noise leaves at most 3.5 % (linearized)
    assert clip.max_norm == pytest.approx(3*quantile, rel=.2)


@pytest.mark.parametrize("quantile, norm", [(0., 0.), (1., math.inf)])
def test_a_threshold_stays_positive_and_finite_as_fast_as_it_goes(quantile, norm):
    "Always in one direction: further than any noise takes it."
    options = dict(batch_size=1, quantile=quantile, lr=1e9, bit_sigma=0.)
    for clip in (AdaptiveClip(**options), LayerClip(1., range(3), **options)):
        before = clip.sensitivity
        for _ in range(60):
            learn(clip, torch.full((3, 4), norm))
            assert 0 < clip.sensitivity < math.inf
        assert clip.sensitivity != before


def test_noised_fraction_counts_k_groups_with_k_noises():
    short = torch.tensor([[True, False, True], [False]*3])
    assert torch.allclose(noised_fraction(short, 3, 0.), float64([2/3, 0.]))
    empty = short[:, :0]
    rows = torch.stack([noised_fraction(empty, 10, 5., gen(s)) for s in range(3000)])
    assert abs(rows.mean() - .5) < .03  # 5 standard errors or more
    assert (rows.std(0)/.5 - 1).abs().max() < .08
    assert abs(torch.corrcoef(rows.T)[0, 1]) < .1


# --- what the trainer makes of it


class Report(LayerClip):
    "Every tensor to C, noise for C: the report's Algorithm, had it run."
    sensitivity = property(lambda self: .5)


class Through(FlatClip):
    "Lets everything through."
    def __call__(self, norms):
        return torch.ones_like(norms)


HARD = [0., 5e-324, 1e-45, 1e-40, 1e-30, 1e-20, 1e-12, 1e-9, 1e-3, 1., 65504., 1e20, 3e38]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [Report([.5]*4), Through(.5),
                                  *(make() for make in CLIPS.values())])
def test_no_example_adds_more_than_the_noise_covers(clip, dtype):
    "Norms at random; the hard ones beside zeros, and in all rows at once; none that is not finite."
    random = 10**(6*torch.rand(4, 50, generator=gen(), dtype=torch.float64) - 3)
    one = float64(HARD)
    zero = torch.zeros_like(one)
    beside = [torch.stack([one, zero, zero, zero]), torch.stack([zero, one, zero, zero])]
    norms = torch.cat([random, *beside, one.repeat(4, 1)], 1).to(dtype)
    norms[1, 3], norms[2, 4] = math.nan, math.inf
    factors, lost = bounded(clip)(norms), ~norms.isfinite().all(0)
    unit = torch.as_tensor(getattr(clip, "scales", None) if getattr(clip, "scales", None)
                           is not None else clip.sensitivity).double().reshape(-1, 1)
    added = (factors.double()*norms.double().nan_to_num(0., 0.)/unit).norm(dim=0)
    assert added.max() <= 1 + 1e-6
    assert factors.isfinite().all() and lost[3:5].all() and (factors[:, lost] == 0).all()
    kind = type(clip)
    if kind not in (Report, Through):  # a clip that keeps its word is left as it is
        wanted = torch.where(lost, 0., clip(norms))[:, :50]
        assert torch.equal(factors[:, :50], wanted.to(factors))


class Later(FlatClip):
    "Promises something else once it was asked."
    def __init__(self, promised):
        self.promised = promised

    sensitivity = property(lambda self: self.promised)


class Less(float):
    __mul__ = __rmul__ = lambda self, other: 0.


@pytest.mark.parametrize("promised", [Less(1.), torch.ones((), dtype=torch.float64)])
def test_a_promise_is_what_it_was(promised):
    asked = sensitivity_of(Later(promised))
    if isinstance(promised, torch.Tensor):
        promised.fill_(1e-9)
    assert noise_std(asked, 2.) == 2.


def test_a_clip_sees_one_example_at_a_time():
    seen = []

    def clip(norms):
        seen.append(norms.shape)
        return norms/norms.max()

    norms = torch.rand(4, 9, generator=gen()) + .1
    factors = bounded(clip, 1e9)(norms)
    assert set(seen) == {(4, 1)} and torch.allclose(factors, (norms/norms.amax(0)).to(factors))


@pytest.mark.parametrize("clip, counts", [
    (AdaptiveClip(100, .5), 1), (LayerClip(.5, [0, 0, 1, 1], batch_size=100), 2)])
def test_noise_is_computed_from_plan_and_clip(clip, counts):
    "Counts are paid for out of sigma; a clip's own word about noise is not asked."
    clip.std = None
    made = noise_std(clip, 2.)
    assert made == split_sigma(2., clip.bit_sigma/counts**.5)*clip.sensitivity
    assert noise_std(FlatClip(.5), 2.) == 1.
    own = LayerClip([.1, .9], [0, 1, 0, 1], own_noise=True)
    assert torch.equal(noise_std(own, 2.), 2.*own.scales)


class SaysNothing(AdaptiveClip):
    def short(self, norms):
        return norms


def test_what_is_short_is_said_in_bits():
    norms = torch.rand(4, 9)
    assert which_are_short(AdaptiveClip(9, 1.), norms).shape == (1, 9)
    assert which_are_short(AdaptiveClip(9, 1.), norms[:, :0]).shape == (1, 0)
    with pytest.raises(ValueError, match="return 1 bool for each example"):
        which_are_short(SaysNothing(9), norms)


# --- layers that don't fit


def test_layer_refuses_another_model():
    with pytest.raises(ValueError, match="2 tensors"):
        LayerClip([1., 1.])(torch.ones(3, 5))


def test_learnt_layers_cost_sqrt_k():
    clip = LayerClip(1., range(16), batch_size=200)
    assert clip.bit_sigma == 40. and clip.std(2.) == pytest.approx(split_sigma(2., 10.))
    before = clip.max_norms.clone()
    learn(clip, torch.cat([torch.full((8, 2000), .01), torch.full((8, 2000), 9.)]), gen())
    assert (clip.max_norms[:8] < before[:8]).all()  # counts of 1000 against noise 40
    assert (clip.max_norms[8:] > before[8:]).all()


# --- schedules

def by_hand(sigmas, q, accountant=PLDAccountant):
    ledger = accountant()
    for sigma in sigmas:
        ledger.step(q, sigma)
    return ledger.epsilon(1e-5)


def stairs(by):
    "A plan whose noise halves in five stairs, and the sigma of each of its steps."
    falling = falling_noise(decay(3., 1.5, 40, levels=5), by)
    plan = PrivacyPlan(n=1000, batch_size=50, steps=40, eps=2., delta=1e-5, accountant=falling)
    return plan, [plan.sigma*ratio for ratio in plan.accountant.ratios]


def test_schedule_costs_what_google_says():
    plan, sigmas = stairs(PLDAccountant)
    google = GooglePLD()
    for sigma in sorted(set(sigmas)):
        google.compose(PoissonSampledDpEvent(.05, GaussianDpEvent(sigma)), sigmas.count(sigma))
    assert plan.epsilon_after(40) == pytest.approx(google.get_epsilon(1e-5), rel=2e-3)


@pytest.mark.parametrize("more", [[2], [1, 1]])
def test_steps_past_the_schedule_cost_what_the_last_one_does(more):
    plan, sigmas = stairs(RDPAccountant)
    ledger = plan.accountant().step(.05, plan.sigma, 40)
    for n in more:
        ledger.step(.05, plan.sigma, n)
    spent = by_hand([*sigmas, sigmas[-1], sigmas[-1]], .05, RDPAccountant)
    assert ledger.epsilon(1e-5) == pytest.approx(spent, rel=1e-9)


def test_a_scheduled_ledger_is_saved_and_goes_on():
    plan, _ = stairs(RDPAccountant)
    ledger = plan.accountant()
    for _ in range(40):  # one at a time, or all at once
        ledger.step(.05, plan.sigma)
    assert ledger.history == plan.accountant().step(.05, plan.sigma, 40).history
    again = plan.accountant().load_state_dict(ledger.state_dict())
    assert again.history == ledger.history


@pytest.mark.parametrize("by", [PLDAccountant, RDPAccountant])
def test_another_accountant_charges_the_falling_noise_too(by):
    "What a record's last line says by RDP: of every step, not of thirty like the first."
    plan = make_plan(falling_noise(decay(1, .5, 30), by))
    run = trainer(ScheduledClip(decay(1, .5, 30), plan), plan, seed=0).fit()
    sigmas = [plan.sigma*ratio for ratio in plan.accountant.ratios]
    for other in (PLDAccountant, RDPAccountant):
        true = by_hand(sigmas, .2, other)
        assert run.epsilon(other) == pytest.approx(true, rel=1e-4)
        assert true > 1.3*by_hand([plan.sigma]*30, .2, other)
    assert run.epsilon(plan.accountant) == run.epsilon()


def test_noise_of_a_scheduled_run_is_what_was_paid_for():
    "Measured on the noise itself, step by step: gradients are next to nothing."
    plan = make_plan(falling_noise(decay(1, .25, 30, levels=3)))
    data = torch.zeros(60, 100).double(), torch.zeros(60).double()
    stds = []

    def look(run):
        stds.append(run.model.weight.grad.std().item()*12)
    run = Trainer(nn.Linear(100, 100).double(), data, plan, seed=0, callbacks=[look],
                  loss_fn=lambda output, y: 1e-9*output.sum(1),
                  clip=ScheduledClip(decay(2, 1, 30), plan)).fit()
    ratios = torch.tensor(plan.accountant.ratios)
    expected = plan.sigma*ratios*decay(2, 1, 30)
    # standard error .7 %: 5.6 sigma, 30 steps
    assert (torch.tensor(stds)/expected - 1).abs().max() < .04
    assert run.epsilon() == pytest.approx(by_hand((plan.sigma*ratios).tolist(), .2), rel=1e-4)


def test_a_used_clip_has_the_noise_of_its_new_run():
    clip = ScheduledClip(decay(1, .5, 30), FALL)
    trainer(clip, FALL, seed=0).fit(5)
    run = trainer(clip, FALL)
    scale = run._sensitivity().scale
    assert scale == clip.max_norm < 1 and run._std(run._sensitivity()) == FALL.sigma*scale


@pytest.mark.parametrize("case", range(3))
def test_resume_with_another_seed_never_underreports(case, tmp_path):
    "Whatever was computed, in whatever order, costs at most what the trainer says."
    rng = random.Random(case)
    plan = make_plan(falling_noise(decay(1, .5, 30), RDPAccountant))
    ratios = plan.accountant.ratios

    def new(seed):
        return trainer(ScheduledClip(decay(1, .1, 30), plan), plan, seed=seed)

    def truth(run):
        steps = [entry.t for entry in run._ledger.entries()]
        return by_hand([plan.sigma*ratios[step] for step in steps], .2, RDPAccountant)

    run = new(0)
    for i in range(1, 4):
        run.fit(min(rng.randint(1, 8), run.left())).save(tmp_path/str(i))
        run = new(100*case + i).fit(rng.randint(1, 4))  # its own steps count, too
        run.load(tmp_path/str(rng.randint(1, i)))
        assert truth(run) <= run.epsilon()*(1 + 1e-9)
    assert run.computed > run.t
    run.fit()
    assert truth(run) <= run.epsilon()*(1 + 1e-9) and run.epsilon() <= 3.


def test_a_checkpoint_of_another_schedule_is_refused(tmp_path):
    assert falling_noise([1., .9, .5]).__name__ != falling_noise([1., .8, .5]).__name__
    named("scheduled", seed=0).fit(3).save(tmp_path/"c")
    other = make_plan(falling_noise(decay(1, .6, 30)))
    with pytest.raises(ValueError, match="another run"):
        trainer(ScheduledClip([1.]*30, other), other).load(tmp_path/"c")
