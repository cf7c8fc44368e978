"scaling: what a batch size buys, and what a search costs. Oracles: brute force, Monte Carlo, dp_accounting, exact distributions."
import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats
from torch import nn

from dp_course.accounting import ORDERS, RDPAccountant, epsilon, rdp_to_epsilon
from dp_course.data import load
from dp_course.dpsgd import FlatClip, loop_grad_sum
from dp_course.gradients import fast_grad_sum
from dp_course.scaling import (RandomTries, composed_search_epsilon, gradient_noise, matched_lr, nonprivate_signal_noise, scaled_lr,
                               search_epsilon, search_noise_multiplier, sigma_table, snr, snr_ceiling)

LOSS = partial(nn.functional.cross_entropy, reduction="none")
REPORT = dict(q=1/25, sigma=1.6138, steps=625, delta=1e-5)  # eps = 2.985
SHAPES = (-.5, 0., 1e-9, .5, 1., 4., math.inf)
by_shape = pytest.mark.parametrize("eta", SHAPES)


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

@pytest.fixture(scope="module")
def few():
    digits = load("digits")
    return SimpleNamespace(train_x=digits.normalize(digits.train_x[:200]), train_y=digits.train_y[:200])


# --- signal and noise -------------------------------------------------------------------------------------------

def test_gradient_noise_by_simulation():
    # 4,000 Poisson sums of 300 fixed vectors: the mean square has a relative std of about 0.5 % here; 4 % is eight of them
    g = torch.Generator().manual_seed(0)
    c = torch.randn(300, 20, generator=g, dtype=torch.float64) + .5
    for b in (10, 150, 299):
        masks = (torch.rand(4000, 300, generator=g, dtype=torch.float64) < b/300).double()
        measured = (masks@c/b - c.mean(0)).square().sum(1).mean().sqrt()
        sampling, dp = gradient_noise(b, 300, c.square().sum(1).mean().item(), 3., 20)
        assert measured == pytest.approx(sampling, rel=.04)
        noise = 3*torch.randn(4000, 20, generator=g, dtype=torch.float64)/b
        assert noise.square().sum(1).mean().sqrt() == pytest.approx(dp, rel=.04)

@pytest.mark.parametrize("wrong", [dict(batch_size=0), dict(batch_size=11), dict(mean_square=-1.), dict(std=-1.), dict(parameters=0),
                                   dict(mean_square=math.nan)])
def test_gradient_noise_refuses(wrong):
    good = dict(batch_size=5, n=10, mean_square=1., std=1., parameters=3)
    assert gradient_noise(**good)
    with pytest.raises(ValueError): gradient_noise(**good | wrong)

def test_signal_is_the_clipped_mean_gradient(few):
    model, clip = linear(), FlatClip(.7)
    grads, norms = loop_grad_sum(model, LOSS, few.train_x, few.train_y, clip)
    mean = torch.cat([g.flatten() for g in grads.values()])/200
    whole = torch.linalg.vector_norm(norms, dim=0).clamp(max=.7)
    full, half = nonprivate_signal_noise(model, few, [200, 100], engine=fast_grad_sum, clip=clip, draws=60, micro_batch=130)
    assert full["signal"] == pytest.approx(mean.norm().item(), rel=1e-5) == pytest.approx(half["signal"], rel=1e-5)
    assert full["scatter"] < 1e-6 and full["predicted"] == 0              # everybody is in every batch
    assert half["mean_square"] == pytest.approx(whole.square().mean().item(), rel=1e-5)
    assert half["scatter"] == pytest.approx(half["predicted"], rel=.25)   # 60 draws, the first direction dominates: std 8 %

def test_a_broken_example_counts_as_zero(few):
    x = few.train_x.clone(); x[3] = math.nan
    row, = nonprivate_signal_noise(linear(), SimpleNamespace(train_x=x, train_y=few.train_y), [100], draws=2)
    keep = torch.arange(200) != 3
    other, = nonprivate_signal_noise(linear(), SimpleNamespace(train_x=x[keep], train_y=few.train_y[keep]), [100], draws=2)
    assert row["signal"] == pytest.approx(other["signal"]*199/200, rel=1e-5) and row["mean_square"] == pytest.approx(other["mean_square"]*199/200, rel=1e-5)
    assert math.isfinite(row["scatter"])

