"Accounting against independent oracles, its properties, its refusals, and the plan's rules."
import inspect
import json
import math
import pickle
import warnings
from fractions import Fraction
from functools import partial

import mpmath
import numpy as np
import pytest
import torch
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant as OpacusRDP
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from scipy import special

from dp_course.privacy import (
    Accountant,
    Budget,
    PLDAccountant,
    PrivacyPlan,
    RDPAccountant,
    epsilon,
    gaussian_epsilon,
    gaussian_sigma,
    loss_masses,
    noise_multiplier,
    pld,
    privacy_loss,
    rdp_gaussian,
    rdp_sampled_gaussian,
    rdp_to_epsilon,
)

ACCOUNTANTS = [RDPAccountant, PLDAccountant]
by_values = pytest.mark.parametrize
BOTH = by_values("accountant", ACCOUNTANTS)


def spent(q, sigma, steps, delta, accountant=PLDAccountant):
    "`epsilon`, for tables of numbers."
    return epsilon(q=q, sigma=sigma, steps=steps, delta=delta, accountant=accountant)


def tight(ours, truth, floor=1e-6):
    "Never below 0.999 of the truth, at most 0.1 % above; `floor` absorbs eps that is nearly zero."
    assert .999*truth - 1e-9 <= ours <= 1.001*truth + floor, f"{ours:.6g} against {truth:.6g}"


@pytest.fixture
def quiet():
    "Opacus warns about the best order being the last one."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Renyi divergences

def mp_moment(q, sigma, a):
    "E_Q[(P/Q)^a] for a whole order, by the binomial sum."
    terms = (mpmath.binomial(a, k)*(1 - q)**(a - k)*q**k*mpmath.exp(k*(k - 1)/(2*sigma**2))
             for k in range(a + 1))
    return sum(terms)


def mp_integral(q, sigma, a):
    "E_Q[(P/Q)^a] for any order, by adaptive quadrature."
    def integrand(x):
        ratio = 1 - q + q*mpmath.exp((2*x - 1)/(2*sigma**2))
        return mpmath.npdf(x, 0, sigma)*ratio**a
    points = [-14*sigma, -4*sigma, 0, a/2, a, a + 4*sigma, a + 14*sigma]
    return mpmath.quad(integrand, points)


@by_values("q, sigma", [(1e-5, .4), (1e-5, 100), (.5, .4), (.5, 100), (1 - 1e-9, 1), (.04, 1.6138)])
@by_values("orders, digits, moment, rel", [((2, 5, 17), 50, mp_moment, 1e-9),
                                           ((1.3, 3.5), 30, mp_integral, 1e-7)])
def test_rdp_agrees_with_many_digits(q, sigma, orders, digits, moment, rel):
    "Where Opacus runs out of digits (tiny q, huge sigma), 50-digit arithmetic does not."
    with mpmath.workdps(digits):
        for a in orders:
            truth = float(mpmath.log(moment(mpmath.mpf(q), mpmath.mpf(sigma), a))/(a - 1))
            assert rdp_sampled_gaussian(q, sigma, [a])[0] == pytest.approx(truth, rel=rel)


@by_values("q", [1e-9, 1e-5, .5, 1 - 1e-12])
@by_values("sigma", [1e-3, .02, .1, .4, 1e3])
def test_rdp_is_sane_at_the_edges(q, sigma):
    "Finite, positive, rising, never above the Gaussian without sampling, and convex."
    orders = np.array([1.01, 1.5, 2, 2.5, 3, 3.5, 4, 50.5, 51, 1024])
    rdp = rdp_sampled_gaussian(q, sigma, orders)
    assert np.isfinite(rdp).all()
    assert (rdp > 0).all()
    assert (rdp <= rdp_gaussian(sigma, orders)*(1 + 1e-6)).all()
    assert (np.diff(rdp) >= -1e-9*rdp[:-1]).all()
    log_moment = (orders - 1)*rdp
    for i in (3, 5):  # equally spaced neighbours
        assert log_moment[i] <= (log_moment[i-1] + log_moment[i+1])/2*(1 + 1e-9)


@by_values("q, sigma, steps, delta", [(.04, 1.6138, 625, 1e-5), (.001, .6, 10_000, 1e-6),
                                      (.5, 5, 100, 1e-3)])
def test_rdp_conversion_agrees_with_opacus(q, sigma, steps, delta, quiet):
    orders = np.array(OpacusRDP.DEFAULT_ALPHAS)
    theirs = compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=orders)
    theirs, _ = get_privacy_spent(orders=orders, rdp=theirs, delta=delta)
    ours = rdp_to_epsilon(steps*rdp_sampled_gaussian(q, sigma, orders), orders, delta)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert spent(q, sigma, steps, delta, RDPAccountant) <= theirs*1.002  # dense orders


# privacy-loss distributions

