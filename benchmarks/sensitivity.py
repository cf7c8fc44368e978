"""How far one example moves a clipped sum: `python benchmarks/sensitivity.py [--out FILE]`.

A clipped sum of floats moves by more than C (Casacuberta, Shoemate, Vadhan & Wagaman 2022, arXiv
2207.10635). One layer of one weight, rows of gradient 1 up to a power of two and then rows just
below the rounding unit: take the first row away, and look how far the sum moved. Of five such
patterns the worst counts. Opacus, opake and jax_privacy run where they are installed
(`pip install --no-deps --target DIR opake-engine opake-dpsgd opake-base optree`, `pip install
--target DIR2 jax-privacy`, and PYTHONPATH=DIR:DIR2), Opacus also as an accumulation over
micro-batches.
"""
import argparse
import datetime
import json
import math
import platform
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
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
from dp_course.training import code_version

try:
    import opacus
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer
except ImportError:
    opacus = None

OURS = [fast_grad_sum, hook_grad_sum, vmap_grad_sum, ghost_grad_sum, bookkeeping_grad_sum]
SIZES = 4096, 16384, 50_000
MICRO = 16


def rows(n, lost=.6):
    "Gradients of one number each, none longer than 1: `lost` units vanish above, and count below."
    k = int(math.log2(n*2/3))
    v = torch.full((n, 1), -lost*2.**(k - 24))
    v[:2**k] = 1.
    v[2**k] = .5
    return v


def blocks(n, length):
    "The same within every block: taking away a row shifts all of them."
    one = torch.full((length, 1), -.6*2.**(int(math.log2(length)) - 25))
    one[:length//2] = 1.
    return one.repeat(-(-n//length), 1)[:n]


PATTERNS = [rows, partial(rows, lost=.51), partial(rows, lost=.75), partial(blocks, length=64),
            partial(blocks, length=1024)]


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


def opake_sum(v, micro):
    "The clipped sum of opake."
    from opake.dpsgd.clipping import clipped_grad

    step, state = clipped_grad(lambda w, x, y: (w["weight"]*x*y).sum(), clipping_norm=1.,
                               batch_argnums=(1, 2))
    found, _ = step({"weight": torch.zeros(1)}, torch.ones_like(v), v, state=state)
    return found.pytree["weight"].item()


def jax_sum(v, micro):
    "The clipped sum of jax_privacy."
    import jax
    from jax_privacy import clipped_grad

    step = clipped_grad(lambda w, x, y: (w*x*y).sum(), l2_clip_norm=1., batch_argnums=(1, 2))
    found = step(jax.numpy.zeros(1), jax.numpy.ones(v.shape), jax.numpy.asarray(v.numpy()))
    return float(found[0])


def installed():
    "Name -> clipped sum (rows, size of a micro-batch or None), of whatever is installed."
    sums = {engine.__name__: partial(our_sum, engine) for engine in OURS}
    if opacus is not None:
        sums[f"opacus {opacus.__version__}"] = opacus_sum
    for needed, package, total in (("opake.dpsgd", "opake-dpsgd", opake_sum),
                                   ("jax_privacy", "jax-privacy", jax_sum)):
        if find_spec(needed.partition(".")[0]):
            sums[f"{needed.partition('.')[0]} {version(package)}"] = total
    return sums


def measured():
    "Name -> how far one example moved the sum, in units of C."
    found = {}
    for name, total in installed().items():
        for micro in (None, MICRO):
            if micro and name != "fast_grad_sum" and not name.startswith("opacus"):
                continue  # thousands of small calls
            sizes = SIZES[:1] if micro else SIZES
            how = "one batch" if micro is None else f"micro-batches of {micro}"
            found[f"{name}, {how}"] = {
                str(n): max(abs(total(v, micro) - total(v[1:], micro))
                            for v in (pattern(n) for pattern in PATTERNS)) for n in sizes}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record = {
        "date": datetime.date.today().isoformat(),
        "what": "how far one example moves a clipped sum, in units of C; rows by count",
        "by": "benchmarks/sensitivity.py", "code": code_version(), "torch": torch.__version__,
        "machine": platform.machine(), "threads": torch.get_num_threads(), "moved": measured()}
    text = json.dumps(record, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
