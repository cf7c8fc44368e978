"Clips that learn, split and follow a schedule: what they let through, what they cost, what they remember."
import math
import random
import types
from fractions import Fraction as Q
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant as GooglePLD
from hypothesis import given, settings, strategies as st
from torch import nn

from dp_course.accounting import PLDAccountant, PrivacyPlan, RDPAccountant, epsilon
from dp_course.clipping import (AdaptiveClip, AutoClip, LayerClip, ScheduledClip, decay, falling_noise,
                                layer_groups, noised_fraction, split_sigma)
from dp_course.dpsgd import FlatClip, loop_grad_sum
from dp_course.guards import refuse_unbounded
from dp_course.trainer import Trainer
from dp_course.gradients import (bookkeeping_grad_sum, fast_grad_sum, ghost_grad_sum, hook_grad_sum,
                                 vmap_grad_sum)

loss = partial(F.cross_entropy, reduction="none")
ENGINES = [hook_grad_sum, vmap_grad_sum, ghost_grad_sum, bookkeeping_grad_sum, fast_grad_sum]
def gen(seed=0): return torch.Generator().manual_seed(seed)


def toy(n=60, classes=3, shape=(5,), dtype=torch.float64):
    x, y = torch.randn(n, *shape, generator=gen(), dtype=dtype), torch.randint(classes, (n,), generator=gen(1))
    return types.SimpleNamespace(train_x=x, train_y=y, test_x=x, test_y=y)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


PLAN = PrivacyPlan(60, 12, 30, 3., 1e-5)
FALL = PrivacyPlan(60, 12, 30, 3., 1e-5, falling_noise(decay(1, .5, 30)))
CLIPS = {
    "auto": lambda: AutoClip(.5), "normalized": lambda: AutoClip(2., 0.),
    "adaptive": lambda: AdaptiveClip(100, .5), "equal": lambda: LayerClip(.5),
    "given": lambda: LayerClip([.1, .2, .3, .4]), "groups": lambda: LayerClip(.5, [0, 0, 1, 1]),
    "own noise": lambda: LayerClip([.1, .9], [0, 1, 0, 1], own_noise=True),
    "learnt": lambda: LayerClip(.5, [0, 0, 1, 1], batch_size=100),
    "learnt, own noise": lambda: LayerClip(.5, range(4), own_noise=True, batch_size=100),
    "scheduled C": lambda: ScheduledClip(decay(1, .1, 30), PLAN), "scheduled": lambda: ScheduledClip(decay(1, .1, 30), FALL),
}
every_clip = pytest.mark.parametrize("name", CLIPS)
def plan_of(name): return FALL if name == "scheduled" else PLAN
def trainer(name, **kw): return Trainer(net(), toy(), plan_of(name), **{"clip": CLIPS[name](), "engine": fast_grad_sum, **kw})
def state(clip): return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in vars(clip).items()}


# What every clip owes

def joint_move(clip, norms, sigma):
    "Length, in units of noise, of what one example with these norms (l,) moves: gradients and centred bits."
    stds = torch.as_tensor(clip.std(sigma), dtype=torch.float64).expand(len(norms))
    moved = [*(clip(norms[:, None])[:, 0]*norms/stds)]
    if getattr(clip, "batch_size", None):
        k = 1 if isinstance(clip, AdaptiveClip) else len(clip.max_norms)
        moved += k*[torch.tensor(.5/clip.bit_sigma, dtype=torch.float64)]  # every bit is 1/2 or -1/2
    return torch.stack(moved).norm().item()


@every_clip
def test_one_example_costs_at_most_a_step_of_the_planned_sigma_at_any_time(name):
    clip, g, sigma = CLIPS[name](), gen(), plan_of(name).sigma
    for t in range(30):
        paid = sigma*clip.ratios[t].item() if name == "scheduled" else sigma
        refuse_unbounded(clip, paid, 4)
        for _ in range(20):
            norms = 10**(6*torch.rand(4, generator=g, dtype=torch.float64) - 3)
            assert joint_move(clip, norms, sigma) <= 1/paid*(1 + 1e-9)
        clip.update(norms[:, None].expand(4, 12), g)
    full = torch.full((4,), 1e9, dtype=torch.float64)   # too long everywhere: the budget is used up, not wasted
    assert joint_move(clip, full, sigma) == pytest.approx(1/(sigma*(clip.ratios[-1].item() if name == "scheduled" else 1)), rel=1e-6)