@pytest.mark.quick(20)
@by_values("sigma", [.4, .8, 1.6138, 10, 100])
@by_values("steps", [1, 10, 1000, 100_000])
@by_values("delta", [1e-3, 1e-5, 1e-8, 1e-30])
def test_pld_is_exact_without_sampling(sigma, steps, delta):
    "By the closed form that the accountant knows, and by the convolution that it needs elsewhere."
    exact = gaussian_epsilon(delta, sigma/math.sqrt(steps))
    assert exact <= spent(1, sigma, steps, delta) <= exact*(1 + 1e-9)
    for sign in (1, -1):
        tight(pld._search_epsilon([(1., sigma, steps)], sign, delta, 0.), exact)


class OneStep:
    "Exact delta and eps of one step: delta has a closed form, eps comes by bisection."
    def __init__(self, q, sigma):
        self.q, self.sigma = q, sigma

    def output(self, loss):
        "The output, over sigma, at which the privacy loss takes this value."
        ratio = max(math.expm1(loss)/self.q + 1, 1e-300)
        return self.sigma*math.log(ratio) + .5/self.sigma

    def removed(self, eps):
        "P - e^eps Q to the right of where the loss is eps."
        z = self.output(eps)
        out, hit = special.ndtr(-z), special.ndtr(1/self.sigma - z)
        return self.q*hit - (math.expm1(eps) + self.q)*out

    def added(self, eps):
        "Q - e^eps P to the left of where the loss is -eps."
        if math.expm1(-eps)/self.q + 1 <= 0:
            return 0.
        z = self.output(-eps)
        out, hit = special.ndtr(z), special.ndtr(z - 1/self.sigma)
        return out - math.exp(eps)*((1 - self.q)*out + self.q*hit)

    def delta(self, eps):
        return max(self.removed(eps), self.added(eps))

    def epsilon(self, delta):
        low, high = 0., 200.
        if self.delta(0.) <= delta:
            return 0.
        for _ in range(200):
            mid = (low + high)/2
            low, high = (mid, high) if self.delta(mid) > delta else (low, mid)
        return high


@by_values("q", [1e-10, 1e-8, 1e-4, .5, 1 - 1e-9])
@by_values("sigma", [.3, .3636, 1., 40.])
@by_values("share", [1e-9, 7e-4, 5e-3])
def test_one_step_has_a_closed_form(q, sigma, share):
    "The delta at the eps of q*share is just below it: with 60 digits, in the dearer direction."
    eps = spent(q, sigma, 1, q*share)
    with mpmath.workdps(60):
        q_, s, e = mpmath.mpf(q), mpmath.mpf(sigma), mpmath.exp(mpmath.mpf(eps))
        y = s*mpmath.log((e - 1 + q_)/q_) + 1/(2*s)
        delta = q_*mpmath.ncdf(1/s - y) - (e - 1 + q_)*mpmath.ncdf(-y)
        assert (1 - 1e-9)*q*share <= delta <= q*share
        assert delta <= PLDAccountant().step(q, sigma).delta(eps) <= delta*(1 + 1e-9)


@by_values("q, sigma, delta", [(.04, 1., 1e-5), (.5, 1., 1e-3), (.9, 3., 1e-6), (.25, .6, .01)])
def test_each_direction_is_exact(q, sigma, delta):
    "Removing and adding an example are two searches; the first costs more, so the second hides."
    one = OneStep(q, sigma)
    for sign, exact in ((1, one.removed), (-1, one.added)):
        eps = pld._search_epsilon([(q, sigma, 1)], sign, delta, 0.)
        assert exact(eps) <= delta < exact(eps*.999 - 1e-6)
        assert delta*(1 - 1e-9) <= pld._search_delta([(q, sigma, 1)], sign, eps*.999 - 1e-6, 0.)


@by_values("dear", [1, -1])
def test_both_directions_are_asked_and_the_dearer_one_reported(dear, monkeypatch):
    def search(ledger, sign, number, least):
        return max(least, 2e-3 if sign == dear else 1e-3)  # below the other bounds
    monkeypatch.setattr(pld, "_search_epsilon", search)
    monkeypatch.setattr(pld, "_search_delta", search)
    account = PLDAccountant().step(.04, 1.6138, 625)
    assert account.epsilon(1e-5) == account.delta(1.) == 2e-3


@pytest.mark.quick(5)
@by_values("q, sigma, steps, h", [
    (.04, 1.6138, 625, 1e-4), (1/13, 2.8809, 650, 1e-4), (.001, .6, 1000, 1e-4),
    (.01, 1, 10_000, 1e-4), (.25, 5, 100, 1e-4), (.5, .6, 10, 1e-3), (.08192, 10, 10_000, 1e-4),
    pytest.param(1e-3, 1, 100, 2e-5, marks=pytest.mark.slow),
    pytest.param(.01, .4, 1000, 3e-4, marks=pytest.mark.slow), (.25, 30, 100_000, 1e-4)])
