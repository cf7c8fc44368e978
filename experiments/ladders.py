"""De et al.'s ladder twice: at equal compute and at equal steps (lesson 10).

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
from torch import nn

from dp_course.data import load, multiplicity, views
from dp_course.gradients import FlatClip, bf16_engine, fast_grad_sum, settled_precision
from dp_course.models import WSConv2d, four_a_group
from dp_course.privacy import PrivacyPlan
from dp_course.training import EMA, Trainer
from experiments.harness import chosen, lines_of, lines_without_privacy

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

def small_net(norm=True, ws=True):
    "Five 3x3 convolutions and a linear layer: 70,826 parameters with GroupNorm."
    conv = WSConv2d if ws else nn.Conv2d
    layers, i = [], 3
    for o, stride in ((16, 2), (32, 1), (32, 2), (64, 1), (64, 1)):
        layers.append(conv(i, o, 3, stride, 1))
        if norm:
            layers.append(four_a_group(o))
        layers.append(nn.ReLU())
        i = o
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 10))


@lru_cache
def images(stage):
    "The first 10,000 of the shuffled training images; tested on 5,000 others, or on the test set."
    data = load("cifar10")
    held = data.split(HELD)
    test = held if stage == "tune" else data
    return test.replace(train_x=held.train_x[:N], train_y=held.train_y[:N])


def precision():
    return settled_precision("auto")


# ---- one run

def train_privately(
    cell,     # ladder, rung, lr, seed, and the fields of the rung
    data,
    steps,
):            # `Trainer` after its last step, with EMA on board
    "Make a private run."
    torch.manual_seed(cell["seed"])
    plan = PrivacyPlan(n=len(data), batch_size=cell["batch_size"], steps=steps, eps=EPS,
                       delta=DELTA)
    engine = bf16_engine(fast_grad_sum) if precision() == "bf16" else fast_grad_sum
    return Trainer(
        small_net(cell["norm"], cell["ws"]), data, plan,
        engine=engine,
        clip=FlatClip(CLIP),
        seed=cell["seed"],
        micro_batch=512//max(1, cell["k"]),
        callbacks=[EMA(.999)],
        augment=multiplicity(cell["k"]) if cell["k"] else None,
        optimizer=partial(torch.optim.SGD, lr=cell["lr"]),
    ).fit()


def train_plainly(cell, data, steps):
    "Ordinary training: momentum, a new view of each image every time, the rate falls to zero."
    torch.manual_seed(cell["seed"])
    generator = torch.Generator().manual_seed(cell["seed"])
    model = small_net(cell["norm"], cell["ws"])
    optimizer = torch.optim.SGD(model.parameters(), lr=cell["lr"], momentum=.9)
    for t in range(steps):
        idx = torch.randint(len(data), (cell["batch_size"],), generator=generator)
        x, y = data.rows(idx)
        seen = views(data.normalize(x), 1, generator).tree[:, 0]
        optimizer.param_groups[0]["lr"] = cell["lr"]*(1 - t/steps)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision() == "bf16"):
            output = model(seen)
        nn.functional.cross_entropy(output.float(), y).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model, data):
    right = [model(data.normalize(x)).argmax(1) == y
             for x, y in zip(data.test_x.split(1000), data.test_y.split(1000))]
    return torch.cat(right).double().mean().item()


def plain_lines(cell, data, steps):
    "The record of a run without privacy."
    began = time.perf_counter()
    found = accuracy(train_plainly(cell, data, steps), data)
    return lines_without_privacy(
        sys.modules[__name__], cell | dict(steps=steps), data, time.perf_counter() - began,
        step=steps,
        test_accuracy=found)


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


def tried(recorded, ladder, rung, by="accuracy"):
    "Mean validation accuracy of every rate that has both its seeds."
    found = {}
    for row in chosen(recorded, stage="tune", ladder=ladder, rung=rung):
        found.setdefault(row["lr"], []).append(row[by])
    return {lr: sum(seen)/len(seen) for lr, seen in found.items() if len(seen) == 2}


def best_rate(recorded, ladder, rung, by="accuracy"):
    "The best rate, or None before it has a worse neighbour on either side."
    means = tried(recorded, ladder, rung, by)
    lr = max(means, key=means.get, default=None)
    return lr if lr and {lr/2, 2*lr} <= means.keys() else None


def next_rates(recorded, ladder, rung, by="accuracy"):
    "Rates to try: three, then one more beyond the edge at which the best one lies."
    means = tried(recorded, ladder, rung, by)
    lr = max(means, key=means.get, default=FIRST.get(rung, 2.))
    return {lr/2, lr, 2*lr}


def cells_of(recorded, ladder, rung):
    "What a rung still asks for, and what it has asked for."
    same = dict(ladder=ladder, rung=rung)
    goals = ("accuracy", "ema") if rung == "+ views" else ("accuracy",)
    rates = set(tried(recorded, **same))
    for by in goals:
        rates |= next_rates(recorded, **same, by=by)
    found = [dict(stage="tune", **same, lr=lr, seed=seed)
             for lr in sorted(rates) for seed in TUNING_SEEDS]
    best = [best_rate(recorded, **same, by=by) for by in goals]
    if None not in best:
        found += [dict(stage="final", **same, lr=lr, seed=seed)
                  for lr in sorted(set(best)) for seed in SEEDS]
    return found


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
