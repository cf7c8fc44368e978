"""Accounting against Opacus, in one run: rounds interleaved, medians of same-round ratios.

    python benchmarks/accounting.py [rounds]
"""
import statistics
import sys
import time
import warnings

from opacus.accountants import RDPAccountant as OpacusRDP
from opacus.accountants.utils import get_noise_multiplier

from dp_course.privacy import PLDAccountant, RDPAccountant, epsilon, noise_multiplier

Q, SIGMA, STEPS = 1/25, 1.6138, 625  # batch 2,000 of 50,000, 25 epochs
DELTA, EPS = 1e-5, 3.


def our_rdp():
    return epsilon(q=Q, sigma=SIGMA, steps=STEPS, delta=DELTA, accountant=RDPAccountant)


def our_search(accountant):
    return noise_multiplier(eps=EPS, delta=DELTA, q=Q, steps=STEPS, accountant=accountant)


def opacus_rdp():
    a = OpacusRDP()
    a.history = [(SIGMA, Q, STEPS)]
    return a.get_epsilon(DELTA)


def opacus_search(kind):
    return get_noise_multiplier(target_epsilon=EPS, target_delta=DELTA, sample_rate=Q, steps=STEPS,
                                accountant=kind)


PAIRS = {  # what: ours, theirs, how often in a round (the fastest counts)
    "RDP eps": (our_rdp, opacus_rdp, 20),
    "RDP noise_multiplier": (lambda: our_search(RDPAccountant), lambda: opacus_search("rdp"), 1),
    "PLD noise_multiplier / PRV": (lambda: our_search(PLDAccountant),
                                   lambda: opacus_search("prv"), 1),
}


def seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def one_round():
    "A pair of seconds, ours and theirs, for every row."
    return {name: [min(seconds(f) for _ in range(repeat)) for f in (ours, theirs)]
            for name, (ours, theirs, repeat) in PAIRS.items()}


def measure(rounds=3):
    "Rows (what, our median seconds, their median seconds, median of theirs/ours in a round)."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one_round()  # warms up
        times = [one_round() for _ in range(rounds)]
    rows = []
    for name in PAIRS:
        ours, theirs = zip(*(t[name] for t in times))
        ratio = statistics.median(b/a for a, b in zip(ours, theirs))
        rows.append((name, statistics.median(ours), statistics.median(theirs), ratio))
    return rows


def main(argv=()):
    rounds = int(argv[0]) if argv else 3
    print(f"accounting: q = {Q}, sigma = {SIGMA}, {STEPS} steps, delta = {DELTA}, eps = {EPS}; "
          f"medians of {rounds} interleaved rounds")
    print(f"{'':28}{'dp_course':>12}{'Opacus':>12}{'ratio':>9}")
    for name, ours, theirs, ratio in measure(rounds):
        print(f"{name:28}{ours*1e3:9.2f} ms{theirs*1e3:9.1f} ms{ratio:8.1f}x")


if __name__ == "__main__":
    main(sys.argv[1:])