def test_measuring_repeats_and_leaves_the_model_alone(few):
    model = linear()
    before = [p.clone() for p in model.parameters()]
    a, b = (nonprivate_signal_noise(model, few, [50], draws=2) for _ in range(2))
    c = nonprivate_signal_noise(model, few, [50], draws=2, generator=torch.Generator().manual_seed(1))
    assert a == b != c and all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), before))


# --- sigma, steps, batch ----------------------------------------------------------------------------------------

def test_published_sigmas():
    "sigma by PLD at (3, 1e-5), n = 50,000, from two independent accountants."
    for b, t, sigma in ((4096, 1000, 3.715), (4096, 1500, 4.506), (8192, 360, 4.445), (8192, 600, 5.677)):
        row, = sigma_table(50_000, [b], 3., 1e-5, steps=t)
        assert row["sigma"] == pytest.approx(sigma, rel=1e-3) and row["per_example"] == row["sigma"]/b
        assert row["snr"] == snr(b, t, row["sigma"]) and row["epochs"] == pytest.approx(t*b/50_000)

def test_every_row_keeps_its_budget_and_hardly_less():
    rows = sigma_table(5000, [32, 500, 5000], 2., 1e-5, epochs=7) + sigma_table(5000, [32, 500, 5000], 2., 1e-5, steps=40)
    for r in rows: assert 2*.998 <= epsilon(r["batch_size"]/5000, r["sigma"], r["steps"], 1e-5) <= 2
    assert [r["steps"] for r in rows] == [1094, 70, 7, 40, 40, 40]

def test_sigma_table_refuses():
    for kw in ({}, {"epochs": 1, "steps": 1}):
        with pytest.raises(ValueError, match="give one of the two"): sigma_table(100, [10], 3., 1e-5, **kw)
    for b in (0, 101, -3):
        with pytest.raises(ValueError, match="no rate"): sigma_table(100, [b], 3., 1e-5, steps=2)

def test_snr_reaches_the_ceiling_with_full_batches_and_never_exceeds_it():
    for eps in (.5, 3., 8.):
        top = snr_ceiling(2000, eps, 1e-5)
        full = sigma_table(2000, [2000], eps, 1e-5, steps=30)[0]["snr"]
        assert top*.998 < full < top                                   # sigma is rounded up by less than 0.1 %
        rows = sigma_table(2000, [20, 100, 500, 1000], eps, 1e-5, steps=30) + sigma_table(2000, [20, 1000], eps, 1e-5, epochs=20)
        assert all(r["snr"] < top for r in rows)
        assert sorted(rows[:4], key=lambda r: r["snr"]) == rows[:4]    # larger batches, more signal
    assert snr(10, 4, 0) == math.inf and snr(10, 4, 2.) == 10

def test_scaled_lr():
    assert [scaled_lr(.5, 256, 1024, r) for r in ("linear", "sqrt", "constant")] == [2., 1., .5]
    for rule in ("linear", "sqrt", "constant"):
        assert scaled_lr(scaled_lr(.3, 100, 700, rule), 700, 100, rule) == pytest.approx(.3)
        assert scaled_lr(scaled_lr(.3, 100, 700, rule), 700, 900, rule) == pytest.approx(scaled_lr(.3, 100, 900, rule))
    for wrong in ((.5, 256, 1024, "cubic"), (0, 256, 1024, "sqrt"), (.5, -1, 1024, "sqrt"), (.5, 256, 0, "linear"), (math.nan, 1, 1, "sqrt")):
        with pytest.raises(ValueError): scaled_lr(*wrong)


def test_matched_lr_keeps_how_far_the_noise_moves_the_weights():
    # 4,000 coordinates of pure-noise SGD: the relative std of each length is 1.1 %; 6 % is four standard errors of the ratio
    g = torch.Generator().manual_seed(0)
    def moved(lr, b, t, sigma): return (lr*sigma/b*torch.randn(t, 4000, generator=g)).sum(0).norm().item()
    old, new = (256, 40, 1.3), (1024, 25, 2.2)
    assert moved(matched_lr(2., old, new), *new)/moved(2., *old) == pytest.approx(1, abs=.06)
    assert matched_lr(matched_lr(2., old, new), new, old) == pytest.approx(2.)
    for b, t in ((500, 120), (1000, 240)):                             # full batches and nearly: equal epochs is the linear rule
        a, = sigma_table(1000, [1000], 3., 1e-5, steps=60)
        c, = sigma_table(1000, [b], 3., 1e-5, steps=t)
        key = ("batch_size", "steps", "sigma")
        assert matched_lr(1., [a[k] for k in key], [c[k] for k in key]) == pytest.approx(60/t, rel=.02)
    for wrong in ((0, old, new), (1., (0, 4, 1.), new), (1., old, (4, 4, 0.)), (1., old, (4, -1, 1.)), (math.nan, old, new)):
        with pytest.raises(ValueError): matched_lr(*wrong)


