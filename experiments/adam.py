"""Adam, and Adam without the noise in its second moment, beside SGD (lesson 11).

    python -m experiments adam all      some minutes of one core

Softmax regression on scikit-learn's digits, eps = 1, 60 steps of batch 256. DP-AdamBC is tried with
five floors. A rate is the better the higher its mean over three seeds on 287 held-out training
digits; the grid grows in steps of two until its best rate has a neighbour on either side. That rate
then trains on all 1,437 digits with three other seeds and is tested at the last step.
"""
import sys
import time
from functools import partial

import torch
from torch import nn

from dp_course.data import load
from dp_course.gradients import FlatClip, fast_grad_sum
from dp_course.privacy import PrivacyPlan
from dp_course.training import EMA, DPAdam, Trainer
from experiments.harness import cells_by_rate, lines_of

NAME = "adam"
EPS, DELTA, CLIP, BATCH, STEPS, HELD = 1., 1e-5, 1., 256, 60, 287
TUNING_SEEDS, SEEDS = (100, 101, 102), (0, 1, 2)
FLOORS = 5e-8, 4e-6, 4e-5, 4e-4, 4e-3
RUNGS = {"SGD": dict(floor=None, first=2.), "Adam": dict(floor=None, first=.02)} | {
    f"DP-AdamBC, floor {floor:g}": dict(floor=floor, first=.02) for floor in FLOORS}


# ---- one run

def make_optimizer(rung, lr, plan, clip):
    "What turns parameters into an optimizer."
    if rung == "SGD":
        return partial(torch.optim.SGD, lr=lr)
    if rung == "Adam":
        return partial(DPAdam, lr=lr)
    return DPAdam.from_plan(plan, clip, lr=lr, floor=RUNGS[rung]["floor"])


def run(
    cell,         # stage, rung, lr, seed
    data=None,    # default: the digits
    steps=STEPS,
):                # list of runs, as `harness.work` wants it
    "Train once."
    digits = data or load("digits")
    data = digits.split(HELD) if cell["stage"] == "tune" else digits
    plan = PrivacyPlan(n=len(data), batch_size=BATCH, steps=steps, eps=EPS, delta=DELTA)
    clip, began = FlatClip(CLIP), time.perf_counter()
    torch.manual_seed(cell["seed"])
    trainer = Trainer(
        nn.Sequential(nn.Flatten(), nn.Linear(data.train_x[0].numel(), 10)), data, plan,
        engine=fast_grad_sum,
        clip=clip,
        seed=cell["seed"],
        callbacks=[EMA(.999)],
        optimizer=make_optimizer(cell["rung"], cell["lr"], plan, clip),
    ).fit()
    cell = cell | dict(split="val" if cell["stage"] == "tune" else "test", max_norm=CLIP,
                       floor=RUNGS[cell["rung"]]["floor"])
    return [lines_of(sys.modules[__name__], cell, trainer, time.perf_counter() - began,
                     test_accuracy=trainer.evaluate(),
                     ema=trainer.callbacks[0].evaluate(trainer))]


# ---- what to run

def key(row):
    return tuple(row[name] for name in "stage rung lr seed".split())


def cells_of(recorded, rung):
    return cells_by_rate(recorded, RUNGS[rung]["first"], TUNING_SEEDS, SEEDS, rung=rung)


PARTS = {"all": lambda recorded: [cell for rung in RUNGS for cell in cells_of(recorded, rung)]}
