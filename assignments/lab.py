"""Suspects for A4: private trainers, of which some leak. Each shows a step and its batches."""
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from dp_course import MUTANTS
from dp_course.audit import SmallTrainer, lab_net, lab_plan


class Suspect:
    "A trainer under suspicion: what it claims, and what you may ask it."
    n, q = 1000, 1/25            # examples and rate of its sampler
    sigma = lab_plan(600).sigma  # its noise multiplier
    bound = 1/24                 # how far one example may move a step

    def __init__(self, change=lambda trainer: trainer):  # what breaks it: MUTANTS["ash"].of
        loss = partial(nn.functional.cross_entropy, reduction="none")
        right = SmallTrainer(plan=lab_plan(600), model=lab_net, loss_fn=loss)
        self._trainer = change(right)
        self._sampler = change(replace(right, plan=lab_plan(self.n)))

    def step(
        self,
        x,          # (b,8) a batch, chosen by you
        y,          # (b,) labels 0, 1, 2
        generator,  # all randomness of the step
    ):              # dict: name of a parameter -> noisy gradient that is released
        "Do one step on a batch."
        return self._trainer.step(x, y, generator)["gradient"]

    def batches(
        self,
        steps=200,
        secret=0,
    ):              # list of index tensors
        "Draw the batches of a run."
        return [self._sampler.draw(self._sampler, secret, t) for t in range(steps)]


def examples(seed=0):
    "A batch (x, y) of 24."
    return torch.randn(24, 8, generator=torch.Generator().manual_seed(seed)), torch.arange(24) % 3


def mutant(name):
    "A suspect of lesson 17's bug lab: alder, ash, aspen ..."
    return Suspect(MUTANTS[name].of)
