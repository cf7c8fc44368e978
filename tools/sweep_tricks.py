"""The longer experiments of notebook 09: one JSON line per finished run, appended to runs/; what is recorded is skipped.

    python tools/sweep_tricks.py ladder few      none, + GroupNorm, + large batch, + WS, + views (and + EMA, which costs no run)
    python tools/sweep_tricks.py optimizers few  momentum, Adam with and without correction, RMSprop, cosine, fewer views

Every run sees 65,536 images in expectation. The ladder is climbed twice: 'many' has all 50,000 training images (1.3
epochs), 'few' has 10,000 (6.6 epochs). Every learning rate of a rung is tried once and judged on 5,000 held-out
training images; the best then trains with three seeds and is tested at the last step. CIFAR-10 at 16x16, else digits.
Call it again until it says that nothing is left; `--minutes` says when to stop starting new runs.
"""
import argparse
import json
import platform
import sys
import time
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from dp_course.accounting import PrivacyPlan, epsilon  # noqa: E402
from dp_course.data import best_available  # noqa: E402
from dp_course.dpsgd import FlatClip
from dp_course.trainer import Trainer  # noqa: E402
from dp_course.gradients import fast_grad_sum  # noqa: E402
from dp_course.models import WSConv2d, four_a_group  # noqa: E402
from dp_course.tricks import EMA, DPAdam, Schedule, TailAverage, multiplicity  # noqa: E402

RECORD = ROOT/"runs/2026-11-21-sweep-tricks.jsonl"
EPS, DELTA, CLIP, SEEDS = 8., 1e-5, 1., (0, 1, 2)
EXAMPLES = {"many": 512*128, "few": 512*128}  # seen in expectation: 1.3 and 6.6 epochs
RATES = (1., 2., 4., 8.)
BASE = dict(norm=True, ws=True, batch_size=512, k=0, optimizer="sgd", schedule="constant")
RUNGS = {  # each adds one thing to the one before it; + EMA is read from the runs of + views
    "none": BASE | dict(norm=False, ws=False, batch_size=128),
    "+ GroupNorm": BASE | dict(ws=False, batch_size=128),
    "+ large batch": BASE | dict(ws=False),
    "+ WS": BASE,
    "+ views": BASE | dict(k=4),
}
ADAM_RATES = (.001, .004, .016)
OTHERS = {  # what replaces plain SGD at a constant rate in '+ WS', and the learning rates that are tried
    "momentum": (BASE | dict(optimizer="momentum"), (.2, .4, .8)),
    "Adam": (BASE | dict(optimizer="adam"), ADAM_RATES),
    "DP-AdamBC": (BASE | dict(optimizer="adambc"), ADAM_RATES),
    "RMSprop": (BASE | dict(optimizer="rmsprop"), (*ADAM_RATES, .064)),
    "cosine": (BASE | dict(schedule="cosine"), (4., 8., 16.)),
    "1 view": (BASE | dict(k=1), (4., 8.)),
    "2 views": (BASE | dict(k=2), (4., 8.)),
}


def small_net(norm=True, ws=True, channels=3, classes=10):
    "Four 3x3 convolutions and a linear layer: 15,786 parameters with GroupNorm and 3 channels."
    layers, i = [], channels
    for o, stride in ((8, 2), (16, 1), (32, 2), (32, 1)):
        layers += [(WSConv2d if ws else nn.Conv2d)(i, o, 3, stride, 1), *([four_a_group(o)] if norm else []), nn.ReLU()]
        i = o
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, classes))


@lru_cache
def small_images():
    data = best_available("cifar10", "digits")
    if data.name.startswith("digits"): return data
    def small(x): return torch.cat([nn.functional.avg_pool2d(data.normalize(u), 2) for u in x.split(5000)])
    return replace(data, train_x=small(data.train_x), test_x=small(data.test_x), name=f"{data.name} at 16x16")


