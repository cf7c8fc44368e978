"A5: the private leaderboard."
import math
from collections import Counter

import leaderboard

from checks import SEED, points  # noqa: F401  (for the notebook)
from dp_course.exercises import Card, Trial, below
from dp_course.privacy import PLDAccountant


def cost(looks, delta):
    "eps of a list of (q, sigma)."
    account = PLDAccountant()
    for (q, sigma), count in sorted(Counter(looks).items()):
        account.step(q, sigma, count)
    return account.epsilon(delta) if looks else 0.


def by(key):
    "A reading of a ledger in which entries with the same key are one look."
    def read(entries, delta):
        kept = {key(entry): entry[1:3] for entry in map(tuple, entries)}
        return cost(list(kept.values()), delta)
    return read


def check_ledger_epsilon(your_function, seed=None):
    "What a ledger costs."
    truth = by(lambda entry: entry)
    trial = Trial(your_function, "check_ledger_epsilon", seed, (
        "Which entries are the same look? Which are others?",
        "A set of tuples drops exact repeats; count by (q, sigma) what is left.",
        "`for _, q, sigma, *_ in set(map(tuple, entries))`: counts[q, sigma] += 1, then "
        "account.step(q, sigma, count) for each."),
        unsafe=below, slips={
            "a step that was drawn again from another stream is another look":
                by(lambda entry: (entry[0], entry[4])),
            "the same stream with another digest noised something else: another look":
                by(lambda entry: (entry[0], entry[3], entry[4])),
            "the same entry twice is one look: a resumed run repeats steps exactly":
                lambda entries, delta: cost([tuple(e[1:3]) for e in entries], delta),
            "whatever else was released counts, too: not the training steps alone":
                lambda entries, delta: truth(
                    [e for e in entries if e[0] == "training steps"], delta),
            "epsilons need not be added up: one account takes all steps":
                lambda entries, delta: sum(cost([tuple(e[1:3])], delta)
                                           for e in set(map(tuple, entries))),
            "the digest alone does not make a look: stream and step do, too":
                by(lambda entry: entry[5]),
            "rate and noise belong to a look as its stream does":
                by(lambda entry: (entry[0], *entry[3:])),
            "eps is asked for at the `delta` that is given": lambda entries, delta: truth(
                entries, 1e-5),
            "every entry has its own noise": lambda entries, delta: cost(
                [tuple(entries[0][1:3])]*len(set(map(tuple, entries))), delta)})

    def run(count=20, stream="a.0", q=.2, sigma=2., first=0):
        return [("training steps", q, sigma, stream, t, f"{stream}{t}")
                for t in range(first, first + count)]
    with trial.holds("a run"):
        trial.same(truth, run(q=trial.uniform(.05, .3)), 1e-5)
    with trial.holds("a run that was killed and repeats ten steps exactly"):
        trial.same(truth, run() + run(10, first=10), 1e-5)
    with trial.holds("a run that drew five steps again, from another stream"):
        trial.same(truth, run() + run(5, "b.0", first=15), 1e-5)
    with trial.holds("a stream used twice, for something else"):
        other = [(*entry[:5], "other") for entry in run(4)]
        trial.same(truth, run() + other, 1e-5)
    with trial.holds("looks that differ from one another in one thing alone"):
        one = ("training steps", .2, 2., "a.0", 0, "a")
        changes = enumerate(("a mean", .3, 3., "b.0", 1, "b"))
        looks = [one] + [(*one[:i], other, *one[i+1:]) for i, other in changes]
        trial.same(truth, run() + looks, 1e-6)
    with trial.holds("a noisy mean beside the steps"):
        trial.same(truth, run() + [("mean", 1., 4., "m.0", 0, "m")], 1e-5)
    with trial.holds("an empty ledger"):
        trial.same(truth, [], 1e-5)
    return trial.card()


def check_honest_total(your_function, seed=None):
    "All runs together."
    def truth(q, sigma, steps, delta, runs):
        return cost([(q, sigma)]*(steps*(1 + runs)), delta)
    trial = Trial(your_function, "check_honest_total", seed, (
        "Runs on the same data compose like steps.",
        "k runs of n steps are one run of k*n steps.",
        "`PLDAccountant().step(q, sigma, steps*(1 + tuning_runs)).epsilon(delta)`"),
        unsafe=below, slips={
            "the runs compose: their epsilons need not be added up, steps can be":
                lambda q, s, n, d, k: (1 + k)*cost([(q, s)]*n, d),
            "the run that you hand in counts, too":
                lambda q, s, n, d, k: cost([(q, s)]*(n*k), d),
            "one run more than you made: 1 + tuning_runs":
                lambda q, s, n, d, k: cost([(q, s)]*(n*(k + 2)), d),
            "eps does not grow with the root of the runs: ask the accountant":
                lambda q, s, n, d, k: math.sqrt(1 + k)*cost([(q, s)]*n, d),
            "runs are further steps, not a higher rate":
                lambda q, s, n, d, k: cost([(min(1., q*(1 + k)), s)]*n, d),
            "every run has the noise it has: runs are further steps":
                lambda q, s, n, d, k: cost([(q, s/(1 + k))]*n, d),
            "tuning looked at the data, too":
                lambda q, s, n, d, k: cost([(q, s)]*n, d)})
    with trial.holds("four runs before"):
        trial.same(truth, trial.uniform(.1, .2), 2., 72, 1e-5, 4)
    with trial.holds("one run before"):
        trial.same(truth, .167, trial.uniform(1.5, 2.5), 50, 1e-5, 1)
    with trial.holds("none before"):
        trial.same(truth, .1, trial.uniform(1.5, 2.5), 100, 1e-6, 0)
    return trial.card()


def judged(folder):
    "(why a submission is refused, empty if it stands; its accuracy; its tiers)."
    whys = {text: why for text, why in leaderboard.findings(folder) if why}
    refused = [f"{text}: {why}" for text, why in whys.items()]
    if len(set(whys.values())) == 1:  # what cannot be read fails every check for one reason
        refused = set(whys.values())
    if refused:
        return "; ".join(refused), 0., leaderboard.DATA["digits"]
    return "", leaderboard.standing(folder), leaderboard.DATA[leaderboard.data_of(folder)]


def check_submission(folder):
    "Six questions, one verdict; the settings that were handed out earn nothing."
    refused, reached, (first, *_) = judged(folder)
    stands = not refused and reached >= first
    told = refused or f"the run, repeated by the grader, recognizes {reached:.2%}"
    return Card("check_submission", ((f"verified, and at least {first:.0%}", stands),),
                numbers=told)


def check_standing(folder):
    "Points for accuracy, if nothing is refused."
    refused, reached, (_, *tiers) = judged(folder)
    held = tuple((f"at least {tier:.1%}", not refused and reached >= tier) for tier in tiers)
    told = f"refused: {refused}" if refused else (
        f"the run, repeated by the grader, recognizes {reached:.2%}")
    return Card("check_standing", held, numbers=told)
