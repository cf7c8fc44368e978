"""Count leaks and innocents: `python benchmarks/leaks.py [--part WORD]`.

Every table of leaks in the tests is tried against the proof: a leak that is accepted is a hole, an
innocent that is refused a false alarm.
"""
import argparse
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn

TESTS = Path(__file__).resolve().parent.parent/"tests"
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS/"training")]

import leaks  # noqa: E402
import test_attacks as attacks  # noqa: E402
import test_guards as guards  # noqa: E402
import test_made_up_rows as odd  # noqa: E402

from dp_course.data import Examples  # noqa: E402
from dp_course.gradients import fast_grad_sum, loop_grad_sum  # noqa: E402
from dp_course.training import prove_separate  # noqa: E402


def trained(**options):
    return partial(guards.attacked, **options)


def odd_rows(f):
    return partial(prove_separate, fast_grad_sum, odd.of_input(f), odd.loss, odd.floats(5))


def of_module(name):
    model, _ = guards.MIXING[name]
    return partial(prove_separate, loop_grad_sum, model, guards.loss, guards.floats(5))


def innocent(name):
    model, data, loss_fn = guards.INNOCENT[name]
    return lambda: prove_separate(fast_grad_sum, model(), loss_fn, data())


def tables():  # dict name of a leak -> f() that should raise ValueError; the same of innocents
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    found = {f"module {name}": of_module(name) for name in guards.MIXING}
    kinds = {"loss_fn": {**guards.LOSSES, **attacks.LOSSES},
             "clip": {**guards.CLIPS, **{f"{name}, rare": attacks.Weighed(how)
                                         for name, how in attacks.CLIPS.items()}},
             "model": {**guards.MODELS, **{name: attacks.OfInput(f)
                                           for name, f in attacks.ROWS.items()}}}
    for kind, table in kinds.items():
        found |= {f"{kind} {name}": trained(**{kind: part}) for name, part in table.items()}
    found |= {f"normalize {name}": trained(
        model=flat, data=guards.bytes_of().replace(normalize=f))
        for name, f in guards.NORMALIZATIONS.items()}
    found |= {f"items {name}": trained(data=Examples(attacks.Items(make, torch.as_tensor)))
              for name, make in attacks.ITEMS.items()}
    found |= {f"odd rows {name}": odd_rows(f) for name, f in odd.ATTACKS.items()}
    found |= {f"new, {name}": partial(leaks.trained, **options)
              for name, options in leaks.LEAKS.items()}
    found |= {f"afterwards, {name}": partial(afterwards, change)
              for name, change in leaks.CHANGES.items()}
    innocents = {name: innocent(name) for name in guards.INNOCENT}
    innocents |= {f"new, {name}": partial(leaks.trained, **options)
                  for name, options in leaks.INNOCENTS.items()}
    return found, innocents


def afterwards(change):
    said = leaks.answer_after(change)
    if said is not None:
        raise ValueError(said)


def refused(f):
    try:
        f()
    except ValueError:
        return True
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="", help="try only names that hold this word")
    part = parser.parse_args().part
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    found, innocents = ({name: f for name, f in table.items() if part in name}
                        for table in tables())
    accepted = [name for name, f in found.items() if not refused(f)]
    alarms = [name for name, f in innocents.items() if refused(f)]
    print(f"{len(found)} leaks tried, {len(accepted)} accepted: {', '.join(accepted)}")
    print(f"{len(innocents)} innocents tried, {len(alarms)} refused: {', '.join(alarms)}")
    print(f"{len(leaks.NAMED)} limits are named: {', '.join(leaks.NAMED)}")


if __name__ == "__main__":
    main()
