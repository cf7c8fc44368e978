"A1: mechanisms and what eps means."
import math

import torch

from checks import SEED, points  # noqa: F401  (for the notebook)
from dp_course.exercises import AGAIN, Trial, below, used_generator


def check_leak(your_function, seed=None):
    "eps of randomized response."
    def truth(p):
        return math.log(p/(1 - p)) if p < 1 else math.inf
    trial = Trial(your_function, "check_leak", seed, (
        "Two answers, two people: four probabilities. Which quotient is the largest?",
        "A yes is p/(1 - p) times as likely from somebody who did.",
        "`math.log(p/(1 - p))`, and math.inf at p = 1."),
        unsafe=below, slips={
            "eps is the logarithm of the ratio": lambda p: p/(1 - p) if p < 1 else math.inf,
            "compare with the lie, which has probability 1 - p, not with 1/2":
                lambda p: math.log(2*p),
            "the larger one is divided by the smaller one": lambda p: -math.log(p/(1 - p)),
            "the difference of the probabilities is no eps: the logarithm of their ratio is":
                lambda p: 2*p - 1,
            "compare p with 1 - p: the ratio is p/(1 - p), not 1/(1 - p)":
                lambda p: -math.log(1 - p)})
    with trial.holds("a fair coin tells nothing"):
        trial.same(truth, .5)
    with trial.holds("three probabilities"):
        for _ in range(3):
            trial.same(truth, trial.uniform(.55, .95))
    with trial.holds("nearly always the truth"):
        trial.same(truth, 1 - 2.**-30)
    with trial.holds("always the truth: nothing is hidden"):
        got = trial(1.)
        trial.need(got == math.inf, f"got {got} for p = 1", "at p = 1 no eps is enough: math.inf",
                   leaks=True)
    return trial.card()


def check_debias(your_function, seed=None):
    "The unbiased estimate."
    def truth(said, eps):
        p = 1/(1 + math.exp(-eps))
        return (said - (1 - p))/(2*p - 1)

    def clamped(said, eps):
        return min(1., max(0., truth(said, eps)))

    def other_p(said, eps):
        p = 1 - math.exp(-eps)
        return (said - (1 - p))/(2*p - 1)

    def not_scaled(said, eps):
        return said - 1/(1 + math.exp(eps))
    trial = Trial(your_function, "check_debias", seed, (
        "First p: question 1 backwards. p/(1 - p) = e^eps.",
        "p = e^eps/(1 + e^eps); the share of yes is t(2p - 1) + (1 - p).",
        "`(said - (1 - p))/(2*p - 1)` with `p = 1/(1 + math.exp(-eps))`."), {
            "an estimate beyond 0 or 1 happens by chance; who clamps it is wrong on average":
                clamped,
            "p follows from p/(1 - p) = e^eps": other_p,
            "after taking the lies off, divide by 2p - 1": not_scaled,
            "1 - p lie: take 1 - p off, not p":
                lambda said, eps: 1 - truth(said, eps),
            "e^eps, the natural one: not 10^eps":
                lambda said, eps: truth(said, eps*math.log(10)),
            "take the lies off first: subtract 1 - p, then divide by 2p - 1":
                lambda said, eps: said*(1 + math.exp(-eps))})
    with trial.holds("half yes stays half"):
        trial.same(truth, .5, trial.uniform(.5, 3.))
    with trial.holds("shares and eps between"):
        for _ in range(4):
            trial.same(truth, trial.uniform(.45, .55), trial.uniform(.5, 2.))
    with trial.holds("estimates beyond 0 and 1 are left as they are"):
        trial.same(truth, .02, .5)
        trial.same(truth, .99, .3)
    with trial.holds("an eps of 40: everybody tells the truth"):
        trial.same(truth, .3, 40.)
    with trial.holds("an eps of 1e-3: hardly anybody does"):
        trial.same(truth, .501, 1e-3, rtol=1e-4)
    return trial.card()


