"""What is free after the noise, and what many views buy (lessons 11 and 12).

    python -m experiments tricks ladder-few        + GroupNorm, + large batch, + WS, + views
    python -m experiments tricks optimizers-few    momentum, Adam, DP-AdamBC, RMSprop, cosine, views

Every run sees 65,536 images in expectation; EMA costs no run. The ladder is climbed twice: `many`
has all 50,000 training images (1.3 epochs), `few` has 10,000 (6.6 epochs). Every rate of a rung is
tried once and judged on 5,000 held-out training images; the best then trains with three seeds and
is tested at the last step. CIFAR-10 at 16x16.
"""
import sys
import time
from functools import lru_cache, partial

import torch
from torch import nn

from dp_course.data import load, multiplicity
from dp_course.gradients import FlatClip, fast_grad_sum
from dp_course.models import WSConv2d, four_a_group
from dp_course.privacy import PrivacyPlan
from dp_course.training import EMA, DPAdam, Schedule, TailAverage, Trainer
from experiments.harness import best_value, chosen, first_images, lines_of, rows_of

NAME = "tricks"
EPS, DELTA, CLIP, SEEDS = 8., 1e-5, 1., (0, 1, 2)
EXAMPLES = 512*128  # seen in expectation
RATES = (1., 2., 4., 8.)
ADAM_RATES = (.001, .004, .016)
BASE = dict(norm=True, ws=True, batch_size=512, k=0, optimizer="sgd", schedule="constant")
RUNGS = {  # each adds one thing to the one before it; + EMA is read from the runs of + views
    "none": BASE | dict(norm=False, ws=False, batch_size=128),
    "+ GroupNorm": BASE | dict(ws=False, batch_size=128),
    "+ large batch": BASE | dict(ws=False),
    "+ WS": BASE,
    "+ views": BASE | dict(k=4),
}
OTHERS = {  # what replaces plain SGD at a constant rate in '+ WS', and the rates that are tried
    "momentum": (BASE | dict(optimizer="momentum"), (.2, .4, .8)),
    "Adam": (BASE | dict(optimizer="adam"), ADAM_RATES),
    "DP-AdamBC": (BASE | dict(optimizer="adambc"), ADAM_RATES),
    "RMSprop": (BASE | dict(optimizer="rmsprop"), (*ADAM_RATES, .064)),
    "cosine": (BASE | dict(schedule="cosine"), (4., 8., 16.)),
    "1 view": (BASE | dict(k=1), (4., 8.)),
    "2 views": (BASE | dict(k=2), (4., 8.)),
}


# ---- data and network

FILTERS = (8, 2), (16, 1), (32, 2), (32, 1)  # filters and stride of every convolution


def small_net(norm=True, ws=True, channels=3, filters=FILTERS):
    "3x3 convolutions and a linear layer: 15,786 parameters with GroupNorm and 3 channels."
    conv = WSConv2d if ws else nn.Conv2d
    layers, i = [], channels
    for o, stride in filters:
        layers.append(conv(i, o, 3, stride, 1))
        if norm:
            layers.append(four_a_group(o))
        layers.append(nn.ReLU())
        i = o
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 10))


@lru_cache
def small_images():
    data = load("cifar10")

    def small(x):
        pool = partial(nn.functional.avg_pool2d, kernel_size=2)
        return torch.cat([pool(data.normalize(rows)) for rows in x.split(5000)])

    return data.replace(train_x=small(data.train_x), test_x=small(data.test_x),
                        name=f"{data.name} at 16x16")


@lru_cache
def images(stage, setting):
    "Tested on held-out training images (tune) or on the test set (final)."
    data = small_images()
    if setting == "few":
        return first_images(data, 10_000, 5000, stage)
    return data.split(5000) if stage == "tune" else data


# ---- one run

def make_optimizer(name, lr, plan, clip):
    "What turns parameters into an optimizer."
    if name == "adambc":
        return DPAdam.from_plan(plan, clip, lr=lr)
    return {
        "sgd": partial(torch.optim.SGD, lr=lr),
        "momentum": partial(torch.optim.SGD, lr=lr, momentum=.9),
        "adam": partial(DPAdam, lr=lr),
        "rmsprop": partial(torch.optim.RMSprop, lr=lr),
    }[name]