def test_pld_agrees_with_dp_accounting(q, sigma, steps, h):
    one = from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=h)
    theirs = one.self_compose(steps)
    for delta in (1e-3, 1e-5, 1e-8):
        truth = theirs.get_epsilon_for_delta(delta)
        if truth < 100:
            tight(spent(q, sigma, steps, delta), truth)


def test_unequal_steps_agree_with_dp_accounting():
    ours, theirs = PLDAccountant(), None
    for q, sigma, n in [(.04, 1.2, 100), (.01, .8, 50), (.04, 3., 400), (.2, 5., 20)]:
        ours.step(q, sigma, n)
        part = from_gaussian_mechanism(sigma, sampling_prob=q).self_compose(n)
        theirs = part if theirs is None else theirs.compose(part)
    tight(ours.epsilon(1e-5), theirs.get_epsilon_for_delta(1e-5))
    assert ours.delta(2.) == pytest.approx(theirs.get_delta_for_epsilon(2.), rel=2e-3)


GRIDS = [(q, sigma, h) for q, sigma in ((1e-4, .4), (.04, 1.6138), (.5, 10), (1, 1))
         for h in (.3, .01)]
FORMS = [dict(), dict(cut=1.), dict(reach=16), dict(cut=2., reach=4)]


@by_values("q, sigma, h", GRIDS)
@by_values("form", FORMS)
@by_values("delta", [1e-2, 1e-4])
def test_grid_never_loses_delta(q, sigma, h, form, delta):
    "At 0.999 of the exact eps, the grid's delta is still at least the exact one."
    points, p, lost, _ = loss_masses(q, sigma, h, **form)
    loss = points*h
    eps = OneStep(q, sigma).epsilon(delta)*.999

    def above(loss):
        return np.maximum(-np.expm1(np.minimum(eps - loss, 0)), 0)

    removed, added = (p*above(loss)).sum() + lost, (p*np.exp(-loss)*above(-loss)).sum()
    assert max(removed, added) >= delta or eps == 0


def test_tilt_does_not_change_the_distribution():
    "In the bulk, where a plain FFT is accurate, every tilt gives the same masses."
    side = pld.ComposedLoss([(.04, 1.6138, 100)], 1, 1e-5)
    plain, *tilted = (side.convolve(tilt, -3., 5., 2**-8) for tilt in (0., 1., 5.))
    bulk = plain[1] > 1e-6
    for _, masses, _ in tilted:
        assert np.allclose(masses[bulk], plain[1][bulk], rtol=1e-6)


def test_privacy_loss_keeps_its_digits():
    x = np.linspace(-3., 4, 15)
    with mpmath.workdps(40):
        for q, sigma in ((1e-9, 1.), (.5, .1), (.9, 30.)):
            s = [(mpmath.mpf(v) - mpmath.mpf(".5"))/mpmath.mpf(sigma)**2 for v in x.tolist()]
            truth = [float(mpmath.log(1 + q*(mpmath.exp(v) - 1))) for v in s]
            assert privacy_loss(x, q, sigma) == pytest.approx(truth, rel=1e-12, abs=1e-25)


# properties

CASES = dict(q=st.floats(1e-4, 1), sigma=st.floats(.5, 20), steps=st.integers(1, 3000),
             delta=st.floats(1e-9, 1e-2))
SLACK = 1.0003  # two evaluations may sit at different ends of the tolerance


@settings(max_examples=15, deadline=None, derandomize=True)
@given(**CASES, more=st.floats(1.01, 2))
def test_eps_is_monotone(q, sigma, steps, delta, more):
    for by in ACCOUNTANTS:
        e = spent(q, sigma, steps, delta, by)
        assert e <= spent(min(1, q*more), sigma, steps, delta, by)*SLACK + 1e-6
        assert e <= spent(q, sigma, math.ceil(steps*more), delta, by)*SLACK + 1e-6
        assert e <= spent(q, sigma/more, steps, delta, by)*SLACK + 1e-6
        assert e <= spent(q, sigma, steps, delta/more, by)*SLACK + 1e-6


@settings(max_examples=12, deadline=None, derandomize=True)
@given(**CASES)
def test_delta_inverts_epsilon(q, sigma, steps, delta):
    for by in ACCOUNTANTS:
        a = by().step(q, sigma, steps)
        assert a.delta(a.epsilon(delta)) <= delta*(1 + 1e-9)
    eps = a.epsilon(delta)
    assert eps < 1e-5 or a.delta(eps*.999 - 1e-6) > delta*.99  # PLD wastes nothing


@settings(max_examples=8, deadline=None, derandomize=True)
@given(q=st.floats(1e-3, 1), steps=st.integers(1, 3000), eps=st.floats(.1, 10),
       delta=st.floats(1e-8, 1e-3))
def test_noise_multiplier_spends_all_and_no_more(q, steps, eps, delta):
    for by in ACCOUNTANTS:
        sigma = noise_multiplier(eps=eps, delta=delta, q=q, steps=steps, accountant=by)
        assert spent(q, sigma, steps, delta, by) <= eps < spent(q, sigma*.999, steps, delta, by)


