"Tricks: views before the clip, averages and schedules that only see released iterates, paid-for plateaus, DP-Adam."
import copy
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dp_course.accounting import PrivacyPlan, RDPAccountant, epsilon
from dp_course.data import load
from dp_course.dpsgd import FlatClip, loop_grad_sum
from dp_course.trainer import Trainer
from dp_course.gradients import fast_grad_sum
from dp_course.tricks import (EMA, SCHEDULES, DPAdam, NoisyAccuracy, Plateau, Schedule, TailAverage, constant, cosine,
                              linear, multiplicity, step_decay, swapped, views)

loss = partial(F.cross_entropy, reduction="none")


def gen(seed=0): return torch.Generator().manual_seed(seed)
def flat(grads): return torch.cat([g.flatten() for g in grads.values()])


@pytest.fixture(scope="module")
def digits(): return load("digits")


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def trainer(digits, steps=12, seed=1, **kwargs):
    plan = PrivacyPlan(1437, 64, steps, 3., 1e-5, RDPAccountant)
    kwargs = dict(engine=fast_grad_sum, optimizer=partial(torch.optim.SGD, lr=.5)) | kwargs
    return Trainer(net(), digits, plan, seed=seed, **kwargs)


# --- views

@pytest.mark.parametrize("shape, pad", [((5, 3, 9, 6), 3), ((4, 1, 8, 8), 7), ((3, 2, 5, 5), 0)])
def test_every_view_is_one_padded_crop(shape, pad):
    x, (b, c, h, w) = torch.randn(*shape, generator=gen()), shape
    v = views(x, 6, gen(1), pad)
    padded = F.pad(x, (pad,)*4, mode="reflect") if pad else x
    crops = [padded[:, :, i:i+h, j:j+w] for i in range(2*pad+1) for j in range(2*pad+1)]
    crops += [z.flip(-1) for z in crops]
    assert v.shape == (b, 6, c, h, w) and v.dtype == x.dtype
    for i in range(b):
        for k in range(6): assert any(torch.equal(z[i], v[i, k]) for z in crops)


def test_views_cover_all_crops_evenly():
    # 50 crops (25 shifts x 2), 100,000 views: chi^2 with 49 degrees of freedom, above 110 by chance once in 1e6
    x = torch.arange(36.).view(1, 1, 6, 6)
    v = views(x, 100_000, gen(2), pad=2)[0, :, 0]
    _, counts = torch.unique(v[:, 2:4, 2:4].flatten(1), dim=0, return_counts=True)
    assert len(counts) == 50
    assert ((counts-2000.)**2/2000).sum() < 110


def test_no_flip_keeps_the_order_and_pad_0_is_the_image():
    x = torch.randn(7, 1, 8, 8, generator=gen())
    assert torch.equal(views(x, 3, gen(), pad=0, flip=False), x[:, None].expand(7, 3, 1, 8, 8))
    ramp = torch.arange(8.).expand(20, 1, 8, 8).contiguous()
    middle = views(ramp, 4, gen(), pad=1, flip=False)[..., 2:6]
    assert (middle.diff(dim=-1) == 1).all()


def test_views_depend_on_their_example_and_the_generator_only():
    x, z = torch.randn(6, 3, 8, 8, generator=gen()), torch.randn(6, 3, 8, 8, generator=gen(1))
    z[2] = x[2]
    assert torch.equal(views(x, 4, gen(5))[2], views(z, 4, gen(5))[2])
    assert torch.equal(views(x[:4], 4, gen(5)), views(x, 4, gen(5))[:4])  # who is appended changes nobody else's views
    assert not torch.equal(views(x, 4, gen(5)), views(x, 4, gen(6)))
    state = torch.get_rng_state()
    views(x, 4, gen(5))
    assert torch.equal(torch.get_rng_state(), state)


