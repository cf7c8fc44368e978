"Accounting against independent oracles (Opacus, dp_accounting, mpmath, closed forms), its properties, and its refusals."
import dataclasses
import json
import math
import pickle
import warnings

import mpmath
import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant as OpacusRDP
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from scipy import special

from dp_course.accounting import (PLDAccountant, PrivacyPlan, RDPAccountant, epsilon, loss_masses, noise_multiplier,
                                  rdp_gaussian, rdp_sampled_gaussian, rdp_to_epsilon)
from dp_course.definition import gaussian_epsilon, gaussian_sigma

ORDERS = np.array([1.1, 1.5, 2, 2.5, 3, 4.7, 7.3, 10.9, 12, 20.5, 33, 63])
BOTH = pytest.mark.parametrize("accountant", [RDPAccountant, PLDAccountant])


def tight(ours, truth, floor=1e-6):
    "Never below 0.999 of the truth, at most 0.1 % above; `floor` absorbs eps that is nearly zero."
    assert .999*truth-1e-9 <= ours <= 1.001*truth+floor, f"{ours:.6g} against {truth:.6g}"


# Renyi

@pytest.mark.parametrize("q", [.001, .01, .04096, .25, .5, .9, 1])
@pytest.mark.parametrize("sigma", [.4, .6, 1, 1.6138, 5, 10])
def test_rdp_agrees_with_opacus(q, sigma):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = np.array(compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=list(ORDERS)))
    # 2e-15/(a-1): Opacus takes the logarithm of 1 + something, which is what float64 leaves of it
    assert (np.abs(rdp_sampled_gaussian(q, sigma, ORDERS)-theirs) <= 1e-6*theirs+2e-15/(ORDERS-1)).all()


@pytest.mark.parametrize("q, sigma", [(1e-5, .4), (1e-5, 100), (.5, .4), (.5, 100), (1-1e-9, 1), (.04, 1.6138)])
def test_rdp_agrees_with_fifty_digits(q, sigma):
    "Where Opacus runs out of digits (tiny q, huge sigma), 50-digit arithmetic does not."
    mpmath.mp.dps = 50
    mq, ms = mpmath.mpf(q), mpmath.mpf(sigma)
    for a in (2, 5, 17):
        moment = sum(mpmath.binomial(a, k)*(1-mq)**(a-k)*mq**k*mpmath.exp(k*(k-1)/(2*ms**2)) for k in range(a+1))
        assert rdp_sampled_gaussian(q, sigma, [a])[0] == pytest.approx(float(mpmath.log(moment)/(a-1)), rel=1e-9)
    mpmath.mp.dps = 30
    for a in (1.3, 3.5):
        def f(x): return mpmath.npdf(x, 0, ms)*(1-mq+mq*mpmath.exp((2*x-1)/(2*ms**2)))**a
        points = [-14*ms, -4*ms, 0, a/2, a, a+4*ms, a+14*ms]
        assert rdp_sampled_gaussian(q, sigma, [a])[0] == pytest.approx(float(mpmath.log(mpmath.quad(f, points))/(a-1)), rel=1e-7)


@pytest.mark.parametrize("q", [1e-9, 1e-5, .5, 1-1e-12])
@pytest.mark.parametrize("sigma", [1e-3, .02, .1, .4, 1e3])
def test_rdp_is_sane_at_the_edges(q, sigma):
    "Finite, positive, never above the Gaussian without sampling, and (a-1) times it convex in the order."
    orders = np.array([1.01, 1.5, 2, 2.5, 3, 3.5, 4, 50.5, 51, 1024])
    rdp = rdp_sampled_gaussian(q, sigma, orders)
    assert np.isfinite(rdp).all() and (rdp > 0).all()
    assert (rdp <= rdp_gaussian(sigma, orders)*(1+1e-6)).all() and (np.diff(rdp) >= -1e-9*rdp[:-1]).all()
    k = (orders-1)*rdp
    assert k[3] <= (k[2]+k[4])/2*(1+1e-9) and k[5] <= (k[4]+k[6])/2*(1+1e-9)


def test_rdp_conversion_agrees_with_opacus():
    orders = np.array(OpacusRDP.DEFAULT_ALPHAS)
    for q, sigma, steps, delta in ((.04, 1.6138, 625, 1e-5), (.001, .6, 10_000, 1e-6), (.5, 5, 100, 1e-3)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs, _ = get_privacy_spent(orders=orders, rdp=compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=orders), delta=delta)
        assert rdp_to_epsilon(steps*rdp_sampled_gaussian(q, sigma, orders), orders, delta) == pytest.approx(theirs, rel=1e-6)
        assert epsilon(q, sigma, steps, delta, RDPAccountant) <= theirs*1.002  # the default orders are dense enough