@by_values("eps", [1e-3, 1e-2, .1])
def test_tiny_budgets(eps):
    "RDP's orders end before eps = 0: PLD calibrates all the same, RDP says that it cannot."
    exact = gaussian_sigma(eps, 1e-5)
    assert exact <= noise_multiplier(eps=eps, delta=1e-5, q=1., steps=1) < 1.001*exact
    small = dict(eps=eps, delta=1e-5, q=.01, steps=100)
    sigma = noise_multiplier(**small)
    assert .998*eps < spent(.01, sigma, 100, 1e-5) <= eps
    if eps < .005:
        with pytest.raises(ValueError, match=f"RDP cannot show eps={eps}"):
            noise_multiplier(**small, accountant=RDPAccountant)


# extremes

def with_digits(q, sigma, delta):
    "Exact eps of one step in the direction of removal, rounded down, with 60 digits."
    with mpmath.workdps(60):
        q, sigma = mpmath.mpf(q), mpmath.mpf(sigma)

        def over(eps):
            z = sigma*mpmath.log(mpmath.expm1(eps)/q + 1) + .5/sigma
            out, hit = mpmath.ncdf(-z), mpmath.ncdf(1/sigma - z)
            return (1 - q)*out + q*hit - mpmath.exp(eps)*out > delta
        low, high = mpmath.mpf(0), mpmath.mpf(1e-12)
        while over(high) and high < 1e12:
            low, high = high, high*8
        for _ in range(14):
            middle = (low + high)/2
            low, high = (middle, high) if over(middle) else (low, middle)
        return float(low)


def log_floats(low, high):
    "Powers of ten, and what lies between."
    return st.floats(low, high).map(lambda x: 10**x)


EXTREMES = dict(q=log_floats(-12, 0) | st.floats(0, 1), sigma=log_floats(-2, 12),
                steps=log_floats(0, 9).map(int), delta=log_floats(-250, -.01))


@pytest.mark.filterwarnings("error")
@settings(max_examples=25, deadline=None, derandomize=True)
@given(**EXTREMES)
def test_extremes_are_numbers_and_no_method_beats_the_truth(q, sigma, steps, delta):
    "No warning, no NaN, not above RDP, and never below what one of the steps costs by itself."
    eps, by_rdp = (spent(q, sigma, steps, delta, by) for by in (PLDAccountant, RDPAccountant))
    assert 0 <= eps <= by_rdp*1.001 + 1e-6
    if q:
        assert eps >= with_digits(q, sigma, delta)*(1 - 1e-9)
    if q == 1:
        assert eps >= gaussian_epsilon(delta, sigma/math.sqrt(steps))*(1 - 1e-9)
    account = PLDAccountant().step(q, sigma, steps)
    if 0 < eps < math.inf and delta > 1e-240:
        assert 0 <= account.delta(eps) <= 1


@pytest.mark.filterwarnings("error")
@by_values("q, sigma, steps, delta", [
    (7.18e-7, .01427, 630, 5.2e-20), (.2656, .01, 46, 7.2e-191),
    (1e-300, 124770., 4_269_741, 5e-86), (1.55e-10, 1179.84, 93_805_449, 1.4e-10),
    (.04, 1.6138, 625, 1e-115), (5.54e-5, 1.88, 1000, 2.3e-173), (1.12e-6, .535, 71755, 5e-188),
    (1.2e-9, .566, 516571, 7.7e-14), (5.9e-8, .614, 5260650, 1.4e-4),
    pytest.param(.6664, 1764., 10**15, 1e-290, marks=pytest.mark.slow),
    pytest.param(.33456, .822, 10**8, 9.2e-78, marks=pytest.mark.slow),
    pytest.param(2.94e-10, .5, 309_376_837, 1.6e-15, marks=pytest.mark.slow)])
def test_what_overflows_on_the_way_is_bounded_all_the_same(q, sigma, steps, delta):
    "Most stopped with an error once; the others came out below the truth, or above RDP."
    account = PLDAccountant().step(q, sigma, steps)
    eps = account.epsilon(delta)
    assert with_digits(q, sigma, delta)*(1 - 1e-9) <= eps
    assert eps <= spent(q, sigma, steps, delta, RDPAccountant)
    assert 0 < account.delta(eps) <= 1.2*delta or delta < 1e-250


@by_values("eps", [1e-3, .01, .03, .1])
def test_a_delta_far_below_what_a_grid_resolves_is_bounded(eps):
    "At .03 two grids once took turns for ever; at .1 the bound was 1.7e-4, truth 1e-50."
    q, sigma = 8.738277469405379e-07, 1.2106889651058925
    assert OneStep(q, sigma).delta(eps) <= PLDAccountant().step(q, sigma).delta(eps) <= 1e-15


