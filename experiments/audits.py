"""The bug lab of lesson 14: every mutant, and four correct trainers, through every audit.

    python -m experiments.audits [--out FILE] [--layer NAME]

About four minutes on one core. The record says what was caught, where, and what was read. With
--layer one audit is run again, and takes its place in the record that is there.
"""
import argparse
import json
import math
import time
from datetime import date
from functools import partial
from pathlib import Path

import torch

from dp_course.audit import AUDITS, MUTANTS, FullTrainer, SmallTrainer, audit_all
from dp_course.basics import machine
from dp_course.data import Views
from dp_course.training import code_version
from experiments.harness import RUNS, today


def two_views(x):
    return torch.stack([x, x], 1)


def augment(x, y, generator):
    return Views(two_views(x)), y


CORRECT = {
    "correct": SmallTrainer,
    "correct, with views": partial(SmallTrainer, see=two_views),
    "Trainer": FullTrainer,
    "Trainer, with views": partial(FullTrainer, options={"augment": augment}),
}


def broken(mutant, **kinds):
    return mutant.of(SmallTrainer(**kinds))


def plain(numbers):
    "Numbers that JSON can hold; what is infinite becomes null."
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def row_of(name, make, mutant=None, layers=tuple(AUDITS)):
    "What the audits say of one trainer."
    start = time.process_time()
    found = audit_all(make, layers)
    return {"name": name,
            "wrong": mutant.wrong if mutant else "nothing",
            "should be caught by": mutant.layer if mutant else None,
            "caught by": [layer for layer in layers if not found[layer]],
            "says": {layer: finding.verdict for layer, finding in found.items()},
            "numbers": {layer: plain(finding.numbers) for layer, finding in found.items()},
            "cpu_seconds": round(time.process_time() - start, 2)}


def joined(old, new):
    "A row of a record, in which some audits were run again."
    caught = {*old["caught by"], *new["caught by"]} - (new["says"].keys() - {*new["caught by"]})
    return {**old,
            "caught by": [layer for layer in AUDITS if layer in caught],
            "says": old["says"] | new["says"],
            "numbers": old["numbers"] | new["numbers"],
            "cpu_seconds": round(old["cpu_seconds"] + new["cpu_seconds"], 2)}


def main(argv=None):
    parser = argparse.ArgumentParser("python -m experiments.audits", description=__doc__)
    parser.add_argument("--out", type=Path, default=RUNS/f"{today()}-audit-lab.json")
    parser.add_argument("--layer", choices=AUDITS)
    options = parser.parse_args(argv)
    out, layers = options.out, [options.layer] if options.layer else list(AUDITS)
    torch.set_num_threads(1)
    suspects = [(name, make, None) for name, make in CORRECT.items()]
    suspects += [(name, partial(broken, mutant), mutant) for name, mutant in MUTANTS.items()]
    rows = []
    for suspect in suspects:
        rows.append(row_of(*suspect, layers=layers))
        print(rows[-1]["name"], rows[-1]["caught by"], rows[-1]["cpu_seconds"], flush=True)
    before = json.loads(out.read_text()) if options.layer else {}
    rows = [joined(*pair) for pair in zip(before["rows"], rows)] if before else rows
    about = {"date": date.today().isoformat(), "code": code_version(),
             "machine": machine(("torch", "scipy")), "alpha": 1e-3}
    if before:
        about["other audits"] = before.get("other audits", before["code"])
    out.write_text(json.dumps({**about, "rows": rows}, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
