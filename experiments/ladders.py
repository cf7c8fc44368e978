"""De et al.'s ladder twice: on as many images and in as many steps (lesson 12).

    python -m experiments ladders compute    + large batch, + WS, + views on as many images
    python -m experiments ladders steps      the same, in as many steps
    python -m experiments ladders plain      the last network without privacy
    python -m experiments ladders all        everything, cheap rungs first; about 4 hours of a core

CIFAR-10 at 32x32, eps = 8, a network of 70,826 parameters in bfloat16 where the processor has it.
10,000 training images: privacy is then as scarce as for De et al., whose batch is as large a share
of theirs. A rate is the better the higher its mean over two seeds on 5,000 other training images;
the grid grows in steps of two until its best rate has a neighbour on either side. That rate then
trains with five seeds and is tested at the last step. EMA costs no run: it is read from those of
"+ views", which also train at the rate that is best for EMA.
"""
import sys
import time
from functools import lru_cache, partial

import torch

from dp_course.data import load, multiplicity, views
from dp_course.gradients import FlatClip, bf16_engine, fast_grad_sum, settled_precision
from dp_course.privacy import PrivacyPlan
from dp_course.training import EMA, Trainer
from experiments.harness import (
    accuracy,
    cells_by_rate,
    first_images,
    lines_of,
    lines_without_privacy,
    train_without_privacy,
)
from experiments.tricks import small_net

NAME = "ladders"
EPS, DELTA, CLIP, N, HELD = 8., 1e-5, 1., 10_000, 5000
TUNING_SEEDS, SEEDS = (100, 101), range(5)
STEPS, SMALL, LARGE, VIEWS = 512, 128, 512, 4
BASE = dict(norm=True, ws=True, batch_size=LARGE, k=0)
RUNGS = {  # each adds one thing to the one before it
    "none": BASE | dict(norm=False, ws=False, batch_size=SMALL),
    "+ GroupNorm": BASE | dict(ws=False, batch_size=SMALL),
    "+ large batch": BASE | dict(ws=False),
    "+ WS": BASE,
    "+ views": BASE | dict(k=VIEWS),
    "without privacy": BASE | dict(batch_size=SMALL, k=1),
}
FIRST = {"none": .5, "without privacy": .1}  # rate to begin with; others 2
LADDERS = {"compute": SMALL*STEPS, "steps": LARGE*STEPS}  # images, views apart


# ---- data and network

FILTERS = (16, 2), (32, 1), (32, 2), (64, 1), (64, 1)  # with GroupNorm 70,826 parameters


def network(cell):
    torch.manual_seed(cell["seed"])
    return small_net(cell["norm"], cell["ws"], filters=FILTERS)


@lru_cache
def images(stage):
    return first_images(load("cifar10"), N, HELD, stage)


def precision():
    return settled_precision("auto")


# ---- one run

def train_privately(
    cell,     # ladder, rung, lr, seed, and the fields of the rung
    data,
    steps,
):            # `Trainer` after its last step, with EMA on board
    "Make a private run."
    plan = PrivacyPlan(n=len(data), batch_size=cell["batch_size"], steps=steps, eps=EPS,
                       delta=DELTA)
    engine = bf16_engine(fast_grad_sum) if precision() == "bf16" else fast_grad_sum
    return Trainer(
        network(cell), data, plan,
        engine=engine,
        clip=FlatClip(CLIP),
        seed=cell["seed"],
        micro_batch=512//max(1, cell["k"]),
        callbacks=[EMA(.999)],
        augment=multiplicity(cell["k"]) if cell["k"] else None,
        optimizer=partial(torch.optim.SGD, lr=cell["lr"]),
    ).fit()


def one_view(x, generator):
    "Every image through a window of its own, or mirrored."
    return views(x, 1, generator).tree[:, 0]


def plain_lines(cell, data, steps):
    "The record of a run without privacy: momentum, new views every time."
    began = time.perf_counter()
    model = network(cell)
    optimizer = torch.optim.SGD(model.parameters(), lr=cell["lr"], momentum=.9)
    train_without_privacy(model, data, optimizer, cell["batch_size"], steps,
                          torch.Generator().manual_seed(cell["seed"]), augment=one_view,
                          half=precision() == "bf16")
    return lines_without_privacy(
        sys.modules[__name__], cell | dict(steps=steps), data, time.perf_counter() - began,
        step=steps,
        test_accuracy=accuracy(model, data))


def run(
    cell,       # stage, ladder, rung, lr, seed
    data=None,  # default: that of the stage
    seen=None,  # images, in expectation and views apart; default: the ladder's
):              # list of runs, as `harness.work` wants it
    "Train once."
    data = data or images(cell["stage"])
    cell = cell | RUNGS[cell["rung"]] | dict(max_norm=CLIP, precision=precision())
    cell["split"] = "val" if cell["stage"] == "tune" else "test"
    steps = (seen or LADDERS[cell["ladder"]])//cell["batch_size"]
    if cell["rung"] == "without privacy":
        return [plain_lines(cell, data, steps)]
    began = time.perf_counter()
    trainer = train_privately(cell, data, steps)
    seconds = time.perf_counter() - began
    return [lines_of(sys.modules[__name__], cell, trainer, seconds,
                     test_accuracy=trainer.evaluate(),
                     ema=trainer.callbacks[0].evaluate(trainer))]


# ---- what to run

def key(row):
    return tuple(row[name] for name in "stage ladder rung lr seed".split())


def cells_of(recorded, ladder, rung):
    by = ("accuracy", "ema") if rung == "+ views" else ("accuracy",)
    return cells_by_rate(recorded, FIRST.get(rung, 2.), TUNING_SEEDS, SEEDS, by,
                         ladder=ladder, rung=rung)


def part(*rungs):
    "A part of the sweep: pairs of ladder and rung, one after the other."
    return lambda recorded: [cell for ladder, rung in rungs
                             for cell in cells_of(recorded, ladder, rung)]


COMPUTE = [("compute", rung) for rung in RUNGS if rung != "without privacy"]
EQUAL_STEPS = [("steps", rung) for rung in ("+ large batch", "+ WS", "+ views")]
PLAIN = [("compute", "without privacy"), ("steps", "without privacy")]
PARTS = {
    "compute": part(*COMPUTE),
    "steps": part(*EQUAL_STEPS),
    "plain": part(*PLAIN),
    "all": part(*COMPUTE, *EQUAL_STEPS[:2], *PLAIN, EQUAL_STEPS[2]),
}