def test_views_of_nobody_of_integers_and_of_strided_images():
    assert views(torch.zeros(0, 3, 8, 8), 4, gen()).shape == (0, 4, 3, 8, 8)
    x = torch.randint(256, (3, 8, 8, 2), generator=gen(), dtype=torch.uint8).permute(0, 3, 1, 2)
    v = views(x, 2, gen())
    assert v.dtype == torch.uint8 and torch.equal(v, views(x.contiguous(), 2, gen()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_views_on_a_gpu_never_wait_for_it():
    x, g = torch.randn(5, 3, 8, 8, device="cuda"), torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try: v = views(x, 4, g, pad=2)
    finally: torch.cuda.set_sync_debug_mode("default")
    padded = F.pad(x, (2,)*4, mode="reflect")
    crops = [padded[:, :, i:i+8, j:j+8] for i in range(5) for j in range(5)]
    crops = torch.stack(crops + [c.flip(-1) for c in crops])
    assert (crops[:, :, None] == v[None]).flatten(3).all(3).any(0).all()


@pytest.mark.parametrize("bad", [dict(k=0), dict(pad=8), dict(pad=-1), dict(x=torch.zeros(3, 8, 8))])
def test_views_refuse(bad):
    with pytest.raises(ValueError, match="pass"): views(**dict(x=torch.zeros(2, 1, 8, 8), k=2, generator=gen(), pad=1) | bad)


@pytest.mark.parametrize("engine", [loop_grad_sum, fast_grad_sum])
def test_sensitivity_with_views_is_the_clip_and_k_times_that_if_each_is_clipped(digits, engine):
    k, x, y = 4, digits.normalize(digits.train_x[:12]).double(), digits.train_y[:12]
    model = net().double()

    def before(x, y): return flat(engine(model, loss, views(x, k, gen(3), 1, False), y, FlatClip(1.))[0])
    def after(x, y): return flat(engine(model, loss, views(x, k, gen(3), 1, False).flatten(0, 1),
                                        y.repeat_interleave(k), FlatClip(1.))[0])
    strangers = [(s*torch.ones(1, 8, 8, dtype=torch.float64), torch.tensor(c)) for s in (0., 1., 1e4) for c in (0, 5)]
    def worst(f): return max((f(torch.cat([x, z[None]]), torch.cat([y, c[None]]))-f(x, y)).norm().item() for z, c in strangers)
    assert worst(before) == pytest.approx(1, abs=1e-6) and worst(after) == pytest.approx(k, abs=1e-3)


def test_trainer_takes_views_and_refuses_mixing(digits):
    run = trainer(digits, 3, augment=multiplicity(3, 1, False), micro_batch=16).fit()
    assert run.t == 3
    with pytest.raises(ValueError, match="no mixup"):
        trainer(digits, augment=lambda x, g: views((x+x.roll(1, 0))/2, 2, g))


def test_views_do_not_change_the_noise(digits):
    def sigma(k): return trainer(digits, 3, augment=multiplicity(k, 1, False)).plan.sigma
    assert sigma(1) == sigma(8)


# --- averages

def walk(averages, steps=30, seed=0):
    "A fake run whose iterates are known."
    model, g = nn.Linear(3, 2), gen(seed)
    iterates, run = [], SimpleNamespace(model=model, t=0)
    for t in range(1, steps+1):
        with torch.no_grad():
            for p in model.parameters(): p.copy_(torch.randn(p.shape, generator=g))
        iterates.append({n: p.detach().clone().double() for n, p in model.named_parameters()})
        run.t = t
        for f in averages: f(run)
    return iterates, run


@pytest.mark.parametrize("decay, warmup", [(.9, True), (.9, False), (.2, True), (0., False), (.999, True)])
def test_ema_is_the_recursion(decay, warmup):
    ema = EMA(decay, warmup)
    iterates, _ = walk([ema])
    want = iterates[0]
    for t, w in enumerate(iterates[1:], 1):
        d = min(decay, (1+t)/(10+t)) if warmup else decay
        want = {n: d*want[n]+(1-d)*w[n] for n in w}
    for n, w in want.items(): torch.testing.assert_close(ema.weights[n].double(), w, rtol=0, atol=1e-6)


def test_tail_average_is_the_mean():
    tail, whole = TailAverage(20), TailAverage()
    iterates, _ = walk([tail, whole])
    for n in iterates[0]:
        torch.testing.assert_close(tail.weights[n].double(), torch.stack([w[n] for w in iterates[20:]]).mean(0), rtol=0, atol=1e-6)
        torch.testing.assert_close(whole.weights[n].double(), torch.stack([w[n] for w in iterates]).mean(0), rtol=0, atol=1e-6)
    late = TailAverage(50)
    walk([late])
    assert late.weights == {}


def test_averages_in_half_precision_keep_small_shares():
    model, ema = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16), EMA(.999, warmup=False)
    run = SimpleNamespace(model=model, t=1)
    for value in [1.] + [2.]*500:
        with torch.no_grad(): model.weight.fill_(value)
        ema(run)
    assert ema.weights["weight"].item() == pytest.approx(2-.999**500, abs=1e-3)


def test_tied_and_frozen_parameters():
    a = nn.Linear(3, 3)
    model = nn.Sequential(a, nn.Linear(3, 3), a)
    model[1].requires_grad_(False)
    ema = EMA(.5)
    ema(SimpleNamespace(model=model, t=1))
    assert set(ema.weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}  # a release has both names


def test_swapped_comes_back_even_after_an_exception(digits):
    model = net()
    old = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="halfway"):
        with swapped(model, {"1.bias": torch.ones(10)}):
            assert (model[1].bias == 1).all() and torch.equal(model[1].weight, old["1.weight"])
            raise RuntimeError("halfway")
    assert all(torch.equal(v, old[n]) for n, v in model.state_dict().items())
    with pytest.raises(ValueError, match="another model"):
        with swapped(model, {"2.bias": torch.ones(10)}): pass
    with pytest.raises(RuntimeError):  # a wrong shape, after one tensor has gone in
        with swapped(model, {"1.weight": torch.zeros(10, 64), "1.bias": torch.ones(3, 3)}): pass
    assert all(torch.equal(v, old[n]) for n, v in model.state_dict().items())


