"""How much should each map of the leaf features count? A look before any private run.

    python -m experiments.kernels            some ten minutes and 8 GB, when the features are there

A linear model that takes few noisy steps is nearly ridge regression, and what the noise adds to its
scores nearly a Gaussian process, both with the kernel of the features. And the kernel of several
maps is the sum of theirs, each times its squared weight. So a map costs one product of matrices,
and a choice of weights one system of equations: half a minute in place of a training.

10,000 training images are fitted and the 5,000 held-out ones are judged, never the test set. The
accuracies are not those of runs (they have 45,000 images); only their order is of use. Each row
has looked at the held-out images, so `tuning_runs` counts it like a run.
"""
import json
import math
import time

import torch
import torch.nn.functional as F

from dp_course.cli import load_data, make_config, make_plan
from experiments.harness import new_record, parser_of

PRESET = "leaves-encoder-eps3"
FITTED, SPLIT = 10_000, 5000
RIDGES = (7e-4, 5e-4, 3.5e-4)  # times images times mean squared length of a feature vector
USUAL = {"scatter": 1., "patches": .6, "encoder2": 1.4, "encoder3": 1.4}
WEIGHTS = [  # what is compared: the maps that are not named are left out
    {"scatter": 1., "patches": .6},
    {"scatter": 1., "patches": .5},
    {"encoder2": 1., "encoder3": 1.},
    *(USUAL | {"encoder2": w, "encoder3": w} for w in (1., 1.4, 2., 2.8)),
    USUAL | {"patches": .5},
    USUAL | {"encoder2": 0.},
    USUAL | {"encoder3": 0.},
]


def noise_per_ridge(preset):
    "Standard deviation of the noise in a score, times the ridge: both follow from the steps."
    # Rates fall linearly: their sum is T/2, their squares' sum T/3 (in units of the first one).
    # The ridge is one over the sum, the noise sigma/B times the root of the squares' sum.
    plan = make_plan(make_config(preset), 50_000)
    T = plan.steps
    return plan.sigma/plan.batch_size*math.sqrt(T/3)/(T/2)


def kernel_of(
    fitted,  # (n,...) one map of the fitted images
    held,    # (m,...) and of the held-out ones
    columns:int=4096,  # features at a time
):           # three tensors: (n,n), (m,n), (m,m)
    "Multiply centred feature vectors with each other."
    a, b = fitted.flatten(1), held.flatten(1)
    n, m = len(a), len(b)
    within, between, beside = torch.zeros(n, n), torch.zeros(m, n), torch.zeros(m, m)
    for x, z in zip(a.split(columns, 1), b.split(columns, 1)):
        x, z = x.float(), z.float()
        mean = x.mean(0)
        x, z = x - mean, z - mean
        within += x @ x.T
        between += z @ x.T
        beside += z @ z.T
    return within, between, beside


def mixed(kernels, weights):
    "The kernel of weighed maps, in units of its mean diagonal."
    parts = [sum(w**2*kernels[name][i] for name, w in weights.items() if w) for i in range(3)]
    unit = parts[0].diagonal().mean()
    return [part/unit for part in parts]


def judged(
    kernel,   # from `mixed`
    y,        # (n,) classes of the fitted images
    held_y,   # (m,)
    noise:float,  # from `noise_per_ridge`
    draws:int=3,
):            # dict: accuracy with noise, without, ridge
    "Fit, add the noise of a private run, and take the best ridge."
    within, between, beside = kernel
    targets = F.one_hot(y.long(), 10).float() - .1
    root = torch.linalg.cholesky(beside + 1e-4*torch.eye(len(beside)))
    best = {"accuracy": 0.}
    for ridge in RIDGES:
        system = within + ridge*len(y)*torch.eye(len(y))
        scores = between @ torch.cholesky_solve(targets, torch.linalg.cholesky(system))
        found = []
        for seed in range(draws):
            z = torch.randn(len(held_y), 10, generator=torch.Generator().manual_seed(seed))
            found.append((scores + noise/ridge*(root @ z)).argmax(1) == held_y)
        accuracy = torch.stack(found).float().mean().item()
        if accuracy > best["accuracy"]:
            clean = (scores.argmax(1) == held_y).float().mean().item()
            best = {"accuracy": accuracy, "without_noise": clean, "ridge": ridge}
    return best


def main():
    args = parser_of("kernel-weights", __doc__).parse_args()
    data = load_data(make_config(PRESET, n_val=SPLIT))
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))[:FITTED]
    fitted, y = data.rows(chosen)
    held, held_y = next(data.test_rows(SPLIT))
    kernels = {name: kernel_of(fitted[name], held[name]) for name in fitted}
    noise = noise_per_ridge(PRESET)
    record = new_record(__doc__, data=data.name, fitted=FITTED, judged=SPLIT, noise_per_ridge=noise)
    rows = record["rows"] = []
    for weights in WEIGHTS:
        began = time.perf_counter()
        found = judged(mixed(kernels, weights), y, held_y, noise)
        rows.append({"weights": weights} | found | {"seconds": time.perf_counter() - began})
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
