"""What a trained model says of its training data: a planted secret, and a whole image.

    python -m experiments.memorization        ten minutes of one thread

A text model reads made-up sentences, one of which holds a PIN of four digits; the attacker ranks
all 10,000 PINs by how likely the trained model finds the sentence (Carlini et al. 2019, *The
Secret Sharer*). Exposure is log2 of 10,000 minus log2 of the rank: 13.3 bits when the model names
the PIN first, 1.44 on average for a PIN that it never saw.

A linear model is trained to the optimum on digits; the attacker knows all other images and solves
for the missing one (Balle, Cherubin & Hayes 2022, *Reconstructing Training Data with Informed
Adversaries*, on generalized linear models).
"""
import json
import math
import time
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from dp_course.basics import machine
from dp_course.data import Examples, load
from dp_course.gradients import FlatClip
from dp_course.privacy import PrivacyPlan, gaussian_sigma
from dp_course.training import DPAdam, Trainer, code_version
from experiments.harness import RUNS, today

LETTERS = " abcdefghijklmnopqrstuvwxyz0123456789."
LENGTH, CONTEXT = 28, 8  # characters of a sentence; characters that a prediction looks at
NAMES = "anna ben carl dora emil fay gus hana ida jon kim lea max nora otto pia".split()
SENTENCES, BATCH, STEPS, DELTA = 1000, 100, 400, 1e-4
COPIES = 1, 8            # sentences with the same PIN; the unit of privacy is one sentence
EPS = None, 8., 1.       # None: neither clip nor noise
SEEDS = range(3)


# ---- a secret in a text

def encoded(sentences):  # (b,t)
    "Characters as numbers, filled up with spaces."
    return torch.tensor([[LETTERS.index(c) for c in s.ljust(LENGTH)] for s in sentences])


def made_up(n, generator):
    "Sentences about rooms: a name, a number of four digits, and no PIN."
    def pick(most):
        return torch.randint(most, (1,), generator=generator).item()
    verbs = "meets", "calls", "pays", "sees"
    return [f"{NAMES[pick(16)]} {verbs[pick(4)]} {NAMES[pick(16)]} in {pick(10_000):04d}."
            for _ in range(n)]


def with_pin(pins):
    return [f"the pin of zoe is {pin:04d}." for pin in pins]


class NextCharacter(nn.Module):
    "Guess each character from the eight before it."
    def __init__(self, width=64, size=8):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), size)
        self.hidden = nn.Linear(CONTEXT*size, width)
        self.answer = nn.Linear(width, len(LETTERS))

    def forward(self, x):  # (b,t) -> (b,t,letters)
        before = F.pad(x, (CONTEXT, 0))[:, :-1].unfold(1, CONTEXT, 1)  # (b,t,context)
        return self.answer(self.hidden(self.letters(before).flatten(2)).tanh())


def per_sentence(output, y):
    "Mean over the characters of a sentence."
    return F.cross_entropy(output.transpose(1, 2), y, reduction="none").mean(1)


@torch.no_grad()
def exposure(model, pin):
    "Bits that the model has learnt of a PIN."
    x = encoded(with_pin(range(10_000)))
    losses = torch.cat([per_sentence(model(some), some) for some in x.split(1000)])
    rank = 1 + (losses < losses[pin]).sum().item()
    return math.log2(10_000) - math.log2(rank)


def trained(x, eps, seed):
    "Train on sentences (b,t): 400 steps of about 100, with Adam."
    torch.manual_seed(seed)
    model = NextCharacter()
    if eps is not None:
        plan = PrivacyPlan(n=len(x), batch_size=BATCH, steps=STEPS, eps=eps, delta=DELTA)
        Trainer(model, Examples(x, x), plan, loss_fn=per_sentence, clip=FlatClip(.1), seed=seed,
                optimizer=partial(DPAdam, lr=.01)).fit()
        return model
    optimizer = torch.optim.Adam(model.parameters(), lr=.01)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        drawn = x[torch.rand(len(x), generator=generator) < BATCH/len(x)]
        optimizer.zero_grad()
        per_sentence(model(drawn), drawn).mean().backward()
        optimizer.step()
    return model