@every_clip
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.__name__)
def test_every_engine_agrees_with_the_loop(name, engine):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).double()
    x, y = torch.randn(7, 1, 6, 6, generator=gen(), dtype=torch.float64)*3, torch.arange(7) % 3
    clip = CLIPS[name]()
    (a, n), (b, m) = loop_grad_sum(model, loss, x, y, clip), engine(model, loss, x, y, clip)
    assert torch.allclose(n, m, 1e-9, 1e-12) and a.keys() == b.keys()
    assert all(torch.allclose(a[k], b[k], 1e-9, 1e-12) for k in a)


@every_clip
def test_what_is_not_finite_counts_nothing(name):
    norms = torch.tensor([[1., math.nan, 1.], [2., 1., 1.], [3., 1., math.inf], [4., 1., 1.]], dtype=torch.float64)
    clip = CLIPS[name]()
    f = clip(norms)
    assert f.shape == norms.shape and (f[:, 0] > 0).all() and (f[:, 1:] == 0).all()
    assert clip(norms.float()).dtype == torch.float32 and clip(norms[:, :0]).shape == (4, 0)
    clip.update(norms, gen())
    refuse_unbounded(clip, .1, 4)


@every_clip
def test_resume_is_bit_identical(name, tmp_path):
    whole = trainer(name, seed=5, micro_batch=5).fit(12)
    first = trainer(name, seed=5).fit(7)
    first.save(tmp_path/"c")
    second = trainer(name).load(tmp_path/"c").fit(5)
    assert state(whole.clip) == state(second.clip) and whole.clip.sensitivity == second.clip.sensitivity
    assert torch.equal(torch.as_tensor(whole.clip.std(2.)), torch.as_tensor(second.clip.std(2.)))
    for p, r in zip(whole.model.parameters(), second.model.parameters()): assert torch.allclose(p, r, 0, 1e-12)
    third = trainer(name, seed=5).fit(7).fit(5)
    assert all(torch.equal(p, r) for p, r in zip(second.model.parameters(), third.model.parameters()))


@every_clip
def test_a_whole_private_run_with_float32_and_an_empty_batch(name):
    data, plan = toy(dtype=torch.float32), plan_of(name)
    tiny = PrivacyPlan(60, .5, 30, 3., 1e-5, plan.accountant)   # most batches are empty
    clip = CLIPS[name]() if name[:9] != "scheduled" else ScheduledClip(decay(1, .1, 30), tiny)
    t = Trainer(net().float(), data, tiny, engine=fast_grad_sum, clip=clip, seed=0, optimizer=partial(torch.optim.SGD, lr=.01)).fit()
    assert t.computed == 30 and t.epsilon() <= 3. and all(p.isfinite().all() for p in t.model.parameters())
    assert getattr(clip, "t", 30) == 30  # an empty batch moves a schedule on, too
    if name == "adaptive": assert clip.max_norm != .5  # and a learnt threshold


# The split between gradient and count

@given(st.floats(1e-3, 1e3), st.floats(1.0001, 1e9))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_split_costs_exactly_sigma(sigma, ratio):
    bit_sigma = sigma/2*ratio
    z = split_sigma(sigma, bit_sigma)
    cost = z**-2 + (2*bit_sigma)**-2
    assert z >= sigma and cost == pytest.approx(sigma**-2, rel=1e-9)
    assert 1/Q(z)**2 + 1/(2*Q(bit_sigma))**2 <= 1/Q(sigma)**2   # exactly, never overspent


