"""Time and memory of every engine against plain SGD, Opacus and torch.func, in one run.

    python benchmarks/bench.py [--quick] [--device cuda] [--cases resnet20-128 ...] [--rounds 9]

All engines of a case run once per round, in an order that rotates; a ratio compares an engine with the plain step of the same
round, and the table gives the median and the quartiles of these ratios. Memory is the peak of a process that runs one engine only;
it varies by some per cent from process to process, so plain SGD and the fast engine get the median of five processes, the others one.
"""
import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))
# glibc gives big blocks back to the system after every step, and fresh pages cost more than the arithmetic on them. The same for all.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_TOP_PAD_": str(2**26)}
if __name__ == "__main__" and any(os.environ.get(n) != v for n, v in MALLOC.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})

import torch
import torch.nn.functional as F
from torch import nn

from dp_course import gradients
from dp_course.core import PALETTE, machine, panels
from dp_course.dpsgd import FlatClip, loop_grad_sum
from dp_course.models import papernot_cnn, resnet20, wrn16_4

warnings.filterwarnings("ignore")  # Opacus' hooks warn at every step
LOSS = partial(F.cross_entropy, reduction="none")
CASES = {  # network, shape of an example, examples, views (None: no view dimension)
    "resnet20-128": (resnet20, (3, 32, 32), 128, None), "resnet20-256": (resnet20, (3, 32, 32), 256, None),
    "wrn16_4-32": (wrn16_4, (3, 32, 32), 32, None), "cnn26k-512": (papernot_cnn, (1, 28, 28), 512, None),
    "resnet20-16x16": (resnet20, (3, 32, 32), 16, 16), "wrn16_4-4x16": (wrn16_4, (3, 32, 32), 4, 16)}
OURS = ["hook_grad_sum", "vmap_grad_sum", "ghost_grad_sum", "bookkeeping_grad_sum", "fast_grad_sum"]
COMPARED = ["plain SGD", "fast_grad_sum"]
OPACUS = {"opacus hooks": "hooks", "opacus functorch": "functorch", "opacus ghost": "ghost"}


def data(case, device):
    _, shape, b, k = CASES[case]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(b, *([k] if k else []), *shape, generator=g)
    return x.to(device), torch.randint(10, (b,), generator=g).to(device)


def model_of(case, device):
    torch.manual_seed(0)
    return CASES[case][0]().to(device)


def amp(device): return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()


def plain_step(case, device):
    "Forward, mean loss, backward: what every engine is compared with; no optimizer, here or there."
    model, (x, y) = model_of(case, device), data(case, device)
    if x.dim() == 5: x, y = x.flatten(0, 1), y.repeat_interleave(x.shape[1])

    def step():
        model.zero_grad(set_to_none=True)
        with amp(device): loss = F.cross_entropy(model(x), y)
        loss.backward()
    return step


def engine_step(case, device, engine):
    model, (x, y), clip = model_of(case, device), data(case, device), FlatClip(1.)

    def step():
        with amp(device): engine(model, LOSS, x, y, clip)
    return step


def opacus_step(case, device, mode):
    "Opacus' own gradient sample module and clipping, without noise; no views. The same network: weight standardization goes through its functorch path."
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    if CASES[case][3]: raise NotImplementedError("Opacus has no views")
    model, (x, y) = model_of(case, device), data(case, device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.)
    if mode == "ghost":
        wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=1., use_ghost_clipping=True, loss_reduction="mean")
        optimizer = DPOptimizerFastGradientClipping(sgd, noise_multiplier=0., max_grad_norm=1., expected_batch_size=len(x))
        criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), "mean")
    else:
        wrapped = GradSampleModule(model, force_functorch=mode == "functorch")
        optimizer, criterion = DPOptimizer(sgd, noise_multiplier=0., max_grad_norm=1., expected_batch_size=len(x)), F.cross_entropy

    def step():
        optimizer.zero_grad(set_to_none=True)
        with amp(device): loss = criterion(wrapped(x), y)
        loss.backward()
        if mode == "ghost": optimizer.accumulate()
        else: optimizer.clip_and_accumulate()
    return step


def make(case, name, device):
    "A function without arguments that does one step."
    if name == "plain SGD": return plain_step(case, device)
    if name == "one at a time": return engine_step(case, device, loop_grad_sum)
    if name in OPACUS: return opacus_step(case, device, OPACUS[name])
    return engine_step(case, device, getattr(gradients, name))


def sync(device):
    if device == "cuda": torch.cuda.synchronize()


def clock(step, device):
    sync(device); start = time.perf_counter(); step(); sync(device)
    return time.perf_counter() - start


def quartiles(v): return statistics.quantiles(v, n=4, method="inclusive") if len(v) > 1 else v*3


def time_case(case, names, rounds, device):
    "Seconds per round for every engine that can run the case; a note for the others."
    steps, notes, times = {}, {}, {}
    for name in names:
        try:
            steps[name] = make(case, name, device)
            for _ in range(2): steps[name]()  # warm-up: allocator, oneDNN's kernels
        except Exception as e: steps.pop(name, None); notes[name] = f"{type(e).__name__}: {str(e)[:120]}"
    for r in range(rounds):
        order = list(steps)
        for name in order[r % len(order):] + order[:r % len(order)]: times.setdefault(name, []).append(clock(steps[name], device))
    return times, notes