# --- the number of tries ----------------------------------------------------------------------------------------

def masses(tries, most=200_000):
    "P(k tries) for k = 0, 1, ... straight from the definition, by gamma functions."
    k = np.arange(most)
    if tries.eta == math.inf: return stats.poisson.pmf(k, tries.mean)
    log_p = k*math.log1p(-tries.gamma) + special.gammaln(k + tries.eta) - special.gammaln(k + 1) if tries.eta > 0 else None
    if log_p is None:                                                 # eta <= 0: the product (l + eta)/(l + 1) from l = 1 on
        log_p = k*math.log1p(-tries.gamma) + special.gammaln(np.maximum(k, 1) + tries.eta) - special.gammaln(k + 1)
    p = np.exp(log_p); p[0] = 0
    return p/p.sum()

@by_shape
@pytest.mark.parametrize("mean", [1.01, 2., 10., 60.])
def test_distribution(eta, mean):
    tries = RandomTries(mean, eta)
    p = masses(tries)
    k = np.arange(len(p))
    assert p@k == pytest.approx(mean, rel=1e-6)
    for x in (0., .3, .9, 1.):
        assert tries.slope(x) == pytest.approx(p[1:]@(k[1:]*x**(k[1:]-1.)), rel=1e-6)

@by_shape
def test_draws_follow_the_distribution(eta):
    # chi-square over 1..8 and the rest, 4,000 draws: false alarm 1e-6 for each of seven shapes (the seed is fixed)
    tries, g = RandomTries(5., eta), torch.Generator().manual_seed(1)
    drawn = np.array([tries.draw(g) for _ in range(4000)])
    p = masses(tries)[:9]
    expected = np.append(p, 1-p.sum())*4000
    seen = np.append(np.bincount(drawn, minlength=9)[:9], (drawn > 8).sum())
    ok = expected > 0
    assert not seen[~ok].any() and stats.chisquare(seen[ok], expected[ok]*seen.sum()/expected[ok].sum()).pvalue > 1e-6
    again = torch.Generator().manual_seed(1)
    assert [RandomTries(5., eta).draw(again) for _ in range(50)] == drawn[:50].tolist()

@pytest.mark.parametrize("wrong", [dict(mean=.5), dict(mean=math.inf), dict(mean=math.nan), dict(mean=-2), dict(mean=3, eta=-1),
                                   dict(mean=3, eta=math.nan), dict(mean=1e6, eta=-.99)])
def test_random_tries_refuses(wrong):
    with pytest.raises(ValueError): RandomTries(**wrong)

def test_one_try_is_one_run():
    run = RDPAccountant().step(REPORT["q"], REPORT["sigma"], REPORT["steps"])
    for eta in (-.5, 0., 1., 3.):
        assert RandomTries(1., eta).gamma == 1 and np.allclose(RandomTries(1., eta).rdp(run), run.rdp(), rtol=1e-6)
        assert {RandomTries(1., eta).draw(torch.Generator().manual_seed(s)) for s in range(20)} == {1}


# --- what a search costs ----------------------------------------------------------------------------------------

@by_shape
def test_agrees_with_dp_accounting(eta):
    rdp = pytest.importorskip("dp_accounting.rdp.rdp_privacy_accountant")
    if eta < 0: pytest.skip("dp_accounting has no negative shapes")
    run = RDPAccountant().step(.04, 1.6138, 625)
    for mean in (1.5, 10., 100.):
        theirs = rdp._compute_rdp_repeat_and_select(ORDERS, run.rdp(), mean, eta)
        ours = RandomTries(mean, eta).rdp(run)
        theirs, ours = (rdp_to_epsilon(v, ORDERS, 1e-5) for v in (theirs, ours))
        assert theirs*.994 < ours < theirs*(1+1e-6)                   # we also use the limit order 1, and the looser of two deltas