def test_evaluate_measures_the_average_and_leaves_the_run_alone(digits):
    def run(look):
        ema = EMA(.9)
        return trainer(digits, callbacks=[ema, lambda t: look and ema.evaluate(t)]).fit(), ema
    (a, ema), (b, _) = run(True), run(False)
    assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters()))
    twin = net()
    twin.load_state_dict(ema.weights)
    accuracy = (twin(digits.normalize(digits.test_x)).argmax(1) == digits.test_y).double().mean().item()
    assert ema.evaluate(a) == accuracy


def test_resume_is_bit_identical_and_release_publishes_the_average(digits, tmp_path):
    def run():
        schedule = Schedule(1., "cosine", 12, warmup=4)
        return trainer(digits, callbacks=[EMA(.8), TailAverage(6), schedule], augment=multiplicity(2, 1, False),
                       optimizer=partial(torch.optim.SGD, lr=schedule.at(0), momentum=.9))
    whole = run().fit()
    run().fit(8).save(tmp_path/"a")
    again = run().load(tmp_path/"a").fit()
    for p, q in zip(whole.model.parameters(), again.model.parameters()): assert torch.equal(p, q)
    for f, g in zip(whole.callbacks[:2], again.callbacks[:2]):
        assert f.count == g.count and all(torch.equal(f.weights[n], g.weights[n]) for n in f.weights)
    ema = EMA(.8)
    run = trainer(digits, callbacks=[ema]).fit()
    run.release(tmp_path/"r")
    out = torch.load(tmp_path/"r", weights_only=True)["weights"]
    assert all(torch.equal(out[n], w) for n, w in ema.weights.items())
    assert not torch.equal(out["1.weight"], run.model[1].weight)


def test_state_dict_is_a_copy():
    ema = EMA(.9)
    walk([ema], 3)
    state = ema.state_dict()
    before = {n: w.clone() for n, w in state["weights"].items()}
    twin = EMA(.9)
    twin.load_state_dict(state)
    walk([twin], 3, seed=5)
    assert all(torch.equal(state["weights"][n], w) for n, w in before.items())


def test_an_average_serves_one_run(digits):
    ema = EMA(.9)
    trainer(digits, callbacks=[ema]).fit(2)
    with pytest.raises(ValueError, match="one per trainer"): trainer(digits, callbacks=[ema]).fit(1)


