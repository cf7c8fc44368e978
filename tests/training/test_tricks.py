"Tricks: views before the clip, averages, schedules, plateaus that are paid for, DP-Adam."
import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toys import digit_net, equal
from toys import generator as gen

from dp_course.data import load, multiplicity, views
from dp_course.gradients import FlatClip, fast_grad_sum
from dp_course.privacy import PLDAccountant, PrivacyPlan, RDPAccountant, epsilon, in_digits
from dp_course.training import (
    EMA,
    SCHEDULES,
    DPAdam,
    NoisyAccuracy,
    Plateau,
    Schedule,
    TailAverage,
    Trainer,
    callbacks,
    end_line,
    public,
)


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def make_plan(steps=12):
    return PrivacyPlan(n=1437, batch_size=64, steps=steps, eps=3., delta=1e-5,
                       accountant=RDPAccountant)


def trainer(digits, steps=12, seed=1, plan=None, **kwargs):
    kwargs = dict(engine=fast_grad_sum, optimizer=partial(torch.optim.SGD, lr=.5)) | kwargs
    return Trainer(digit_net(), digits, plan or make_plan(steps), seed=seed, **kwargs)


def same_weights(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters()))


# --- views


def test_views_are_those_of_a_gather_over_flat_pixels():
    "The first version's formula, bit for bit."
    x, k, crop = torch.randn(6, 3, 9, 7, generator=gen()), 5, 4
    b, c, h, w = x.shape
    down, right, mirror = torch.randint(2**31, (b, k, 3), generator=gen(1)).unbind(2)

    def reflect(i, n):
        return (n-1) - ((n-1) - i.abs()).abs()
    row = reflect(torch.arange(h) + (down % (2*crop+1) - crop)[..., None], h)
    col = reflect(torch.arange(w) + (right % (2*crop+1) - crop)[..., None], w)
    col = torch.where((mirror % 2 == 1)[..., None], w-1-col, col)
    pixel = (row[..., :, None]*w + col[..., None, :]).view(b, k, 1, h*w).expand(b, k, c, h*w)
    gathered = x.reshape(b, 1, c, h*w).expand(b, k, c, h*w).gather(3, pixel)
    assert torch.equal(views(x, k, gen(1), crop).tree, gathered.view(b, k, c, h, w))


def test_views_of_nobody_of_integers_and_of_strided_images():
    assert views(torch.zeros(0, 3, 8, 8), 4, gen()).tree.shape == (0, 4, 3, 8, 8)
    x = torch.randint(256, (3, 8, 8, 2), generator=gen(), dtype=torch.uint8).permute(0, 3, 1, 2)
    shown = views(x, 2, gen()).tree
    assert shown.dtype == torch.uint8
    assert torch.equal(shown, views(x.contiguous(), 2, gen()).tree)