def _answers(trial, values, high, eps, runs):
    got = [float(trial(values, high, eps, trial.fresh_generator())) for _ in range(runs)]
    return torch.tensor(got, dtype=torch.float64)


def _judged(trial, values, high, eps, want, runs=500):
    "Mean and mean absolute deviation of many answers; each wrong by chance once in 100,000."
    errors = _answers(trial, values, high, eps, runs) - want
    scale = high/eps
    off = errors.mean().item()/scale
    beyond = len(values) > 0 and (values.min() < 0 or values.max() > high)
    why = "the sum of the clamped values, and noise whose mean is 0"
    if beyond:
        why = "what lies outside [0, high] counts as 0 or as high: clamp first"
    elif .8 < abs(off) < 1.2:
        why = "noise that has one sign: the difference of two exponential variables has both"
    trial.need(abs(off) < 4.4*math.sqrt(2/runs),
               f"on average {off:+.3g} scales from {want:.6g}, over {runs} runs", why,
               leaks=bool(abs(off)*scale > high*len(values) + 9*scale  # somebody counts for more
                          or errors.min() > 0 or errors.max() < 0))
    ratio = errors.abs().mean().item()/scale
    room = 4.4/math.sqrt(runs)
    why = ""
    if ratio < 1 - room:
        why = "too little noise: one person moves the sum by up to `high`, so b = high/eps"
    elif ratio > 1 + room:
        why = "too much noise: add or remove moves the sum by `high`, not twice that"
    if ratio == 0:
        why = "no noise at all"
    trial.need(abs(ratio - 1) < room, f"the noise is {ratio:.3f} times as large as it should be",
               why, leaks=ratio < 1)
    return errors.abs()/scale


def check_noisy_sum(your_function, seed=None):
    "A Laplace sum, judged by its distribution."
    trial = Trial(your_function, "check_noisy_sum", seed, (
        "What can one more person do to the sum, if she writes 1e9?",
        "Clamp to [0, high], add up, then Laplace noise of scale high/eps.",
        "`a, b = -torch.log1p(-torch.rand(2, generator=generator))`; the noise is "
        "`high/eps*(a - b)`."))
    values = torch.rand(20, generator=trial.generator)*3
    with trial.holds("values within the bounds"):
        sizes = [_judged(trial, values, 10., 1., values.sum().item())]
    with trial.holds("other bounds and another eps"):
        sizes.append(_judged(trial, 10*values, 30., .25, 10*values.sum().item()))
    with trial.holds("people who exaggerate, in both directions"):
        wild = torch.cat([torch.tensor([1e6, -1e3, 2., 1.]), torch.zeros(36)])
        sizes.append(_judged(trial, wild, 5., 2., 8.))
    with trial.holds("nobody at all: noise all the same"):
        sizes.append(_judged(trial, torch.zeros(0), 1., 1., 0.))
    with trial.holds("Laplace noise: half of it within 0.69 scales"):
        pooled = torch.cat(sizes)
        median = pooled.median().item()
        trial.need(abs(median - math.log(2)) < 4.4/math.sqrt(len(pooled)),
                   f"half of {len(pooled)} answers lie within {median:.3f} scales",
                   "the noise has the right size but another shape: Laplace, for a pure eps",
                   leaks=True)
        least = math.log(len(pooled)/11.5)  # chance stays below it once in 100,000 times
        trial.need(pooled.max() > least, f"no noise of {len(pooled)} is larger than "
                   f"{pooled.max().item():.3g} scales", "noise that ends somewhere tells some "
                   "neighbours apart for sure: Laplace noise has no end", leaks=True)
        mean, room = pooled.mean().item(), 4.4/math.sqrt(len(pooled))
        trial.need(abs(mean - 1) < room, f"over all runs the noise is {mean:.3f} times as large "
                   "as it should be", "the scale is high/eps, no less", leaks=mean < 1)
    with trial.holds("all randomness comes from the generator"):
        pair = [float(trial(values, 3., 1., torch.Generator().manual_seed(s))) for s in (7, 7, 8)]
        trial.need(pair[0] == pair[1] != pair[2], f"seeds 7, 7, 8 gave {pair}",
                   "pass generator=generator to torch.rand: two runs on one seed must agree",
                   leaks=pair[0] == pair[2])
        later = float(trial(values, 3., 1., used_generator(7)))
        trial.need(later != pair[0], "the same noise again", AGAIN, leaks=True)
    return trial.card()