@pytest.mark.parametrize("make", [lambda: EMA(1.), lambda: EMA(-.1), lambda: EMA(float("nan")), lambda: TailAverage(-1)])
def test_averages_refuse(make):
    with pytest.raises(ValueError, match="pass"): make()


# --- schedules

def test_shapes():
    assert constant(7, 10) == 1
    assert [linear(t, 10) for t in (0, 5, 10, 12)] == [1, .5, 0, 0]
    assert [round(cosine(t, 10), 6) for t in (0, 5, 10, 12)] == [1, .5, 0, 0]
    assert [step_decay(t, 8, (.5, .75), .1) for t in (0, 3, 4, 6)] == pytest.approx([1, 1, .1, .01])
    for f in (linear, cosine):
        assert [f(t, 10, warmup=4) for t in range(4)] == [.25, .5, .75, 1] and f(4, 10, warmup=4) == 1
        assert f(10, 10, floor=.2) == pytest.approx(.2) and f(10, 10, warmup=4) == pytest.approx(0)
        assert all(a >= b for a, b in zip([f(t, 50, 5, .1) for t in range(4, 50)], [f(t, 50, 5, .1) for t in range(5, 51)]))
        assert f(20, 10, warmup=10) == pytest.approx(0) and 0 < f(3, 4, warmup=9) < 1


def test_schedule_sets_the_rate_of_the_next_step(digits):
    schedule, seen = Schedule(2., "linear", 4), []
    run = trainer(digits, 4, callbacks=[schedule, lambda t: seen.append(t.optimizer.param_groups[0]["lr"])],
                  optimizer=partial(torch.optim.SGD, lr=schedule.at(0)))
    run.fit()
    assert seen == [1.5, 1., .5, 0.] and set(SCHEDULES) == {"constant", "linear", "cosine", "step"}


def test_schedule_refuses(digits):
    with pytest.raises(ValueError, match="unknown"): Schedule(1., "cosin", 10)
    with pytest.raises(ValueError, match=r"lr=schedule.at\(0\)"):
        trainer(digits, callbacks=[Schedule(1., "cosine", 12, warmup=3)], optimizer=partial(torch.optim.SGD, lr=1.)).fit(1)


# --- DP-Adam

@pytest.mark.parametrize("options", [{}, dict(lr=.1, betas=(.5, .7), eps=1e-3), dict(betas=(0., 0.))])
def test_without_correction_it_is_adam(options):
    a = [nn.Parameter(torch.randn(4, 3, dtype=torch.float64, generator=gen(i))) for i in range(3)]
    b = [nn.Parameter(p.detach().clone()) for p in a]
    ours, theirs = DPAdam(a, **options), torch.optim.Adam(b, **options)
    for t in range(20):
        for i, (p, q) in enumerate(zip(a, b)): p.grad = q.grad = None if i == t % 4 else torch.randn(4, 3, dtype=torch.float64, generator=gen(t+9*i))
        ours.step(); theirs.step()
    for p, q in zip(a, b): torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stds", [.3, [.3, 0., 2.]])
def test_correction_is_the_formula(stds):
    lr, b1, b2, floor = .01, .9, .99, 1e-3
    params = [nn.Parameter(torch.zeros(50, dtype=torch.float64)) for _ in range(3)]
    optimizer = DPAdam(params, lr, (b1, b2), noise_std=stds, floor=floor)
    m, v, w = ([torch.zeros(50, dtype=torch.float64) for _ in range(3)] for _ in range(3))
    for t in range(1, 25):
        for i, p in enumerate(params):
            g = .5*torch.randn(50, dtype=torch.float64, generator=gen(100*t+i))
            p.grad, m[i], v[i] = g, b1*m[i]+(1-b1)*g, b2*v[i]+(1-b2)*g*g
            std = stds if isinstance(stds, float) else stds[i]
            mh, vh = m[i]/(1-b1**t), v[i]/(1-b2**t)
            w[i] = w[i] - lr*mh/((vh-std**2).clamp(min=floor).sqrt() if std else vh.sqrt()+1e-8)
        optimizer.step()
    for p, u in zip(params, w): torch.testing.assert_close(p.detach(), u, rtol=0, atol=1e-12)


