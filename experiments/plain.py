"""The lines without privacy in the figures of lessons 08 and 09.

    python -m experiments plain all    three settings, about 13 runs each, two minutes of a core

The same images, network and batch as the private runs, no clip and no noise, and what one would
do without them: momentum .9, a rate that falls to zero. A rate is judged by its mean over two seeds
on held-out training images; the grid grows until its best rate has a neighbour on either side;
then five seeds on the test set. "clipping" takes as many steps as the private runs of lesson 08,
"clipping, longer" ten times as many.
"""
import sys
import time

import torch
from torch import nn

from experiments import clipping, scaling
from experiments.harness import chosen, lines_without_privacy

NAME = "plain"
MOMENTUM, TUNING_SEEDS, SEEDS = .9, (100, 101), range(5)
TASKS = {  # data of a stage, network, batch size, steps
    "clipping": (lambda stage: clipping.fashion(stage == "final"), clipping.fashion_net, 256, 100),
    "clipping, longer": (lambda stage: clipping.fashion(stage == "final"), clipping.fashion_net,
                         256, 1000),
    "scaling": (lambda stage: scaling.small_fashion(scaling.N, stage), scaling.mlp, 256, 1024),
}


def train(model, data, lr, batch_size, steps, seed):
    "Ordinary training on uniformly drawn batches."
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    for t in range(steps):
        optimizer.param_groups[0]["lr"] = lr*(1 - t/steps)
        x, y = data.rows(torch.randint(len(data), (batch_size,), generator=generator))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.normalize(x)), y).backward()
        optimizer.step()
    return model


@torch.no_grad()
def accuracy(model, data):
    right = model(data.normalize(data.test_x)).argmax(1) == data.test_y
    return right.double().mean().item()


def run(cell):  # stage, task, lr, seed
    "Train once."
    load_data, net, batch_size, steps = TASKS[cell["task"]]
    data = load_data(cell["stage"])
    began = time.perf_counter()
    torch.manual_seed(cell["seed"])
    model = train(net(), data, cell["lr"], batch_size, steps, cell["seed"])
    config = cell | dict(n=len(data), batch_size=batch_size, steps=steps, momentum=MOMENTUM,
                         schedule="linear")
    return [lines_without_privacy(
        sys.modules[__name__], config, data, time.perf_counter() - began,
        step=steps,
        parameters=sum(p.numel() for p in model.parameters()),
        test_accuracy=accuracy(model, data))]


def key(row):
    return tuple(row[name] for name in "stage task lr seed".split())


def cells_of(recorded, task):
    "Rates until the best one has a worse neighbour on either side; then the final seeds."
    seen = {}
    for row in chosen(recorded, stage="tune", task=task):
        seen.setdefault(row["lr"], []).append(row["accuracy"])
    means = {lr: sum(found)/len(found) for lr, found in seen.items() if len(found) == 2}
    best = max(means, key=means.get, default=.125)
    rates = {best/2, best, 2*best}
    found = [dict(stage="tune", task=task, lr=lr, seed=seed)
             for lr in sorted(rates | set(means)) for seed in TUNING_SEEDS]
    if rates <= set(means):
        found += [dict(stage="final", task=task, lr=best, seed=seed) for seed in SEEDS]
    return found


PARTS = {"all": lambda recorded: [cell for task in TASKS for cell in cells_of(recorded, task)]}
