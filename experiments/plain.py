"""The lines without privacy in the figures of lessons 09 and 09.

    python -m experiments plain all    three settings, about 13 runs each, two minutes of a core

The same images, network and batch as the private runs, no clip and no noise, and what one would
do without them: momentum .9, a rate that falls to zero. A rate is judged by its mean over two seeds
on held-out training images; the grid grows until its best rate has a neighbour on either side;
then five seeds on the test set. "clipping" takes as many steps as the private runs of lesson 09,
"clipping, longer" ten times as many.
"""
import sys
import time

import torch

from experiments import clipping, scaling
from experiments.harness import (
    accuracy,
    cells_by_rate,
    lines_without_privacy,
    parameters,
    train_without_privacy,
)

NAME = "plain"
MOMENTUM, TUNING_SEEDS, SEEDS = .9, (100, 101), range(5)
TASKS = {  # data of a stage, network, batch size, steps
    "clipping": (clipping.fashion, clipping.fashion_net, 256, 100),
    "clipping, longer": (clipping.fashion, clipping.fashion_net, 256, 1000),
    "scaling": (lambda stage: scaling.small_fashion(scaling.N, stage), scaling.mlp, 256, 1024),
}


def run(cell):  # stage, task, lr, seed
    "Train once."
    load_data, net, batch_size, steps = TASKS[cell["task"]]
    data = load_data(cell["stage"])
    began = time.perf_counter()
    torch.manual_seed(cell["seed"])
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=cell["lr"], momentum=MOMENTUM)
    train_without_privacy(model, data, optimizer, batch_size, steps,
                          torch.Generator().manual_seed(cell["seed"]))
    config = cell | dict(n=len(data), batch_size=batch_size, steps=steps, momentum=MOMENTUM,
                         schedule="linear")
    return [lines_without_privacy(
        sys.modules[__name__], config, data, time.perf_counter() - began,
        step=steps,
        parameters=parameters(model),
        test_accuracy=accuracy(model, data))]


def key(row):
    return tuple(row[name] for name in "stage task lr seed".split())


def cells_of(recorded, task):
    return cells_by_rate(recorded, .125, TUNING_SEEDS, SEEDS, task=task)


PARTS = {"all": lambda recorded: [cell for task in TASKS for cell in cells_of(recorded, task)]}
