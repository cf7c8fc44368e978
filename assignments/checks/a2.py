"A2: an RDP accountant."
import math

from checks import SEED, points  # noqa: F401  (for the notebook)
from dp_course.exercises import Refused, Trial, below
from dp_course.privacy import RDPAccountant, epsilon

ORDERS = [*range(2, 65), 128, 256]


def gaussian(alpha, sigma):
    return alpha/(2*sigma**2) if sigma else math.inf


def sampled(alpha, q, sigma, factor=1., coins=True, divide=True, first=0, last=0, ways=True,
            square=False):
    "The right divergence, or a wrong one."
    if q == 0:
        return 0.
    if q == 1:
        return gaussian(alpha, sigma)
    logs = []
    for k in range(first, alpha + 1 - last):
        log = ways*math.log(math.comb(alpha, k))
        log += k*math.log(q) + ((alpha - k)*math.log1p(-q) if coins else 0.)
        logs.append(log + factor*k*(k if square else k - 1)/(2*sigma**2))
    top = max(logs)
    total = top + math.log(math.fsum(math.exp(v - top) for v in logs))
    return total/(alpha - 1) if divide else total


def _terms(alpha, q, sigma):
    "Logarithms of the terms of the sum."
    return [math.log(math.comb(alpha, k)) + k*math.log(q) + (alpha - k)*math.log1p(-q)
            + k*(k - 1)/(2*sigma**2) for k in range(alpha + 1)]


def converted(rdp, delta):
    found = [value + math.log((a - 1)/a) - (math.log(delta) + math.log(a))/(a - 1)
             for a, value in rdp.items()]
    return max(0., min(found))


def cost(phases, delta, rdp=sampled):
    if not any(steps for _, _, steps in phases):
        return 0.
    total = {a: sum(steps*rdp(a, q, sigma) for q, sigma, steps in phases) for a in ORDERS}
    return converted(total, delta)


def check_rdp_gaussian(your_function, seed=None):
    "alpha/(2 sigma^2)."
    trial = Trial(your_function, "check_rdp_gaussian", seed, (
        "The formula stands in the question.",
        "Square sigma, and mind the 2.",
        "`alpha/(2*sigma**2) if sigma else math.inf`"),
        unsafe=below, slips={
            "the 2 belongs below the line": lambda alpha, sigma: alpha/sigma**2,
            "sigma is squared": lambda alpha, sigma: alpha/(2*sigma),
            "it grows with the order": lambda alpha, sigma: 1/(2*sigma**2),
            "alpha itself, not alpha*(alpha - 1): that is the logarithm of the moment":
                lambda alpha, sigma: alpha*(alpha - 1)/(2*sigma**2),
            "alpha, not alpha - 1": lambda alpha, sigma: (alpha - 1)/(2*sigma**2),
            "the 2 is not squared along": lambda alpha, sigma: alpha/(2*sigma)**2})
    with trial.holds("a few orders"):
        for alpha in (2, 5, 64):
            trial.same(gaussian, alpha, trial.uniform(.5, 3.))
    with trial.holds("orders that are not whole"):
        trial.same(gaussian, 1.25, trial.uniform(.5, 3.))
    with trial.holds("very much noise"):
        trial.same(gaussian, 2, 1e4)
    with trial.holds("no noise"):
        try:
            got = trial(2, 0.)
        except Refused as refused:
            refused.why = "at sigma = 0 nothing is hidden: math.inf, no error"
            raise
        trial.need(got == math.inf, f"got {got}", "without noise nothing is hidden: math.inf",
                   leaks=True)
    return trial.card()


