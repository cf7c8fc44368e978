"""The longer experiments of notebook 08: one JSON line per finished run, appended to runs/; what is recorded is skipped.

    python tools/sweep_scaling.py grid      accuracy over batch size and steps at eps = 3, learning rate tuned for each
    python tools/sweep_scaling.py papernot  batch 256 x 40 epochs against 1024 x 7, Papernot et al. 2021
    python tools/sweep_scaling.py small     the same with a small network, a few minutes
    python tools/sweep_scaling.py signal    signal and noise of one gradient, over batch size and training

Call it again until it says that nothing is left; `--minutes` says when to stop starting new runs.
"""
import argparse
import json
import math
import platform
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from dp_course.accounting import PrivacyPlan, epsilon  # noqa: E402
from dp_course.data import best_available  # noqa: E402
from dp_course.dpsgd import FlatClip
from dp_course.trainer import Trainer  # noqa: E402
from dp_course.gradients import fast_grad_sum  # noqa: E402
from dp_course.models import papernot_cnn  # noqa: E402
from dp_course.scaling import matched_lr, nonprivate_signal_noise  # noqa: E402

RECORD = ROOT/"runs/2026-11-21-sweep-scaling.jsonl"
KEY = ("part", "split", "model", "n", "batch_size", "steps", "planned", "lr", "noise", "seed")
DELTA = 1e-5


def small_fashion(n=12_000, split="val"):
    "n training images of 14x14 pixels; 'val': tested on 5,000 other training images, 'test': on the real test set."
    data = best_available("fashion", "digits")
    if data.name.startswith("digits"): return data.split(300) if split == "val" else data
    i = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
    def small(x): return nn.functional.avg_pool2d(data.normalize(x), 2)
    x, y = data.train_x, data.train_y
    other = (x[i[-5000:]], y[i[-5000:]]) if split == "val" else (data.test_x, data.test_y)
    return replace(data, train_x=small(x[i[:n]]), train_y=y[i[:n]], test_x=small(other[0]), test_y=other[1])


def mlp(seed, pixels=196):
    "6,634 parameters on 14x14 pixels: the smallest network with a hidden layer that is any good here."
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 32), nn.Tanh(), nn.Linear(32, 10))


def cnn(seed):
    torch.manual_seed(seed)
    return papernot_cnn(16, "tanh")


def seen():
    "Keys of the runs that are recorded."
    if not RECORD.exists(): return set()
    return {tuple(r.get(k) for k in KEY) for r in map(json.loads, RECORD.read_text().splitlines())}


def write(row):
    row |= {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    with open(RECORD, "a") as f: f.write(json.dumps(row) + "\n")
    print({k: row[k] for k in (*KEY, "accuracy", "seconds") if k in row}, flush=True)


def describe(part, split, data, name, model, plan, steps, lr, momentum, clip, seed):
    "Everything that says which run this is."
    return {"part": part, "split": split, "data": data.name, "model": name,
            "parameters": sum(p.numel() for p in model.parameters()), "n": plan.n, "batch_size": plan.batch_size,
            "q": plan.q, "steps": steps, "planned": plan.steps, "epochs": steps*plan.q, "sigma": plan.sigma,
            "noise": True, "target_eps": plan.eps, "delta": plan.delta, "lr": lr,
            "momentum": momentum, "max_norm": clip.max_norm, "seed": seed, "tested_on": len(data.test_x)}


def train(part, split, data, name, make, plan, lr, seed, *, momentum=0., max_norm=1., steps=None, deadline=None, keep=None):
    "Train once and record it, unless that is done; False if the time was up before (then a checkpoint is kept)."
    model, clip, steps = make(seed), FlatClip(max_norm), steps or plan.steps
    row = describe(part, split, data, name, model, plan, steps, lr, momentum, clip, seed)
    if tuple(row.get(k) for k in KEY) in seen(): return True
    if deadline and time.time() > deadline: return False
    trainer = Trainer(model, data, plan, engine=fast_grad_sum, clip=clip, seed=seed, micro_batch=512 if name == "cnn" else None,
                      optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum))
    began, before = time.time(), 0.
    if keep and keep.exists():
        trainer.load(keep)
        before = json.loads(keep.with_suffix(".json").read_text())
    while trainer.t < steps:
        trainer.fit(min(20, steps - trainer.t))
        if keep and time.time() > deadline:
            trainer.save(keep)
            keep.with_suffix(".json").write_text(json.dumps(before + time.time() - began))
            return False
    eps = trainer.epsilon()
    write(row | {"eps": eps, "accuracy": trainer.evaluate(), "seconds": round(before + time.time() - began, 2)})
    if keep:
        for p in keep.parent.glob(f"{keep.stem}.*"): p.unlink()
    return True


N, EPS = 12_000, 3.
BATCHES = (64, 256, 1024, 4096)
STEPS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LRS = (.125, .25, .5, 1., 2., 4., 8., 16.)


def best_lr(rows):
    "The learning rate with the best mean validation accuracy."
    by = {}
    for r in rows: by.setdefault(r["lr"], []).append(r["accuracy"])
    return max(by, key=lambda lr: sum(by[lr])/len(by[lr]))


