"""Time and memory of every engine on a U-Net of 23 convolutions, against plain SGD, in one run.

    python benchmarks/unet.py [--bases 16 64] [--size 224] [--batch 8 4] [--rounds 9 3] [--out FILE]

As `bench.py`: all engines of a case run once per round, in an order that rotates; a ratio compares
an engine with the plain step of the same round, and the table gives the median and the quartiles of
these ratios. Memory is the peak of a process that runs one engine only, above the imported
libraries; the median of three processes for plain SGD and fast_grad_sum, one for the others.
Base 64 makes 35 thousand million multiply-adds an image of 224 x 224: the whole takes about 40
minutes of two cores, base 16 alone some 8.
"""
import argparse
import datetime
import json
import os
import statistics
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))
sys.path.insert(0, str(HERE.parent))
from bench import MALLOC, add_memory, clock, peaks, print_peak, quartiles  # noqa: E402

if __name__ == "__main__" and any(os.environ.get(n) != v for n, v in MALLOC.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})

import torch  # noqa: E402
from bench import ghost_optimizer, ghost_utils, grad_sample, opacus  # noqa: E402
from torch import nn  # noqa: E402

from dp_course import gradients  # noqa: E402
from dp_course.basics import machine  # noqa: E402
from dp_course.data import pixel_loss  # noqa: E402
from dp_course.gradients import (
    FlatClip,
    GhostNorm,
    bf16_engine,
    has_bfloat16,
    loop_grad_sum,
    one_pass,
)
from dp_course.models import UNet  # noqa: E402
from dp_course.training import code_version  # noqa: E402

warnings.filterwarnings("ignore")
OURS = ["hook_grad_sum", "vmap_grad_sum", "ghost_grad_sum", "bookkeeping_grad_sum",
        "fast_grad_sum"]
OPACUS = ["opacus hooks", "opacus functorch", "opacus FastGradClip", "opacus ghost"]
ENGINES = ["plain SGD", "one at a time", *OPACUS, "mixed rule", *OURS, "plain bf16", "fast bf16"]
OFTEN = ["plain SGD", "fast_grad_sum"]  # memory of these from three processes


class PixelLoss(nn.Module):
    "`pixel_loss` with a `reduction`, as Opacus wants it."
    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, output, y):
        losses = pixel_loss(output, y)
        return losses if self.reduction == "none" else losses.mean()


def mixed(weight):
    "The rule of Bu et al. (2022, 2023): ghost norms where 2 t^2 < p, else kept gradients."
    t = weight.g.shape[2:].numel()
    if 2*t*t < weight.conv.weight.numel():
        return GhostNorm(weight.ghost_norms(), weight.weighted_sum)
    return weight.keep(weight.naive())


def mixed_grad_sum(model, loss_fn, x, y, clip):
    "Their hybrid book-keeping on our tape."
    return one_pass(model, loss_fn, x, y, clip, mixed)


def parts(base, size, batch):
    torch.manual_seed(0)
    x = torch.randn(batch, 1, size, size)
    return UNet(base), x, torch.randint(9, (batch, size, size))


def plain_step(case, half=False):
    model, x, y = parts(*case)

    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            output = model(x)
        pixel_loss(output, y).mean().backward()
    return step


def engine_step(case, engine):
    model, x, y = parts(*case)
    return lambda: engine(model, pixel_loss, x, y, FlatClip(1.))


def opacus_step(case, name):
    "Opacus' model and clipping without noise; it has no rule for nn.ConvTranspose2d."
    if opacus is None:
        raise NotImplementedError("Opacus is not here")
    model, x, y = parts(*case)
    sgd = torch.optim.SGD(model.parameters(), lr=0.)
    numbers = dict(noise_multiplier=0., max_grad_norm=1., expected_batch_size=len(x))
    if name in ("opacus hooks", "opacus functorch"):
        wrapped = grad_sample.GradSampleModule(model, force_functorch=name.endswith("functorch"))
        optimizer = opacus.optimizers.DPOptimizer(sgd, **numbers)
        loss_fn, clip = PixelLoss(), optimizer.clip_and_accumulate
    else:
        wrapped = grad_sample.GradSampleModuleFastGradientClipping(
            model, max_grad_norm=1., use_ghost_clipping=name.endswith("ghost"),
            loss_reduction="mean")
        optimizer = ghost_optimizer.DPOptimizerFastGradientClipping(sgd, **numbers)
        loss_fn = ghost_utils.DPLossFastGradientClipping(wrapped, optimizer, PixelLoss(), "mean")
        clip = optimizer.accumulate

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss_fn(wrapped(x), y).backward()
        clip()
    return step


