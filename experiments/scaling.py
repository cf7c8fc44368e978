"""Batch, steps and learning rate under one budget (lesson 10).

    python -m experiments scaling grid        accuracy over batch size and steps at eps = 3
    python -m experiments scaling papernot    256 x 40 epochs against 1024 x 7, Papernot et al. 2021
    python -m experiments scaling small       the same with a small network, a few minutes
    python -m experiments scaling signal      signal and noise of one gradient, before and after
"""
import math
import sys
import time
from functools import lru_cache, partial
from itertools import product

import torch
from torch import nn

from dp_course.data import load
from dp_course.gradients import FlatClip, fast_grad_sum
from dp_course.models import papernot_cnn
from dp_course.privacy import PrivacyPlan
from dp_course.training import Trainer, matched_lr, nonprivate_signal_noise
from experiments.harness import best_value, chosen, lines_of

NAME = "scaling"
DELTA, TUNING_SEED, SEEDS = 1e-5, 100, range(3)
N = 12_000                           # training images of the grid
BATCHES = (64, 256, 1024, 4096)
STEPS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LRS = (.125, .25, .5, 1., 2., 4., 8., 16.)
CNN_LRS = (.5, 1., 2., 4., 8.)
PAPERNOT = (1024, 7), (256, 40)      # batch size, epochs; both at eps = 2.7
LOOKS = (0, 59, 410)                 # steps at which `signal` measures: start, 1 epoch, end


# ---- data and networks

@lru_cache
def small_fashion(n, stage):
    "n training images of 14x14 pixels, tested on 5,000 others (tune) or on the test set (final)."
    data = load("fashion")
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
    train, held = order[:n], order[-5000:]

    def small(x):
        return nn.functional.avg_pool2d(data.normalize(x), 2)

    test_x, test_y = data.test_x, data.test_y
    if stage == "tune":
        test_x, test_y = data.train_x[held], data.train_y[held]
    return data.replace(train_x=small(data.train_x[train]), train_y=data.train_y[train],
                        test_x=small(test_x), test_y=test_y)


def full_fashion(n, stage):
    "All 28x28 images; tune: 5,000 training images are held out and tested on."
    data = load("fashion")
    return data.split(5000) if stage == "tune" else data


def mlp(pixels=196):
    "6,634 parameters on 14x14 pixels: the smallest network with a hidden layer that is any good."
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 32), nn.Tanh(), nn.Linear(32, 10))


def cnn():
    return papernot_cnn(16, "tanh")


NETS = {"mlp": mlp, "cnn": cnn}


# ---- one run

@lru_cache
def grid_plan(batch_size, steps):
    return PrivacyPlan(n=N, batch_size=batch_size, steps=steps, eps=3., delta=DELTA)


@lru_cache
def papernot_plan(n, batch_size, epochs):
    steps = round(epochs*n/batch_size)
    return PrivacyPlan(n=n, batch_size=batch_size, steps=steps, eps=2.7, delta=DELTA)


def make_trainer(cell, data, plan):
    "The trainer of a cell, before its first step."
    torch.manual_seed(cell["seed"])
    return Trainer(
        NETS[cell["model"]](), data, plan,
        engine=fast_grad_sum,
        clip=FlatClip(cell["max_norm"]),
        seed=cell["seed"],
        micro_batch=512 if cell["model"] == "cnn" else None,
        optimizer=partial(torch.optim.SGD, lr=cell["lr"], momentum=cell["momentum"]),
    )


def run(
    cell,       # part, stage, model, n, batch_size, steps, lr, momentum, max_norm, seed
    data=None,  # default: that of the part
):              # list of runs, as `harness.work` wants it
    "Train once; `signal` measures instead."
    if cell["part"] == "signal":
        return measure_signal(cell)
    if data is None:
        images = full_fashion if cell["model"] == "cnn" else small_fashion
        data = images(cell["n"], cell["stage"])
    plan = PrivacyPlan(n=cell["n"], batch_size=cell["batch_size"], steps=cell["steps"],
                       eps=3. if cell["part"] == "grid" else 2.7, delta=DELTA)
    trainer = make_trainer(cell, data, plan)
    began = time.perf_counter()
    trainer.fit()
    split = "val" if cell["stage"] == "tune" else "test"
    cell = cell | dict(split=split, noise=True, epochs=plan.steps*plan.q)
    return [lines_of(sys.modules[__name__], cell, trainer, time.perf_counter() - began,
                     test_accuracy=trainer.evaluate())]