def test_split_by_the_accountant():
    "Two queries with sensitivities C and 1/2 in one step are one Gaussian of the planned multiplier."
    assert split_sigma(2.8703, 4096/20) == pytest.approx(2.87037, abs=5e-6)
    assert split_sigma(2.8703, 10.) == pytest.approx(2.900, abs=5e-4)
    z, b, q, T = split_sigma(1.3, 2.), 2., .05, 200
    move = math.hypot(1/z, .5/b)
    assert epsilon(q, 1/move, T, 1e-5) == pytest.approx(epsilon(q, 1.3, T, 1e-5), rel=1e-9)
    google = GooglePLD().compose(PoissonSampledDpEvent(q, GaussianDpEvent(1/move)), T).get_epsilon(1e-5)
    assert epsilon(q, 1.3, T, 1e-5) == pytest.approx(google, rel=2e-3)


@pytest.mark.parametrize("sigma, bit_sigma", [(2., 1.), (2., .5), (2., 0.), (-1., 1.), (1., -1.), (math.nan, 1.), (1., math.nan), (math.inf, 1.)])
def test_split_refuses(sigma, bit_sigma):
    with pytest.raises(ValueError, match="bit_sigma|noise"): split_sigma(sigma, bit_sigma)
def test_split_of_no_noise_is_no_noise(): assert split_sigma(0., 3.) == split_sigma(0., 0.) == 0.


def test_trainer_refuses_a_count_that_costs_too_much():
    with pytest.raises(ValueError, match="bit_sigma"): Trainer(net(), toy(), PLAN, clip=AdaptiveClip(12, bit_sigma=.3))
    with pytest.raises(ValueError, match="bit_sigma"): Trainer(net(), toy(), PLAN, clip=LayerClip(1., range(4), batch_size=12, bit_sigma=.9))


def test_a_plan_without_noise_is_defined():
    open_plan = types.SimpleNamespace(n=60, batch_size=12, steps=5, q=.2, sigma=0., eps=math.inf, delta=1e-5, accountant=RDPAccountant)
    for clip in (AdaptiveClip(12), AdaptiveClip(12, bit_sigma=0.), LayerClip(1., range(4), batch_size=12), ScheduledClip([1.]*5, open_plan)):
        t = Trainer(net(), toy(), open_plan, clip=clip, engine=fast_grad_sum, seed=0).fit()
        assert t.epsilon() == math.inf and (torch.as_tensor(clip.std(0.)) == 0).all()


# The threshold that is learnt

def test_update_is_algorithm_1_by_hand():
    "11 of 20 norms are at most C = 1: (11-9)/2 centred, plus noise, over the constant 100, plus 1/2."
    norms = torch.tensor([.5]*10 + [1.] + [1.001]*9)[None]
    for seed in range(5):
        clip = AdaptiveClip(100, 1., quantile=.3, lr=.2, bit_sigma=7.)
        clip.update(norms, gen(seed))
        noise = 7*torch.randn(1, generator=gen(seed), dtype=torch.float64).item()
        assert clip.max_norm == pytest.approx(math.exp(-.2*((1 + noise)/100 + .5 - .3)), rel=1e-12)
    assert AdaptiveClip(4096).bit_sigma == 204.8 and AdaptiveClip(4096).quantile == .5 and AdaptiveClip(4096).lr == .2


def test_nothing_but_the_noised_count_survives_the_batch():
    "Two batches with nothing in common but the centred count leave the same clip, to the last bit."
    a, b = torch.tensor([[.1, .2, 5., 6., 7.]]), torch.tensor([[math.nan, 1e30]*3 + [math.inf]*3 + [1e-9]*8])
    for make in (lambda: AdaptiveClip(50, 1.), lambda: LayerClip([1.], batch_size=50)):
        one, two = make(), make()
        one.update(a, gen()); two.update(b, gen())          # 2-3 = 8-9 = -1
        assert state(one) == state(two) and state(one) != state(make())