# privacy-loss distributions

@pytest.mark.parametrize("sigma", [.4, .8, 1.6138, 10, 100])
@pytest.mark.parametrize("steps", [1, 10, 1000, 100_000])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8, 1e-30])
def test_pld_is_exact_without_sampling(sigma, steps, delta):
    tight(epsilon(1, sigma, steps, delta), gaussian_epsilon(delta, sigma/math.sqrt(steps)))


def one_step(q, sigma, delta):
    "Exact eps of one step, the worse of both directions: delta has a closed form, eps by bisection."
    def x(eps): return sigma**2*math.log(max(math.expm1(eps)/q+1, 1e-300))+.5
    def removed(eps): return (1-q)*special.ndtr(-x(eps)/sigma)+q*special.ndtr((1-x(eps))/sigma)-math.exp(eps)*special.ndtr(-x(eps)/sigma)
    def added(eps):
        if math.expm1(-eps)/q+1 <= 0: return 0.
        y = x(-eps)/sigma
        return special.ndtr(y)-math.exp(eps)*((1-q)*special.ndtr(y)+q*special.ndtr(y-1/sigma))
    low, high = 0., 200.
    if max(removed(0), added(0)) <= delta: return 0.
    for _ in range(200):
        mid = (low+high)/2
        low, high = (mid, high) if max(removed(mid), added(mid)) > delta else (low, mid)
    return high


@pytest.mark.parametrize("q", [1e-4, .01, .04, .25, .5, .9])
@pytest.mark.parametrize("sigma", [.4, 1, 2.8809, 30])
def test_pld_is_exact_for_one_step(q, sigma):
    for delta in (1e-3, 1e-6): tight(epsilon(q, sigma, 1, delta), one_step(q, sigma, delta))


@pytest.mark.parametrize("q, sigma, steps, h", [
    (.04, 1.6138, 625, 1e-4), (1/13, 2.8809, 650, 1e-4), (.001, .6, 1000, 1e-4), (.01, 1, 10_000, 1e-4), (.25, 5, 100, 1e-4),
    (.5, .6, 10, 1e-3), (.08192, 10, 10_000, 1e-4), (1e-3, 1, 100, 2e-5), (.01, .4, 1000, 3e-4), (.25, 30, 100_000, 1e-4)])
def test_pld_agrees_with_dp_accounting(q, sigma, steps, h):
    theirs = from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=h).self_compose(steps)
    for delta in (1e-3, 1e-5, 1e-8):
        if theirs.get_epsilon_for_delta(delta) < 100: tight(epsilon(q, sigma, steps, delta), theirs.get_epsilon_for_delta(delta))


def test_unequal_steps_agree_with_dp_accounting():
    parts = [(.04, 1.2, 100), (.01, .8, 50), (.04, 3., 400), (.2, 5., 20)]
    ours, theirs = PLDAccountant(), None
    for q, sigma, n in parts:
        ours.step(q, sigma, n)
        one = from_gaussian_mechanism(sigma, sampling_prob=q).self_compose(n)
        theirs = one if theirs is None else theirs.compose(one)
    tight(ours.epsilon(1e-5), theirs.get_epsilon_for_delta(1e-5))
    assert ours.delta(2.) == pytest.approx(theirs.get_delta_for_epsilon(2.), rel=2e-3)


def test_many_unequal_steps():
    "A noise schedule: 50 different sigmas, in any order, between the constant ones."
    sigmas = np.linspace(1.5, 3, 50)
    there, back = PLDAccountant(), PLDAccountant()
    for s in sigmas: there.step(.04, s)
    for s in sigmas[::-1]: back.step(.04, s)
    assert there.epsilon(1e-5) == pytest.approx(back.epsilon(1e-5), rel=1e-9)
    assert epsilon(.04, 3, 50, 1e-5) < there.epsilon(1e-5) < epsilon(.04, 1.5, 50, 1e-5)
    assert there.epsilon(1e-5) <= RDPAccountant().load_state_dict(there.state_dict()).epsilon(1e-5)


@pytest.mark.parametrize("q, sigma", [(1e-4, .4), (.04, 1.6138), (.5, 10), (1, 1)])
@pytest.mark.parametrize("h", [.3, .01])
def test_grid_keeps_both_totals_and_never_loses_delta(q, sigma, h):
    first, p, p_lost, q_lost = loss_masses(q, sigma, h)
    loss = (first+np.arange(len(p)))*h
    assert p.sum()+p_lost == pytest.approx(1, abs=1e-12) and (p >= 0).all()
    assert (p*np.exp(-loss)).sum() == pytest.approx(1, abs=1e-9) and 0 <= q_lost < 1e-12
    for delta in (1e-2, 1e-4):
        eps = one_step(q, sigma, delta)*.999
        removed = (p*np.maximum(-np.expm1(np.minimum(eps-loss, 0)), 0)).sum()
        added = (p*np.exp(-loss)*np.maximum(-np.expm1(np.minimum(eps+loss, 0)), 0)).sum()
        assert max(removed, added) >= delta or eps == 0