def measure_signal(cell):
    "How long a clipped gradient is and how far batches scatter, at some step of the 1024 x 7 run."
    # nonprivate: computed from training images without noise; they are public
    data = load("fashion")
    plan = papernot_plan(60_000, *PAPERNOT[0])
    trainer = make_trainer(cell, data, plan).fit(cell["steps"])
    began = time.perf_counter()
    found = nonprivate_signal_noise(
        trainer.model, data, clip=trainer.clip, engine=fast_grad_sum, draws=4,
        batch_sizes=[4**k for k in (4, 5, 6, 7)], generator=torch.Generator().manual_seed(0))
    seconds, accuracy = time.perf_counter() - began, trainer.evaluate()
    cell = cell | dict(split="train (nonprivate)", noise=True, epochs=cell["steps"]*plan.q)
    return [lines_of(sys.modules[__name__], cell | {"batch_size": row.pop("batch_size")}, trainer,
                     seconds, test_accuracy=accuracy, **row) for row in found]


# ---- what to run

def key(row):
    if row["part"] == "signal":
        return row["part"], row["steps"]
    return tuple(row[name] for name in "part stage model batch_size steps lr seed".split())


def cells(part, model, plans, lrs, seeds, stage, momentum=0., max_norm=1.):
    "One cell per plan, rate and seed."
    return [dict(part=part, stage=stage, model=model, n=plan.n, batch_size=plan.batch_size,
                 steps=plan.steps, lr=lr, momentum=momentum, max_norm=max_norm, seed=seed)
            for plan, lr, seed in product(plans, lrs, seeds)]


def tuned_lr(recorded, rates, **which):
    "The best rate of a setting, or None if not all of them are recorded."
    return best_value(chosen(recorded, stage="tune", **which), "lr", rates)


def tune_then_final(recorded, part, model, plan_of, rates, **which):
    "Every rate on validation images; when all are there, three seeds of the best on the test set."
    found = cells(part, model, [plan_of("tune")], rates, [TUNING_SEED], "tune")
    lr = tuned_lr(recorded, rates, part=part, model=model, **which)
    if lr is not None:
        found += cells(part, model, [plan_of("final")], [lr], SEEDS, "final")
    return found


def grid(recorded):
    found = []
    for batch_size, steps in product(BATCHES, STEPS):
        if 2**11 <= batch_size*steps <= 2**21:
            plan = grid_plan(batch_size, steps)
            found += tune_then_final(recorded, "grid", "mlp", lambda stage: plan, LRS,
                                     batch_size=batch_size, steps=steps)
    return found


def small(recorded):
    found = []
    for batch_size, epochs in PAPERNOT:
        def plan_of(stage):
            return papernot_plan(55_000 if stage == "tune" else 60_000, batch_size, epochs)
        found += tune_then_final(recorded, "papernot", "mlp", plan_of, LRS, batch_size=batch_size)
    return found


def papernot(recorded):
    "1024 x 7 is tuned; for 256 x 40 the rate is carried over, to the nearest power of two."
    same = dict(momentum=.9, max_norm=.1)
    tuning = [papernot_plan(55_000, *PAPERNOT[0])]
    found = cells("papernot", "cnn", tuning, CNN_LRS, [TUNING_SEED], "tune", **same)
    lr = tuned_lr(recorded, CNN_LRS, part="papernot", model="cnn", batch_size=1024)
    if lr is None:
        return found
    short, long = (papernot_plan(60_000, *setting) for setting in PAPERNOT)
    old, new = ((plan.batch_size, plan.steps, plan.sigma) for plan in (short, long))
    carried = 2.**round(math.log2(matched_lr(lr, old, new)))
    for seed in SEEDS:
        found += cells("papernot", "cnn", [short], [lr], [seed], "final", **same)
        found += cells("papernot", "cnn", [long], [carried], [seed], "final", **same)
    return found


def signal(recorded):
    run = dict(part="signal", stage="measure", model="cnn", lr=2., momentum=.9, max_norm=.1, seed=0)
    return [run | {"steps": steps} for steps in LOOKS]


PARTS = {"grid": grid, "papernot": papernot, "small": small, "signal": signal}