def test_the_threshold_leaks_no_more_than_its_noise_hides():
    "log C moves by lr/2B when a stranger comes; its noise is lr*bit_sigma/B: a Gaussian with multiplier 2*bit_sigma."
    def log_c(n, seed):
        clip = AdaptiveClip(50, 1., bit_sigma=2.5)
        clip.update(torch.full((1, n), .5), gen(seed))
        return math.log(clip.max_norm)
    with_z = torch.tensor([log_c(8, s) for s in range(4000)], dtype=torch.float64)
    without = torch.tensor([log_c(7, s) for s in range(4000)], dtype=torch.float64)
    assert torch.allclose(with_z - without, torch.tensor(-.2*.5/50, dtype=torch.float64), 0, 1e-12)
    ratio = without.std().item()/(.2*.5/50)                 # noise in units of the move
    assert abs(ratio/5 - 1) < .06                           # std of an estimated std: 1.1 %, so 5 sigma: 1 in 2 million


def test_unnoised_update_leaks_and_noised_update_hides_the_batch():
    "Without noise C_{t+1} is a function of the batch; with it, the same C_{t+1} comes from either batch."
    def after(bit_sigma, n, seed=0):
        clip = AdaptiveClip(50, 1., bit_sigma=bit_sigma)
        clip.update(torch.full((1, n), .5), gen(seed))
        return clip.max_norm
    assert len({after(0., 7, s) for s in range(20)}) == 1 and after(0., 7) != after(0., 8)
    a, b = ({round(after(2.5, n, s), 3) for s in range(2000)} for n in (7, 8))
    assert len(a & b) > .8*len(a | b)


def test_threshold_is_updated_after_use():
    "The gradient of step t is clipped and noised with the C that was there before its batch was seen."
    seen = []
    class Spy(AdaptiveClip):
        def __call__(self, norms): seen.append(("clip", self.max_norm)); return super().__call__(norms)
        def std(self, sigma): seen.append(("std", self.max_norm)); return super().std(sigma)
        def update(self, norms, generator=None):
            seen.append(("update", self.max_norm)); super().update(norms, generator)
    t = Trainer(net(), toy(), PLAN, clip=Spy(40), micro_batch=4, engine=fast_grad_sum, seed=0)
    seen.clear()
    t.step()
    assert [k for k, _ in seen[-2:]] == ["std", "update"] and len({c for _, c in seen}) == 1 and len(seen) >= 4
    assert t.clip.max_norm != seen[-1][1]


def test_threshold_finds_the_quantile():
    norms = torch.rand(1, 1000, generator=gen())*3
    for quantile in (.2, .5, .8):
        clip = AdaptiveClip(1000, .01, quantile=quantile)
        for t in range(400): clip.update(norms, gen(t))
        assert clip.max_norm == pytest.approx(3*quantile, rel=.2)   # noise leaves at most 3.5 % (linearized)


def test_threshold_stays_positive_and_finite_whatever_the_noise():
    for clip in (AdaptiveClip(1, 1., bit_sigma=1e6), LayerClip(1., range(3), batch_size=1, bit_sigma=1e6, lr=50.)):
        for t in range(60):
            clip.update(torch.full((3, 4), 10.**(t % 20 - 10)), gen(t))
            assert 0 < clip.sensitivity < math.inf
            refuse_unbounded(clip, 1., 3)
    for quantile, norm in ((0., 0.), (1., math.inf)):   # always in one direction, as fast as it goes
        clip = AdaptiveClip(1, 1., quantile=quantile, lr=1e9, bit_sigma=0.)
        for t in range(60): clip.update(torch.full((3, 4), norm))
        assert 0 < clip.max_norm < math.inf and clip.max_norm != 1.


@pytest.mark.parametrize("bad", [dict(batch_size=0), dict(batch_size=math.nan), dict(max_norm=0.), dict(max_norm=math.inf), dict(quantile=1.1),
                                 dict(lr=-1.), dict(lr=math.inf), dict(bit_sigma=-1.), dict(bit_sigma=math.nan)])
def test_adaptive_refuses(bad):
    with pytest.raises(ValueError): AdaptiveClip(**{"batch_size": 100, **bad})


def test_noised_fraction_counts_k_groups_with_k_noises():
    norms, C = torch.tensor([[.5, 2., 1.], [3., 3., 3.]]), torch.tensor([1., 1.], dtype=torch.float64)
    assert torch.allclose(noised_fraction(norms, C, 3, 0.), torch.tensor([2/3, 0.], dtype=torch.float64))
    rows = torch.stack([noised_fraction(norms[:, :0], C, 10, 5., gen(s)) for s in range(3000)])
    assert abs(rows.mean() - .5) < .03 and (rows.std(0)/.5 - 1).abs().max() < .08   # 5 standard errors or more
    assert abs(torch.corrcoef(rows.T)[0, 1]) < .1