def test_one_sided_rule_notices_rounding_down(monkeypatch):
    "Proof that the oracle above can fail: a grid rounded down reports less than half."
    import dp_course.accounting as accounting
    good = accounting.loss_masses
    monkeypatch.setattr(accounting, "loss_masses", lambda *a: (good(*a)[0]-1, *good(*a)[1:]))
    with pytest.raises(AssertionError): tight(epsilon(.04, 1.6138, 625, 1e-5), 2.9845)


# properties

CASES = dict(q=st.floats(1e-4, 1), sigma=st.floats(.5, 20), steps=st.integers(1, 3000), delta=st.floats(1e-9, 1e-2))
SLACK = 1.0003  # two evaluations may sit at different ends of the tolerance


@settings(max_examples=15, deadline=None, derandomize=True)
@given(**CASES, more=st.floats(1.01, 2))
def test_eps_is_monotone(q, sigma, steps, delta, more):
    for by in (RDPAccountant, PLDAccountant):
        e = epsilon(q, sigma, steps, delta, by)
        assert e <= epsilon(min(1, q*more), sigma, steps, delta, by)*SLACK+1e-6
        assert e <= epsilon(q, sigma, math.ceil(steps*more), delta, by)*SLACK+1e-6
        assert e <= epsilon(q, sigma/more, steps, delta, by)*SLACK+1e-6
        assert e <= epsilon(q, sigma, steps, delta/more, by)*SLACK+1e-6
    assert epsilon(q, sigma, steps, delta) <= epsilon(q, sigma, steps, delta, RDPAccountant)*SLACK+1e-6


@settings(max_examples=12, deadline=None, derandomize=True)
@given(**CASES)
def test_delta_inverts_epsilon(q, sigma, steps, delta):
    for by in (RDPAccountant, PLDAccountant):
        a = by().step(q, sigma, steps)
        assert a.delta(a.epsilon(delta)) <= delta*(1+1e-9)
    assert a.epsilon(delta) < 1e-5 or a.delta(a.epsilon(delta)*.999-1e-6) > delta*.99  # and it wastes nothing


@settings(max_examples=8, deadline=None, derandomize=True)
@given(q=st.floats(1e-3, 1), steps=st.integers(1, 3000), eps=st.floats(.1, 10), delta=st.floats(1e-8, 1e-3))
def test_noise_multiplier_spends_all_and_no_more(q, steps, eps, delta):
    for by in (RDPAccountant, PLDAccountant):
        sigma = noise_multiplier(eps, delta, q, steps, by)
        assert epsilon(q, sigma, steps, delta, by) <= eps < epsilon(q, sigma*.999, steps, delta, by)


@BOTH
def test_ledger(accountant):
    a, b = accountant(), accountant()
    for _ in range(5): assert a.step(.04, 1.5) is a
    b.step(.04, 1.5, 2).step(.04, 1.5, 3)
    assert a.history == b.history == [(.04, 1.5, 5)] and a.epsilon(1e-5) == b.epsilon(1e-5) == epsilon(.04, 1.5, 5, 1e-5, accountant)
    a.step(.1, 3.); b = accountant().step(.1, 3.).step(.04, 1.5, 5)
    assert a.epsilon(1e-5) == pytest.approx(b.epsilon(1e-5), rel=1e-12)
    c = accountant().load_state_dict(json.loads(json.dumps(a.state_dict())))
    assert c.history == a.history and c.epsilon(1e-5) == a.epsilon(1e-5)


@BOTH
def test_nothing_and_everything(accountant):
    assert epsilon(.04, 1, 0, 1e-5, accountant) == epsilon(0, 1, 9, 1e-5, accountant) == accountant().delta(1.) == 0
    assert epsilon(.04, 0, 1, 1e-5, accountant) == math.inf and accountant().step(.04, 0).delta(5.) == 1
    assert accountant().step(.04, 1).step(.04, 0).epsilon(1e-5) == math.inf
    assert accountant().step(.04, 1).delta(math.inf) == 0
    assert noise_multiplier(3, 1e-5, .04, 0, accountant) == 0
    assert epsilon(.04, 1.6138, 625, 1e-5, accountant) > 0


@BOTH
@pytest.mark.parametrize("sigma", [1e-300, 1e-9, .05, 1e4])
@pytest.mark.parametrize("q", [1e-7, .3, 1])
def test_never_nan(accountant, q, sigma):
    for steps in (1, 10**4):
        e = epsilon(q, sigma, steps, 1e-5, accountant)
        assert e >= 0 and accountant().step(q, sigma, steps).delta(1.) >= 0
        if q == 1: assert e >= gaussian_epsilon(1e-5, sigma/math.sqrt(steps))*.999 if sigma > 1e-6 else e == math.inf or e > 1e6


