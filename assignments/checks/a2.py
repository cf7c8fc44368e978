"A2: the price of a run."
from functools import lru_cache

from checks import SEED, points  # noqa: F401  (for the notebook)
from dp_course.exercises import Trial, above
from dp_course.privacy import RDPAccountant, epsilon


def cost(history, delta):
    "eps of a list of (q, sigma, steps)."
    account = RDPAccountant()
    for q, sigma, steps in history:
        account.step(q, sigma, steps)
    return account.epsilon(delta) if any(steps for *_, steps in history) else 0.


@lru_cache(maxsize=200)
def exact(q, sigma, steps, delta):
    return epsilon(q=q, sigma=sigma, steps=steps, delta=delta)


# --- 1


def possible(claims, spent=exact):
    return [eps >= .99*spent(q, sigma, steps, delta) for q, sigma, steps, delta, eps in claims]


def check_possible(your_function, seed=None):
    "Claims of papers, believed or not."
    slips = {
        "each step draws a batch: without q a run seems to cost far more":
            lambda claims: possible(claims, lambda q, *run: exact(1., *run)),
        "the claim is about the whole run: every step counts":
            lambda claims: possible(claims, lambda q, s, n, d: exact(q, s, 1, d)),
        "an upper bound by Renyi divergences is above the truth: a claim below it may be right":
            lambda claims: possible(claims, lambda q, s, n, d: cost([(q, s, n)], d)),
        "every claim has a delta of its own":
            lambda claims: possible(claims, lambda q, s, n, d: exact(q, s, n, 1e-5)),
        "who claims more than she spends is careful, not wrong":
            lambda claims: [not ok for ok in possible(claims)],
        "claims are rounded: allow one per cent": lambda claims: [
            eps >= exact(*run) for *run, eps in claims]}
    trial = Trial(your_function, "check_possible", seed, (
        "What does each run cost at least? The course's `epsilon` knows it.",
        "A claim is possible if it is no smaller than that, up to rounding.",
        "`[eps >= .99*epsilon(q=q, sigma=sigma, steps=steps, delta=delta) for ...]`"),
        unsafe=above, slips=slips)

    def claims(runs, *factors):
        return [(*run, factor*exact(*run)) for run, factor in zip(runs, factors)]
    runs = [(trial.uniform(.01, .05), trial.uniform(.8, 2.), 500, 1e-5),
            (.02, trial.uniform(.8, 1.5), 2000, 1e-6), (1., trial.uniform(5., 9.), 10, 1e-3)]
    with trial.holds("claims that are right, and half of what was spent"):
        trial.same(possible, claims(runs, 1., .5, 1.))
        trial.same(possible, claims(runs, .6, 1., .5))
    with trial.holds("claims with much room, and nine tenths of what was spent"):
        trial.same(possible, claims(runs, 3., .9, 1.5))
        trial.same(possible, claims(runs, .9, 4., .9))
    with trial.holds("claims below what Renyi divergences prove, and yet right"):
        trial.same(possible, claims(runs, 1.02, 1.02, .85))
    with trial.holds("claims that were rounded down by less than one per cent"):
        trial.same(possible, claims(runs, .993, .7, .995))
    return trial.card()


# --- 2


def _overspent(trial, history, delta, eps):
    "A budget that is gone must be called gone."
    try:
        got = trial.attempt(*history, eps, delta)
    except Exception as error:
        got = error
    trial.need(isinstance(got, ValueError), f"got {got!r}", "the history alone has spent the "
               "budget, whatever the noise is: ValueError", leaks=not isinstance(got, Exception))


def check_rest_sigma(your_function, seed=None):
    "The noise of what is left of a run."
    trial = Trial(your_function, "check_rest_sigma", seed, (
        "What does everything cost together, if the rest has this sigma?",
        "Halve an interval of sigma whose upper end keeps the budget.",
        "`cost(history + [(q, sigma, steps)]) <= eps` in a bisection; return the end that keeps "
        "it."))

    def judged(history, q, steps, eps, delta):
        sigma = float(trial(history, q, steps, eps, delta))
        spent = cost([*history, (q, sigma, steps)], delta)
        alone = cost([(q, sigma, steps)], delta)
        near = abs(alone/eps - 1) < .01
        trial.need(spent <= eps, f"sigma {sigma:.6g} spends {spent:.6g} of {eps:g}",
                   "the history costs, too: count it with the rest" if near and history else
                   "return the end of the interval that keeps the promise", leaks=True)
        less = cost([*history, (q, sigma/1.001, steps)], delta)
        parts = cost(history, delta) + alone
        trial.need(less > eps, f"sigma {sigma:.6g}, and {sigma/1.001:.6g} is enough",
                   "epsilons add up to too much: give all phases to one accountant"
                   if history and abs(parts/eps - 1) < .01 else
                   "more noise than needed: go on until the interval is below a thousandth")
    with trial.holds("nothing has been spent"):
        judged([], trial.uniform(.01, .05), 800, 3., 1e-5)
    with trial.holds("half of the run is over"):
        judged([(.02, trial.uniform(1., 1.3), 400)], .02, 400, 4., 1e-5)
    with trial.holds("another rate, and a noisy mean that was bought before"):
        judged([(1., 20., 1), (.05, 2., 100)], trial.uniform(.01, .1), 300, 2., 1e-6)
    with trial.holds("much noise: a budget that is nearly spent"):
        history = [(.02, 1., 500)]
        judged(history, .02, 500, 1.02*cost(history, 1e-5), 1e-5)
    with trial.holds("a history that has spent more than the budget"):
        judged([], .02, 100, 1., 1e-5)
        _overspent(trial, ([(.05, .8, 500)], .05, 100), 1e-5, 1.)
    return trial.card()