def check_rdp_sampled(your_function, seed=None):
    "The binomial sum, in logarithms."
    trial = Trial(your_function, "check_rdp_sampled", seed, (
        "Write the logarithm of one term of the sum, then think about adding up.",
        "ln of a sum: top = max(logs), then top + ln(sum(exp(v - top))).",
        "log term: lgamma(alpha + 1) - lgamma(k + 1) - lgamma(alpha - k + 1) + "
        "(alpha - k)*log1p(-q) + k*log(q) + k*(k - 1)/(2*sigma**2); divide by alpha - 1."),
        unsafe=below, slips={
            "divide the logarithm by alpha - 1":
                lambda alpha, q, sigma: sampled(alpha, q, sigma, divide=False),
            "who is not drawn counts, too: (1 - q)^(alpha - k)":
                lambda alpha, q, sigma: sampled(alpha, q, sigma, coins=False),
            "the exponent is k(k - 1)/(2 sigma^2)":
                lambda alpha, q, sigma: sampled(alpha, q, sigma, factor=2.),
            "all alpha + 1 terms: k = alpha is the last of them, and the largest":
                lambda alpha, q, sigma: sampled(alpha, q, sigma, last=1),
            "the sum begins at k = 0": lambda alpha, q, sigma: sampled(alpha, q, sigma, first=1),
            "the exponent has k*(k - 1), not k^2":
                lambda alpha, q, sigma: sampled(alpha, q, sigma, square=True),
            "the binomials are missing: lgamma(n + 1) is ln n!":
                lambda alpha, q, sigma: sampled(alpha, q, sigma, ways=False),
            "divide by alpha - 1, not by alpha":
                lambda alpha, q, sigma: sampled(alpha, q, sigma)*(alpha - 1)/alpha,
            "the natural logarithm": lambda alpha, q, sigma: sampled(alpha, q, sigma)/math.log(10),
            "the largest term alone is not the sum: add exp(v - top) of all":
                lambda alpha, q, sigma: max(_terms(alpha, q, sigma))/(alpha - 1),
            "the largest term was taken out of the sum: put it back, top + ln(...)":
                lambda alpha, q, sigma: sampled(alpha, q, sigma)
                - max(_terms(alpha, q, sigma))/(alpha - 1),
            "sampling is no factor q": lambda alpha, q, sigma: q*gaussian(alpha, sigma),
            "sampling is no factor q^2: that holds for tiny q and low orders only":
                lambda alpha, q, sigma: q*q*gaussian(alpha, sigma)})
    with trial.holds("low orders"):
        for alpha in (2, 3, 8):
            trial.same(sampled, alpha, trial.uniform(.05, .5), trial.uniform(.7, 2.))
    with trial.holds("rates as in training"):
        trial.same(sampled, 16, trial.uniform(.01, .1), trial.uniform(.8, 1.5), rtol=1e-4)
    with trial.holds("order 256, where powers overflow"):
        try:
            trial.same(sampled, 256, .05, .6)
        except Refused as refused:
            refused.why = "a float ends at 1e308: add up logarithms"*("Overflow" in str(refused))
            raise
    with trial.holds("a rate of 0: she is never looked at"):
        trial.same(sampled, 4, 0., 1., zero=1e-12)
    with trial.holds("a rate of 1: the plain Gaussian"):
        trial.same(sampled, 16, 1., 1.3)
    return trial.card()


def _bounds(rdp, log_delta, below=1, turned=1, order=1):
    "What each order proves; or with one of its parts changed."
    return [v + turned*math.log((a - 1)/a) - (log_delta + order*math.log(a))/(a - below)
            for a, v in rdp.items()]


def _classic(rdp, delta):
    return max(0., min(v + math.log(1/delta)/(a - 1) for a, v in rdp.items()))