@pytest.mark.gpu
def test_views_on_a_gpu_never_wait_for_it():
    x, g = torch.randn(5, 3, 8, 8, device="cuda"), torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert views(x, 4, g, crop=2).tree.shape == (5, 4, 3, 8, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- averages


def test_averages_in_half_precision_keep_small_shares():
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    ema, run = EMA(.999, warmup=False), SimpleNamespace(model=model, t=1)
    for value in [1.] + [2.]*500:
        nn.init.constant_(model.weight, value)
        ema(run)
    assert ema.weights["weight"].item() == pytest.approx(2 - .999**500, abs=1e-3)


def test_tied_and_frozen_parameters():
    a = nn.Linear(3, 3)
    model = nn.Sequential(a, nn.Linear(3, 3), a)
    model[1].requires_grad_(False)
    ema = EMA(.5)
    ema(SimpleNamespace(model=model, t=1))
    assert set(ema.weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}  # as a release has


def test_weights_that_do_not_fit_are_refused_before_any_goes_in(digits):
    run = trainer(digits)
    old = copy.deepcopy(run.model.state_dict())
    half_wrong = {"1.weight": torch.zeros(10, 64), "1.bias": torch.ones(3, 3)}
    with pytest.raises(ValueError, match="no 1.bias of shape"):
        with run.weights_swapped(half_wrong):
            pass
    assert equal(run.model.state_dict(), old)


def test_evaluate_measures_the_average_and_leaves_the_run_alone(digits):
    def run(look):
        ema = EMA(.9)
        peek = [lambda t: ema.evaluate(t)] if look else []
        return trainer(digits, callbacks=[ema, *peek]).fit(), ema
    (looked, ema), (blind, _) = run(True), run(False)
    assert same_weights(looked, blind)
    twin = digit_net()
    twin.load_state_dict(ema.weights)
    guess = twin(digits.normalize(digits.test_x)).argmax(1)
    assert ema.evaluate(looked) == (guess == digits.test_y).double().mean().item()


def test_averages_schedules_views_and_adam_resume_bit_identically(digits, tmp_path):
    def run():
        schedule = Schedule(1., "cosine", 12, warmup=4)
        return trainer(digits, callbacks=[EMA(.8), TailAverage(6), schedule],
                       augment=multiplicity(2, 1, False),
                       optimizer=partial(DPAdam, lr=schedule.at(0), noise_std=.01))
    whole = run().fit()
    run().fit(8).save(tmp_path/"a")
    again = run().load(tmp_path/"a").fit()
    assert same_weights(whole, again)
    for a, b in zip(whole.callbacks[:2], again.callbacks[:2]):
        assert a.count == b.count
        assert all(torch.equal(a.weights[n], b.weights[n]) for n in a.weights)


# --- schedules

@pytest.mark.parametrize("make", [
    lambda: EMA(1.), lambda: EMA(float("nan")), lambda: TailAverage(-1),
    lambda: Plateau(public(max), 0), lambda: Plateau(public(max), 1, factor=1.),
    lambda: NoisyAccuracy([], [], 1., 1), lambda: NoisyAccuracy(torch.ones(1), torch.ones(1), 0, 1),
    lambda: NoisyAccuracy(torch.ones(1), torch.ones(2), 1., 1),
    lambda: DPAdam(digit_net().parameters(), betas=(1., .9)),
    lambda: DPAdam(digit_net().parameters(), noise_std=[.1, math.inf]),
    lambda: views(torch.zeros(2, 1, 8, 8), 2, gen(), crop=8),
    lambda: views({"image": torch.zeros(2, 1, 8, 8)}, 2, gen(), crop=1)])
def test_settings_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match="pass"):
        make()


def test_schedule_sets_the_rate_of_the_next_step(digits):
    schedule, seen = Schedule(2., "linear", 4), []

    def look(run):
        seen.append(run.optimizer.param_groups[0]["lr"])
    trainer(digits, 4, callbacks=[schedule, look],
            optimizer=partial(torch.optim.SGD, lr=schedule.at(0))).fit()
    assert seen == [1.5, 1., .5, 0.]
    assert set(SCHEDULES) == {"constant", "linear", "cosine", "step"}


def test_schedule_refuses(digits):
    with pytest.raises(ValueError, match="unknown"):
        Schedule(1., "cosin", 10)
    schedule = Schedule(1., "cosine", 12, warmup=3)
    run = trainer(digits, callbacks=[schedule], optimizer=partial(torch.optim.SGD, lr=1.))
    with pytest.raises(ValueError, match=r"lr=schedule.at\(0\)"):
        run.fit(1)


# --- DP-Adam


@pytest.mark.parametrize("stds", [.3, [.3, 0., 2.]])
def test_correction_is_the_formula(stds):
    lr, b1, b2, floor = .01, .9, .99, 1e-3
    params = [nn.Parameter(torch.zeros(50, dtype=torch.float64)) for _ in range(3)]
    optimizer = DPAdam(params, lr, (b1, b2), noise_std=stds, floor=floor)
    m, v, w = torch.zeros(3, 3, 50, dtype=torch.float64)
    for t in range(1, 25):
        for i, p in enumerate(params):
            g = .5*torch.randn(50, dtype=torch.float64, generator=gen(100*t + i))
            p.grad = g
            m[i] = b1*m[i] + (1-b1)*g
            v[i] = b2*v[i] + (1-b2)*g*g
            std = stds if isinstance(stds, float) else stds[i]
            m_hat, v_hat = m[i]/(1 - b1**t), v[i]/(1 - b2**t)
            root = (v_hat - std**2).clamp(min=floor).sqrt() if std else v_hat.sqrt() + 1e-8
            w[i] -= lr*m_hat/root
        optimizer.step()
    torch.testing.assert_close(torch.stack([p.detach() for p in params]), w, rtol=0, atol=1e-12)


