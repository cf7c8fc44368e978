"A4: find the bugs."
import math
from dataclasses import replace

import torch
from lab import Suspect, examples

from checks import SEED, points  # noqa: F401  (for the notebook)
from checks.a3 import (
    RTOL,
    STRETCHED,
    bounded,
    clipped,
    normals,
    short_and_long,
)
from dp_course import MUTANTS
from dp_course.audit import SmallTrainer
from dp_course.exercises import Trial, gap, is_noise, judge_generator


def altered(**changes):
    "What makes a trainer differ from the right one in some functions."
    return lambda trainer: replace(trainer, **changes)


def honest(trainer):
    return trainer


def _of_its_own(function):
    def same(*args):
        return function(*args)
    return same


def suspect(change):
    "A suspect none of whose functions is the course's own: what it does tells, not what it holds."
    def disguised(trainer):
        trainer = change(trainer)
        parts = {part: _of_its_own(getattr(trainer, part)) for part in ("bound", "noise", "draw")}
        return replace(trainer, **parts)
    return Suspect(disguised)


def _bound_too_wide(grads, max_norm):
    right = SmallTrainer.__dataclass_fields__["bound"].default
    return right(grads, 1.5*max_norm)


def _bound_by_who_came(grads, max_norm):
    right = SmallTrainer.__dataclass_fields__["bound"].default
    total, norms = right(grads, max_norm)
    return {name: 25*part/(1 + len(norms)) for name, part in total.items()}, norms


def _less_noise(trainer, total, b, generator):
    right = SmallTrainer.__dataclass_fields__["noise"].default
    return right(replace(trainer, max_norm=.6*trainer.max_norm), total, b, generator)


def _fixed_size(trainer, secret, t):
    generator = trainer.stream(secret, "sample", t)
    return torch.randperm(trainer.plan.n, generator=generator)[:round(trainer.plan.batch_size)]


UNSEEN = {  # not in the bug lab
    "a bound half as much again": (altered(bound=_bound_too_wide), "sensitivity"),
    "six tenths of the noise": (altered(noise=_less_noise), "noise"),
    "batches of one size": (altered(draw=_fixed_size), "sampling"),
}


# --- 1


def moved(suspect, batch, newcomer, seeds=(0, 0), unit=True, together=True):
    "The right distance, or a wrong one."
    x, y = batch
    more = torch.cat([x, newcomer[0]]), torch.cat([y, newcomer[1]])
    without = suspect.step(x, y, torch.Generator().manual_seed(seeds[0]))
    having = suspect.step(*more, torch.Generator().manual_seed(seeds[1]))
    lengths = [(having[name] - without[name]).double().norm().item() for name in without]
    length = math.hypot(*lengths) if together else max(lengths)
    return length/suspect.bound if unit else length


def _alone(suspect, batch, newcomer):
    return moved(suspect, [part[:0] for part in batch], newcomer)


def _stranger(trial, size=1.):
    label = torch.randint(3, (1,), generator=trial.generator)
    return size*torch.randn(1, 8, generator=trial.generator), label


def check_move(your_function, seed=None):
    "Distance of two steps with the same randomness."
    trial = Trial(your_function, "check_move", seed, (
        "Two steps that differ in the newcomer only: batch, randomness and model are the same.",
        "Two generators with the same seed, one for each step.",
        "`math.sqrt(sum((having[k] - without[k]).square().sum() for k in without))"
        "/suspect.bound`"), {
            "in units of the bound: divide by suspect.bound":
                lambda *args: moved(*args, unit=False),
            "one length over all parameters together, not the longest of them":
                lambda *args: moved(*args, together=False),
            "the others are in the batch, too, with her and without her": _alone})

    def judged(change, size=1.):
        case = suspect(change), examples(trial.seed % 1000 + trial.calls), _stranger(trial, size)
        if trial.calls == 0:
            got, want = trial(*case), moved(*case)
            trial.need(not (got > 3 and want < 1.1), f"got {got:.4g}, expected {want:.4g}",
                       "the noise does not cancel: seed both generators alike")
        trial.same(moved, *case, rtol=2e-3)
    with trial.holds("an honest one, and a newcomer of ordinary size"):
        judged(honest)
    with trial.holds("an honest one, and a huge newcomer"):
        judged(honest, 1e3)
    with trial.holds("two that leak"):
        judged(MUTANTS["birch"].of, 100.)
        judged(MUTANTS["beech"].of)
    with trial.holds("one whose bound is too wide, which no list names"):
        judged(UNSEEN["a bound half as much again"][0], 50.)
    with trial.holds("one that looks at who else came"):
        judged(altered(bound=_bound_by_who_came), 50.)
    return trial.card()


# --- 2