def test_what_went_wrong_bounds_nothing(monkeypatch):
    "A NaN anywhere in the grid is never an eps of 0: the moments' bound is reported."
    def broken(self, tilt, low, top, h):
        return np.arange(low, top, h), np.full(len(np.arange(low, top, h)), math.nan), 0.
    monkeypatch.setattr(pld.ComposedLoss, "convolve", broken)
    account = PLDAccountant().step(.04, 1.6138, 625)
    by_rdp = spent(.04, 1.6138, 625, 1e-5, RDPAccountant)
    assert account.epsilon(1e-5) >= by_rdp*(1 - 1e-9)
    by_rdp = RDPAccountant().load_state_dict(account.state_dict())
    assert account.delta(3.) >= by_rdp.delta(3.)*(1 - 1e-9)


def test_the_spectrum_keeps_the_digits_of_rare_losses():
    "The logarithm of almost 1 is the rare part itself; multiplied by the steps it counts."
    p = np.zeros(64)
    p[3], p[10] = 1 - 1e-13, 1e-13
    peak, spectrum = pld._log_spectrum(p)
    turned = np.exp(-2j*np.pi*7*np.arange(33)/64)
    assert peak == 3
    assert spectrum.real == pytest.approx(1e-13*(turned - 1).real, rel=1e-9, abs=1e-24)


@by_values("numbers", [
    pytest.param(dict(eps=1., delta=1e-10, q=1e-9, steps=1000), marks=pytest.mark.slow),
    dict(eps=3., delta=.09, q=.04, steps=1000), dict(eps=1e-6, delta=1e-5, q=.01, steps=100),
    pytest.param(dict(eps=1e6, delta=1e-5, q=.01, steps=100), marks=pytest.mark.slow),
    dict(eps=3., delta=1e-5, q=.01, steps=10**7),
    pytest.param(dict(eps=3., delta=1e-5, q=.01, steps=10**9), marks=pytest.mark.slow),
    dict(eps=.1, delta=1e-5, q=1., steps=10**15)])
def test_calibration_at_the_extremes_never_overspends(numbers):
    sigma = noise_multiplier(**numbers)
    q, steps, delta = (numbers[name] for name in ("q", "steps", "delta"))
    assert .8*numbers["eps"] < spent(q, sigma, steps, delta) <= numbers["eps"]


# the ledger


@BOTH
@by_values("kind", [np.int8, np.uint8, lambda n: torch.tensor(n, dtype=torch.uint8)])
def test_narrow_integers_do_not_wrap_around(accountant, kind):
    taken = accountant().step(.1, 1., 200).step(.1, 1., kind(100)).step(.1, 1., kind(100))
    assert taken.history == [(.1, 1., 400)]


@BOTH
def test_nothing_costs_nothing(accountant):
    assert spent(.04, 1, 0, 1e-5, accountant) == 0
    assert spent(0, 1, 9, 1e-5, accountant) == 0
    assert accountant().delta(1.) == 0
    assert accountant().step(.04, 1).delta(math.inf) == 0
    nothing = dict(eps=3, delta=1e-5, accountant=accountant)
    assert noise_multiplier(q=.04, steps=0, **nothing) == 0
    assert noise_multiplier(q=0, steps=5, **nothing) == 0


@BOTH
def test_no_noise_costs_everything(accountant):
    assert spent(.04, 0, 1, 1e-5, accountant) == math.inf
    assert accountant().step(.04, 0).delta(5.) == 1
    assert accountant().step(.04, 1).step(.04, 0).epsilon(1e-5) == math.inf


# refusals


GOOD = dict(q=.04, sigma=1., steps=10, delta=1e-5)
BAD = [dict(q=-.1), dict(q=1.5), dict(q=math.nan), dict(q="half"), dict(q=None), dict(sigma=-1),
       dict(sigma=math.nan), dict(sigma=math.inf), dict(steps=-1), dict(steps=1.5),
       dict(steps=math.inf), dict(delta=0), dict(delta=1), dict(delta=-1e-5), dict(delta=math.nan)]


@BOTH
@by_values("bad", BAD)
def test_what_is_out_of_range_is_refused_by_its_name(accountant, bad):
    (name, value), = bad.items()
    asked = {key: v for key, v in GOOD.items() if key != "sigma"} | {"eps": 3}
    for f, good in ((epsilon, GOOD), (noise_multiplier, asked)):
        if name in good:
            with pytest.raises(ValueError, match=f"^{name}={value!r} is not".replace(".", r"\.")):
                f(**good | bad, accountant=accountant)


REFUSED = [
    *((lambda eps=eps: noise_multiplier(eps=eps, delta=1e-5, q=.04, steps=10),
       f"^eps={eps} is no budget to aim at: pass a ") for eps in (0, -1, math.inf, math.nan, None)),
    *((lambda eps=eps, by=by: by().step(.04, 1.).delta(eps), f"eps={eps}")
      for eps in (-1, math.nan, None) for by in ACCOUNTANTS),
    *((lambda rdp=rdp: rdp_to_epsilon(rdp, [2.], 1e-5),
       "is not a list of divergences: pass a number >= 0")  # NaN was once an eps of 0
      for rdp in ([math.nan], [-.1], [.1, .2], ["a"], [10**400], None)),
    *((lambda orders=orders, f=f: f(1., orders), "orders") for f in (
        rdp_gaussian, partial(rdp_sampled_gaussian, .04))
      for orders in ([1.], [.5, 2], [], [math.nan], [math.inf], 10**400)),
    (lambda: Accountant().load_state_dict({"history": [[40, 1.5, 5]]}), "q=40 is not")]