def pure(eps):  # a run that is eps-DP and nothing better
    return SimpleNamespace(orders=np.array([1.5, 10., 1e9]), rdp=lambda: np.full(3, eps))

def test_pure_dp_costs_two_plus_eta():
    "Liu & Talwar 2019: a geometric number of eps-DP tries is 3 eps; Papernot & Steinke 2022, corollary of Theorem 2: (2+eta) eps."
    for eta in (-.5, 0., 1., 2.): assert RandomTries(20., eta).rdp(pure(.7))[-1] == pytest.approx((2+eta)*.7, abs=1e-6)

def pgf(tries, x):
    "E x^K in closed form."
    if tries.eta == math.inf: return np.exp(tries.mean*(x-1))
    g, e = tries.gamma, tries.eta
    if abs(e) < 1e-6: return np.log1p((g-1)*x)/math.log(g)
    return np.expm1(-e*np.log1p((g-1)*x))/np.expm1(-e*math.log(g))

def renyi(p, q, a): return special.logsumexp(a*np.log(p) + (1-a)*np.log(q))/(a-1)

@by_shape
def test_never_below_the_truth_for_random_mechanisms(eta):
    "Small mechanisms with random outputs in a random order of preference: the exact divergence of the best of K."
    rng, orders = np.random.default_rng(0), np.array([1.2, 1.5, 2., 3., 6., 12., 30.])
    closest = 0.
    for _ in range(150):
        p = rng.dirichlet(np.full(rng.integers(2, 6), rng.choice([.3, 1., 5.])))
        q = p*np.exp(rng.uniform(0, rng.choice([.1, 1., 3.]), len(p))); q /= q.sum()
        p, q = np.maximum(p, 1e-12), np.maximum(q, 1e-12)
        p, q = p/p.sum(), q/q.sum()
        one = np.array([max(renyi(p, q, a), renyi(q, p, a)) for a in orders])
        tries = RandomTries(rng.choice([1.3, 5., 40.]), eta)
        best = [np.diff(np.concatenate([[0 if eta < math.inf else math.exp(-tries.mean)], pgf(tries, np.minimum(1, np.cumsum(v)))])) for v in (p, q)]
        if eta == math.inf: best = [np.append(v, math.exp(-tries.mean)) for v in best]
        bound = tries.rdp(SimpleNamespace(orders=orders, rdp=lambda: one))
        b0, b1 = (np.maximum(v, 1e-300) for v in best)
        exact = np.array([max(renyi(b0, b1, a), renyi(b1, b0, a)) for a in orders])
        closest = max(closest, (exact/bound).max())
        assert (exact <= bound*(1+1e-7)+1e-9).all()
    assert closest > .5  # and some of them come close, so the bound is attacked

def exact_best_of(tries, sigma, q, delta):
    "Tight eps when one Gaussian number on a Poisson sample is a run, and the largest (or smallest) is published."
    y = np.linspace(-14*sigma, 1+14*sigma, 200_001)
    def cdf(z): return (1-q)*special.ndtr(z/sigma) + q*special.ndtr((z-1)/sigma)
    def pdf(z): return ((1-q)*np.exp(-z**2/2/sigma**2) + q*np.exp(-(z-1)**2/2/sigma**2))/sigma/math.sqrt(2*math.pi)
    def out(z): return special.ndtr(z/sigma), np.exp(-z**2/2/sigma**2)/sigma/math.sqrt(2*math.pi)
    dens = {}
    for side in ("max", "min"):
        F, G = cdf(y), out(y)[0]
        if side == "min": F, G = 1-F, 1-G
        dens[side] = pdf(y)*tries.slope(np.clip(F, 0, 1)), out(y)[1]*tries.slope(np.clip(G, 0, 1))
    def delta_at(eps): return max(np.trapezoid(np.maximum(a-math.exp(eps)*b, 0), y) for p, r in dens.values() for a, b in ((p, r), (r, p)))
    return optimize.brentq(lambda e: delta_at(e)-delta, 0, 60, xtol=1e-4) if delta_at(0) > delta else 0.