def test_from_plan_knows_the_noise_that_the_trainer_adds(digits):
    # 650 coordinates x 12 steps: the sample std is off by more than 4.5 % once in 1e8
    plan, clip = PrivacyPlan(1437, 64, 12, 3., 1e-5, RDPAccountant), FlatClip(.3)
    grads = []
    nothing = lambda output, y: 0*output.sum(1)
    run = Trainer(net(), digits, plan, loss_fn=nothing, clip=clip, engine=fast_grad_sum, seed=2,
                  optimizer=DPAdam.from_plan(plan, clip, lr=.01), callbacks=[lambda t: grads.append(flat({n: p.grad for n, p in t.params.items()}))])
    run.fit()
    std = run.optimizer.param_groups[0]["noise_std"]
    assert std == pytest.approx(.3*plan.sigma/64) and torch.cat(grads).std().item() == pytest.approx(std, rel=.045)


def test_from_plan_with_one_std_per_tensor(digits):
    class PerTensor(FlatClip):
        def std(self, sigma): return torch.tensor([1., 2.])*sigma
    plan = PrivacyPlan(1437, 64, 3, 3., 1e-5, RDPAccountant)
    optimizer = DPAdam.from_plan(plan, PerTensor(1.))(net().parameters())
    assert optimizer.param_groups[0]["noise_std"] == pytest.approx([plan.sigma/64, 2*plan.sigma/64])


def test_adam_resumes_bit_identically(digits, tmp_path):
    plan, clip = PrivacyPlan(1437, 64, 12, 3., 1e-5, RDPAccountant), FlatClip(1.)
    def run(): return trainer(digits, clip=clip, optimizer=DPAdam.from_plan(plan, clip, lr=.01))
    whole = run().fit()
    run().fit(7).save(tmp_path/"a")
    again = run().load(tmp_path/"a").fit()
    for p, q in zip(whole.model.parameters(), again.model.parameters()): assert torch.equal(p, q)


@pytest.mark.parametrize("bad", [dict(lr=-1), dict(betas=(1., .9)), dict(floor=0.), dict(noise_std=-1.), dict(noise_std=[.1, math.inf])])
def test_adam_refuses(bad):
    with pytest.raises(ValueError, match="pass"): DPAdam(net().parameters(), **bad)


def test_adam_refuses_the_wrong_number_of_stds():
    model = net()
    optimizer = DPAdam(model.parameters(), noise_std=[.1]*3)
    model(torch.zeros(1, 1, 8, 8)).sum().backward()
    with pytest.raises(ValueError, match="3 noise_std for 2 tensors"): optimizer.step()


# --- plateaus

def fake(t=1, seed="s", lr=1.): return SimpleNamespace(t=t, _seed=seed, callbacks=[], optimizer=SimpleNamespace(param_groups=[{"lr": lr}]))