def rows(**wanted):
    "Recorded runs with these values."
    found = map(json.loads, RECORD.read_text().splitlines()) if RECORD.exists() else ()
    return [r for r in found if all(r.get(k) == v for k, v in wanted.items())]


def grid(deadline, keep):
    "Tune the learning rate on validation in every cell, then three seeds at the best one, on the test set."
    val, test = small_fashion(N, "val"), small_fashion(N, "test")
    for batch_size, steps in product(BATCHES, STEPS):
        if batch_size*steps > 2**21 or batch_size*steps < 2**11: continue
        plan = PrivacyPlan(N, batch_size, steps, EPS, DELTA)
        if not all(train("grid", "val", val, "mlp", mlp, plan, lr, 100, deadline=deadline) for lr in LRS): return False
        lr = best_lr(rows(part="grid", split="val", batch_size=batch_size, steps=steps))
        if not all(train("grid", "test", test, "mlp", mlp, plan, lr, seed, deadline=deadline) for seed in range(3)): return False
    return True


def papernot(deadline, keep, seeds=range(3)):
    "1024 x 7: tuned on 5,000 held-out images. 256 x 40: its lr is carried over (`matched_lr`), to the nearest power of two. Three seeds each."
    data = best_available("fashion", "digits")
    val, kw = data.split(5000), dict(momentum=.9, max_norm=.1, deadline=deadline)
    def plan(n, batch_size, epochs): return PrivacyPlan(n, batch_size, round(epochs*n/batch_size), 2.7, DELTA)
    for lr in (.5, 1., 2., 4., 8.):
        if not train("papernot", "val", val, "cnn", cnn, plan(55_000, 1024, 7), lr, 100, **kw): return False
    tuned = best_lr(rows(part="papernot", split="val", model="cnn", batch_size=1024))
    short, long = plan(60_000, 1024, 7), plan(60_000, 256, 40)
    carried = 2.**round(math.log2(matched_lr(tuned, *((p.batch_size, p.steps, p.sigma) for p in (short, long)))))
    for seed, (p, lr) in product(seeds, ((short, tuned), (long, carried))):
        at = keep/f"papernot-{p.batch_size}-{lr:g}-{seed}.checkpoint"
        if not train("papernot", "test", data, "cnn", cnn, p, lr, seed, keep=at, **kw): return False
    return True


def small(deadline, keep):
    "The same two settings with the small network on 14x14 pixels; both rates tuned on 5,000 held-out images."
    val, test = small_fashion(55_000, "val"), small_fashion(60_000, "test")
    for batch_size, epochs in ((1024, 7), (256, 40)):
        def plan(n): return PrivacyPlan(n, batch_size, round(epochs*n/batch_size), 2.7, DELTA)
        for lr in LRS:
            if not train("papernot", "val", val, "mlp", mlp, plan(55_000), lr, 100, deadline=deadline): return False
        lr = best_lr(rows(part="papernot", split="val", model="mlp", batch_size=batch_size))
        for seed in range(3):
            if not train("papernot", "test", test, "mlp", mlp, plan(60_000), lr, seed, deadline=deadline): return False
    return True


def signal(deadline, keep):
    "Measure a clipped gradient's signal and noise before, during and after the 1024 x 7 run."
    data = best_available("fashion", "digits")
    plan = PrivacyPlan(60_000, 1024, round(7*60_000/1024), 2.7, DELTA)
    trainer = Trainer(cnn(0), data, plan, engine=fast_grad_sum, clip=FlatClip(.1), seed=0, micro_batch=512,
                      optimizer=partial(torch.optim.SGD, lr=2., momentum=.9))
    done = {r["steps"] for r in rows(part="signal")}
    for steps in (0, 59, plan.steps):
        trainer.fit(steps - trainer.t)
        if steps in done: continue
        began, x, y = time.time(), data.train_x, data.train_y
        found = nonprivate_signal_noise(trainer.model, data, clip=trainer.clip, engine=fast_grad_sum, batch_sizes=[4**k for k in (4, 5, 6, 7)],
                                        draws=4, generator=torch.Generator().manual_seed(0))
        row = describe("signal", "train (nonprivate)", data, "cnn", trainer.model, plan, steps, 2., .9, trainer.clip, 0)
        for r in found: write(row | r | {"accuracy": trainer.evaluate(), "seconds": round(time.time()-began, 2)})
        if time.time() > deadline: return False
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["grid", "papernot", "small", "signal"])
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after this time")
    parser.add_argument("--keep", type=Path, default=ROOT/"out", help="folder for the checkpoint of a long run")
    parser.add_argument("--seed", type=int, help="papernot: this seed only")
    args = parser.parse_args()
    if args.seed is not None: papernot = partial(papernot, seeds=[args.seed])  # noqa: F811
    args.keep.mkdir(exist_ok=True)
    done = globals()[args.part](time.time() + 60*args.minutes, args.keep)
    print("nothing is left" if done else "more is left: call it again")
