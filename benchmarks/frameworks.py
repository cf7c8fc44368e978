"""A private step of three older libraries, in units of the plain step of each one's own framework.

    pip install --no-deps --target DIR backpack-for-pytorch einops unfoldNd pyvacy
    python -m venv TF && TF/bin/pip install tensorflow-privacy "tensorflow==2.15.*"
    PYTHONPATH=DIR python benchmarks/frameworks.py [--tf-python TF/bin/python] [--rounds 9]

Forward, backward, clipping and the sum, without noise or optimizer, on one thread, in CPU seconds.
A library has processes of its own: one in which plain and private steps alternate, and which then
compares the sum with a loop over the examples in float64; and one per step for its peak memory
above imports and data. A library that is not installed says so. opake and jax_privacy were
measured by this file at commit e9235b7.
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
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))
CASES = {  # examples, shape of one, words: None for images
    "resnet20-128": (128, (3, 32, 32), None), "resnet20-bare-128": (128, (3, 32, 32), None),
    "mlp-256": (256, (1, 28, 28), None), "words-256": (256, (40,), 5000)}
PACKAGES = {  # what a library's version is the version of
    "dp_course": ["torch"], "backpack": ["backpack-for-pytorch", "torch"],
    "backpack norms": ["backpack-for-pytorch", "torch"], "pyvacy": ["pyvacy", "torch"],
    "tf_privacy": ["tensorflow-privacy", "tensorflow"]}
ALONE = {  # one thread, and freed memory stays with the process, as in bench.py
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26)}


def batch(case):
    b, shape, words = CASES[case]
    rng = np.random.default_rng(0)
    x = rng.integers(words, size=(b, *shape)) if words else rng.standard_normal((b, *shape))
    return x if words else x.astype(np.float32), rng.integers(10, size=b)


def flat(arrays):
    return np.concatenate([np.asarray(a, np.float64).ravel() for a in arrays])


def clipped_sum(gradients):
    "Sum, in float64, of gradients that are clipped to norm 1: each a list of arrays."
    return sum(g/max(1., np.linalg.norm(g)) for g in map(flat, gradients))


# --- PyTorch


def torch_network(case):
    import torch
    from torch import nn

    from dp_course.models import resnet20

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    def bare_norm(channels):
        return nn.GroupNorm(channels//4, channels, affine=False)

    torch.manual_seed(0)
    if case == "resnet20-bare-128":
        return resnet20(conv=nn.Conv2d, norm=bare_norm)
    if case == "resnet20-128":
        return resnet20()
    if case == "mlp-256":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(nn.Embedding(5000, 32), Mean(), nn.Linear(32, 10))


def torch_steps(case, private):
    "A plain step, one by `private` (model, x, y) -> step, and the sum by a loop in float64."
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    model = torch_network(case)
    exact = deepcopy(model).double()
    x, y = (torch.from_numpy(v) for v in batch(case))

    def plain():
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()

    def loop():
        rows = x.double() if x.is_floating_point() else x
        for one, label in zip(rows, y):
            loss = F.cross_entropy(exact(one[None]), label[None])
            yield torch.autograd.grad(loss, list(exact.parameters()))

    return {"plain": plain, "private": private(deepcopy(model), x, y), "loop": loop}


def ours(model, x, y):
    import torch.nn.functional as F

    from dp_course.gradients import FlatClip, fast_grad_sum

    def loss_fn(output, y):
        return F.cross_entropy(output, y, reduction="none")

    def step():
        sums, _ = fast_grad_sum(model, loss_fn, x, y, FlatClip(1.))
        return [sums[name] for name, _ in model.named_parameters()]

    return step


def has_rules(model, field):
    "Refuse a network of which BackPACK left parameters out: it does so with a warning."
    left = sorted({type(m).__name__ for m in model.modules()
                   for p in m.parameters(recurse=False) if not hasattr(p, field)})
    if left:
        raise NotImplementedError(f"BackPACK has no {field} for {', '.join(left)}")


def backpack(model, x, y):
    "Its gradients of all examples, and our clip."
    import torch
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad
    model, loss_fn = extend(model), extend(torch.nn.CrossEntropyLoss(reduction="sum"))

    def step():
        model.zero_grad(set_to_none=True)
        with backpack(BatchGrad()):
            loss_fn(model(x), y).backward()
        has_rules(model, "grad_batch")
        rows = [p.grad_batch for p in model.parameters()]
        norms = sum(g.flatten(1).square().sum(1) for g in rows).sqrt()
        factors = (1/norms).clamp(max=1.)
        return [torch.tensordot(factors, g, 1) for g in rows]

    return step


def backpack_norms(model, x, y):
    "Its norms of all examples, and a second backward pass of the losses times our factors."
    import torch.nn.functional as F
    from backpack import backpack, extend
    from backpack.extensions import BatchL2Grad
    model = extend(model)

    def step():
        model.zero_grad(set_to_none=True)
        losses = F.cross_entropy(model(x), y, reduction="none")
        with backpack(BatchL2Grad()):
            losses.sum().backward(retain_graph=True)
        has_rules(model, "batch_l2")
        norms = sum(p.batch_l2 for p in model.parameters()).sqrt()
        factors = (1/norms).clamp(max=1.)
        model.zero_grad(set_to_none=True)
        (factors*losses).sum().backward()
        return [p.grad for p in model.parameters()]

    return step


def pyvacy(model, x, y):
    "Its optimizer, with next to no noise (it takes no zero): gradients come out divided by b."
    import torch.nn.functional as F
    from pyvacy.optim.dp_optimizer import DPSGD
    optimizer = DPSGD(l2_norm_clip=1., noise_multiplier=1e-12, batch_size=len(x),
                      params=model.parameters(), lr=0.)

    def step():
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return [len(x)*p.grad for p in model.parameters()]

    return step


# --- TensorFlow


def keras_network(case):  # inputs and scores of the same networks, channels last
    import tensorflow as tf
    of = tf.keras.layers

    class WSConv2D(of.Conv2D):
        def convolution_op(self, x, w):
            w = w - tf.reduce_mean(w, (0, 1, 2))
            inputs = w.shape[0]*w.shape[1]*w.shape[2]
            variance = tf.reduce_mean(tf.square(w), (0, 1, 2))
            return super().convolution_op(x, w*tf.math.rsqrt((variance + 1e-5)*inputs))

    def conv(x, channels, size, stride=1):
        x = WSConv2D(channels, size, stride, "same", use_bias=False)(x)
        return of.GroupNormalization(channels//4, epsilon=1e-5)(x)

    if case == "mlp-256":
        x = tf.keras.Input((28, 28, 1))
        return x, of.Dense(10)(of.Dense(128, "relu")(of.Flatten()(x)))
    if case == "words-256":
        x = tf.keras.Input((40,))
        return x, of.Dense(10)(of.GlobalAveragePooling1D()(of.Embedding(5000, 32)(x)))
    if case != "resnet20-128":
        raise NotImplementedError("this network is for BackPACK")
    x = tf.keras.Input((32, 32, 3))
    h, i = of.ReLU()(conv(x, 16, 3)), 16
    for o in [16]*3 + [32]*3 + [64]*3:
        stride = 1 if i == o else 2
        side = h if i == o else conv(h, o, 1, stride)
        h, i = of.ReLU()(side + conv(of.ReLU()(conv(h, o, 3, stride)), o, 3)), o
    return x, of.Dense(10)(of.GlobalAveragePooling2D()(h))


def keras_steps(case):
    "DPModel's own step, with its rules for Dense and Embedding; vmap where a layer has none."
    import tensorflow as tf
    import tensorflow_privacy
    from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.keras.utils.set_random_seed(0)
    losses = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    class Keep(tf.keras.optimizers.legacy.SGD):
        def apply_gradients(self, pairs, **_):
            self.kept = [g for g, _ in pairs]

    def dense(gradients):
        return [tf.convert_to_tensor(g).numpy() for g in gradients]

    def gradient(model):
        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = losses(y, model(x, training=True))
            return tape.gradient(loss, model.trainable_variables)
        return step

    inputs, scores = keras_network(case)
    network = tf.keras.Model(inputs, scores)
    private = tensorflow_privacy.DPModel(
        l2_norm_clip=1., noise_multiplier=0., use_xla=False, inputs=inputs, outputs=scores,
        layer_registry=layer_registry.make_default_layer_registry())
    optimizer = Keep()
    private.compile(optimizer, losses)
    x, y = batch(case)
    x = tf.constant(x.transpose(0, 2, 3, 1) if x.ndim == 4 else x)
    y = tf.constant(y)
    plain = gradient(network)

    @tf.function
    def step(x, y):
        private.train_step((x, y))
        return optimizer.kept

    def loop():
        tf.keras.backend.set_floatx("float64")
        exact = tf.keras.Model(*keras_network(case))
        exact.set_weights(network.get_weights())
        one = gradient(exact)
        rows = tf.cast(x, tf.float64) if x.dtype.is_floating else x
        for i in range(len(y)):
            yield dense(one(rows[i:i+1], y[i:i+1]))

    return {"plain": lambda: plain(x, y), "loop": loop,
            "private": lambda: [len(y)*tf.convert_to_tensor(g) for g in step(x, y)]}


def steps(library, case):
    if library == "tf_privacy":
        return keras_steps(case)
    return torch_steps(case, {"dp_course": ours, "backpack": backpack, "pyvacy": pyvacy,
                              "backpack norms": backpack_norms}[library])


# --- one process


def clock(step, times):
    start = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - start)/times


def deviation(both):
    "How far the private sum is from that of the loop, as a share of the latter's norm."
    found, right = flat(both["private"]()), clipped_sum(both["loop"]())
    return float(np.linalg.norm(found - right)/np.linalg.norm(right))


def alternate(library, case, rounds):
    "Seconds and ratios of both steps, in turns."
    both = steps(library, case)
    loop = both.pop("loop")
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
    found |= dict(ratio=ratio, q1=q1, q3=q3, rounds=rounds)
    found = {name: round(value, 5) for name, value in found.items()}
    return found | {"deviation": float(f"{deviation(both | {'loop': loop}):.2g}"),
                    "version": ", ".join(f"{p} {version(p)}" for p in PACKAGES[library])}


def resident():
    "The most memory that this process ever held, in MB."
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])/1024


def peak(library, case, name):
    "Peak memory in MB of two steps, above what imports and parameters took."
    step = steps(library, case)[name]
    before = resident()
    for _ in range(2):
        step()
    return round(resident() - before)


# --- all of them


def child(python, *words):
    "Run this file on one case, in a process of its own."
    done = subprocess.run([python, str(HERE), "--one", *map(str, words)], text=True,
                          capture_output=True, env={**os.environ, **ALONE})
    if done.returncode:
        return {"note": (done.stderr.strip().splitlines() or ["it died"])[-1][:160]}
    return json.loads(done.stdout.splitlines()[-1])


def measured(python, library, case, rounds):
    row = child(python, library, case, rounds)
    if "note" in row:
        return row
    return row | {f"{name}_mb": child(python, library, case, name)
                  for name in ("plain", "private")}


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--tf-python", default=sys.executable, help="that has tensorflow-privacy")
    p.add_argument("--out", type=Path, default=HERE.parent.parent/"out")
    p.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.one:
        library, case, what = args.one
        found = (alternate(library, case, int(what)) if what.isdigit()
                 else peak(library, case, what))
        return print(json.dumps(found))
    from dp_course.basics import machine
    from dp_course.training import code_version
    day = datetime.date.today().isoformat()
    path = args.out/f"{day}-bench-frameworks.json"
    args.out.mkdir(parents=True, exist_ok=True)
    about = dict(date=day, code=code_version(), machine=machine(("torch",)),
                 how=" ".join(__doc__.split("\n\n")[-1].split()))
    cases = {}
    for case in args.cases:
        rows = cases[case] = {}
        for library in PACKAGES:
            python = args.tf_python if library == "tf_privacy" else sys.executable
            rows[library] = measured(python, library, case, args.rounds)
            print(case, library, rows[library], flush=True)
        record = {**about, "load": os.getloadavg(), "cases": cases}
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