# Layers

def test_layer_splits_by_hand():
    clip = LayerClip([.3, .4], [0, 1, 0])
    norms = torch.tensor([[3., .1], [.1, 4.], [4., .1]])
    f = clip(norms)
    assert torch.allclose(f, torch.tensor([[.06, 1.], [1., .1], [.06, 1.]])) and clip.sensitivity == pytest.approx(.5)
    assert clip.std(2.) == pytest.approx(1.)
    own = LayerClip([.3, .4], [0, 1, 0], own_noise=True).std(2.)
    assert torch.allclose(own, 2*2**.5*torch.tensor([.3, .4, .3], dtype=torch.float64))
    equal = LayerClip(2.)
    assert torch.allclose(equal(norms[:, :1])[:, 0], torch.tensor([2/3**.5/3, 1., 2/3**.5/4])) and equal.sensitivity == 2.
    assert LayerClip(2., [0, 0, 0])(norms)[0, 0] == FlatClip(2.)(norms)[0, 0]


def test_without_the_root_the_trainer_refuses():
    class Report(LayerClip):
        "Every tensor to C, noise for C: the report's Algorithm, had it run."
        sensitivity = property(lambda self: .5)
    with pytest.raises(ValueError, match="lets 1 through"): Trainer(net(), toy(), PLAN, clip=Report([.5]*4))


@pytest.mark.parametrize("args, kw", [(([],), {}), (([1., 0.],), {}), ((math.inf,), {}), (([[1.]],), {}), (([1., 1.], [0, 0]), {}), ((1., [0, 2]), {}),
                                      ((1.,), dict(batch_size=10)), ((1., [0, 1]), dict(batch_size=-1)), ((1., [0, 1]), dict(batch_size=10, lr=-1))])
def test_layer_refuses(args, kw):
    with pytest.raises(ValueError): LayerClip(*args, **kw)
def test_layer_refuses_another_model():
    with pytest.raises(ValueError, match="2 tensors"): LayerClip([1., 1.])(torch.ones(3, 5))


def test_learnt_layers_cost_sqrt_k():
    clip = LayerClip(1., range(16), batch_size=200)
    assert clip.bit_sigma == 40. and clip.std(2.) == pytest.approx(split_sigma(2., 10.))
    before = clip.max_norms.clone()
    clip.update(torch.cat([torch.full((8, 2000), .01), torch.full((8, 2000), 9.)]), gen())
    assert (clip.max_norms[:8] < before[:8]).all() and (clip.max_norms[8:] > before[8:]).all()   # 1000 against noise 40


def test_layer_groups_follow_the_rows_of_norms():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(32, 3))
    assert layer_groups(model) == [0, 0, 1, 1, 2, 2]
    model[1].weight.requires_grad_(False)
    assert layer_groups(model) == [0, 0, 1, 2, 2]
    _, norms = fast_grad_sum(model, loss, torch.randn(3, 1, 6, 6), torch.arange(3), LayerClip(1., layer_groups(model)))
    assert len(norms) == 5


# Schedules

def by_hand(sigmas, q, delta, accountant=PLDAccountant):
    a = accountant()
    for s in sigmas: a.step(q, s)
    return a.epsilon(delta)


