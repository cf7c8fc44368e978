"""Normalization under privacy and without: a small residual network, part by part (lesson 07).

    python -m experiments normalization all

Every variant gets the same search over rates on held-out images, with privacy and without, and
five seeds on the test set. Without privacy: the same steps and batches, no clipping, no noise.
Between the two stands a run that clips and adds no noise: what it loses is the clip's.

    python -m experiments normalization alone

Without GroupNorm, and started better than PyTorch does it: He's initialization, or standardized
filters with the gain that a ReLU asks for. With privacy only.
"""
import math
import sys
import time
from functools import lru_cache, partial

import torch
from torch import nn

from dp_course.data import load
from dp_course.gradients import FlatClip, fast_grad_sum
from dp_course.models import BasicBlock, WSConv2d, four_a_group
from dp_course.privacy import PrivacyPlan
from dp_course.training import Trainer
from experiments.harness import (
    accuracy,
    best_value,
    chosen,
    lines_of,
    lines_without_privacy,
    parameters,
)

NAME = "normalization"
N, SPLIT = 20_000, 5000             # training images; those held out for choosing the rate
BATCH_SIZE, STEPS, MOMENTUM = 512, 40, .9
TUNING_SEED, SEEDS = 100, range(5)
RATES = {
    "private": (.25, .5, 1., 2., 4.),
    "clipped": (.25, .5, 1., 2., 4., 8.),  # clipped as in the private run, and no noise
    "plain": (.02, .05, .1, .2, .4, .8),
}
GROUPS, STANDARDIZED, EARLY = dict(norm=four_a_group), dict(conv=WSConv2d), dict(order="relu-norm")
VARIANTS = {
    "linear model": None,
    "no norm": {},
    "GN": GROUPS,
    "GN + WS": GROUPS | STANDARDIZED,
    "GN, ReLU first": GROUPS | EARLY,
    "GN + WS, ReLU first": GROUPS | STANDARDIZED | EARLY,
}
RELU_GAIN = math.sqrt(2/(1 - 1/math.pi))  # one over the spread of a ReLU of standard normals


class GainConv2d(WSConv2d):
    "A standardized convolution with the gain of Brock et al. (arXiv 2101.08692) for a ReLU."
    def centred(self, weight=None):
        c, f, h = super().centred(weight)
        return c, RELU_GAIN*f, RELU_GAIN*h


def he_conv(*args, **kwargs):
    "A convolution that keeps the mean square of what comes out of a ReLU (He et al. 2015)."
    conv = nn.Conv2d(*args, **kwargs)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv


ALONE = {"no norm, He": dict(conv=he_conv), "WS with ReLU gain": dict(conv=GainConv2d)}


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
    parts = (VARIANTS | ALONE)[variant]
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


per_example = partial(nn.functional.cross_entropy, reduction="none")


def without_noise(model, data, lr, generator, clip=None):
    "SGD without noise, and so without a guarantee; a clip shortens each example's gradient."
    optimizer = torch.optim.SGD(model.parameters(), lr, MOMENTUM)
    q = BATCH_SIZE/len(data)
    for _ in range(STEPS):
        drawn = torch.rand(len(data), generator=generator) < q
        x, y = data.train_x[drawn], data.train_y[drawn]
        optimizer.zero_grad()
        if clip is None:
            nn.functional.cross_entropy(model(x), y).backward()
        else:
            total, _ = fast_grad_sum(model, per_example, x, y, clip)
            for name, p in model.named_parameters():
                p.grad = total[name]/BATCH_SIZE
        optimizer.step()


def run_without_noise(cell, data):
    began = time.perf_counter()
    model = model_of(cell["variant"], data.train_x[0].numel())
    clip = FlatClip(1.) if way_of(cell) == "clipped" else None
    without_noise(model, data, cell["lr"], torch.Generator().manual_seed(cell["seed"]), clip)
    settings = cell | dict(momentum=MOMENTUM, batch_size=BATCH_SIZE, steps=STEPS)
    return [lines_without_privacy(
        sys.modules[__name__], settings, data, time.perf_counter() - began,
        parameters=parameters(model),
        test_accuracy=accuracy(model, data),
        tuning_runs=len(RATES[way_of(cell)]))]


def run(
    cell,       # stage, variant, way, private, lr, seed
    data=None,  # default: Fashion-MNIST
):              # list of runs, as `harness.work` wants it
    "Train once."
    data = data or images(cell["stage"])
    torch.manual_seed(cell["seed"])
    if not cell["private"]:
        return run_without_noise(cell, data)
    plan = PrivacyPlan(n=len(data), batch_size=BATCH_SIZE, steps=STEPS, eps=3., delta=1e-5)
    trainer = Trainer(
        model_of(cell["variant"], data.train_x[0].numel()), data, plan,
        engine=fast_grad_sum,
        seed=cell["seed"],
        optimizer=partial(torch.optim.SGD, lr=cell["lr"], momentum=MOMENTUM))
    began = time.perf_counter()
    trainer.fit()
    cell = cell | dict(momentum=MOMENTUM, tuning_runs=len(RATES["private"]))
    return [lines_of(sys.modules[__name__], cell, trainer, time.perf_counter() - began,
                     test_accuracy=trainer.evaluate())]


def way_of(row):
    "private, clipped or plain; the oldest rows say only whether they are private."
    return row.get("way") or ("private" if row["private"] else "plain")


def key(row):
    return row["stage"], row["variant"], way_of(row), row["lr"], row["seed"]


def cell_of(stage, variant, way, lr, seed):
    return dict(stage=stage, variant=variant, way=way, private=way == "private", lr=lr, seed=seed)


def tune(recorded):
    return [cell_of("tune", variant, way, lr, TUNING_SEED)
            for variant in VARIANTS for way in RATES for lr in RATES[way]]


def best_rate(variant, way, recorded):
    "The rate with the best held-out accuracy, or None before the search is done."
    tried = [row for row in chosen(recorded, stage="tune", variant=variant) if way_of(row) == way]
    return best_value(tried, "lr", RATES[way])


def final(recorded):
    rates = {(v, way): best_rate(v, way, recorded) for v in VARIANTS for way in RATES}
    return [cell_of("final", variant, way, lr, seed)
            for (variant, way), lr in rates.items() if lr is not None for seed in SEEDS]


def alone(recorded):
    "The search over rates for the networks without GroupNorm, then five seeds."
    cells = [cell_of("tune", v, "private", lr, TUNING_SEED)
             for v in ALONE for lr in RATES["private"]]
    rates = {v: best_rate(v, "private", recorded) for v in ALONE}
    return cells + [cell_of("final", v, "private", lr, seed)
                    for v, lr in rates.items() if lr is not None for seed in SEEDS]


PARTS = {"tune": tune, "final": final, "all": lambda recorded: tune(recorded) + final(recorded),
         "alone": alone}