def train(
    data,
    config,             # of a rung
    lr,
    seed,
    examples=EXAMPLES,  # seen in expectation: every rung computes about the same, views apart
):                      # `Trainer` before its first step, with all averages on board
    "Make a private run."
    torch.manual_seed(seed)
    n, channels = data.train_x.shape[:2]
    batch_size, k = config["batch_size"], config["k"]
    model = small_net(config["norm"], config["ws"], channels)
    steps = int(examples/batch_size)
    plan = PrivacyPlan(n=n, batch_size=batch_size, steps=steps, eps=EPS, delta=DELTA)
    clip = FlatClip(CLIP)
    schedule = Schedule(lr, config["schedule"], steps)
    averages = [EMA(.999), EMA(.999, warmup=False), TailAverage(steps//2)]
    photo = channels == 3  # a mirrored digit is none
    return Trainer(
        model, data, plan,
        engine=fast_grad_sum,
        clip=clip,
        seed=seed,
        micro_batch=2048//max(1, k),
        callbacks=[*averages, schedule],
        augment=multiplicity(k, crop=2 if photo else 1, flip=photo) if k else None,
        optimizer=make_optimizer(config["optimizer"], schedule.at(0), plan, clip),
    )


def measure(trainer):
    "Accuracy at the last step: of the last iterate and of three averages of all of them."
    ema, cold, tail = trainer.callbacks[:3]
    return {
        "accuracy": trainer.evaluate(),
        "ema": ema.evaluate(trainer),
        "ema_no_warmup": cold.evaluate(trainer),
        "tail": tail.evaluate(trainer),
    }


def run(
    cell,       # stage, setting, rung, lr, seed
    data=None,  # default: that of the setting
    **changes,  # of the rung: a smaller batch, say
):
    "Train once."
    config = settings(cell["rung"]) | changes
    examples = config.pop("examples", EXAMPLES)
    data = data or images(cell["stage"], cell["setting"])
    began = time.perf_counter()
    trainer = train(data, config, cell["lr"], cell["seed"], examples).fit()
    found = measure(trainer)
    split = "val" if cell["stage"] == "tune" else "test"
    cell = cell | config | dict(split=split, max_norm=CLIP)
    return [lines_of(sys.modules[__name__], cell, trainer, time.perf_counter() - began,
                     test_accuracy=found.pop("accuracy"), **found)]


# ---- what to run

def settings(rung):
    return RUNGS[rung] if rung in RUNGS else OTHERS[rung][0]


def key(row):
    return row["stage"], row.get("setting", "many"), row["rung"], row["lr"], row["seed"]


def rows(path=None):
    "What is recorded; the oldest rows have no `setting` and mean 'many'."
    return [{"setting": "many", **row} for row in rows_of(sys.modules[__name__], path)]


def rung_cells(recorded, setting, rung, rates):
    "Every rate once; when all are there, three seeds of the best (for views also of EMA's best)."
    def cell(stage, lr, seed):
        return dict(stage=stage, setting=setting, rung=rung, lr=lr, seed=seed)

    tried = [row for row in chosen(recorded, rung=rung, stage="tune")
             if row.get("setting", "many") == setting]
    found = [cell("tune", lr, 0) for lr in rates]
    for by in ("accuracy", "ema") if rung == "+ views" else ("accuracy",):
        lr = best_value(tried, "lr", rates, by)
        if lr is not None:
            found += [cell("final", lr, seed) for seed in SEEDS]
    return found


def part(setting, rungs):
    "A part of the sweep: rung by rung."
    return lambda recorded: [cell for rung, rates in rungs.items()
                             for cell in rung_cells(recorded, setting, rung, rates)]


LADDER = {rung: RATES for rung in RUNGS}
OPTIMIZERS = {rung: rates for rung, (_, rates) in OTHERS.items()}
PARTS = {
    "ladder-few": part("few", LADDER),
    "ladder-many": part("many", LADDER),
    "optimizers-few": part("few", OPTIMIZERS),
    "optimizers-many": part("many", OPTIMIZERS),
}