# --- 3


def steps_left(history, q, sigma, eps, delta, spent=cost, least=0):
    if spent(history, delta) > eps:
        return least
    low, high = 0, 1
    while spent([*history, (q, sigma, high)], delta) <= eps:
        low, high = high, 2*high
    while high - low > 1:
        middle = (low + high)//2
        if spent([*history, (q, sigma, middle)], delta) <= eps:
            low = middle
        else:
            high = middle
    return low


def check_steps_left(your_function, seed=None):
    "How long a run may go on."
    def apart(history, delta):
        return sum(cost([phase], delta) for phase in history)

    def alone(history, q, sigma, eps, delta):
        return steps_left([], q, sigma, eps, delta)
    trial = Trial(your_function, "check_steps_left", seed, (
        "Cost grows with every step: the last one that the budget pays for is asked for.",
        "Double the number of steps until it is too many, then halve the interval.",
        "keep `low` with `cost(history + [(q, sigma, low)]) <= eps`; return `low`."),
        unsafe=above, slips={
            "the history costs, too": alone,
            "one step more than the budget pays for": lambda *args: steps_left(*args) + 1,
            "one step less than the budget pays for: it may be spent to the end":
                lambda *args: max(0, steps_left(*args) - 1),
            "epsilons add up to too much: give all phases to one accountant":
                lambda *args: steps_left(*args, spent=apart),
            "eps does not grow in proportion to the steps":
                lambda h, q, s, eps, d: int(max(0., eps - cost(h, d))/cost([(q, s, 1)], d)),
            "each step draws a batch at the rate q":
                lambda h, q, s, eps, d: steps_left(h, 1., s, eps, d)})
    with trial.holds("a run that begins"):
        for _ in range(2):
            trial.same(steps_left, [], trial.uniform(.02, .05), trial.uniform(.9, 1.2), 3., 1e-5,
                       rtol=0)
    with trial.holds("a run that goes on"):
        trial.same(steps_left, [(.02, 1.1, 400)], .02, trial.uniform(1., 1.2), 3., 1e-5, rtol=0)
    with trial.holds("other noise from now on"):
        trial.same(steps_left, [(.1, 3., 50), (1., 30., 1)], .05, trial.uniform(1.5, 2.), 2., 1e-6,
                   rtol=0)
    with trial.holds("a budget that is spent, and one that is not"):
        trial.same(steps_left, [(.05, .8, 300)], .05, .8, 1., 1e-5, rtol=0)
        trial.same(steps_left, [(.05, 1.5, 30)], .05, .8, 4., 1e-5, rtol=0)
    return trial.card()


# --- 4



def _suspects():
    "Accountants, made anew: (what is wrong, function); each has the course's inside and no more."
    from dp_course.privacy import PLDAccountant, RDPAccountant, epsilon

    def say(change=lambda *run: run, by=1., accountant=RDPAccountant):
        def account(q, sigma, steps, delta):
            q, sigma, steps, delta = change(q, sigma, steps, delta)
            return by*epsilon(q=q, sigma=sigma, steps=steps, delta=delta, accountant=accountant)
        return account
    return {
        "honest": [say(), say(accountant=PLDAccountant), say(by=1.3),
                   say(lambda q, s, n, d: (1., s, n, d))],
        "rate": [say(lambda q, s, n, d: (q*q, s, n, d)), say(lambda q, s, n, d: (q/2, s, n, d))],
        "steps": [say(lambda q, s, n, d: (q, s, 1, d)),
                  say(lambda q, s, n, d: (q, s, min(n, 1000), d)),
                  say(lambda q, s, n, d: (q, s, max(1, round(n**.5)), d))],
        "delta": [say(lambda q, s, n, d: (q, s, n, max(d, 1e-4)))],
        "sigma": [say(lambda q, s, n, d: (q, max(s, 1.), n, d)),
                  say(lambda q, s, n, d: (q, s + .5, n, d))],
        "factor": [say(by=.9)]}


def check_underpays(your_function, seed=None):
    "Accountants that promise too much."
    trial = Trial(your_function, "check_underpays", seed, (
        "Where does an accountant go wrong? High rates, many steps, tiny delta, little noise.",
        "Ask it in some ten settings, and compare with what the course says at least.",
        "`any(accountant(*run) < .995*epsilon(...) for run in runs)`: less than the exact eps is a "
        "promise that nobody keeps."))
    suspects = _suspects()

    def judged(kind, why):
        for account in suspects["honest"]:
            trial.need(not trial.yes(account), "an honest one is accused", "an accountant may "
                       "claim more than the exact eps, and never less: accuse the latter alone")
        for account in suspects[kind]:
            trial.need(trial.yes(account), "one of them is believed", why, leaks=True)
    with trial.holds("one that forgets how batches are drawn"):
        judged("rate", "try rates from .001 to 1")
    with trial.holds("one that forgets steps"):
        judged("steps", "try one step, and ten thousand")
    with trial.holds("one that does not listen to a tiny delta"):
        judged("delta", "try a delta of 1e-8")
    with trial.holds("one that believes in more noise"):
        judged("sigma", "try a sigma of a half")
    with trial.holds("one that is a tenth too low, everywhere"):
        judged("factor", "compare with the exact eps, not with an upper bound")
    return trial.card()