@by_shape
@pytest.mark.parametrize("q,sigma", [(1., .8), (1., 3.), (.1, .7)])
def test_never_below_the_truth_for_gaussian_runs(eta, q, sigma):
    single = epsilon(q, sigma, 1, 1e-5)
    for mean in (2., 10., 50.):
        tries = RandomTries(mean, eta)
        truth, bound = exact_best_of(tries, sigma, q, 1e-5), search_epsilon(tries, q, sigma, 1, 1e-5)
        assert truth <= bound*(1+1e-6)
        if eta in (0., 1.): assert single*.99 < truth < 3*single and bound < 6*truth  # the oracle is no dummy, the bound no joke

def test_search_epsilon_is_monotone():
    base = dict(q=.04, sigma=1.6, steps=600, delta=1e-5)
    for eta in SHAPES:
        costs = [search_epsilon(RandomTries(m, eta), **base) for m in (1., 2., 5., 30., 300.)]
        assert costs == sorted(costs) and costs[0] >= epsilon(**base)
    costs = [search_epsilon(RandomTries(10., eta), **base) for eta in (-.5, 0., 1., 4.)]
    assert costs == sorted(costs)
    for other in (dict(sigma=1.4), dict(steps=800), dict(q=.05), dict(delta=1e-7)):
        assert search_epsilon(RandomTries(10.), **base | other) > search_epsilon(RandomTries(10.), **base)

def test_edges():
    assert search_epsilon(RandomTries(5.), 0., 1., 10, 1e-5) == search_epsilon(RandomTries(5.), .1, 1., 0, 1e-5) == 0
    for eta in (1., math.inf): assert search_epsilon(RandomTries(5., eta), .1, 0., 3, 1e-5) == math.inf
    with pytest.raises(ValueError): search_epsilon(RandomTries(5.), 2., 1., 3, 1e-5)
    with pytest.raises(ValueError): search_epsilon(RandomTries(5.), .1, 1., 3, 0.)

def test_composed_search():
    assert composed_search_epsilon(10, 1/13, 2.8809, 650, 1e-5) == pytest.approx(11.4, abs=.05)  # ten runs of the report's last stage
    assert composed_search_epsilon(1, **REPORT) == epsilon(**REPORT) and composed_search_epsilon(0, **REPORT) == 0
    assert composed_search_epsilon(3, accountant=RDPAccountant, **REPORT) > composed_search_epsilon(3, **REPORT)
    for wrong in (-1, 2.5, math.nan, math.inf):
        with pytest.raises(ValueError): composed_search_epsilon(wrong, **REPORT)

def test_search_noise_multiplier():
    for tries in (RandomTries(10.), RandomTries(30., 0.), RandomTries(3., math.inf), RandomTries(1., 1.)):
        sigma = search_noise_multiplier(tries, 3., 1e-5, .04, 625)
        assert 3*.998 <= search_epsilon(tries, .04, sigma, 625, 1e-5) <= 3
    with pytest.raises(ValueError): search_noise_multiplier(RandomTries(10.), 0., 1e-5, .04, 625)
    with pytest.raises(ValueError, match="try less often"): search_noise_multiplier(RandomTries(1e6), 1e-3, 1e-5, .04, 625)


# --- the record that the notebook quotes ------------------------------------------------------------------------

RECORD = Path(__file__).resolve().parent.parent/"runs/2026-11-21-sweep-scaling.jsonl"

def test_record_tells_the_truth():
    rows = [json.loads(line) for line in RECORD.read_text().splitlines()]
    key = "part split model n batch_size steps planned lr noise seed".split()
    assert len({tuple(r.get(k) for k in key) for r in rows}) == len(rows), "a run is recorded twice"
    plans = {(r["q"], r["sigma"], r["planned"], r["delta"]): r["target_eps"] for r in rows if r["noise"] and r["part"] != "signal"}
    for (q, sigma, steps, delta), eps in list(plans.items())[::6]: assert eps*.998 <= epsilon(q, sigma, steps, delta) <= eps
    for r in rows:
        assert 0 < r["accuracy"] < 1
        if r["part"] == "signal": continue                             # measured at other batch sizes than the run's
        assert r["q"] == r["batch_size"]/r["n"] and (not r["noise"] or r["eps"] <= r["target_eps"])
    tests = {}
    for r in rows:
        if r["split"] == "test" and r["model"] == "mlp": tests.setdefault((r["part"], r["batch_size"], r["steps"], r["lr"]), set()).add(r["seed"])
    assert tests and all(len(s) >= 3 for s in tests.values()), "fewer than three seeds"
