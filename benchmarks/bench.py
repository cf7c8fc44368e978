"""Time and memory of every engine against plain SGD, Opacus and torch.func, in one run.

A second table has the same plain and private step with the network in bfloat16, where the
processor has it, in units of the plain float32 step and of the plain bfloat16 step.

    python benchmarks/bench.py [--quick] [--device cuda] [--cases resnet20-128 ...] [--rounds 9]
    python benchmarks/bench.py --one-thread ...  # CPU seconds: where others use the machine, too

All engines of a case run once per round, in an order that rotates; a ratio compares an engine with
the plain step of the same round, and the table gives the median and the quartiles of these ratios.
Memory is the peak of a process that runs one engine only; it varies by some per cent from process
to process, so plain SGD and the fast engine get the median of five processes, the others one.
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
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))
# glibc gives big blocks back to the system after every step, and fresh pages cost more than the
# arithmetic on them. The same for all.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34),
          "MALLOC_TOP_PAD_": str(2**26)}
if __name__ == "__main__" and any(os.environ.get(n) != v for n, v in MALLOC.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import torchvision  # noqa: E402
from torch import nn  # noqa: E402

from dp_course import gradients  # noqa: E402
from dp_course.basics import machine  # noqa: E402
from dp_course.data import Views, flatten_views  # noqa: E402
from dp_course.gradients import (
    FlatClip,
    bf16_engine,
    bf16_product_ratio,
    fast_grad_sum,
    has_bfloat16,
    layers,
    loop_grad_sum,
)
from dp_course.models import WSConv2d, papernot_cnn, resnet20, wrn16_4  # noqa: E402
from dp_course.training import code_version  # noqa: E402

try:
    import opacus.optimizers
    from opacus import grad_sample
    from opacus.optimizers import optimizer_fast_gradient_clipping as ghost_optimizer
    from opacus.utils import fast_gradient_clipping_utils as ghost_utils
except ImportError:  # a GPU machine may have none
    opacus = None

warnings.filterwarnings("ignore")  # Opacus' hooks warn at every step
LOSS = partial(F.cross_entropy, reduction="none")
IMAGE, DIGIT = (3, 32, 32), (1, 28, 28)


def vit():
    return torchvision.models.VisionTransformer(32, 4, 6, 4, 128, 256, num_classes=10)


def mobilenet():
    def norm(channels):
        return nn.GroupNorm(8 if channels % 8 == 0 else 4, channels)

    model = torchvision.models.mobilenet_v2(num_classes=10, norm_layer=norm)
    model.classifier[0] = nn.Identity()  # dropout
    return model


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


class Reads(nn.Module):
    "A BERT of Hugging Face as a function of numbers: each becomes a word."
    def __init__(self):
        super().__init__()
        import transformers
        self.net = transformers.BertForSequenceClassification(transformers.BertConfig(
            vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=256, max_position_embeddings=64, num_labels=10,
            hidden_dropout_prob=0., attention_probs_dropout_prob=0.))

    def forward(self, x):
        return self.net((1000*x).long() % 1000).logits


CASES = {  # network, shape of an example, examples, views (None: not a batch of views)
    "resnet20-128": (resnet20, IMAGE, 128, None), "resnet20-256": (resnet20, IMAGE, 256, None),
    "wrn16_4-32": (wrn16_4, IMAGE, 32, None), "cnn26k-512": (papernot_cnn, DIGIT, 512, None),
    "resnet20-16x16": (resnet20, IMAGE, 16, 16), "wrn16_4-4x16": (wrn16_4, IMAGE, 4, 16),
    "vit-32": (vit, IMAGE, 32, None), "mobilenet-32": (mobilenet, (3, 64, 64), 32, None),
    "mlp-256": (mlp, DIGIT, 256, None), "bert-32": (Reads, (64,), 32, None)}
HALF_CASES = ["resnet20-128", "resnet20-256", "wrn16_4-32"]
HALF = ["plain SGD", "plain bf16", "fast bf16", "fast_grad_sum"]
# Opacus has a rule for nn.Conv2d, and takes torch.func for WSConv2d unless it is given one, too
PLAIN_NETWORK = {resnet20: partial(resnet20, conv=nn.Conv2d),
                 wrn16_4: partial(wrn16_4, conv=nn.Conv2d)}
OURS = ["hook_grad_sum", "vmap_grad_sum", "ghost_grad_sum", "bookkeeping_grad_sum",
        "fast_grad_sum"]
FLOAT32 = "float32 sums"  # what the sum over examples costs in float64: a float32 sum is unsafe
COMPARED = ["plain SGD", "fast_grad_sum"]
OPACUS = {"opacus hooks": "hooks", "opacus functorch": "functorch", "opacus ghost": "ghost",
          "opacus hooks, WS rule": "rule", "opacus hooks, no WS": "plain network"}
HOW = ("median and quartiles of same-round ratios to plain SGD; peak above imports, one process "
       "per engine, the median of five for plain SGD and fast_grad_sum; Opacus runs the same "
       "network, and its functorch path where it has no rule for a layer (WSConv2d); 'WS rule': "
       "with a rule for that layer registered, made of its own for nn.Conv2d; 'no WS': the network "
       "with nn.Conv2d, in units of plain SGD with WSConv2d; it has no views")


# --- one step of everything


def data(case, device):
    _, shape, b, k = CASES[case]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(b, *([k] if k else []), *shape, generator=g).to(device)
    return Views(x) if k else x, torch.randint(10, (b,), generator=g).to(device)


def model_of(case, device):
    torch.manual_seed(0)
    return CASES[case][0]().to(device)


def amp(device):
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()


def plain_step(case, device, half=False):
    "Forward, mean loss, backward: what every engine is compared with; no optimizer anywhere."
    model = model_of(case, device)
    x, y, _, _ = flatten_views(*data(case, device))

    def step():
        model.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16) if half else amp(device):
            loss = F.cross_entropy(model(x), y)
        loss.backward()

    return step


def engine_step(case, device, engine):
    model, clip = model_of(case, device), FlatClip(max_norm=1.)
    x, y = data(case, device)

    def step():
        with amp(device):
            engine(model, LOSS, x, y, clip)

    return step


@contextmanager
def float32_sums():
    "Let the fast engine measure and add up kept gradients in float32, as it did before."
    measured, added = layers._row_norms, layers._add_rows
    layers._row_norms = lambda rows: torch.linalg.vector_norm(rows, dim=1).double()
    layers._add_rows = lambda total, rows, factors: total.add_(factors.to(rows) @ rows)
    try:
        yield
    finally:
        layers._row_norms, layers._add_rows = measured, added


def unsafe_grad_sum(*args):
    with float32_sums():
        return fast_grad_sum(*args)


def opacus_ghost(model, sgd, b):
    "Opacus' model, optimizer and loss for ghost clipping."
    wrapped = grad_sample.GradSampleModuleFastGradientClipping(
        model, max_grad_norm=1., use_ghost_clipping=True, loss_reduction="mean")
    optimizer = ghost_optimizer.DPOptimizerFastGradientClipping(
        sgd, noise_multiplier=0., max_grad_norm=1., expected_batch_size=b)
    loss_fn = ghost_utils.DPLossFastGradientClipping(
        wrapped, optimizer, nn.CrossEntropyLoss(), "mean")
    return wrapped, optimizer, loss_fn, optimizer.accumulate


def opacus_hooks(model, sgd, b, functorch):
    "The same for its hooks, or for torch.func in every layer."
    wrapped = grad_sample.GradSampleModule(model, force_functorch=functorch)
    optimizer = opacus.optimizers.DPOptimizer(
        sgd, noise_multiplier=0., max_grad_norm=1., expected_batch_size=b)
    return wrapped, optimizer, F.cross_entropy, optimizer.clip_and_accumulate


def standardized_rule(layer, activations, backprops):
    "Opacus' rule for a convolution, and the Jacobian of weight standardization."
    twin = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride,
                     layer.padding, layer.dilation, layer.groups, device="meta")
    twin.weight, twin.bias = layer.weight, layer.bias  # its rule asks for the exact type
    found = grad_sample.conv.compute_conv_grad_sample(twin, activations, backprops)
    if layer.weight in found:
        g = found[layer.weight]
        c, f, h = (t.detach() for t in layer.centred())
        flat = g.flatten(2)
        along = (flat*c).sum(-1, keepdim=True)
        raw = f*(flat - flat.mean(-1, keepdim=True)) - h*along*c
        found[layer.weight] = raw.view(g.shape)
    return found


@contextmanager
def registered(rule):
    "Let Opacus know a rule for WSConv2d: it looks for one when it wraps, and at every step."
    samplers = grad_sample.GradSampleModule.GRAD_SAMPLERS
    samplers[WSConv2d] = rule
    try:
        yield
    finally:
        del samplers[WSConv2d]


def opacus_step(case, device, mode):
    "Opacus' own model and clipping, without noise; the same network, or the one without WS."
    if opacus is None or CASES[case][3]:
        raise NotImplementedError("Opacus is not here" if opacus is None else "Opacus has no views")
    if mode in ("rule", "plain network") and CASES[case][0] not in PLAIN_NETWORK:
        raise NotImplementedError("this network has no weight standardization")
    model = model_of(case, device)
    if mode == "plain network":
        model = PLAIN_NETWORK[CASES[case][0]]().to(device)
    x, y = data(case, device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.)
    if mode == "ghost":
        wrapped, optimizer, loss_fn, clip = opacus_ghost(model, sgd, len(x))
    elif mode == "rule":
        with registered(standardized_rule):
            wrapped, optimizer, loss_fn, clip = opacus_hooks(model, sgd, len(x), False)
    else:
        wrapped, optimizer, loss_fn, clip = opacus_hooks(model, sgd, len(x), mode == "functorch")

    def step():
        optimizer.zero_grad(set_to_none=True)
        with amp(device):
            loss = loss_fn(wrapped(x), y)
        with registered(standardized_rule) if mode == "rule" else nullcontext():
            loss.backward()
        clip()

    return step


def make(case, name, device):
    "A function without arguments that does one step."
    if name in ("plain SGD", "plain bf16"):
        return plain_step(case, device, half=name == "plain bf16")
    if name == "fast bf16":
        return engine_step(case, device, bf16_engine(fast_grad_sum))
    if name == "one at a time":
        return engine_step(case, device, loop_grad_sum)
    if name == FLOAT32:
        return engine_step(case, device, unsafe_grad_sum)
    if name in OPACUS:
        return opacus_step(case, device, OPACUS[name])
    return engine_step(case, device, getattr(gradients, name))


# --- time


def sync(device):
    if device == "cuda":
        torch.cuda.synchronize()


def clock(step, device):
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    sync(device)
    start = now()
    step()
    sync(device)
    return now() - start


def quartiles(values):
    if len(values) == 1:
        return values*3
    return statistics.quantiles(values, n=4, method="inclusive")


def time_case(case, names, rounds, device):
    "Seconds per round for every engine that can run the case; a note for the others."
    steps, notes = {}, {}
    for name in names:
        try:
            step = make(case, name, device)
            for _ in range(2):  # warm-up: allocator, oneDNN's kernels
                step()
            steps[name] = step
        except Exception as error:
            notes[name] = f"{type(error).__name__}: {str(error)[:120]}"
    times = {name: [] for name in steps}
    order = list(steps)
    for r in range(rounds):
        first = r % len(order)
        for name in order[first:] + order[:first]:
            times[name].append(clock(steps[name], device))
    return times, notes


def summarize(times, notes):
    rows, base = {}, times["plain SGD"]
    for name, seconds in times.items():
        q1, median, q3 = quartiles([t/p for t, p in zip(seconds, base)])
        rows[name] = dict(seconds=round(statistics.median(seconds), 5), ratio=round(median, 3),
                          q1=round(q1, 3), q3=round(q3, 3), rounds=len(seconds))
    return rows | {name: {"note": note} for name, note in notes.items()}


def half_table(cases):
    "Steps in bfloat16, in units of the plain float32 step and of the plain bfloat16 step."
    lines = [f"{'':16}{'step':22}{'/plain float32':>15}{'/plain bf16':>13}"]
    for case, rows in cases.items():
        for name, row in rows.items():
            if "note" in row:
                lines.append(f"{case:16}{name:22} {row['note']}")
            else:
                by_half = f"{row['ratio_bf16']:13.2f}" if "ratio_bf16" in row else ""
                lines.append(f"{case:16}{name:22}{row['ratio']:15.2f}{by_half}")
    return "\n".join(lines)


def run_half(case, rounds, device):
    "Time plain and private steps in both precisions, all in the same rounds."
    print(f"{case}, both precisions: {rounds} rounds ...", flush=True)
    times, notes = time_case(case, HALF, rounds, device)
    rows = summarize(times, notes)
    for name, seconds in times.items():
        ratios = [t/p for t, p in zip(seconds, times["plain bf16"])]
        rows[name]["ratio_bf16"] = round(statistics.median(ratios), 3)
    print(half_table({case: rows}), flush=True)
    return rows


# --- memory


def resident():
    "The most memory that this process ever held, in MB (ru_maxrss would inherit the parent's)."
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])/1024


def print_peak(make_step, device="cpu", steps=2):
    "Make a step and take it: MB of this process above the imported libraries."
    x = torch.randn(8, 8)
    (x @ x).sum()
    if device == "cuda":
        torch.zeros(1, device=device)
        torch.cuda.reset_peak_memory_stats()
    before, step = resident(), make_step()
    for _ in range(steps):
        step()
    used = resident() - before
    if device == "cuda":
        used = torch.cuda.max_memory_allocated()/2**20
    print(json.dumps(round(used)))


def peaks(times, *words):
    "What processes of their own print at their end; one that fails is left out."
    command = [sys.executable, *map(str, words)]
    runs = [subprocess.run(command, capture_output=True, text=True) for _ in range(times)]
    return [json.loads(r.stdout.splitlines()[-1]) for r in runs if r.returncode == 0]


def add_memory(rows, peaks_of):  # name of an engine -> MB of each process
    for name, row in rows.items():
        found = [] if "note" in row else peaks_of(name)
        if found:
            row |= dict(peak_mb=statistics.median(found), peaks_mb=found)
    for row in rows.values():
        if "peak_mb" in row and "peak_mb" in rows["plain SGD"]:
            row["peak_ratio"] = round(row["peak_mb"]/rows["plain SGD"]["peak_mb"], 3)


# --- what comes out


def line(case, name, row):
    if "note" in row:
        return f"{case:16}{name:22} {row['note']}"
    spread = f"{row['q1']:.2f} .. {row['q3']:.2f}"
    text = f"{case:16}{name:22}{row['seconds']:9.4f}{row['ratio']:8.2f}  {spread:15}"
    if "peak_mb" in row:
        text += f"{row['peak_mb']:8}{row['peak_ratio']:7.2f}"
    return text


def table(cases):
    head = (f"{'':16}{'engine':22}{'seconds':>9}{'ratio':>8}  "
            f"{'quartiles':15}{'peak MB':>8}{'ratio':>7}")
    rows = [line(case, name, row) for case, rows in cases.items() for name, row in rows.items()]
    return "\n".join([head, *rows])


def run_case(case, names, rounds, device, memory):
    print(f"{case}: {rounds} rounds of {len(names)} engines ...", flush=True)
    if case != "resnet20-128":  # the loop is timed once
        names = [n for n in names if n != "one at a time"]
    rows = summarize(*time_case(case, names, rounds, device))
    if memory:
        command = HERE, "--device", device, "--peak", case
        add_memory(rows, lambda name: peaks(5 if name in COMPARED else 1, *command, name))
    print(table({case: rows}), flush=True)
    return rows


def parse(argv):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true",
                   help="two cases, three rounds, no memory: about a minute")
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"],
                   help="cuda: the same under bf16 autocast")
    p.add_argument("--cases", nargs="*", choices=list(CASES), default=None)
    p.add_argument("--engines", nargs="*", default=None)
    p.add_argument("--rounds", type=int, default=None)
    p.add_argument("--no-memory", action="store_true")
    p.add_argument("--one-thread", action="store_true",
                   help="one thread, and CPU seconds in place of the wall clock's")
    p.add_argument("--out", default=HERE.parent.parent/"out", type=Path, help="default: out/")
    p.add_argument("--peak", nargs=2, metavar=("CASE", "ENGINE"), help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("no CUDA device here")
    return args


def runs(args):
    "All cases, one after the other: (part of the record, name, rows)."
    names = args.engines or [*OURS, FLOAT32, *OPACUS, *([] if args.quick else ["one at a time"])]
    rounds = args.rounds or (3 if args.quick else 9)
    memory = not (args.quick or args.no_memory)
    for case in args.cases or (["resnet20-128", "cnn26k-512"] if args.quick else CASES):
        yield "cases", case, run_case(case, ["plain SGD", *names], rounds, args.device, memory)
    if args.device == "cpu" and has_bfloat16("cpu"):
        for case in args.cases or (HALF_CASES[:1] if args.quick else HALF_CASES):
            if case in HALF_CASES:
                yield "bf16", case, run_half(case, rounds, args.device)


def main(argv=None):
    args = parse(argv)
    if args.one_thread:
        torch.set_num_threads(1)
    if args.peak:
        return print_peak(partial(make, *args.peak, args.device), args.device)
    today = datetime.date.today().isoformat()
    stem = args.out/f"{today}-bench-{args.device}{'-quick' if args.quick else ''}"
    args.out.mkdir(parents=True, exist_ok=True)
    result = dict(date=today, code=code_version(), machine=machine(), device=args.device,
                  malloc=MALLOC, cases={}, bf16={}, how=HOW, threads=torch.get_num_threads())
    if args.device == "cpu" and has_bfloat16("cpu"):  # what `auto` goes by
        result["bf16_product"] = round(bf16_product_ratio(), 3)
        result["amx"] = bool(getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16"))
    for part, case, rows in runs(args):
        result[part][case] = rows
        result["load"] = os.getloadavg()
        # after every case: a run that is stopped keeps what it has
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print("", table(result["cases"]), "", half_table(result["bf16"]), "",
          ", ".join(f"{k} {v}" for k, v in result["machine"].items()),
          f"written: {stem.name}.json", sep="\n")


if __name__ == "__main__":
    main()