@pytest.mark.parametrize("by", [PLDAccountant, RDPAccountant])
def test_schedule_is_paid_step_by_step(by):
    plan = PrivacyPlan(1000, 50, 40, 2., 1e-5, falling_noise(decay(3., 1.5, 40, levels=5), by))
    sigmas = [plan.sigma*r for r in plan.accountant.ratios]
    assert sigmas[-1] == pytest.approx(plan.sigma/2) and plan.accountant.ratios[0] == 1
    for t in (1, 7, 40): assert plan.epsilon_after(t) == pytest.approx(by_hand(sigmas[:t], .05, 1e-5, by), rel=1e-4)
    assert plan.epsilon_after(40) <= 2. and by_hand([s*.998 for s in sigmas], .05, 1e-5, by) > 2.
    if by is PLDAccountant:
        google = GooglePLD()
        for s in sorted(set(sigmas)): google.compose(PoissonSampledDpEvent(.05, GaussianDpEvent(s)), sigmas.count(s))
        assert plan.epsilon_after(40) == pytest.approx(google.get_epsilon(1e-5), rel=2e-3)
    a = plan.accountant()
    for _ in range(40): a.step(.05, plan.sigma)             # one at a time, or all at once
    assert a.history == plan.accountant().step(.05, plan.sigma, 40).history
    again = plan.accountant().load_state_dict(a.state_dict())
    assert again.history == a.history


def test_a_level_schedule_is_the_ordinary_plan():
    assert PrivacyPlan(1000, 50, 40, 2., 1e-5, falling_noise([1.]*40)).sigma == PrivacyPlan(1000, 50, 40, 2., 1e-5).sigma


def test_noise_of_a_scheduled_run_is_what_was_paid_for():
    "Measured on the noise itself, step by step: gradients are zero, so p.grad is noise alone."
    plan = PrivacyPlan(60, 12, 30, 3., 1e-5, falling_noise(decay(1, .25, 30, levels=3)))
    model = nn.Linear(100, 100).double()
    data = types.SimpleNamespace(train_x=torch.zeros(60, 100).double(), train_y=torch.zeros(60).double())
    stds = []
    t = Trainer(model, data, plan, loss_fn=lambda out, y: 0*out.sum(1), clip=ScheduledClip(decay(2, 1, 30), plan), seed=0,
                callbacks=[lambda t: stds.append(t.model.weight.grad.std().item()*12)], engine=fast_grad_sum).fit()
    expected = plan.sigma*torch.tensor(plan.accountant.ratios)*decay(2, 1, 30)
    assert (torch.tensor(stds)/expected - 1).abs().max() < .04    # standard error .7 %: 5.6 sigma, 30 steps
    assert t.epsilon() == pytest.approx(by_hand([plan.sigma*r for r in plan.accountant.ratios], .2, 1e-5), rel=1e-4)


def test_no_pairing_of_plan_and_clip_underpays():
    for clip in (FlatClip(1.), AdaptiveClip(60), LayerClip(1.)):   # the noise stays that of the first step
        t = Trainer(net(), toy(), FALL, clip=clip, engine=fast_grad_sum, seed=0).fit()
        assert (torch.as_tensor(t.clip.std(FALL.sigma))/t.clip.sensitivity >= FALL.sigma*(1 - 1e-9)).all()
    clip = ScheduledClip(decay(1, .5, 30), FALL)                    # under another plan: the multiplier does not fall
    t = Trainer(net(), toy(), PLAN, clip=clip, engine=fast_grad_sum, seed=0).fit(29)
    assert clip.std(PLAN.sigma) == pytest.approx(PLAN.sigma*clip.max_norm) and clip.max_norm == pytest.approx(.5)


def test_a_used_clip_is_refused():
    clip = ScheduledClip(decay(1, .5, 30), FALL)
    Trainer(net(), toy(), FALL, clip=clip, engine=fast_grad_sum, seed=0).fit(5)
    with pytest.raises(ValueError, match="step 5 of 30"): Trainer(net(), toy(), FALL, clip=clip)