def test_plateau_is_reduce_on_plateau():
    values = [.1, .2, .2, .15, .19, .3, .3, .29, .31, .3, .3, .3, .3, .3, .3]
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=.5, patience=2, threshold=0., threshold_mode="abs")
    ours, run = Plateau(lambda run: values[run.t//2-1], every=2), fake()
    for t in range(1, 2*len(values)+1):
        run.t = t
        ours(run)
        if t % 2 == 0:
            theirs.step(values[t//2-1])
            assert run.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert len(ours.history) == len(values) and ours.history[-1][2] < 1


def test_the_exact_metric_leaks_and_the_noisy_one_is_noised(digits):
    x, y = digits.test_x[:50], digits.test_y[:50]
    run = trainer(digits).fit(3)
    exact = (run.model(digits.normalize(x)).argmax(1) == y).double().mean().item()
    noisy = NoisyAccuracy(x, y, 5., 500)
    draws = []
    for s in range(400):
        run._seed = str(s)
        draws.append(noisy(run)*50 - exact*50)
    draws = torch.tensor(draws)
    assert abs(draws.mean()) < 5*5/20 and .8 < draws.std()/5 < 1.2  # each fails by chance less than once in 1e6


def test_one_answer_per_step_and_no_more_than_paid_for(digits):
    run = trainer(digits).fit(1)
    threes = digits.test_y == 3
    metric = NoisyAccuracy(digits.test_x[threes], digits.test_y[threes], 3., 2)
    first = metric(run)
    for c in (3, 5):  # first all of them are right, then none
        with torch.no_grad(): run.model[1].bias.copy_(100*F.one_hot(torch.tensor(c), 10))
        assert metric(run) == first  # the noise of a step answers once
    run.fit(1)
    assert metric(run) != first
    run.fit(1)
    with pytest.raises(ValueError, match="plan for more"): metric(run)


def test_two_metrics_do_not_share_their_noise(digits):
    def metric(): return NoisyAccuracy(digits.test_x, digits.test_y, 3., 9)
    a, b = Plateau(metric(), 1), Plateau(metric(), 1)
    trainer(digits, callbacks=[a, b]).fit(2)
    assert a.history[0][1] != b.history[0][1]


def test_the_bill_is_the_composition():
    plan = PrivacyPlan(1437, 64, 12, 3., 1e-5, RDPAccountant)
    metric = NoisyAccuracy(torch.zeros(5, 1, 8, 8), torch.zeros(5), 10., 20)
    look = epsilon(1., 10., 20, 1e-5, RDPAccountant)
    both = RDPAccountant().step(plan.q, plan.sigma, 12).step(1., 10., 20).epsilon(1e-5)
    assert metric.epsilon(plan) == pytest.approx(both) and both > max(3*.99, look)
    assert metric.epsilon(plan, disjoint=True) == pytest.approx(max(look, epsilon(plan.q, plan.sigma, 12, 1e-5, RDPAccountant)))
    assert NoisyAccuracy(torch.zeros(5, 1), torch.zeros(5), .5, 20).epsilon(plan, disjoint=True) > 10


def test_plateau_resumes_bit_identically_with_its_bill(digits, tmp_path):
    def run():
        return trainer(digits, callbacks=[Plateau(NoisyAccuracy(digits.test_x, digits.test_y, 3., 6), 2, patience=0)])
    whole = run().fit()
    run().fit(6).save(tmp_path/"a")
    again = run().load(tmp_path/"a").fit()
    assert whole.callbacks[0].history == again.callbacks[0].history and len(whole.callbacks[0].history) == 6
    assert whole.callbacks[0].metric.taken == again.callbacks[0].metric.taken
    other = trainer(digits, seed=9, callbacks=[Plateau(NoisyAccuracy(digits.test_x, digits.test_y, 3., 4), 2, patience=0)])
    other.load(tmp_path/"a")  # new randomness: the three answers that were taken stay on the bill
    with pytest.raises(ValueError, match="4 measurements were paid for"): other.fit()


@pytest.mark.parametrize("make", [lambda: Plateau(max, 0), lambda: Plateau(max, 1, patience=-1), lambda: Plateau(max, 1, factor=1.),
                                  lambda: NoisyAccuracy([], [], 1., 1), lambda: NoisyAccuracy([1], [1], 0., 1),
                                  lambda: NoisyAccuracy([1], [1, 2], 1., 1), lambda: NoisyAccuracy([1], [1], 1., 0)])
def test_plateaus_refuse(make):
    with pytest.raises(ValueError, match="pass"): make()


# --- the sweep

def test_the_sweep_runs_and_its_records_are_what_they_say(digits):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent/"tools"))
    import sweep_tricks as sweep
    run = sweep.train(digits, sweep.RUNGS["+ views"] | dict(batch_size=64), 1., 0, examples=3*64)
    run.fit()
    assert set(sweep.measure(run)) == {"accuracy", "ema", "ema_no_warmup", "tail"} and run.t == 3
    rows = sweep.rows()
    for r in rows[::12]:
        assert r["eps"] <= sweep.EPS and r["q"] == r["batch_size"]/r["n"]
        assert epsilon(r["q"], r["sigma"], r["steps"], r["delta"]) == pytest.approx(r["eps"], rel=1e-6)
    for rung in {(r.get("setting", "many"), r["rung"]) for r in rows if r["split"] == "test"}:
        assert {r["lr"] for r in sweep.find(*rung, "test")} >= {sweep.best(*rung)}