def check_to_epsilon(your_function, seed=None):
    "The conversion, at the best order."
    trial = Trial(your_function, "check_to_epsilon", seed, (
        "One number per order, from the formula; which of them do you return?",
        "All are valid: the smallest. And an eps below 0 is 0.",
        "`max(0, min(v + math.log((a - 1)/a) - (math.log(delta) + math.log(a))/(a - 1) "
        "for a, v in rdp.items()))`"),
        unsafe=below, slips={
            "that is the older conversion, valid but larger: use the one in the question": _classic,
            "every order gives a valid bound: take the smallest, not the largest":
                lambda rdp, delta: max(0., max(converted({a: v}, delta) for a, v in rdp.items())),
            "the natural logarithm of delta":
                lambda rdp, delta: max(0., min(_bounds(rdp, math.log10(delta)))),
            "divide by a - 1, not by a":
                lambda rdp, delta: max(0., min(_bounds(rdp, math.log(delta), below=0))),
            "ln((a - 1)/a): the fraction stands the other way round":
                lambda rdp, delta: max(0., min(_bounds(rdp, math.log(delta), turned=-1))),
            "both logarithms are subtracted: -(ln delta + ln a)/(a - 1)":
                lambda rdp, delta: max(0., min(_bounds(rdp, math.log(delta), order=-1))),
            "delta has a price: a divergence alone is no eps":
                lambda rdp, delta: min(rdp.values()),
            "every order gives a bound: the smallest of them, no mean":
                lambda rdp, delta: max(0., sum(_bounds(rdp, math.log(delta)))/len(rdp)),
            "the order with the smallest bound, not with the smallest divergence":
                lambda rdp, delta: converted({min(rdp, key=rdp.get): min(rdp.values())}, delta),
            "eps below 0 promises nothing more than 0":
                lambda rdp, delta: min(v + math.log((a - 1)/a) - (math.log(delta) + math.log(a))
                                       / (a - 1) for a, v in rdp.items())})

    def table(sigma, steps, orders=ORDERS):
        return {a: steps*gaussian(a, sigma) for a in orders}
    with trial.holds("a single order"):
        trial.same(converted, {5: trial.uniform(.1, 2.)}, 1e-5)
    with trial.holds("the best of many"):
        for delta in (1e-3, 1e-5, 1e-9):
            trial.same(converted, table(trial.uniform(2., 9.), 3), delta)
    with trial.holds("orders that are not whole"):
        trial.same(converted, table(1., 1, (1.5, 1.75, 2.5, 4.)), 1e-2)
    with trial.holds("next to nothing was released: 0, not less"):
        trial.same(converted, table(1e4, 1, (2, 3)), .9)
    return trial.card()


def check_run_epsilon(your_function, seed=None):
    "Phases add up, order by order."
    def apart(phases, delta):
        return sum(cost([phase], delta) for phase in phases)

    def largest(phases, delta):
        return max([cost([phase], delta) for phase in phases], default=0.)

    def average(phases, delta):
        steps = max(1, sum(n for _, _, n in phases))
        q = sum(n*q for q, _, n in phases)/steps
        sigma = sum(n*s for _, s, n in phases)/steps
        return cost([(q, sigma, steps)], delta) if phases else 0.
    trial = Trial(your_function, "check_run_epsilon", seed, (
        "Add divergences of the same order, not epsilons.",
        "rdp[a] = sum over phases of steps*rdp_sampled(a, q, sigma).",
        "`to_epsilon({a: sum(n*rdp_sampled(a, q, s) for q, s, n in phases) for a in orders}, "
        "delta)`, and 0 if there is nothing."),
        unsafe=below, slips={
            "add the divergences, order by order; epsilons add up to too much": apart,
            "all phases look at the same people: they add up": largest,
            "two phases that look alike are two phases: no set, no dict of them":
                lambda phases, delta: cost(list(set(phases)), delta),
            "phases of the same rate and noise add their steps up: no later one replaces them":
                lambda phases, delta: cost([(*key, n) for key, n in {
                    (q, s): n for q, s, n in phases}.items()], delta),
            "the average plan costs less than the plans: cost is not linear in q and sigma":
                average,
            "squares of eps do not add up either: divergences do":
                lambda phases, delta: math.hypot(*(cost([phase], delta) for phase in phases)),
            "delta is paid once, for all phases together; epsilons add up to too much":
                lambda phases, delta: apart(phases, delta/max(1, len(phases))),
            "every phase has its own number of steps": lambda phases, delta: cost(
                [(q, s, phases[0][2]) for q, s, _ in phases], delta) if phases else 0.,
            "each phase draws at its rate q: without that it costs far more":
                lambda phases, delta: cost([(1., s, n) for _, s, n in phases], delta),
            "every step counts": lambda phases, delta: cost([(q, s, min(1, n))
                                                             for q, s, n in phases], delta)})
    with trial.holds("two phases"):
        for _ in range(2):
            phases = [(trial.uniform(.01, .05), trial.uniform(.8, 1.1), 300),
                      (trial.uniform(.02, .1), trial.uniform(1.5, 2.), 200)]
            trial.same(cost, phases, 1e-5, rtol=1e-4)
    with trial.holds("a phase that comes again, and one that differs from it in its rate alone"):
        for others in ((.02, .9, 300), (.02, .9, 100)), ((.03, .9, 300), (.02, 1.1, 300)):
            trial.same(cost, [(.02, .9, 300), *others], 1e-5, rtol=1e-4)
    with trial.holds("one phase"):
        trial.same(cost, [(.02, trial.uniform(.7, 2.), 1000)], 1e-5, rtol=1e-4)
    with trial.holds("a release without sampling beside them"):
        trial.same(cost, [(.02, 1., 500), (1., 10., 1)], 1e-6, rtol=1e-4)
    with trial.holds("nothing at all, and phases of no steps"):
        trial.same(cost, [], 1e-5)
        trial.same(cost, [(.1, 1., 0)], 1e-5)
    return trial.card()