def test_from_plan_knows_the_noise_that_the_trainer_adds(digits):
    # 650 coordinates x 12 steps: the sample std is off by more than 4.5 % once in 1e8
    plan, clip, grads = make_plan(), FlatClip(.3), []

    def look(run):
        grads.append(flat(p.grad for p in run.params.values()))
    run = Trainer(digit_net(), digits, plan, loss_fn=lambda output, y: 1e-9*output.sum(1),
                  clip=clip, seed=2, callbacks=[look],
                  optimizer=DPAdam.from_plan(plan, clip, lr=.01)).fit()
    std = run.optimizer.param_groups[0]["noise_std"]
    assert std == pytest.approx(.3*plan.sigma/64)
    assert torch.cat(grads).std().item() == pytest.approx(std, rel=.045)


# --- plateaus


def looking_plan(sigma, looks, eps=3.):
    return PrivacyPlan(n=1437, batch_size=64, steps=12, eps=eps, delta=1e-5,
                       accountant=RDPAccountant, releases=(sigma,)*looks)


def test_equal_looks_are_one_and_no_more_than_planned_are_taken(digits):
    run = trainer(digits, plan=looking_plan(3., 2, eps=8.)).fit(1)
    threes = digits.test_y == 3
    metric = NoisyAccuracy(digits.test_x[threes], digits.test_y[threes], 3., 2)
    first = metric(run)
    assert metric(run) == first
    answers = []
    for label in (3, 5):           # first all of them are right, then none
        run.set_weights({"1.bias": 100*F.one_hot(torch.tensor(label), 10)})
        try:
            answers.append(metric(run))
        except ValueError as error:
            assert "2 looks were planned, and taken" in str(error)
    assert len(answers) == 1 and abs(answers[0] - 1) > 1e-9
    assert sum(n for _, sigma, n in run.accountant.history if sigma == 3.) == 2


def test_looks_that_were_not_planned_are_refused_and_statement_says_the_total(digits, tmp_path):
    plateau = Plateau(NoisyAccuracy(digits.train_x, digits.train_y, 5., 12), every=1)
    run = trainer(digits, callbacks=[plateau])
    with pytest.raises(ValueError, match=r"plan for it with PrivacyPlan\(releases"):
        run.fit()
    assert run.epsilon() <= 3 and not plateau.history
    run = trainer(digits, callbacks=[plateau], plan=looking_plan(5., 12, eps=4.)).fit()
    total = RDPAccountant().step(1., 5., 12).step(run.plan.q, run.plan.sigma, 12).epsilon(1e-5)
    assert run.t == len(plateau.history) == 12
    assert run.epsilon() == pytest.approx(total) and 2.5 < total <= 4
    assert f"eps = {in_digits(total, 4)}" in run.statement()
    assert "12 x accuracy on 1437 private examples" in run.statement()
    run.release(tmp_path/"r")
    assert torch.load(tmp_path/"r", weights_only=True)["statement"] == run.statement()
    end = end_line({"preset": "none"}, run, 1., .5, "steps")
    by_pld = PLDAccountant().step(1., 5., 12).step(run.plan.q, run.plan.sigma, 12).epsilon(1e-5)
    assert end["eps_rdp"] == pytest.approx(total) and run.epsilon(PLDAccountant) <= by_pld*1.001


