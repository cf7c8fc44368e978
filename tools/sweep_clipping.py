"""Compare ways to clip at one eps: learning rates on a validation split, then five seeds on the test set.

    python tools/sweep_clipping.py tune      # every method with every learning rate, one seed, on validation images
    python tools/sweep_clipping.py final     # every method with its best learning rate, five seeds, on the test set
    python tools/sweep_clipping.py all       # the one, then the other

Appends one JSON line per finished run to runs/2026-11-21-sweep-clipping.jsonl and skips what is already there, so it
can be stopped at any time (--minutes) and called again. Notebook 07_clipping plots the file.
"""
import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from dp_course.accounting import PrivacyPlan, RDPAccountant, epsilon
from dp_course.clipping import AdaptiveClip, AutoClip, LayerClip, ScheduledClip, decay, falling_noise, layer_groups
from dp_course.core import machine
from dp_course.data import load
from dp_course.dpsgd import FlatClip
from dp_course.trainer import Trainer
from dp_course.gradients import fast_grad_sum

RECORD = Path(__file__).resolve().parent.parent/"runs/2026-11-21-sweep-clipping.jsonl"
EPS, DELTA = 3., 1e-5
SPEEDS = (.5, 1., 2., 4., 8., 16.)   # learning rate times the first threshold: how far one step of full signal goes
SEEDS, TUNING_SEED = range(5), 100


def ratios(steps): return decay(1., .5, steps, levels=min(steps, 15))


# method -> first threshold C, and (C, plan, model) -> clip
METHODS = {
    **{f"flat C={C:g}": (C, lambda C, plan, model: FlatClip(C)) for C in (.03, .1, .3, 1., 3., 10.)},
    "adaptive": (1., lambda C, plan, model: AdaptiveClip(plan.batch_size, C)),
    "per layer, equal": (1., lambda C, plan, model: LayerClip(C, layer_groups(model))),
    "per layer, learnt": (1., lambda C, plan, model: LayerClip(C, layer_groups(model), own_noise=True, batch_size=plan.batch_size)),
    "automatic": (1., lambda C, plan, model: AutoClip(C)),
    "dynamic": (1., lambda C, plan, model: ScheduledClip(decay(C, C/2, plan.steps), plan)),
}


def fashion(final):
    "10,000 training images; 5,000 others to choose learning rates on, the test set only at the end."
    data = load("fashion")
    split = data.split(5000, seed=0)
    test = (data.test_x, data.test_y) if final else (split.test_x, split.test_y)
    return replace(data, train_x=split.train_x[:10_000], train_y=split.train_y[:10_000], test_x=test[0], test_y=test[1])


def fashion_net():
    "13,578 parameters on 14x14 pixels."
    return nn.Sequential(nn.AdaptiveAvgPool2d(14), nn.Conv2d(1, 16, 5, 2), nn.Tanh(), nn.Flatten(), nn.Linear(400, 32), nn.Tanh(), nn.Linear(32, 10))


def digits(final):
    "The embedded 8x8 digits, for a miniature that runs anywhere."
    data = load("digits")
    return data if final else data.split(360, seed=0)


def digits_net():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))


TASKS = {"fashion": (fashion, fashion_net, 256, 100), "digits": (digits, digits_net, 128, 60)}


def run(method, speed, seed, task="fashion", final=False, steps=None, data=None):
    "Train once; one row of the record."
    load_data, make_model, batch_size, default_steps = TASKS[task]
    data, steps, (C, make_clip) = data or load_data(final), steps or default_steps, METHODS[method]
    accountant = {"accountant": falling_noise(ratios(steps))} if method == "dynamic" else {}
    plan = PrivacyPlan(len(data.train_x), batch_size, steps, EPS, DELTA, **accountant)
    torch.manual_seed(seed)
    model = make_model()
    clip, start = make_clip(C, plan, model), time.perf_counter()
    first_std = torch.as_tensor(clip.std(plan.sigma)).tolist()
    trainer = Trainer(model, data, plan, engine=fast_grad_sum, clip=clip, seed=seed, optimizer=partial(torch.optim.SGD, lr=speed/C)).fit()
    last = {"max_norm": getattr(clip, "max_norm", None)} if not isinstance(clip, LayerClip) else {"max_norms": clip.max_norms.tolist()}
    rdp = epsilon(plan.q, plan.sigma, plan.steps, DELTA, falling_noise(ratios(steps), RDPAccountant) if accountant else RDPAccountant)
    return dict(kind="final" if final else "tune", method=method, speed=speed, lr=speed/C, C=C, seed=seed, task=task, n=plan.n,
                batch_size=batch_size, steps=steps, q=plan.q, sigma=plan.sigma, first_std=first_std, eps=trainer.epsilon(), eps_rdp=rdp,
                delta=DELTA, accountant=plan.accountant.__name__, momentum=0., last=last, tested_on=len(data.test_x),
                accuracy=trainer.evaluate(), nonfinite=trainer.nonprivate_nonfinite, seconds=round(time.perf_counter() - start, 1),
                seed_policy=trainer.seed_policy, versions={k: v for k, v in machine().items() if k in ("python", "torch")})


def rows(path=RECORD): return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def best_speed(method, recorded):
    "The learning rate with the best validation accuracy, the smaller one of equals; None if not all were tried."
    tried = {r["speed"]: r["accuracy"] for r in recorded if r["kind"] == "tune" and r["method"] == method}
    return max(SPEEDS, key=lambda s: (tried[s], -s)) if set(SPEEDS) <= set(tried) else None


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["tune", "final", "all"])
    p.add_argument("--minutes", type=float, default=1e9, help="start no further run after this long")
    p.add_argument("--reverse", action="store_true", help="begin at the other end: two processes can share the work")
    p.add_argument("--out", type=Path, default=RECORD)
    a = p.parse_args(argv)
    start = time.monotonic()
    for kind in ("tune", "final") if a.what == "all" else (a.what,):
        final, recorded = kind == "final", rows(a.out)
        todo = [(m, best_speed(m, recorded), seed) for seed in SEEDS for m in METHODS] if final else \
               [(m, s, TUNING_SEED) for s in SPEEDS for m in METHODS]
        data = TASKS["fashion"][0](final)
        for method, speed, seed in todo[::-1] if a.reverse else todo:
            if speed is None: print(f"{method}: tune first", flush=True); continue
            if (kind, method, speed, seed) in {(r["kind"], r["method"], r["speed"], r["seed"]) for r in rows(a.out)}: continue
            if time.monotonic() - start > 60*a.minutes: print("time is up; call again", flush=True); return
            row = run(method, speed, seed, final=final, data=data)
            with a.out.open("a") as f: f.write(json.dumps(row) + "\n")
            print(f"{method:18} speed {speed:<5g} seed {seed:<4} accuracy {row['accuracy']:.4f}  {row['seconds']} s", flush=True)
        print(kind, "complete", flush=True)


if __name__ == "__main__": main()