@torch.no_grad()
def secrets():
    "A row per copies, eps and seed: exposure of the PIN that was there and of one that was not."
    rows = []
    for copies in COPIES:
        for eps in EPS:
            for seed in SEEDS:
                began = time.perf_counter()
                generator = torch.Generator().manual_seed(seed)
                pin, other = torch.randperm(10_000, generator=generator)[:2].tolist()
                x = encoded(made_up(SENTENCES - copies, generator) + with_pin([pin]*copies))
                with torch.enable_grad():
                    model = trained(x, eps, seed)
                new = encoded(made_up(500, generator))
                rows.append(dict(copies=copies, eps=eps, seed=seed, exposure=exposure(model, pin),
                                 exposure_of_another=exposure(model, other),
                                 held_out_loss=per_sentence(model(new), new).mean().item(),
                                 seconds=round(time.perf_counter() - began, 1)))
                print(rows[-1], flush=True)
    return rows


# ---- an image from the optimum

LAMBDA, KNOWN, TARGETS = .01, 499, 10  # weight decay; images the attacker knows; images in turn
NOISY = None, 1000., 100., 10., 1.     # eps of the release


def unit_rows(x):
    "Pixels and a constant, shortened to length 1 at most; the constant keeps its share."
    x = torch.cat([x.flatten(1), torch.full((len(x), 1), x.flatten(1).norm(dim=1).max())], 1)
    return x/x.norm(dim=1).max()


def optimum(x, y):
    "Weights (10,d) that minimize mean cross-entropy + LAMBDA/2 |W|^2: unique, to 1e-10."
    w = torch.zeros(10, x.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=2000, tolerance_grad=1e-13, tolerance_change=1e-16,
                                  history_size=50, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = F.cross_entropy(x @ w.T, y) + LAMBDA/2*w.square().sum()
        value.backward()
        return value
    optimizer.step(loss)
    return w.detach()


def missing_image(w, x, y, n):
    "The n-th image, from the optimum and the other n - 1: all gradients and the decay add to 0."
    p = (x @ w.T).softmax(1) - F.one_hot(y, 10)
    rest = -(n*LAMBDA*w + p.T @ x)               # (10,d): (p - y) of the missing one, times itself
    row = rest[rest.norm(dim=1).argmax()]
    return row/row[-1]                           # the constant of the image is known


def images():
    "A row per target and eps: how far the image that the attacker solves for is from the true one."
    data = load("digits")
    x, y = unit_rows(data.normalize(data.train_x).double()), data.train_y
    test_x = unit_rows(data.normalize(data.test_x).double())
    rows, shown = [], {}
    n = KNOWN + 1
    for target in range(TARGETS):
        idx = torch.tensor([target, *range(TARGETS, TARGETS + KNOWN)])
        w = optimum(x[idx], y[idx])
        others, theirs = x[idx[1:]], y[idx[1:]]
        true = x[target]/x[target, -1]
        near = (others/others[:, -1:] - true).norm(dim=1).min().item()
        for eps in NOISY:
            # replacing one image moves the optimum by 2 sqrt(2)/(n LAMBDA) at most: gradients
            # are no longer than sqrt(2), and the loss is LAMBDA-strongly convex
            std = 0.
            if eps:
                std = gaussian_sigma(eps=eps, delta=1e-5)*2*2**.5/(n*LAMBDA)
            noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(target),
                                dtype=torch.float64)
            released = w + std*noise
            found = missing_image(released, others, theirs, n)
            score = ((test_x @ released.T).argmax(1) == data.test_y).double().mean().item()
            rows.append(dict(target=target, eps=eps, distance=(found - true).norm().item(),
                             nearest_known=near, length=true.norm().item(), test_accuracy=score))
            if target < 3:
                shown.setdefault(str(eps), []).append([round(v, 3) for v in found[:-1].tolist()])
        shown.setdefault("true", []).append([round(v, 3) for v in true[:-1].tolist()])
        print(rows[-len(NOISY)], rows[-1], flush=True)
    shown["true"] = shown["true"][:3]
    return rows, shown


def main():
    torch.set_num_threads(1)
    rows, shown = images()
    record = dict(kind="memorization", code=code_version(), machine=machine(),
                  started=time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()),
                  reconstruction=dict(n=KNOWN + 1, weight_decay=LAMBDA, delta=1e-5, rows=rows,
                                      pixels=shown),
                  extraction=dict(sentences=SENTENCES, batch_size=BATCH, steps=STEPS, delta=DELTA,
                                  rows=secrets()))
    path = RUNS/f"{today()}-memorization.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
