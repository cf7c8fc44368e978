"""What a trained model says of its training data: a planted secret, and a whole image.

    python -m experiments.memorization        twelve minutes of one thread

A text model reads made-up sentences, one of which holds a PIN of four digits; the attacker ranks
all 10,000 PINs by how likely the trained model finds the sentence (Carlini et al. 2019, *The
Secret Sharer*). Exposure is log2 of 10,000 minus log2 of the rank: 13.3 bits when the model names
the PIN first, 1.44 on average for a PIN that it never saw.

A linear model is trained to the optimum on digits; the attacker knows all other images and solves
for the missing one (Balle, Cherubin & Hayes 2022, *Reconstructing Training Data with Informed
Adversaries*, on generalized linear models). What he finds is compared with the true image and with
digits that he has never seen: how many of these are more alike?
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
EPS = None, math.inf, 3.  # None: neither clip nor noise; inf: the clip alone (sigma .01)
SEEDS = range(6)


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
        noise = dict(eps=1e7, sigma=.01) if eps == math.inf else dict(eps=eps)
        plan = PrivacyPlan(n=len(x), batch_size=BATCH, steps=STEPS, delta=DELTA, **noise)
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
                rows.append(dict(copies=copies, eps="clip alone" if eps == math.inf else eps,
                                 seed=seed, exposure=exposure(model, pin),
                                 exposure_of_another=exposure(model, other),
                                 held_out_loss=per_sentence(model(new), new).mean().item(),
                                 seconds=round(time.perf_counter() - began, 1)))
                print(rows[-1], flush=True)
    return rows


# ---- an image from the optimum

LAMBDA, KNOWN, TARGETS = .01, 499, 10  # weight decay; images the attacker knows; images in turn
NOISY = None, 1e6, 1e5, 1e4, 1e3, 1e2, 3.  # eps of the release


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
    rest = -(n*LAMBDA*w + p.T @ x)    # (10,d): (p - y) of the missing one, times itself, and noise
    row = torch.linalg.svd(rest).Vh[0]  # the row whose multiples come closest to all ten
    return row/row[-1]                  # the constant of the image is known


def alike(found, image):
    "Cosines of what was found with images (...,d), without the constant."
    return torch.cosine_similarity(found[:-1], image[..., :-1], dim=-1)


def images():
    "A row per target and eps: how much the image that is solved for is like the true one."
    data = load("digits")
    everything = torch.cat([data.train_x, data.test_x])
    x, y = unit_rows(data.normalize(everything).double()), data.train_y
    train, test_x = x[:len(y)], x[len(y):]
    strangers = x[TARGETS + KNOWN:]
    rows, shown = [], {}
    n = KNOWN + 1
    for target in range(TARGETS):
        idx = torch.tensor([target, *range(TARGETS, TARGETS + KNOWN)])
        w = optimum(train[idx], y[idx])
        others, theirs = train[idx[1:]], y[idx[1:]]
        for i, eps in enumerate(NOISY):
            # replacing one image moves the optimum by 2 sqrt(2)/(n LAMBDA) at most: gradients
            # are no longer than sqrt(2), and the loss is LAMBDA-strongly convex
            std = 0.
            if eps:
                std = gaussian_sigma(eps=eps, delta=1e-5)*2*2**.5/(n*LAMBDA)
            generator = torch.Generator().manual_seed(100*target + i)  # noise of its own
            noise = torch.randn(w.shape, generator=generator, dtype=torch.float64)
            released = w + std*noise
            found = missing_image(released, others, theirs, n)
            cosine = alike(found, train[target]).item()
            score = ((test_x @ released.T).argmax(1) == data.test_y).double().mean().item()
            rows.append(dict(
                target=target, eps=eps, cosine=cosine, test_accuracy=score,
                nearest_known=alike(train[target], others).max().item(),
                more_alike=(alike(found, strangers) > cosine).double().mean().item()))
            if target < 3:
                image = found[:-1]/found[:-1].norm()
                shown.setdefault(str(eps), []).append([round(v, 3) for v in image.tolist()])
        print(rows[-len(NOISY)], rows[-1], flush=True)
    images = [train[i, :-1]/train[i, :-1].norm() for i in range(3)]
    shown["true"] = [[round(v, 3) for v in image.tolist()] for image in images]
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
