"""How far one example moves a clipped sum: `python benchmarks/sensitivity.py [--out FILE]`.

A clipped sum of floats moves by more than C (Casacuberta, Shoemate, Vadhan & Wagaman 2022, arXiv
2207.10635). One layer of one weight, rows of gradient 1 up to a power of two and then rows just
below the rounding unit: take the first row away, and look how far the sum moved. Opacus runs
where it is installed, whole batches and as an accumulation over micro-batches.
"""
import argparse
import datetime
import json
import math
import platform
from functools import partial
from pathlib import Path

import torch
from torch import nn

from dp_course.gradients import (
    FlatClip,
    bookkeeping_grad_sum,
    fast_grad_sum,
    ghost_grad_sum,
    hook_grad_sum,
    vmap_grad_sum,
)

try:
    import opacus
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer
except ImportError:
    opacus = None

OURS = [fast_grad_sum, hook_grad_sum, vmap_grad_sum, ghost_grad_sum, bookkeeping_grad_sum]
SIZES = 4096, 16384, 50_000
MICRO = 16


def rows(n):
    "Gradients of one number each, none longer than 1."
    k = int(math.log2(n*2/3))
    v = torch.full((n, 1), -.6*2.**(k - 24))
    v[:2**k] = 1.
    v[2**k] = .5
    return v


def dot(output, y):
    return (output*y).sum(1)


def our_sum(engine, v, micro):
    "The clipped sum of one of our engines."
    model, total = nn.Linear(1, 1, bias=False), 0
    for part in v.split(micro or len(v)):
        sums, _ = engine(model, dot, torch.ones_like(part), part, FlatClip(1.))
        total = total + sums["weight"].item()
    return total


def opacus_sum(v, micro):
    "The clipped sum of Opacus' optimizer, before noise; skipped steps add up micro-batches."
    model = GradSampleModule(nn.Linear(1, 1, bias=False))
    sgd = torch.optim.SGD(model.parameters(), lr=1.)
    optimizer = DPOptimizer(sgd, noise_multiplier=0., max_grad_norm=1., expected_batch_size=1)
    parts = v.split(micro or len(v))
    for i, part in enumerate(parts):
        optimizer.signal_skip_step(do_skip=i + 1 < len(parts))
        dot(model(torch.ones_like(part)), part).mean().backward()
        if i + 1 < len(parts):
            optimizer.step()
            optimizer.zero_grad()
    optimizer.clip_and_accumulate()
    return optimizer.params[0].summed_grad.item()


def measured():
    "Name -> how far one example moved the sum, in units of C."
    sums = {engine.__name__: partial(our_sum, engine) for engine in OURS}
    if opacus is not None:
        sums[f"opacus {opacus.__version__}"] = opacus_sum
    found = {}
    for name, total in sums.items():
        for micro in (None, MICRO):
            if micro and name.endswith("_grad_sum") and name != "fast_grad_sum":
                continue  # thousands of small calls
            sizes = SIZES[:1] if micro else SIZES
            how = "one batch" if micro is None else f"micro-batches of {micro}"
            found[f"{name}, {how}"] = {
                str(n): abs(total(rows(n), micro) - total(rows(n)[1:], micro)) for n in sizes}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record = {
        "date": datetime.date.today().isoformat(),
        "what": "how far one example moves a clipped sum, in units of C; rows by count",
        "by": "benchmarks/sensitivity.py", "torch": torch.__version__,
        "machine": platform.machine(), "threads": torch.get_num_threads(), "moved": measured()}
    text = json.dumps(record, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