@by_values("call, words", REFUSED)
def test_what_makes_no_sense_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_plan_keeps_plain_numbers():
    "Whatever they came as: a checkpoint and a record hold them as text."
    strange = dict(n=np.int64(1000), batch_size=torch.tensor(40), steps=torch.tensor(10),
                   eps=Fraction(3), delta=np.float64(1e-5))
    plan = PrivacyPlan(**strange)
    assert plan == PrivacyPlan(n=1000, batch_size=40, steps=10, eps=3, delta=1e-5)
    numbers = (plan.n, plan.batch_size, plan.steps, plan.eps, plan.delta, plan.sigma)
    assert json.loads(json.dumps(numbers)) == list(numbers)
    few = dict(n=np.int64(1000), batch_size=torch.tensor(40), eps=3., delta=1e-5)
    assert PrivacyPlan(**few, epochs=torch.tensor(2)).steps == 50
    with pytest.raises(ValueError, match="epochs=2 in batches of batch_size=1e-320 are inf steps"):
        PrivacyPlan(**few | {"batch_size": 1e-320}, epochs=2)


@by_values("q", [1e-320, 1e-200])
@pytest.mark.filterwarnings("error")
def test_a_rate_whose_square_is_no_float(q):
    for by in ACCOUNTANTS:
        assert 0 <= spent(q, 1., 10, 1e-5, by) < .01


def test_a_delta_beyond_double_precision_is_refused():
    assert 45 < spent(.04, 1.6138, 625, 1e-280) < spent(.04, 1.6138, 625, 1e-280, RDPAccountant)
    with pytest.raises(ValueError, match="delta=1e-300 is too small"):
        spent(.04, 1.6138, 625, 1e-300)


@by_values("f", [epsilon, noise_multiplier, PrivacyPlan])
def test_numbers_in_a_row_go_by_name(f):
    "Nobody can swap q and sigma."
    kinds = {p.kind for p in inspect.signature(f).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


# the plan

PLAN = dict(n=100, batch_size=10, steps=5, eps=3., delta=1e-5)
REPORT = dict(n=50_000, batch_size=4096, steps=610, eps=3, delta=1e-5)


@by_values("bad, words", [
    (dict(n=0), "n=0: a plan needs at least one"),
    (dict(n=-5), "n=-5 is not a count"),
    (dict(n=10.5), "n=10.5 is not a count: pass an integer"),
    (dict(n="all"), "n='all' is not a count"),
    (dict(batch_size=0), "batch_size=0 is not an expected batch size"),
    (dict(batch_size=math.nan), "batch_size=nan is not"),
    (dict(batch_size=101), "batch_size=101 is more than all n=100 examples: pass less"),
    (dict(batch_size=101, unit="patient"), "more than all n=100 units (one patient each)"),
    (dict(steps=0), "steps=0: a plan takes at least one step"),
    (dict(steps=2.5), "steps=2.5 is not a number of steps: pass an integer"),
    (dict(eps=0), "eps=0 is no budget to aim at: pass a finite number > 0"),
    (dict(eps=-1), "eps=-1 is no budget to aim at: pass a finite number > 0"),
    (dict(eps=math.inf), "eps=inf is no budget"),
    (dict(delta=0), "delta=0 is not a failure probability"),
    (dict(delta=1.), "delta=1.0 is not a failure probability"),
    (dict(delta=.011), "delta=0.011 is above 1/n = 0.01: pass less, such as 1e-5"),
    (dict(sigma=-1.), "sigma=-1.0 is not a noise multiplier"),
    (dict(sigma=math.nan), "sigma=nan is not a noise multiplier"),
    (dict(sigma=0.), "sigma=0.0 spends eps = inf"),
    (dict(sigma=.5), "more than eps=3.0: leave sigma out, or pass a larger one"),
    (dict(n=1000, steps=10**30), "0 is not a number of steps"),
    (dict(sigma=1e300), "sigma=1e+300 is not a noise multiplier"),
    (dict(eps=1e-300), "eps=1e-300 is no budget"),
    (dict(n=2, batch_size=.1, steps=1, delta=.5), "delta=0.5 is above 0.005, a tenth of"),
])
def test_plan_refuses_by_name(bad, words):
    with pytest.raises(ValueError) as refusal:
        PrivacyPlan(**PLAN | bad)
    assert words in str(refusal.value)


def test_plan_accepts_the_edges():
    "delta = 1/n, the whole data set in every batch, and more noise than needed."
    assert PrivacyPlan(**PLAN | dict(delta=.01)).delta == .01
    assert PrivacyPlan(**PLAN | dict(batch_size=100)).q == 1
    noisy = PrivacyPlan(**PLAN, sigma=50.)
    assert noisy.sigma == 50
    assert noisy.epsilon_after(5) < .5


# one budget for everything

def by_google(*parts, delta, h=1e-4):
    "eps of (q, sigma, steps) entries composed by dp_accounting."
    total = None
    for q, sigma, steps in parts:
        one = from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=h)
        many = one.self_compose(steps)
        total = many if total is None else total.compose(many)
    return total.get_epsilon_for_delta(delta)


