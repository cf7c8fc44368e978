"""A private step of other frameworks, in units of the plain step of each one's own framework.

    pip install --no-deps --target DIR opake-engine opake-dpsgd opake-base optree
    pip install --target DIR2 jax-privacy
    PYTHONPATH=DIR:DIR2 python benchmarks/frameworks.py [--cases mlp-256 ...] [--rounds 15]

Forward, backward, clipping and the sum, without noise or optimizer, on one thread, in CPU seconds.
A framework has processes of its own: one in which plain and private steps alternate, and one per
step for its peak memory above imports and data. What is not installed is said to be so. opake and
our engine run the same PyTorch networks; JAX has its own of the same shapes.
"""
import argparse
import datetime
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))
CASES = {  # examples, shape of one, words: None for images
    "resnet20-128": (128, (3, 32, 32), None), "transformer-32": (32, (64,), 1000),
    "mlp-256": (256, (1, 28, 28), None), "words-256": (256, (40,), 5000)}
NEEDS = {"dp_course": "torch", "opake": "opake.dpsgd", "jax_privacy": "jax_privacy",
         "fastDP": "fastDP"}
ALONE = {  # one thread, and freed memory stays with the process, as in bench.py
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26)}
D, HEADS, HIDDEN = 128, 4, 256  # of the transformer: two blocks


def batch(case):
    b, shape, words = CASES[case]
    rng = np.random.default_rng(0)
    x = rng.integers(words, size=(b, *shape)) if words else rng.standard_normal((b, *shape))
    return x if words else x.astype(np.float32), rng.integers(10, size=b)


# --- PyTorch


