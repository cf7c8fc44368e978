"""Do many views of each digit help where the test digits lie anywhere? (lesson 12)

    python -m experiments shifted all      a quarter of an hour of one core

MNIST at 14x14, eps = 2, a network of 13,258 parameters in two dense layers. 10,000 training digits
lie in the middle, as MNIST has them; every digit that is held out or tested is shifted, once, by up
to two pixels each way. A view shifts a training digit in the same way. Beside 1, 4 and 16 views
stand runs that spend the work of 4 views on one view: in batches that are four times as large, or
in four times as many steps. A rate is the better the higher its accuracy on 5,000 held-out training
digits; the grid grows in steps of two until its best rate has a neighbour on either side. That rate
then trains with three seeds and is tested at the last step.
"""
import sys
import time
from functools import lru_cache, partial

import torch
from torch import nn

from dp_course.data import load, multiplicity, views
from dp_course.gradients import FlatClip, fast_grad_sum
from dp_course.privacy import PrivacyPlan
from dp_course.training import EMA, Trainer
from experiments.harness import accuracy, cells_by_rate, first_images, lines_of

NAME = "shifted"
EPS, DELTA, CLIP, N, HELD, SHIFT = 2., 1e-5, 1., 10_000, 5000, 2
BASE = dict(k=1, batch_size=500, steps=100)
RUNGS = {
    "no views": BASE | dict(k=0),
    "1 view": BASE,
    "4 views": BASE | dict(k=4),
    "16 views": BASE | dict(k=16),
    "1 view, batch x 4": BASE | dict(batch_size=2000),
    "1 view, steps x 4": BASE | dict(steps=400),
}
TUNING_SEED, SEEDS, FIRST = 100, (0, 1, 2), 4.


# ---- data and network

@lru_cache
def digits(stage):
    "Small digits: for training in the middle, for testing where they were shifted to."
    data = load("mnist")
    data = data.replace(train_x=halved(data, data.train_x), test_x=halved(data, data.test_x),
                        name="mnist at 14x14, test digits shifted")
    return first_images(data, N, HELD, stage)


def halved(data, x):
    "Normalized images of half the height and width."
    pool = partial(nn.functional.avg_pool2d, kernel_size=2)
    return torch.cat([pool(data.normalize(rows)) for rows in x.split(5000)])


def moved(data):
    "The same data with every test image shifted, the same way in every run."
    x = views(data.test_x, 1, torch.Generator().manual_seed(0), crop=SHIFT, flip=False).tree[:, 0]
    return data.replace(test_x=x)


def network(seed, pixels=196):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 64), nn.Tanh(), nn.Linear(64, 10))


# ---- one run

def run(
    cell,        # stage, rung, lr, seed
    data=None,   # default: that of the stage
    **changes,   # of the rung: fewer steps, say
):               # list of runs, as `harness.work` wants it
    "Train once."
    data = data or digits(cell["stage"])
    cell = cell | RUNGS[cell["rung"]] | changes
    cell |= dict(split="val" if cell["stage"] == "tune" else "test", max_norm=CLIP, shift=SHIFT)
    plan = PrivacyPlan(n=len(data), batch_size=cell["batch_size"], steps=cell["steps"], eps=EPS,
                       delta=DELTA)
    augment = multiplicity(cell["k"], crop=SHIFT, flip=False) if cell["k"] else None
    trainer = Trainer(
        network(cell["seed"], data.train_x[0].numel()), moved(data), plan,
        engine=fast_grad_sum,
        clip=FlatClip(CLIP),
        seed=cell["seed"],
        callbacks=[EMA(.999)],
        augment=augment,
        optimizer=partial(torch.optim.SGD, lr=cell["lr"]),
    )
    began = time.perf_counter()
    trainer.fit()
    seconds = time.perf_counter() - began
    return [lines_of(sys.modules[__name__], cell, trainer, seconds,
                     test_accuracy=trainer.evaluate(),
                     ema=trainer.callbacks[0].evaluate(trainer),
                     centred=accuracy(trainer.model, data))]


# ---- what to run

def key(row):
    return tuple(row[name] for name in "stage rung lr seed".split())


def cells_of(recorded, rung):
    return cells_by_rate(recorded, FIRST, (TUNING_SEED,), SEEDS, rung=rung)


PARTS = {"all": lambda recorded: [cell for rung in RUNGS for cell in cells_of(recorded, rung)]}