MIXED = [((.04, 1.6138, 625), (1, 30., 12)), ((1/13, 2.8809, 650), (1, 5., 12)),
         ((.001, .6, 1000), (1, 4., 1), (1, 20., 3)), ((.2, 3., 50), (.01, 1., 200), (1, 8., 2))]


@by_values("parts, delta", [
    pytest.param(parts, delta, marks=[pytest.mark.slow]*(delta == 1e-7 and parts != MIXED[0]))
    for parts in MIXED for delta in (1e-5, 1e-7)])
def test_a_budget_composes_exactly(parts, delta):
    book = Budget(delta=delta)
    for i, (q, sigma, steps) in enumerate(parts):
        book.post(f"look {i}", q=q, sigma=sigma, steps=steps)
    truth = by_google(*parts, delta=delta)
    tight(book.epsilon(), truth)
    assert book.epsilon(accountant=RDPAccountant) >= truth
    assert book.epsilon(delta=delta/10) > book.epsilon()
    alone = max(spent(*part, delta) for part in parts)
    assert alone < book.epsilon() < sum(spent(*part, delta) for part in parts)


@pytest.mark.parametrize("name, value", [("eps", 1.), ("delta", .1), ("accountant", object)])
def test_a_budget_is_told_by_what_it_was_made_with(name, value):
    book = Budget(eps=3, delta=1e-5)
    with pytest.raises(ValueError, match=f"budget.{name} cannot be changed"):
        setattr(book, name, value)


def test_posts_are_told_apart_and_added_up():
    book = Budget(delta=1e-5)
    for _ in range(3):
        book.post("training steps", q=.04, sigma=2.)
    book.post("training steps", q=.04, sigma=3.).post("accuracy", sigma=30., steps=2)
    assert book.posts == {"training steps": [(.04, 2., 3), (.04, 3., 1)],
                          "accuracy": [(1., 30., 2)]}
    book.post("loss", sigma=30.)  # another name, the same price: the third such release
    same = PLDAccountant().step(.04, 2., 3).step(.04, 3.).step(1, 30., 3)
    assert book.epsilon() == pytest.approx(same.epsilon(1e-5), rel=1e-12)


def test_step_by_step_is_the_same_as_at_once():
    plan = PrivacyPlan(**REPORT, releases=(20., 20., 50.))
    book = plan.budget()
    for _ in range(610):
        book.post("training steps", q=plan.q, sigma=plan.sigma)
    book.post("a", sigma=20., steps=2).post("b", sigma=50.)
    assert book.epsilon() <= 3
    at_once = by_google((plan.q, plan.sigma, 610), (1, 20., 2), (1, 50., 1), delta=1e-5)
    tight(book.epsilon(), at_once)
    assert not book.affords(sigma=50.)


def test_left_counts_the_steps_that_fit():
    book = Budget(eps=3, delta=1e-5).post("accuracy", sigma=5., steps=2)
    most = book.left(q=.04, sigma=1.6138, most=10**6)
    assert book.affords(q=.04, sigma=1.6138, steps=most)
    assert not book.affords(q=.04, sigma=1.6138, steps=most + 1)
    assert most < Budget(eps=3, delta=1e-5).left(q=.04, sigma=1.6138, most=10**6)
    assert book.left(q=.04, sigma=1.6138, most=7) == 7
    book.post("training steps", q=.04, sigma=1.6138, steps=most)
    assert book.left(q=.04, sigma=1.6138, most=100) == 0


def test_what_fits_the_plan_fits_at_its_own_delta_by_its_own_accountant():
    "Elsewhere the plan's eps is no bound: at a smaller delta it would be said too low."
    plan = PrivacyPlan(n=1000, batch_size=100, steps=20, eps=2., delta=1e-4)
    book = plan.budget().post("steps", q=plan.q, sigma=plan.sigma, steps=20)
    assert 1.9 < book.epsilon() <= 2. < book.epsilon(accountant=RDPAccountant)
    stricter = epsilon(q=plan.q, sigma=plan.sigma, steps=20, delta=1e-8)
    assert book.epsilon(1e-8) == pytest.approx(stricter) and stricter > 2.5