def peaks(case, name, device):
    "Peak memory in MB above the imported libraries, in processes of their own."
    command = [sys.executable, str(HERE), "--peak", case, name, "--device", device]
    runs = [subprocess.run(command, capture_output=True, text=True) for _ in range(5 if name in COMPARED else 1)]
    return [json.loads(r.stdout.splitlines()[-1]) for r in runs if r.returncode == 0]


def peak_here(case, name, device):
    rss = lambda: int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])/1024  # ru_maxrss would inherit the parent's
    x = torch.randn(8, 8); (x @ x).sum()
    if device == "cuda": torch.zeros(1, device=device); torch.cuda.reset_peak_memory_stats()
    if name in OPACUS: import opacus.optimizers  # noqa: F401
    before, step = rss(), make(case, name, device)
    for _ in range(2): step()
    print(json.dumps(round(torch.cuda.max_memory_allocated()/2**20 if device == "cuda" else rss() - before)))


def table(result):
    lines = [f"{'':16}{'engine':22}{'seconds':>9}{'ratio':>8}  {'quartiles':15}{'peak MB':>8}{'ratio':>7}"]
    for case, rows in result["cases"].items():
        for name, r in rows.items():
            if "note" in r: lines.append(f"{case:16}{name:22} {r['note']}"); continue
            memory = f"{r['peak_mb']:8}{r['peak_ratio']:7.2f}" if r.get("peak_mb") is not None else ""
            lines.append(f"{case:16}{name:22}{r['seconds']:9.4f}{r['ratio']:8.2f}  {r['q1']:.2f} .. {r['q3']:.2f}   {memory}")
    return "\n".join(lines)


def draw(result, path):
    cases = list(result["cases"])
    fig, axes = panels([f"{c}" for c in cases], "time / plain SGD", "", size=(3.6, 3.2))
    for ax, case in zip(axes, cases):
        rows = {n: r for n, r in result["cases"][case].items() if "note" not in r and n != "one at a time"}
        for i, (n, r) in enumerate(rows.items()):
            ax.barh(i, r["ratio"], color=PALETTE[3] if n == "fast_grad_sum" else PALETTE[0])
            ax.plot([r["q1"], r["q3"]], [i, i], "k-", lw=2)
        ax.set_yticks(range(len(rows)), list(rows)); ax.invert_yaxis(); ax.axvline(1, color="k", lw=.8)
    fig.savefig(path, dpi=110, bbox_inches="tight")


def summarize(times, notes):
    rows, base = {}, times["plain SGD"]
    for name, v in times.items():
        q1, median, q3 = quartiles([t/p for t, p in zip(v, base)])
        rows[name] = dict(seconds=round(statistics.median(v), 5), ratio=round(median, 3), q1=round(q1, 3), q3=round(q3, 3), rounds=len(v))
    return rows | {n: {"note": note} for n, note in notes.items()}


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="two cases, three rounds, no memory: about a minute")
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: the same under bf16 autocast")
    p.add_argument("--cases", nargs="*", choices=list(CASES), default=None)
    p.add_argument("--engines", nargs="*", default=None)
    p.add_argument("--rounds", type=int, default=None)
    p.add_argument("--no-memory", action="store_true")
    p.add_argument("--out", default=None, help="folder; default: out/")
    p.add_argument("--peak", nargs=2, metavar=("CASE", "ENGINE"), help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    if a.device == "cuda" and not torch.cuda.is_available(): p.error("no CUDA device here")
    if a.peak: return peak_here(*a.peak, a.device)
    cases = a.cases or (["resnet20-128", "cnn26k-512"] if a.quick else list(CASES))
    names = ["plain SGD", *(a.engines or [*OURS, *OPACUS, *([] if a.quick else ["one at a time"])])]
    rounds = a.rounds or (3 if a.quick else 9)
    result = dict(date=datetime.date.today().isoformat(), machine=machine(), device=a.device, malloc=MALLOC, cases={},
                  how="median and quartiles of same-round ratios to plain SGD; peak above imports, one process per engine, the median of five "
                      "for plain SGD and fast_grad_sum; Opacus "
                      "runs the same network, and its functorch path where it has no rule for a layer (WSConv2d); it has no views")
    for case in cases:
        print(f"{case}: {rounds} rounds of {len(names)} engines ...", flush=True)
        slow = [n for n in names if n == "one at a time" and case != "resnet20-128"]  # the loop is timed once
        rows = summarize(*time_case(case, [n for n in names if n not in slow], rounds, a.device))
        for name, r in rows.items():
            mb = [] if a.quick or a.no_memory or "note" in r else peaks(case, name, a.device)
            if mb: r |= dict(peak_mb=statistics.median(mb), peaks_mb=mb)
        for r in rows.values():
            if r.get("peak_mb") is not None: r["peak_ratio"] = round(r["peak_mb"]/rows["plain SGD"]["peak_mb"], 3)
        result["cases"][case] = rows
        print(table(result | {"cases": {case: rows}}), flush=True)
    out = Path(a.out or HERE.parent.parent/"out"); out.mkdir(parents=True, exist_ok=True)
    stem = out/f"{result['date']}-bench-{a.device}{'-quick' if a.quick else ''}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, stem.with_suffix(".png"))
    print("\n" + table(result) + f"\n\n{', '.join(f'{k} {v}' for k, v in result['machine'].items())}\nwritten: {stem.name}.json, .png")
    accounting = HERE.with_name("accounting.py")
    if accounting.exists() and not a.quick and not a.cases: subprocess.run([sys.executable, str(accounting)], check=False)


if __name__ == "__main__": main()
