"""Accuracy per class of the *ordinary* linear model on scattering features (lesson 13).

    python -m experiments classes all

Nothing here is private. Three rates on held-out training images, then three seeds on the test set.
"""
import sys
import time
from functools import lru_cache

import torch
from torch import nn

from dp_course.data import load
from dp_course.features import scattered
from dp_course.models import linear_head
from experiments.harness import chosen, lines_without_privacy

NAME = "classes"
SPLIT = 5000  # training images held out for choosing the rate
RATES = (.0005, .002, .008)
EPOCHS, BATCH_SIZE, MOMENTUM = 6, 1024, .9


@lru_cache
def features(stage):
    data = scattered(load("cifar10"))
    return data if stage == "final" else data.split(SPLIT)


def train(data, lr, seed, epochs=EPOCHS, batch_size=BATCH_SIZE):
    "Plain SGD with momentum and a rate that falls to zero; no clipping, no noise, no guarantee."
    torch.manual_seed(seed)
    model = linear_head(data.train_x.shape[1:], len(data.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr, MOMENTUM)
    n = len(data.train_y)//batch_size*batch_size
    t, steps = 0, epochs*n//batch_size
    while t < steps:
        for idx in torch.randperm(len(data.train_y))[:n].split(batch_size):
            optimizer.param_groups[0]["lr"] = lr*(1 - t/steps)
            optimizer.zero_grad()
            output = model(data.train_x[idx].float())
            nn.functional.cross_entropy(output, data.train_y[idx]).backward()
            optimizer.step()
            t += 1
    return model


@torch.no_grad()
def test(model, data):
    "Accuracy, and accuracy of each class."
    guess = torch.cat([model(x.float()).argmax(1) for x in data.test_x.split(1000)])
    right = (guess == data.test_y).double()
    by_class = [right[data.test_y == label].mean().item() for label in range(len(data.classes))]
    return right.mean().item(), [round(accuracy, 6) for accuracy in by_class]


def run(cell, data=None, epochs=EPOCHS, batch_size=BATCH_SIZE):
    "Train once."
    data = data or features(cell["stage"])
    began = time.perf_counter()
    accuracy, by_class = test(train(data, cell["lr"], cell["seed"], epochs, batch_size), data)
    settings = cell | dict(private=False, model="scatter_linear", momentum=MOMENTUM,
                           schedule="linear", epochs=epochs, batch_size=batch_size)
    return [lines_without_privacy(
        sys.modules[__name__], settings, data, time.perf_counter() - began,
        test_accuracy=accuracy,
        class_accuracy=by_class,
        classes=list(map(str, data.classes)),
        tuning_runs=len(RATES))]


def key(row):
    return row["stage"], row["lr"], row["seed"]


def tune(recorded):
    return [dict(stage="tune", lr=lr, seed=0) for lr in RATES]


def final(recorded):
    tried = chosen(recorded, stage="tune")
    if len(tried) < len(RATES):
        return []
    best = max(tried, key=lambda row: row["accuracy"])["lr"]
    return [dict(stage="final", lr=best, seed=seed) for seed in range(3)]


PARTS = {"tune": tune, "final": final, "all": lambda recorded: tune(recorded) + final(recorded)}