def test_exact_metrics_on_private_rows_are_refused(digits):
    def exact(run):
        return (run.model(digits.normalize(digits.train_x)).argmax(1) == digits.train_y).mean()

    with pytest.raises(ValueError, match="nobody knows what it looks at"):
        Plateau(exact, every=1)
    Plateau(Trainer.evaluate, every=1)
    held_out = digits.split(300).replace(name="whatever it is called")
    plan = PrivacyPlan(n=1137, batch_size=64, steps=2, eps=3., delta=1e-5)
    run = Trainer(digit_net(), held_out, plan, callbacks=[Plateau(Trainer.evaluate, every=1)])
    with pytest.raises(ValueError, match="held out of the private training set"):
        run.step()
    assert "validation split are nonprivate" in run.statement()
    assert "validation" not in trainer(digits).statement()
    same = digits.replace(test_x=digits.train_x, test_y=digits.train_y)
    with pytest.raises(ValueError, match="or is that set"):
        trainer(same, callbacks=[Plateau(Trainer.evaluate, every=1)]).step()


class Centred(nn.Linear):
    "Mixes examples, and keeps what it is shown when it is evaluated."
    seen = ()

    def forward(self, x):
        x = x.flatten(1)
        if not self.training and self.seen != ():
            self.seen.append(x)
        return super().forward(x - x.mean(0))


def test_a_private_count_moves_by_one_example_alone(digits):
    run = Trainer(Centred(64, 10), digits, looking_plan(3., 2, eps=8.))
    count = partial(callbacks._correct, run)
    x, y = digits.test_x[:50].float(), digits.test_y[:50]
    more, its = torch.cat([x, 1e6*x[:1]]), torch.cat([y, y[:1]])
    assert abs(count(more, its) - count(x, y)) <= 1
    run.model.seen = []
    with pytest.raises(ValueError, match="was kept"):
        count(x, y)


def test_an_accuracy_counts_one_answer_for_each_example(digits):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Unflatten(1, (10, 5)))
    run = Trainer(net, digits, looking_plan(3., 2, eps=8.),
                  loss_fn=lambda output, y: F.cross_entropy(output[:, :, 0], y))
    with pytest.raises(ValueError, match=r"\(5,\) answers for each example"):
        callbacks._correct(run, digits.test_x[:1], digits.test_y[:1])


def test_the_cost_is_the_composition():
    plan = make_plan()
    metric = NoisyAccuracy(torch.zeros(5, 1, 8, 8), torch.zeros(5), 10., 20)
    cost = partial(epsilon, delta=1e-5, accountant=RDPAccountant)
    look = cost(q=1., sigma=10., steps=20)
    training = cost(q=plan.q, sigma=plan.sigma, steps=12)
    both = RDPAccountant().step(plan.q, plan.sigma, 12).step(1., 10., 20).epsilon(1e-5)
    assert metric.epsilon(plan) == pytest.approx(both) and both > max(3*.99, look)
    assert metric.epsilon(plan, disjoint=True) == pytest.approx(max(look, training))
    loud = NoisyAccuracy(torch.zeros(5, 1), torch.zeros(5), .5, 20)
    assert loud.epsilon(plan, disjoint=True) > 10


def test_plateau_resumes_bit_identically_with_what_it_spent(digits, tmp_path):
    def run(looks=6, **kwargs):
        metric = NoisyAccuracy(digits.test_x, digits.test_y, 30., looks)
        plan = looking_plan(30., 6)
        return trainer(digits, callbacks=[Plateau(metric, 2, patience=0)], plan=plan, **kwargs)
    whole = run().fit()
    run().fit(6).save(tmp_path/"a")
    run().load(tmp_path/"a").fit(2)  # this one is lost, but not its entries
    again = run().load(tmp_path/"a").fit()
    (a,), (b,) = whole.callbacks, again.callbacks
    assert a.history == b.history and len(a.history) == 6
    assert whole.epsilon() == again.epsilon() and again.computed == 12
    run().fit(6).save(tmp_path/"b")
    other = run(looks=4, seed=9).load(tmp_path/"b")  # new randomness: 3 answers stay paid
    with pytest.raises(ValueError, match="4 looks were planned"):
        other.fit()