def check_calibrate(your_function, seed=None):
    "The smallest sigma within a budget."
    trial = Trial(your_function, "check_calibrate", seed, (
        "Begin with 1e-3 and 1e4, and halve the interval (on a logarithmic scale).",
        "Keep one end that overspends and one that does not; return the latter.",
        "`while high/low > 1.0005: middle = math.sqrt(low*high)`; low = middle if "
        "epsilon_of(middle) > budget, else high = middle; return high."))

    def judged(epsilon_of, budget):
        sigma = float(trial(epsilon_of, budget))
        spent = epsilon_of(sigma)
        trial.need(spent <= budget, f"sigma {sigma:.8g} spends {spent:.8g} of {budget:.8g}",
                   "return the end of the interval that keeps the promise: not a hair above",
                   leaks=True)
        less = epsilon_of(sigma/1.001)
        trial.need(less > budget, f"sigma {sigma:.8g}, but {sigma/1.001:.8g} is enough",
                   "more noise than needed: bisect until the interval is below a thousandth")
    with trial.holds("eps = c/sigma"):
        for _ in range(3):
            c = trial.uniform(.5, 20.)
            judged(lambda sigma, c=c: c/sigma, trial.uniform(.2, 9.))
    with trial.holds("a real plan: 500 steps at q = 0.02"):
        judged(lambda sigma: epsilon(  # the course's: a function of these checks would travel
            q=.02, sigma=sigma, steps=500, delta=1e-5, accountant=RDPAccountant), 3.)
    with trial.holds("a cost in stairs"):
        judged(lambda sigma: math.ceil(100/sigma)/10, trial.uniform(1., 3.))
    with trial.holds("much noise: sigma beyond 1000"):
        try:
            judged(lambda sigma: 1e3/sigma, .3)
        except Refused as refused:
            refused.why = refused.why or "the interval ends at 1e4, not before"*(
                "ValueError" in str(refused))
            raise
    with trial.holds("a budget that nothing meets"):
        try:
            got = your_function(lambda sigma: 1. + 1/sigma, .5)
        except Exception as error:
            got = error
        trial.need(isinstance(got, ValueError), f"got {got!r}", "who cannot keep the promise must "
                   "say so: ValueError", leaks=not isinstance(got, Exception))
    return trial.card()