@lru_cache
def part(split, setting="many"):
    "'val': tested on held-out training images; 'test': on the test set."
    data = small_images()
    held = data.split(min(5000, len(data.train_x)//5))  # few: the same 10,000 of the others in both
    if setting == "few":
        test = data if split == "test" else held
        return replace(test, train_x=held.train_x[:10_000], train_y=held.train_y[:10_000])
    return data if split == "test" else held


def make_optimizer(name, lr, plan, clip):
    "What turns parameters into an optimizer."
    if name == "adambc": return DPAdam.from_plan(plan, clip, lr=lr)
    return {"sgd": partial(torch.optim.SGD, lr=lr), "momentum": partial(torch.optim.SGD, lr=lr, momentum=.9),
            "adam": partial(DPAdam, lr=lr), "rmsprop": partial(torch.optim.RMSprop, lr=lr)}[name]


def train(data, config, lr, seed, examples):
    "One private run with all averages on board: the trainer, ready to be evaluated."
    # `examples`: how many are seen in expectation, so that every rung computes about the same, views apart
    torch.manual_seed(seed)
    channels = data.train_x.shape[1]
    model, steps = small_net(config["norm"], config["ws"], channels), int(examples/config["batch_size"])
    plan, clip = PrivacyPlan(len(data.train_x), config["batch_size"], steps, EPS, DELTA), FlatClip(CLIP)
    schedule = Schedule(lr, config["schedule"], steps)
    small = dict(pad=2, flip=True) if channels == 3 else dict(pad=1, flip=False)  # mirrored digits are no digits
    return Trainer(model, data, plan, engine=fast_grad_sum, clip=clip, seed=seed, micro_batch=2048//max(1, config["k"]),
                   callbacks=[EMA(.999), EMA(.999, warmup=False), TailAverage(steps//2), schedule],
                   augment=multiplicity(config["k"], **small) if config["k"] else None,
                   optimizer=make_optimizer(config["optimizer"], schedule.at(0), plan, clip))


def measure(trainer):
    "Accuracy at the last step: of the last iterate and of three averages of all of them."
    ema, cold, tail = trainer.callbacks[:3]
    return {"accuracy": trainer.evaluate(), "ema": ema.evaluate(trainer), "ema_no_warmup": cold.evaluate(trainer),
            "tail": tail.evaluate(trainer)}


def rows():
    "The recorded runs; of two records of the same run the first."
    seen = {}
    for line in RECORD.read_text().splitlines() if RECORD.exists() else []:
        r = json.loads(line)
        seen.setdefault((r.get("setting", "many"), r["rung"], r["split"], r["lr"], r["seed"]), r)
    return list(seen.values())


def find(setting, rung, split, lr=None, seed=None):
    "The recorded runs of a rung."
    return [r for r in rows() if (r.get("setting", "many"), r["rung"], r["split"]) == (setting, rung, split)
            and lr in (None, r["lr"]) and seed in (None, r["seed"])]


def one(setting, rung, config, split, lr, seed):
    "Run, record, and say so; nothing if it is recorded."
    if find(setting, rung, split, lr, seed): return
    start, data = time.time(), part(split, setting)
    trainer = train(data, config, lr, seed, EXAMPLES[setting]).fit()
    plan = trainer.plan
    row = {"setting": setting, "rung": rung, "split": split, "lr": lr, "seed": seed, "data": data.name, **config, "max_norm": CLIP,
           "parameters": sum(p.numel() for p in trainer.params.values()), "n": plan.n, "steps": plan.steps, "q": plan.q,
           "sigma": plan.sigma, "eps": epsilon(plan.q, plan.sigma, trainer.t, DELTA), "delta": DELTA, **measure(trainer),
           "seconds": round(time.time() - start, 1), "seed_policy": trainer.seed_policy, "device": "cpu",
           "threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version()}
    with open(RECORD, "a") as f: f.write(json.dumps(row) + "\n")
    print({k: row[k] for k in ("setting", "rung", "split", "lr", "seed", "sigma", "accuracy", "ema", "tail", "seconds")}, flush=True)


def best(setting, rung, key="accuracy"):
    "The learning rate that was best on the held-out images."
    return max(find(setting, rung, "val"), key=lambda r: r[key])["lr"]


def todo(which, setting):
    "The runs of a part, in order; a learning rate is chosen only when all of its candidates are recorded."
    parts = {"ladder": {k: (c, RATES) for k, c in RUNGS.items()}, "optimizers": OTHERS}[which]
    for rung, (config, rates) in parts.items():
        for lr in rates: yield rung, config, "val", lr, 0
        for key in ("accuracy", "ema") if rung == "+ views" else ("accuracy",):
            for seed in SEEDS: yield rung, config, "test", partial(best, setting, rung, key), seed


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["ladder", "optimizers"])
    parser.add_argument("setting", choices=EXAMPLES)
    parser.add_argument("--only", nargs="+", default=[*RUNGS, *OTHERS], help="these rungs")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no new run after this long")
    args, start = parser.parse_args(argv), time.time()
    for rung, config, split, lr, seed in todo(args.part, args.setting):
        if rung not in args.only: continue
        if time.time() - start > 60*args.minutes: return print("more is left: call it again")
        one(args.setting, rung, config, split, lr() if callable(lr) else lr, seed)
    print("nothing is left")


if __name__ == "__main__": main()