def test_resume_with_another_seed_never_underreports(tmp_path):
    "Whatever was computed, in whatever order, costs at most what the trainer says."
    r = random.Random(0)
    plan = PrivacyPlan(60, 12, 30, 3., 1e-5, falling_noise(decay(1, .5, 30), RDPAccountant))
    def new(seed): return Trainer(net(), toy(), plan, clip=ScheduledClip(decay(1, .1, 30), plan), engine=fast_grad_sum, seed=seed)
    def truth(t):
        steps = [s for steps in t._ledger.values() for s in steps]
        return by_hand([plan.sigma*plan.accountant.ratios[s] for s in steps], .2, 1e-5, RDPAccountant)
    for case in range(3):
        t = new(0)
        for i in range(1, 4):
            t.fit(min(r.randint(1, 8), t.left())).save(tmp_path/f"{case}-{i}")
            t = new(100*case + i).fit(r.randint(1, 4)).load(tmp_path/f"{case}-{r.randint(1, i)}")   # its own steps count, too
            assert truth(t) <= t.epsilon()*(1 + 1e-9)
        repeated = t.computed > t.t
        t.fit()
        assert truth(t) <= t.epsilon()*(1 + 1e-9) and t.epsilon() <= 3. and repeated


def test_a_checkpoint_of_another_schedule_is_refused(tmp_path):
    assert falling_noise([1., .9, .5]).__name__ != falling_noise([1., .8, .5]).__name__
    trainer("scheduled", seed=0).fit(3).save(tmp_path/"c")
    other = PrivacyPlan(60, 12, 30, 3., 1e-5, falling_noise(decay(1, .6, 30)))
    with pytest.raises(ValueError, match="another run"): Trainer(net(), toy(), other, clip=ScheduledClip([1.]*30, other)).load(tmp_path/"c")


@pytest.mark.parametrize("ratios", [[], [1., 1.1], [1., .5, .6], [1., 0.], [1., -1.], [math.nan], [math.inf, 1.]])
def test_noise_may_only_fall(ratios):
    with pytest.raises(ValueError, match="must not rise"): falling_noise(ratios)
@pytest.mark.parametrize("C", [[1.]*29, [1.]*29 + [0.], [1.]*29 + [math.nan], 1.])
def test_scheduled_refuses(C):
    with pytest.raises(ValueError, match="one positive finite number per step"): ScheduledClip(C, PLAN)
def test_schedule_of_another_length_is_refused():
    with pytest.raises(ValueError, match="40 noise ratios"): ScheduledClip([1.]*30, PrivacyPlan(60, 12, 30, 3., 1e-5, falling_noise(decay(1, .5, 40))))


def test_decay():
    d = decay(2., .5, 9)
    assert d[0] == 2 and d[-1] == pytest.approx(.5) and torch.allclose(d[1:]/d[:-1], (d[1]/d[0]))
    assert decay(2., .5, 100, levels=5).unique().tolist() == pytest.approx([.5, .5*2**.5, 1., 2**.5, 2.])
    assert (decay(1., .1, 7, levels=1) == 1).all() and decay(3., 1., 1).tolist() == [3.]
    for bad in ((0, 1, 5), (1, math.inf, 5), (1, .5, 5, 6), (1, .5, 5, 0)):
        with pytest.raises(ValueError): decay(*bad)


# Automatic clipping

def test_auto_by_hand():
    f = AutoClip(2., .5)(torch.tensor([[3., 0., 0.], [4., 0., 1e-30]]))
    assert torch.allclose(f[0], torch.tensor([2/5.5, 0., 4.])) and torch.equal(f[0], f[1])
    assert torch.allclose(AutoClip(2., 0.)(torch.tensor([[1e-6, 1e6]])), torch.tensor([[2e6, 2e-6]]))
    for bad in ((0.,), (math.inf,), (1., -1.), (1., math.nan)):
        with pytest.raises(ValueError): AutoClip(*bad)


# On D and D+z, with the same randomness

@every_clip
def test_replay_with_a_stranger_moves_the_sum_by_the_sensitivity_at_most(name):
    model, data, clip = net(), toy(), CLIPS[name]()
    home, _ = loop_grad_sum(model, loss, data.train_x[:8], data.train_y[:8], clip)
    for scale in (0., 1e-3, 1., 1e3, 1e6):
        for label in range(3):
            x = torch.cat([data.train_x[:8], scale*data.train_x[9:10]])
            y = torch.cat([data.train_y[:8], torch.tensor([label])])
            there, _ = loop_grad_sum(model, loss, x, y, clip)
            moved = torch.cat([(there[k] - home[k]).flatten() for k in home]).norm()
            assert moved <= clip.sensitivity*(1 + 1e-9)
