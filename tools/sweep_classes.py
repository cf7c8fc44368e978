"Accuracy per class of the *ordinary* linear model on scattering features: what notebook 10_results holds against the private runs."
import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from dp_course.core import machine
from dp_course.data import load
from dp_course.scattering import linear_head, scattered

ROOT = Path(__file__).resolve().parent.parent
SPLIT = 5000                   # training images held out for choosing the rate
RATES = (.0005, .002, .008)


def train(data, lr, seed, epochs, batch_size):
    "Plain SGD with momentum and a rate that falls to zero; no clipping, no noise, no guarantee."
    torch.manual_seed(seed)
    model = linear_head(data.train_x.shape[1:], len(data.classes))
    optimizer, t, steps = torch.optim.SGD(model.parameters(), lr, .9), 0, epochs*(len(data.train_y)//batch_size)
    while t < steps:
        for idx in torch.randperm(len(data.train_y))[:len(data.train_y)//batch_size*batch_size].split(batch_size):
            for group in optimizer.param_groups: group["lr"] = lr*(1 - t/steps)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.train_x[idx].float()), data.train_y[idx]).backward()
            optimizer.step(); t += 1
    with torch.no_grad(): guess = torch.cat([model(x.float()).argmax(1) for x in data.test_x.split(1000)])
    right = guess == data.test_y
    return right.double().mean().item(), [round(right[data.test_y == c].double().mean().item(), 6) for c in range(len(data.classes))]


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", default=ROOT/"runs/2026-11-21-sweep-classes.jsonl", type=Path)
    p.add_argument("--epochs", default=6, type=int)
    p.add_argument("--batch-size", default=1024, type=int)
    p.add_argument("--minutes", default=4., type=float, help="start no run after so many; run it again for the rest")
    a, begin = p.parse_args(), time.perf_counter()
    done = [json.loads(line) for line in a.out.read_text().splitlines()] if a.out.exists() else []
    full = scattered(load("cifar10"))
    held = full.split(SPLIT)

    def once(kind, data, lr, seed):
        old = [r for r in done if (r["kind"], r["lr"], r["seed"]) == (kind, lr, seed)]
        if old or time.perf_counter() - begin > 60*a.minutes: return old[0] if old else None
        clock = time.perf_counter()
        accuracy, per_class = train(data, lr, seed, a.epochs, a.batch_size)
        row = dict(kind=kind, private=False, eps=None, data=data.name, model="scatter_linear", lr=lr, momentum=.9, schedule="linear",
                   epochs=a.epochs, batch_size=a.batch_size, seed=seed, accuracy=accuracy, class_accuracy=per_class,
                   classes=list(data.classes), tested_on=len(data.test_y), tuning_runs=len(RATES),
                   seconds=round(time.perf_counter() - clock, 1), machine=machine())
        with open(a.out, "a") as f: f.write(json.dumps(row) + "\n")
        print(kind, lr, seed, f"{accuracy:.2%}", row["seconds"], "s", flush=True)
        return row

    tuned = [once("tuning", held, lr, 0) for lr in RATES]
    if None in tuned: return
    best = max(tuned, key=lambda r: r["accuracy"])["lr"]
    for seed in range(3): once("ordinary", full, best, seed)


if __name__ == "__main__": main()
