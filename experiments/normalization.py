"""Normalization under privacy and without: a small residual network, part by part (lesson 06).

    python -m experiments normalization all

Every variant gets the same search over rates on held-out images, with privacy and without, and
five seeds on the test set. Without privacy: the same steps and batches, no clipping, no noise.
"""
import sys
import time
from functools import lru_cache, partial

import torch
from torch import nn

from dp_course.data import load
from dp_course.gradients import fast_grad_sum
from dp_course.models import BasicBlock, WSConv2d, four_a_group
from dp_course.privacy import PrivacyPlan
from dp_course.training import Trainer
from experiments.harness import chosen, lines_of, lines_without_privacy

NAME = "normalization"
N, SPLIT = 20_000, 5000             # training images; those held out for choosing the rate
BATCH_SIZE, STEPS, MOMENTUM = 512, 40, .9
TUNING_SEED, SEEDS = 100, range(5)
RATES = {True: (.25, .5, 1., 2., 4.), False: (.02, .05, .1, .2, .4, .8)}  # private, not private
GROUPS, STANDARDIZED, EARLY = dict(norm=four_a_group), dict(conv=WSConv2d), dict(order="relu-norm")
VARIANTS = {
    "linear model": None,
    "no norm": {},
    "GN": GROUPS,
    "GN + WS": GROUPS | STANDARDIZED,
    "GN, ReLU first": GROUPS | EARLY,
    "GN + WS, ReLU first": GROUPS | STANDARDIZED | EARLY,
}


def nothing(channels):
    return nn.Identity()


def network(conv=nn.Conv2d, norm=nothing, order="norm-relu"):
    "Seven 3x3 convolutions, six of them in residual blocks."
    block = partial(BasicBlock, conv=conv, norm=norm, order=order)
    pair = [norm(8), nn.ReLU()]
    if order == "relu-norm":
        pair.reverse()
    return nn.Sequential(
        conv(1, 8, 3, 2, 1, bias=False), *pair,
        block(8, 8, 1), block(8, 16, 2), block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def model_of(variant, pixels=196):
    parts = VARIANTS[variant]
    if parts is None:
        return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 10))
    return network(**parts)


@lru_cache
def images(stage):
    "14x14 pixels, averages of two by two; tune: tested on held-out training images."
    data = load("fashion")
    shrunk = data.replace(
        train_x=nn.functional.avg_pool2d(data.normalize(data.train_x[:N]), 2),
        train_y=data.train_y[:N],
        test_x=nn.functional.avg_pool2d(data.normalize(data.test_x), 2))
    return shrunk.split(SPLIT) if stage == "tune" else shrunk


def plain(model, data, lr, generator):
    "Ordinary SGD: no clipping, no noise, no guarantee."
    optimizer = torch.optim.SGD(model.parameters(), lr, MOMENTUM)
    q = BATCH_SIZE/len(data)
    for _ in range(STEPS):
        drawn = torch.rand(len(data), generator=generator) < q
        optimizer.zero_grad()
        output = model(data.train_x[drawn])
        nn.functional.cross_entropy(output, data.train_y[drawn]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model, data):
    guess = torch.cat([model(x).argmax(1) for x in data.test_x.split(1000)])
    return (guess == data.test_y).double().mean().item()


def run_plain(cell, data):
    began = time.perf_counter()
    model = model_of(cell["variant"], data.train_x[0].numel())
    plain(model, data, cell["lr"], torch.Generator().manual_seed(cell["seed"]))
    settings = cell | dict(momentum=MOMENTUM, batch_size=BATCH_SIZE, steps=STEPS)
    return [lines_without_privacy(
        sys.modules[__name__], settings, data, time.perf_counter() - began,
        parameters=sum(p.numel() for p in model.parameters()),
        test_accuracy=accuracy(model, data),
        tuning_runs=len(RATES[False]))]


def run(
    cell,       # stage, variant, private, lr, seed
    data=None,  # default: Fashion-MNIST
):              # list of runs, as `harness.work` wants it
    "Train once."
    data = data or images(cell["stage"])
    torch.manual_seed(cell["seed"])
    if not cell["private"]:
        return run_plain(cell, data)
    plan = PrivacyPlan(n=len(data), batch_size=BATCH_SIZE, steps=STEPS, eps=3., delta=1e-5)
    trainer = Trainer(
        model_of(cell["variant"], data.train_x[0].numel()), data, plan,
        engine=fast_grad_sum,
        seed=cell["seed"],
        optimizer=partial(torch.optim.SGD, lr=cell["lr"], momentum=MOMENTUM))
    began = time.perf_counter()
    trainer.fit()
    cell = cell | dict(momentum=MOMENTUM, tuning_runs=len(RATES[True]))
    return [lines_of(sys.modules[__name__], cell, trainer, time.perf_counter() - began,
                     test_accuracy=trainer.evaluate())]


def key(row):
    return row["stage"], row["variant"], row["private"], row["lr"], row["seed"]


def tune(recorded):
    return [dict(stage="tune", variant=variant, private=private, lr=lr, seed=TUNING_SEED)
            for variant in VARIANTS for private in RATES for lr in RATES[private]]


def best_rate(variant, private, recorded):
    "The rate with the best held-out accuracy, or None before the search is done."
    tried = chosen(recorded, stage="tune", variant=variant, private=private)
    if len(tried) < len(RATES[private]):
        return None
    return max(tried, key=lambda row: row["accuracy"])["lr"]


def final(recorded):
    rates = {(v, private): best_rate(v, private, recorded) for v in VARIANTS for private in RATES}
    return [dict(stage="final", variant=variant, private=private, lr=lr, seed=seed)
            for (variant, private), lr in rates.items() if lr is not None for seed in SEEDS]


PARTS = {"tune": tune, "final": final, "all": lambda recorded: tune(recorded) + final(recorded)}