# refusals

@BOTH
@pytest.mark.parametrize("bad", [dict(q=-.1), dict(q=1.5), dict(q=math.nan), dict(q="half"), dict(q=None), dict(sigma=-1), dict(sigma=math.nan),
                                 dict(sigma=math.inf), dict(steps=-1), dict(steps=1.5), dict(steps=math.inf), dict(delta=0), dict(delta=1),
                                 dict(delta=-1e-5), dict(delta=math.nan)])
def test_bad_arguments(accountant, bad):
    good = dict(q=.04, sigma=1., steps=10, delta=1e-5)
    with pytest.raises(ValueError, match=next(iter(bad))): epsilon(**good | bad, accountant=accountant)
    if "sigma" not in bad:
        with pytest.raises(ValueError, match=next(iter(bad))):
            noise_multiplier(3, **{k: v for k, v in (good | bad).items() if k != "sigma"}, accountant=accountant)
    a = accountant().step(.04, 1.)
    for eps in (-1, math.nan, None):
        with pytest.raises(ValueError, match="eps"): a.delta(eps)
    for eps in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="aim"): noise_multiplier(eps, 1e-5, .04, 10, accountant)


def test_bad_orders():
    for orders in ([1.], [.5, 2], [], [math.nan], [math.inf]):
        with pytest.raises(ValueError, match="orders"): rdp_sampled_gaussian(.04, 1., orders)
        with pytest.raises(ValueError, match="orders"): rdp_gaussian(1., orders)


def test_plan():
    plan = PrivacyPlan(50_000, 4096, 610, 3, 1e-5)
    assert plan.q == 4096/50_000 and plan.sigma is plan.sigma and plan.epsilon_after(0) == 0
    assert plan.epsilon_after(610) <= 3 < epsilon(plan.q, plan.sigma*.999, 610, 1e-5)
    assert [plan.epsilon_after(t) for t in (1, 10, 100, 610)] == sorted(plan.epsilon_after(t) for t in (610, 1, 100, 10))
    with pytest.raises(dataclasses.FrozenInstanceError): plan.eps = 8
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan and copy.sigma == plan.sigma
    for word in ("adding or removing", "one example", "Poisson", "PLDAccountant", "610", "1e-05", "4096/50000", f"{plan.sigma:g}",
                 "Not covered", "tuning", "test set", "nonprivate", "floating-point"): assert word in plan.statement()
    assert "RDPAccountant" in PrivacyPlan(100, 10, 5, 3, 1e-5, RDPAccountant).statement()


@pytest.mark.parametrize("bad", [dict(n=0), dict(n=-5), dict(n=10.5), dict(batch_size=0), dict(batch_size=101), dict(batch_size=math.nan), dict(steps=0),
                                 dict(steps=2.5), dict(eps=0), dict(eps=math.inf), dict(delta=0), dict(delta=1.)])
def test_plan_refuses(bad):
    with pytest.raises(ValueError): PrivacyPlan(**dict(n=100, batch_size=10, steps=5, eps=3., delta=1e-5) | bad)


# the numbers that the course quotes

def test_numbers_of_the_report():
    spent = [epsilon(1/25, 1.6138, 25*e, 1e-5) for e in (1, 2, 5, 10, 15, 20, 25)]
    assert spent == pytest.approx([.631, .850, 1.306, 1.846, 2.277, 2.649, 2.985], abs=6e-4)
    for q, steps, sigma in ((1/98, 1470, .928), (1/25, 625, 1.714), (1/13, 650, 3.079)):
        assert noise_multiplier(3, 1e-5, q, steps, RDPAccountant) == pytest.approx(sigma, abs=4e-3)
    assert PLDAccountant().step(1, 1.6138, 25).epsilon(1e-5) == pytest.approx(17.39, abs=.01)


@pytest.mark.parametrize("eps", [1e-3, 1e-2, .1])
def test_tiny_budgets(eps):
    "RDP's orders end before eps = 0: PLD calibrates all the same, RDP says that it cannot."
    exact = gaussian_sigma(eps, 1e-5)
    assert exact <= noise_multiplier(eps, 1e-5, 1., 1) < 1.001*exact
    sigma = noise_multiplier(eps, 1e-5, .01, 100)
    assert .998*eps < epsilon(.01, sigma, 100, 1e-5) <= eps
    if eps < .005:
        with pytest.raises(ValueError, match="RDP cannot show eps"): noise_multiplier(eps, 1e-5, .01, 100, RDPAccountant)
