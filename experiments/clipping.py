"""Ways to clip at one eps (lesson 09).

    python -m experiments clipping all     96 tuning and 80 final runs, a few minutes on one core

Learning rates are chosen on a validation split; then five seeds on the test set. 10,000 images of
Fashion-MNIST at 14x14 pixels, a network of 13,578 parameters, eps = 3.
"""
import sys
import time
from functools import partial

import torch
from torch import nn

from dp_course.data import load
from dp_course.gradients import (
    AdaptiveClip,
    AutoClip,
    FlatClip,
    LayerClip,
    ScheduledClip,
    decay,
    falling_noise,
    fast_grad_sum,
    layer_groups,
)
from dp_course.privacy import PLDAccountant, PrivacyPlan, RDPAccountant, epsilon
from dp_course.training import Trainer
from experiments.harness import best_value, chosen, first_images, lines_of, rows_of

NAME = "clipping"
EPS, DELTA = 3., 1e-5
SPEEDS = (.5, 1., 2., 4., 8., 16.)  # learning rate times threshold: how far a step can go
SEEDS, TUNING_SEED = range(5), 100


# ---- the methods: first threshold C, and (C, plan, model) -> clip

def flat(C, plan, model):
    return FlatClip(C)


def adaptive(C, plan, model):
    return AdaptiveClip(plan.batch_size, C)


def per_layer(C, plan, model):
    return LayerClip(C, layer_groups(model))


def learnt_per_layer(C, plan, model):
    return LayerClip(C, layer_groups(model), own_noise=True, batch_size=plan.batch_size)


def automatic(C, plan, model, gamma=.01):
    return AutoClip(C, gamma)


def dynamic(C, plan, model):
    return ScheduledClip(decay(C, C/2, plan.steps), plan)


METHODS = {
    **{f"flat C={C:g}": (C, flat) for C in (.03, .1, .3, 1., 3., 10.)},
    "adaptive": (1., adaptive),
    "per layer, equal": (1., per_layer),
    "per layer, learnt": (1., learnt_per_layer),
    "automatic": (1., automatic),
    "dynamic": (1., dynamic),
    **{f"automatic, gamma={gamma:g}": (1., partial(automatic, gamma=gamma))
       for gamma in (.1, .3, 1., 3., 10.)},
}


def ratios(steps):
    "Noise of each step of the dynamic method, relative to the first."
    return decay(1., .5, steps, levels=min(steps, 15))


# ---- the tasks

def fashion(stage):
    "10,000 training images; 5,000 others to choose rates on, the test set only at the end."
    return first_images(load("fashion"), 10_000, 5000, stage)


def fashion_net():
    return nn.Sequential(nn.AdaptiveAvgPool2d(14), nn.Conv2d(1, 16, 5, 2), nn.Tanh(), nn.Flatten(),
                         nn.Linear(400, 32), nn.Tanh(), nn.Linear(32, 10))


def digits(stage):
    "The embedded 8x8 digits, for a miniature that runs anywhere."
    return load("digits").split(360) if stage == "tune" else load("digits")


def digits_net():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(),
                         nn.Linear(72, 10))


TASKS = {"fashion": (fashion, fashion_net, 256, 100), "digits": (digits, digits_net, 128, 60)}


# ---- one run

def accountants(make_clip, steps):
    "PLD and RDP; of the dynamic method, whose noise falls."
    both = PLDAccountant, RDPAccountant
    return [falling_noise(ratios(steps), by) for by in both] if make_clip is dynamic else both


def final_thresholds(clip):
    "The threshold, or thresholds, after the last step."
    if isinstance(clip, LayerClip):
        return {"max_norms": clip.max_norms.tolist()}
    return {"max_norm": getattr(clip, "max_norm", None)}


def run(
    cell,        # stage, method, speed, seed
    task="fashion",
    steps=None,  # default: those of the task
    data=None,   # default: that of the task
):               # one run, as `harness.work` wants it
    "Train once."
    load_data, net, batch_size, usual = TASKS[task]
    data = data or load_data(cell["stage"])
    steps = steps or usual
    C, make_clip = METHODS[cell["method"]]
    by_pld, by_rdp = accountants(make_clip, steps)
    plan = PrivacyPlan(n=len(data.train_x), batch_size=batch_size, steps=steps,
                       eps=EPS, delta=DELTA, accountant=by_pld)
    began = time.perf_counter()
    torch.manual_seed(cell["seed"])
    model = net()
    clip = make_clip(C, plan, model)
    first_std = torch.as_tensor(clip.std(plan.sigma)).tolist()
    lr = cell["speed"]/C
    trainer = Trainer(model, data, plan, engine=fast_grad_sum, clip=clip, seed=cell["seed"],
                      optimizer=partial(torch.optim.SGD, lr=lr)).fit()
    rdp = epsilon(q=plan.q, sigma=plan.sigma, steps=steps, delta=DELTA, accountant=by_rdp)
    cell = cell | dict(lr=lr, C=C, momentum=0., task=task, accountant=plan.accountant.__name__)
    return [lines_of(sys.modules[__name__], cell, trainer, time.perf_counter() - began,
                     test_accuracy=trainer.evaluate(), eps_rdp=rdp, first_std=first_std,
                     last=final_thresholds(clip), nonfinite=trainer.nonprivate_nonfinite)]


# ---- what to run

def key(row):
    return row["stage"], row["method"], row["speed"], row["seed"]


def rows(path=None):
    "What is recorded."
    return rows_of(sys.modules[__name__], path)


def best_speed(method, recorded):
    "The rate with the best validation accuracy, the smaller of equals; None: not all were tried."
    return best_value(chosen(recorded, stage="tune", method=method), "speed", SPEEDS)


def tune(recorded):
    "Every method with every learning rate, one seed, on validation images."
    return [dict(stage="tune", method=method, speed=speed, seed=TUNING_SEED)
            for speed in SPEEDS for method in METHODS]


def final(recorded):
    "Every method with its best learning rate, five seeds, on the test set."
    best = {method: best_speed(method, recorded) for method in METHODS}
    return [dict(stage="final", method=method, speed=best[method], seed=seed)
            for seed in SEEDS for method in METHODS if best[method] is not None]


PARTS = {"tune": tune, "final": final, "all": lambda recorded: tune(recorded) + final(recorded)}