def test_budgets_join_and_never_forget():
    ours = Budget(eps=3, delta=1e-5).post("steps", q=.04, sigma=2., steps=9).post("a", sigma=30.)
    theirs = Budget(eps=3, delta=1e-5).post("steps", q=.04, sigma=2., steps=5).post("b", sigma=9.)
    saved = json.loads(json.dumps(theirs.state_dict()))
    for _ in range(2):  # twice the same state: entered once
        ours.load_state_dict(saved)
        assert ours.posts == {"steps": [(.04, 2., 9)], "a": [(1., 30., 1)], "b": [(1., 9., 1)]}
    broke = Budget(eps=3, delta=1e-5).load_state_dict({"posts": [["steps", 1., .5, 3]]})
    assert broke.epsilon() > 3  # what was spent is spent, and said
    assert not broke.affords(sigma=1e6)
    with pytest.raises(ValueError, match="q=40 is not a Poisson"):
        Budget(delta=1e-5).load_state_dict({"posts": [["steps", 40, 2., 5]]})


@BOTH
def test_a_plan_sets_money_aside_for_releases(accountant):
    alone = PrivacyPlan(**REPORT, accountant=accountant)
    plan = PrivacyPlan(**REPORT, releases=(10.,)*3, accountant=accountant)
    assert plan.releases == (10., 10., 10.)
    assert alone.releases == ()
    assert plan.sigma > alone.sigma
    everything = accountant().step(plan.q, plan.sigma, 610).step(1, 10., 3)
    assert everything.epsilon(1e-5) <= 3
    a_little_less = accountant().step(plan.q, plan.sigma*.999, 610).step(1, 10., 3)
    assert a_little_less.epsilon(1e-5) > 3
    assert plan.epsilon_after(610) <= 3
    assert plan.epsilon_after(0) == pytest.approx(accountant().step(1, 10., 3).epsilon(1e-5))
    assert "3 with multiplier 10;" in plan.statement()
    assert "other Gaussian releases" not in alone.statement()
    assert pickle.loads(pickle.dumps(plan)) == plan != alone
    with pytest.raises(ValueError, match="more than eps=3"):
        PrivacyPlan(**REPORT, sigma=alone.sigma, releases=(10.,)*3, accountant=accountant)


def test_a_plan_without_releases_has_the_sigma_it_always_had():
    assert PrivacyPlan(**REPORT).sigma == PrivacyPlan(**REPORT, releases=[]).sigma == 2.95561
    assert noise_multiplier(eps=3, delta=1e-5, q=64/1437, steps=30) == .849365


@by_values("releases, words", [
    (5., "releases=5.0 is no list of noise multipliers: pass a tuple"),
    (("a",), "is no list of noise multipliers"), (None, "is no list"), ("5", "is no list"),
    (b"5", "is no list"), ({5.: 1}, "is no list"), ([10**400], "is no list"),
    ((-1.,), "sigma=-1.0 is not a noise multiplier"), ((math.nan,), "sigma=nan is not"),
    ((0.,), "the releases alone spend eps = inf of eps=3"),
    ((4.,)*12, "the releases alone spend eps = 3.7"),
])
def test_releases_are_refused_by_name(releases, words):
    with pytest.raises(ValueError) as refusal:
        PrivacyPlan(**REPORT, releases=releases)
    assert words in str(refusal.value)


@by_values("bad, words", [(dict(delta=0), "delta=0 is not"), (dict(eps=-1), "eps=-1 is not"),
                          (dict(accountant="PLD"), "is no accountant")])
def test_a_budget_names_what_it_refuses(bad, words):
    with pytest.raises(ValueError, match=words):
        Budget(**dict(eps=3, delta=1e-5) | bad)
    book = Budget(eps=3, delta=1e-5)
    for post in (dict(sigma=-1), dict(sigma=math.nan), dict(sigma=1, q=2), dict(sigma=1, steps=.5)):
        with pytest.raises(ValueError, match="is not a"):
            book.post("look", **post)
        with pytest.raises(ValueError, match="is not a"):
            book.affords(**post)
    assert book.posts == {}


def test_a_budget_without_limit_counts_and_refuses_nothing():
    book = Budget(delta=1e-5).post("look", sigma=0.)
    assert book.epsilon() == math.inf
    assert book.affords(sigma=0.)
    assert book.left(q=1, sigma=.1, most=10) == 10


# the numbers that the course quotes

def test_curve_of_the_report():
    curve = [spent(1/25, 1.6138, 25*epoch, 1e-5) for epoch in (1, 2, 5, 10, 15, 20, 25)]
    assert curve == pytest.approx([.631, .850, 1.306, 1.846, 2.277, 2.649, 2.985], abs=6e-4)
    assert PLDAccountant().step(1, 1.6138, 25).epsilon(1e-5) == pytest.approx(17.39, abs=.01)


@by_values("q, steps, sigma", [(1/98, 1470, .928), (1/25, 625, 1.714), (1/13, 650, 3.079)])
def test_sigmas_of_the_report(q, steps, sigma):
    by_rdp = noise_multiplier(eps=3, delta=1e-5, q=q, steps=steps, accountant=RDPAccountant)
    assert by_rdp == pytest.approx(sigma, abs=4e-3)