def torch_network(case):
    import torch
    from torch import nn

    from dp_course.models import resnet20

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(D, 3*D), nn.Linear(D, D)

        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, HEADS, D//HEADS).permute(2, 0, 3, 1, 4)
            weights = (q @ k.mT/(D//HEADS)**.5).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).reshape(b, t, D))

    class Residual(nn.Module):
        def __init__(self, *parts):
            super().__init__()
            self.parts = nn.Sequential(nn.LayerNorm(D), *parts)

        def forward(self, x):
            return x + self.parts(x)

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    torch.manual_seed(0)
    if case.startswith("resnet"):
        return resnet20()
    if case.startswith("mlp"):
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    if case.startswith("words"):
        return nn.Sequential(nn.Embedding(5000, 32), Mean(), nn.Linear(32, 10))
    blocks = [Residual(part) for _ in range(2) for part in (Attention(), nn.Sequential(
        nn.Linear(D, HIDDEN), nn.GELU(approximate="tanh"), nn.Linear(HIDDEN, D)))]
    return nn.Sequential(nn.Embedding(1000, D), *blocks, Mean(), nn.Linear(D, 10))


def torch_steps(case, private):
    "A plain step, and one by `private` (model, x, y) -> step."
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    model = torch_network(case)
    x, y = (torch.from_numpy(v) for v in batch(case))

    def plain():
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()

    return {"plain": plain, "private": private(model, x, y)}


def ours(model, x, y):
    import torch.nn.functional as F

    from dp_course.gradients import FlatClip, fast_grad_sum
    loss_fn = partial(F.cross_entropy, reduction="none")
    return lambda: fast_grad_sum(model, loss_fn, x, y, FlatClip(1.))


def opake(model, x, y):
    import torch.nn.functional as F
    from opake.dpsgd.clipping import clipped_grad
    from torch.func import functional_call

    def loss_fn(params, x, y):
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    params = {name: p.detach() for name, p in model.named_parameters()}
    step, state = clipped_grad(loss_fn, clipping_norm=1., batch_argnums=(1, 2))
    return lambda: step(params, x, y, state=state)


# --- JAX


def jax_network(case):  # parameters, (parameters, x) -> scores
    import jax
    import jax.numpy as jnp
    rng = np.random.default_rng(0)

    def new(*shape):
        return jnp.asarray(rng.standard_normal(shape)*.05, jnp.float32)

    def linear(i, o):
        return {"w": new(i, o), "b": jnp.zeros(o)}

    def at(p, x):
        return x @ p["w"] + p["b"]

    def layer_norm(p, x):
        x = x - x.mean(-1, keepdims=True)
        return x*jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)*p["w"] + p["b"]

    def scale(channels):
        return {"w": jnp.ones(channels), "b": jnp.zeros(channels)}

    if case.startswith("mlp"):
        def forward(p, x):
            return at(p[1], jax.nn.relu(at(p[0], x.reshape(len(x), -1))))
        return [linear(784, 128), linear(128, 10)], forward

    if case.startswith("words"):
        def forward(p, x):
            return at(p[1], p[0][x].mean(1))
        return [new(5000, 32), linear(32, 10)], forward

    if case.startswith("transformer"):
        def attention(p, x):
            b, t, _ = x.shape
            qkv = at(p["qkv"], x).reshape(b, t, 3, HEADS, D//HEADS)
            q, k, v = qkv.transpose(2, 0, 3, 1, 4)
            weights = jax.nn.softmax(q @ k.swapaxes(2, 3)/(D//HEADS)**.5)
            return at(p["out"], (weights @ v).swapaxes(1, 2).reshape(b, t, D))

        def forward(p, x):
            x = p["words"][x]
            for block in p["blocks"]:
                x = x + attention(block, layer_norm(block["norm1"], x))
                x = x + at(block["down"], jax.nn.gelu(at(block["up"],
                                                         layer_norm(block["norm2"], x))))
            return at(p["head"], x.mean(1))

        blocks = [dict(norm1=scale(D), norm2=scale(D), qkv=linear(D, 3*D), out=linear(D, D),
                       up=linear(D, HIDDEN), down=linear(HIDDEN, D)) for _ in range(2)]
        return dict(words=new(1000, D), blocks=blocks, head=linear(D, 10)), forward

    def conv(w, x, stride=1):  # with weight standardization
        w = w - w.mean((0, 1, 2))
        w = w*jax.lax.rsqrt((jnp.square(w).mean((0, 1, 2)) + 1e-5)*w[..., 0].size)
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME",
                                            dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def group_norm(p, x):
        b, h, w, c = x.shape
        x = x.reshape(b, h, w, c//4, 4)
        x = x - x.mean((1, 2, 4), keepdims=True)
        x = x*jax.lax.rsqrt(jnp.square(x).mean((1, 2, 4), keepdims=True) + 1e-5)
        return x.reshape(b, h, w, c)*p["w"] + p["b"]

    shapes = [(i, o, 2 if i != o else 1)
              for i, o in ((16, 16), (16, 32), (32, 64)) for i, o in ((i, o), (o, o), (o, o))]

    def forward(p, x):
        x = jax.nn.relu(group_norm(p["norm"], conv(p["first"], x.transpose(0, 2, 3, 1))))
        for block, (i, o, stride) in zip(p["blocks"], shapes):
            side = x if stride == 1 else conv(block["side"], x, stride)
            y = jax.nn.relu(group_norm(block["norm1"], conv(block["conv1"], x, stride)))
            x = jax.nn.relu(side + group_norm(block["norm2"], conv(block["conv2"], y)))
        return at(p["head"], x.mean((1, 2)))

    blocks = [dict(conv1=new(3, 3, i, o), conv2=new(3, 3, o, o), norm1=scale(o), norm2=scale(o),
                   **({"side": new(1, 1, i, o)} if stride > 1 else {})) for i, o, stride in shapes]
    return dict(first=new(3, 3, 3, 16), norm=scale(16), blocks=blocks, head=linear(64, 10)), forward


def jax_steps(case):
    import jax
    import jax.numpy as jnp
    from jax_privacy import clipped_grad
    params, forward = jax_network(case)
    x, y = (jnp.asarray(v) for v in batch(case))

    def loss_fn(params, x, y):
        scores = jax.nn.log_softmax(forward(params, x))
        return -jnp.take_along_axis(scores, y[:, None], 1).mean()

    plain = jax.jit(jax.grad(loss_fn))
    private = jax.jit(clipped_grad(loss_fn, l2_clip_norm=1., batch_argnums=(1, 2)))
    return {name: lambda f=f: jax.block_until_ready(f(params, x, y))
            for name, f in (("plain", plain), ("private", private))}


def steps(framework, case):
    if framework == "jax_privacy":
        return jax_steps(case)
    return torch_steps(case, {"dp_course": ours, "opake": opake}[framework])


# --- one process


def clock(step, times):
    start = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - start)/times


def alternate(framework, case, rounds):
    "Seconds and ratios of both steps, in turns."
    both = steps(framework, case)
    for step in both.values():
        for _ in range(2):
            step()
    times = {name: max(1, round(.02/clock(step, 1))) for name, step in both.items()}
    seconds = {name: [] for name in both}
    for _ in range(rounds):
        for name, step in both.items():
            seconds[name].append(clock(step, times[name]))
    ratios = [b/a for a, b in zip(seconds["plain"], seconds["private"])]
    q1, ratio, q3 = statistics.quantiles(ratios, n=4)
    found = {f"{name}_seconds": statistics.median(v) for name, v in seconds.items()}
    return found | dict(ratio=ratio, q1=q1, q3=q3, rounds=rounds)


def resident():
    "The most memory that this process ever held, in MB."
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])/1024


def peak(framework, case, name):
    "Peak memory in MB of two steps, above what imports and parameters took."
    step = steps(framework, case)[name]
    before = resident()
    for _ in range(2):
        step()
    return resident() - before


# --- all of them


def child(*words):
    "Run this file on one case, in a process of its own."
    done = subprocess.run([sys.executable, str(HERE), "--one", *map(str, words)], text=True,
                          capture_output=True, env={**os.environ, **ALONE})
    if done.returncode:
        return {"note": (done.stderr.strip().splitlines() or ["it died"])[-1][:160]}
    return json.loads(done.stdout.splitlines()[-1])


def measured(framework, case, rounds):
    row = child(framework, case, rounds)
    if "note" in row:
        return row
    peaks = {name: child(framework, case, name) for name in ("plain", "private")}
    return {k: round(v, 5) for k, v in row.items()} | {f"{k}_mb": v for k, v in peaks.items()}


def installed(framework):
    try:
        return importlib.util.find_spec(NEEDS[framework]) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def line(case, framework, row):
    if "note" in row:
        return f"{case:16}{framework:12} {row['note']}"
    return (f"{case:16}{framework:12}{row['plain_seconds']:9.4f}{row['private_seconds']:9.4f}"
            f"{row['ratio']:9.2f}  {row['q1']:.2f} .. {row['q3']:.2f}"
            f"{row['plain_mb']:9.0f}{row['private_mb']:9.0f}")


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--out", type=Path, default=HERE.parent.parent/"out")
    p.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.one:
        framework, case, what = args.one
        found = (alternate(framework, case, int(what)) if what.isdigit()
                 else round(peak(framework, case, what)))
        return print(json.dumps(found))
    from dp_course.basics import machine
    from dp_course.training import code_version
    print(f"{'':16}{'framework':12}{'plain s':>9}{'private s':>9}{'ratio':>9}  {'quartiles':12}"
          f"{'plain MB':>9}{'private':>9}")
    day = datetime.date.today().isoformat()
    path = args.out/f"{day}-bench-frameworks.json"
    args.out.mkdir(parents=True, exist_ok=True)
    about = dict(date=day, code=code_version(),
                 machine=machine(("torch", "opake-dpsgd", "jax", "jax_privacy")),
                 how=" ".join(__doc__.split("\n\n")[-1].split()))
    cases = {}
    for case in args.cases:
        rows = cases[case] = {}
        for framework in NEEDS:
            rows[framework] = (measured(framework, case, args.rounds) if installed(framework)
                               else {"note": "not installed"})
            print(line(case, framework, rows[framework]), flush=True)
        record = {**about, "load": os.getloadavg(), "cases": cases}
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