def check_noise(your_function, seed=None):
    "Noise by tensor."
    trial = Trial(your_function, "check_noise", seed, (
        "The batch stays the same, so whatever varies between runs is noise.",
        "torch.stack the runs of one tensor; its variance over runs, averaged over coordinates.",
        "`math.sqrt(values.var(0).mean())/(suspect.sigma*suspect.bound)` for each name."))
    batch = examples(trial.seed % 1000)

    def judged(change, right, tries=150):
        theirs = suspect(change)
        got = trial(theirs, batch, tries)
        names = theirs.step(*batch, torch.Generator()).keys()
        trial.need(isinstance(got, dict) and got.keys() == names, f"got {str(got)[:80]}",
                   "a dict with one number per parameter tensor")
        for name in names:
            want, value = right(name), float(got[name])
            room = .25 if name.endswith("by") else .1
            why = ""
            if abs(value - want**2) < .05 and want not in (0, 1):
                why = "standard deviations, not variances"
            elif want == 0:
                why = "keep the tensors apart: an average hides the one without noise"
            elif value > 1.15*want:
                why = "only what varies from run to run is noise: compare runs, not coordinates"
            trial.need(abs(value - want) <= room*max(want, .2), f"{name}: {value:.3g}, expected "
                       f"about {want:.3g}", why)
    with trial.holds("an honest one"):
        judged(honest, lambda name: 1.)
    with trial.holds("half of the noise, and none at all"):
        judged(MUTANTS["holly"].of, lambda name: .5)
        judged(MUTANTS["hazel"].of, lambda name: 0.)
    with trial.holds("no noise on the smallest tensor"):
        judged(MUTANTS["oak"].of, lambda name: 0. if name.endswith("by") else 1.)
    with trial.holds("six tenths of it, which no list names"):
        judged(UNSEEN["six tenths of the noise"][0], lambda name: .6)
    return trial.card()


# --- 3


def _accused(trial, change, runs, first=0):
    "How many runs of a sampler are called impossible."
    theirs = suspect(change)
    said = []
    for run in range(runs):
        secret = trial.seed + 1000*first + run
        answer = trial(theirs.batches(200, secret), theirs.n, theirs.q)
        trial.need(answer in (True, False), f"got {answer!r}: answer True or False")
        said.append(not bool(answer))
    return sum(said)


def check_coins(your_function, seed=None):
    "Whether a sampler tosses coins."
    # With a rate of one in a hundred more than 3 of 40 are accused once in 1,000 times
    trial = Trial(your_function, "check_coins", seed, (
        "Three questions: how many in all? how much do sizes vary? do batches know of each other?",
        "Sizes: mean n q, variance n q (1 - q). Each estimate has a standard error; allow three "
        "to four of them.",
        "For lags 1 to 1/q: the sum of (mark - q)(mark' - q) over pairs of batches has std "
        "q(1 - q) sqrt(n (steps - lag)); many lags need a higher threshold."))
    with trial.holds("honest samplers are left alone"):
        accused = _accused(trial, honest, 40)
        why = ("who accuses everybody catches the honest, too" if accused == 40 else
               "chance moves every number: allow more than two standard errors")
        trial.need(accused <= 3, f"{accused} of 40 honest runs are accused", why)
    with trial.holds("shuffled epochs"):
        caught = _accused(trial, MUTANTS["pine"].of, 5, 1)
        trial.need(caught == 5, f"{caught} of 5 are caught",
                   "the right number of examples in all is no coin yet: look at how sizes vary")
    with trial.holds("a rate that is 10 % too high"):
        def more(trainer, secret, t):
            generator = trainer.stream(secret, "sample", t)
            plan = trainer.plan
            return (torch.rand(plan.n, generator=generator) < 1.1*plan.q).nonzero()[:, 0]
        caught = _accused(trial, altered(draw=more), 5, 2)
        trial.need(caught == 5, f"{caught} of 5 are caught",
                   "200 batches of about 44 instead of 40: the mean size gives it away")
    with trial.holds("batches that come again in every epoch"):
        caught = _accused(trial, MUTANTS["rowan"].of, 5, 3)
        trial.need(caught == 5, f"{caught} of 5 are caught",
                   "sizes look right: compare batches that are 1/q steps apart")
    with trial.holds("batches of one size, which no list names"):
        caught = _accused(trial, UNSEEN["batches of one size"][0], 5, 4)
        trial.need(caught == 5, f"{caught} of 5 are caught", "coins make batches of many sizes")
    return trial.card()


# --- 4