def check_exact_delta(your_function, seed=None):
    "Hockey-stick divergence of two lists, both ways."
    def one_way(p, q, eps):
        return math.fsum(max(0., a - math.exp(eps)*b) for a, b in zip(p, q))

    def truth(p, q, eps):
        return max(one_way(p, q, eps), one_way(q, p, eps))

    def over(p, q, eps):
        return max(sum(a for a, b in zip(u, v) if a > math.exp(eps)*b)
                   for u, v in ((p, q), (q, p)))

    def whole(p, q, eps):
        sums = [sum(a - math.exp(eps)*b for a, b in zip(u, v)) for u, v in ((p, q), (q, p))]
        return round(max(0., *sums), 12)
    trial = Trial(your_function, "check_exact_delta", seed, (
        "Add up how much p exceeds e^eps q, output by output; then the same the other way round.",
        "Where p does not exceed it, the output counts 0, not a negative number.",
        "`sum(max(0, a - math.exp(eps)*b) for a, b in zip(p, q))`, and the larger of both ways."),
        unsafe=below, slips={
            "Ada may also leave: take the larger of both directions": one_way,
            "subtract e^eps q: what lies under it is paid by eps": over,
            "clamp each output at 0 before adding up": whole,
            "an output that only one world can produce counts most: leave no zeros out":
                lambda p, q, eps: truth(*zip(*((a, b) for a, b in zip(p, q) if a and b)), eps),
            "the larger of both directions, not their sum":
                lambda p, q, eps: one_way(p, q, eps) + one_way(q, p, eps),
            "add up over the outputs: the largest one alone is too little":
                lambda p, q, eps: max(a - math.exp(eps)*b for u, v in ((p, q), (q, p))
                                      for a, b in zip(u, v)),
            "e^eps is more than 1 + eps":
                lambda p, q, eps: max(one_way(p, q, math.log1p(eps)),
                                      one_way(q, p, math.log1p(eps))),
            "half of the distance is right at eps = 0 only: clamp at 0, and add up":
                lambda p, q, eps: sum(abs(a - math.exp(eps)*b) for a, b in zip(p, q))/2,
            "e^eps with a plus: the other world may be e^eps times as likely":
                lambda p, q, eps: max(one_way(p, q, -eps), one_way(q, p, -eps))})

    def pair(k):
        both = torch.rand(2, k, generator=trial.generator, dtype=torch.float64)
        return (both/both.sum(1, keepdim=True)).tolist()
    with trial.holds("at eps = 0: the total variation"):
        trial.same(truth, *pair(4), 0.)
    with trial.holds("five outputs, several eps"):
        for eps in (.1, .3, .6):
            p, q = pair(5)
            trial.same(truth, p, q, eps)
            trial.same(truth, q, p, eps)
    with trial.holds("an output that only one world can produce"):
        trial.same(truth, [.5, .5, 0.], [.4, .5, .1], 1.)
        trial.same(truth, [.4, .5, .1], [.5, .5, 0.], 1.)
    with trial.holds("an eps beyond every ratio: nothing is left"):
        trial.same(truth, [.6, .4], [.4, .6], 2.)
    with trial.holds("the same in both worlds"):
        trial.same(truth, [.2, .8], [.2, .8], 0.)
    return trial.card()