def make(case, name):
    "A function without arguments that does one step."
    if name.endswith("bf16") and not has_bfloat16("cpu"):
        raise NotImplementedError("this processor has no bfloat16")
    if name in ("plain SGD", "plain bf16"):
        return plain_step(case, half=name == "plain bf16")
    if name == "one at a time":
        return engine_step(case, loop_grad_sum)
    if name == "mixed rule":
        return engine_step(case, mixed_grad_sum)
    if name == "fast bf16":
        return engine_step(case, bf16_engine(gradients.fast_grad_sum))
    if name in OPACUS:
        return opacus_step(case, name)
    return engine_step(case, getattr(gradients, name))


def time_case(case, names, rounds):
    "Rows of the table: engine -> seconds, ratio, quartiles, or a note."
    steps, rows = {}, {}
    for name in names:
        try:
            step = make(case, name)
            step()  # warm-up
            steps[name] = step
        except Exception as error:
            rows[name] = {"note": f"{type(error).__name__}: {str(error)[:120]}"}
    times = {name: [] for name in steps}
    order = list(steps)
    for turn in range(rounds):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            times[name].append(clock(steps[name], "cpu"))
        print(f"  round {turn + 1} of {rounds}", flush=True)
    for name, seconds in times.items():
        q1, median, q3 = quartiles([t/p for t, p in zip(seconds, times["plain SGD"])])
        rows[name] = dict(ms=round(1000*statistics.median(seconds), 1), ratio=round(median, 3),
                          q1=round(q1, 3), q3=round(q3, 3), rounds=rounds)
    return {name: rows[name] for name in names}


def shown(rows):
    for name, row in rows.items():
        if "note" in row:
            print(f"  {name:22} {row['note']}")
            continue
        memory = f"{row['peak_mb']:8}{row.get('peak_ratio', 0):7.2f}" if "peak_mb" in row else ""
        print(f"  {name:22}{row['ms']:10.1f}{row['ratio']:7.2f}  {row['q1']:.2f} .. "
              f"{row['q3']:.2f}{memory}", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bases", nargs="*", type=int, default=[16, 64])
    parser.add_argument("--size", type=int, default=224, help="rows and columns")
    parser.add_argument("--batch", nargs="*", type=int, default=[8, 4], help="one for each base")
    parser.add_argument("--rounds", nargs="*", type=int, default=[9, 3], help="one for each base")
    parser.add_argument("--engines", nargs="*", default=ENGINES)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", type=Path, help="default: runs/<date>-bench-unet.json")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.peak:
        name, *case = args.peak
        return print_peak(lambda: make(tuple(map(int, case)), name))
    today = datetime.date.today().isoformat()
    out = args.out or HERE.parent.parent/"runs"/f"{today}-bench-unet.json"
    cases = {}
    names = ["plain SGD", *(name for name in args.engines if name != "plain SGD")]
    for base, batch, rounds in zip(args.bases, args.batch, args.rounds):
        case = base, args.size, batch
        print(f"base {base}, {args.size} x {args.size}, batch {batch}: {rounds} rounds", flush=True)
        rows = time_case(case, names, rounds)
        if not args.no_memory:
            add_memory(rows, lambda name: peaks(3 if name in OFTEN else 1,
                                                HERE, "--peak", name, *case))
        shown(rows)
        cases[str(base)] = dict(size=args.size, batch=batch, rows=rows)
        found = dict(date=today, machine=machine(), code=code_version(), how=__doc__,
                     threads=torch.get_num_threads(), load=os.getloadavg(), cases=cases)
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