def check_verdict(your_function, seed=None):
    "One word for each suspect."
    trial = Trial(your_function, "check_verdict", seed, (
        "One instrument after the other; the first that complains names the part.",
        "Newcomers of several sizes and labels; noise of the quietest tensor; then the batches.",
        "`if max(move(...)) > 1.01: ...; if min(noise(...).values()) < .8: ...; if not coins(...)`"
    ))

    def judged(change, want):
        got = trial(suspect(change))
        why = ""
        if want == "nothing":
            why = "an honest trainer is accused: allow for chance and rounding"
        elif got == "nothing":
            why = {"sensitivity": "try more newcomers: huge ones, and each label",
                   "noise": "look at the quietest tensor, not at the average",
                   "sampling": "ask its batches, too"}[want]
        elif got in ("sensitivity", "noise", "sampling"):
            why = "the word is right for another part: is your order of questions the reason?"
        trial.need(got == want, f"got {got!r}, expected {want!r}", why)
    with trial.holds("an honest one"):
        judged(honest, "nothing")
    with trial.holds("bounds that are broken"):
        for name in ("alder", "birch"):
            judged(MUTANTS[name].of, "sensitivity")
        judged(UNSEEN["a bound half as much again"][0], "sensitivity")
    with trial.holds("noise that is missing"):
        for name in ("hazel", "oak"):
            judged(MUTANTS[name].of, "noise")
        judged(UNSEEN["six tenths of the noise"][0], "noise")
    with trial.holds("batches that are no coins"):
        judged(MUTANTS["pine"].of, "sampling")
        judged(UNSEEN["batches of one size"][0], "sampling")
    return trial.card()


# --- 5


def check_mended_step(your_function, seed=None):
    "Clip each, add, noise, divide by the expected size."
    trial = Trial(your_function, "check_mended_step", seed, (
        "What is clipped? What does the noise scale with? What is divided by what?",
        "Each row is clipped; the noise is sigma times max_norm; everything over batch_size.",
        "`total = ((max_norm/norms).clamp(max=1)*grads).sum(0)`, then "
        "`(total + sigma*max_norm*noise)/batch_size`; keep the norms from being 0."))

    def step(grads, max_norm, batch_size):
        return trial(grads, max_norm, 0., batch_size, trial.fresh_generator())
    with trial.holds("every example is clipped by itself, and short ones stay as they are"):
        grads = short_and_long(trial, 12, 5, .3)
        got = step(grads, .3, 12.)
        found = gap(got, clipped(grads, .3)/12, RTOL)
        of_mean = not gap(got, clipped(grads.mean(0, keepdim=True), .3), RTOL)
        trial.need(not (found and of_mean), found, "the mean is clipped, not every example",
                   leaks=True)
        near = [why for why, slip in STRETCHED.items() if not gap(got, slip(grads, .3)/12, RTOL)]
        trial.need(not found, found, *near[:1])
    with trial.holds("the expected batch size divides"):
        grads = normals(trial, 9, 5)
        found = gap(step(grads, 1., 20.), clipped(grads, 1.)/20, RTOL)
        trial.need(not found, found, "len(grads) is private: divide by the expected batch_size",
                   leaks=True)
    with trial.holds("one more example moves the sum by max_norm at most"):
        newcomers = [(size*normals(trial, 1, 5),) for size in (1., 1e4)]
        bounded(trial, lambda rows: step(rows, 1., 1.), (grads,), newcomers, 1.)
    with trial.holds("empty batches, and gradients of zero"):
        found = gap(step(torch.zeros(0, 4), 1., 5.), torch.zeros(4), zero=1e-9)
        trial.need(not found, found, "an empty batch has a mean of 0/batch_size")
        found = gap(step(torch.zeros(3, 4), 1., 5.), torch.zeros(4), zero=1e-9)
        trial.need(not found, found, "0/0 is NaN: keep the norms from being 0")
    with trial.holds("all randomness comes from the generator"):
        judge_generator(trial, lambda g: trial(torch.zeros(2, 3), 1., 1., 1., g))
    with trial.holds("the noise is sigma times max_norm, over the batch size, for any batch"):
        for rows, max_norm, sigma, size in ((60, 3., 1., 10.), (2, .1, 2., 40.), (0, 1., 1., 9.)):
            grads = normals(trial, rows, 5000)  # what differs between two runs is noise
            one, two = (torch.as_tensor(trial(grads, max_norm, sigma, size, trial.fresh_generator())
                                        ).double() for _ in range(2))
            trial.need(one.shape == two.shape == (5000,), f"the shapes {tuple(one.shape)} and "
                       f"{tuple(two.shape)}", "a step has the shape of one row")
            z = ((one - two)/math.sqrt(2) if rows else one)*size/(sigma*max_norm)
            ratio = z.std().item()
            why = "sigma is a multiplier: the noise is sigma*max_norm" if (
                abs(ratio*max_norm - 1) < .1) else "divide the noise by the batch size, once"
            if abs(ratio*rows/size - 1) < .1:
                why = "the noise does not depend on who came: divide by batch_size, not len(grads)"
            elif rows == 0:
                why = "a batch of nobody has the same noise as any other"
            trial.need(abs(ratio - 1) < .05, f"{ratio:.3g} times what it should be, with {rows} "
                       "rows", why, leaks=ratio < 1)
            is_noise(trial, z)
    return trial.card()
