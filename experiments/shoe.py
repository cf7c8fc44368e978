"""Which network is made for private training (lesson 18), after Papernot et al. 2021.

    python -m experiments shoe activations   tanh and ReLU, each with its own rate and threshold
    python -m experiments shoe plain         the same networks without privacy
    python -m experiments shoe sigmoid       a sigmoid, with its own rate
    python -m experiments shoe long          tanh and ReLU for 40 epochs, rates carried over
    python -m experiments shoe table5        SGD and Adam, short and long, private and not
    python -m experiments shoe capacity      accuracy over the number of filters, private and not
    python -m experiments shoe adam          DP-Adam beside DP-SGD
    python -m experiments shoe meanvar       first weights drawn like trained ones
    python -m experiments shoe cifar         tanh and ReLU on CIFAR-10
    python -m experiments shoe seeds         tanh and ReLU, seeds 3 to 9
    python -m experiments shoe all           everything but the last two, in this order

Rates and thresholds are chosen on 5,000 held-out training images; a search goes on until the best
point has worse neighbours. Final rows see the test set. The network computes in bfloat16 where the
processor has it. One thread; the long rows take five minutes, the others one or two.
"""
import sys
import time
from functools import lru_cache, partial

import torch
from torch import nn

from dp_course.basics import keep_memory
from dp_course.data import load
from dp_course.gradients import FlatClip, bf16_engine, fast_grad_sum, gains_from_bfloat16
from dp_course.models import (
    activation,
    activation_norm,
    draw_like,
    first_moment,
    papernot_cnn,
    weight_statistics,
)
from dp_course.privacy import PrivacyPlan, epsilon
from dp_course.training import EMA, DPAdam, Trainer, matched_lr
from experiments.harness import (
    accuracy,
    best_value,
    chosen,
    lines_of,
    lines_without_privacy,
    parameters,
    train_without_privacy,
)

NAME = "shoe"
DELTA, MOMENTUM, TUNING_SEED, SEEDS = 1e-5, .9, 100, range(3)
BUDGETS = {"mnist": 2.93, "fashion": 2.7}  # eps of their summary table
TASKS = tuple(BUDGETS)
BATCH, STEPS = 2048, 300                   # of the private runs: 10 epochs
THRESHOLDS = .025, .1, .4, 1.6, 6.4
START = {"tanh": .4, "relu": .4, "sigmoid": 1.6}  # rate times threshold, where the search begins
CAPACITY_EPS = 1.12  # what their recipe for Fig. 1 really spends (B 100, 40 epochs, sigma 1.1)
WIDTHS = 2, 4, 8, 16, 32
CIFAR = dict(k=8, k2=None, batch_size=512, steps=200, budget=8.)  # an eighth of the width of theirs
PLAIN_LRS = .025, .05, .1, .2


# ---- networks

ACTS = {"tanh": "tanh", "relu": "relu", "sigmoid": nn.Sigmoid()}  # as for `activation`


def all_convolutional(width, act):
    "Their network for CIFAR-10 (width 64 there), thinner."
    layers, i = [], 3
    for o in (1, 2, 2, 4, 4, 8):
        layers += [nn.Conv2d(i, o*width, 3, padding=1), activation(ACTS[act])]
        i = o*width
        if len(layers) % 5 == 4:
            layers.append(nn.AvgPool2d(2))
    return nn.Sequential(*layers, nn.Conv2d(i, 10, 3, padding=1), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten())


def network(cell):
    torch.manual_seed(cell["seed"])
    if cell["task"] in ("cifar10", "cifar100"):
        model = all_convolutional(cell["k"], cell["act"])
    else:
        model = papernot_cnn(cell["k"], ACTS[cell["act"]], k2=cell["k2"])
    if cell["stats"]:
        draw_like(model, cell["stats"])
    return model


# ---- what is looked at on the way

class Looks:
    "A curve over the run, on test images."
    def __init__(self, data, steps, points=10):
        self.at = {round(steps*i/points) for i in range(1, points + 1)} | {1}
        self.data, self.first = data, data.normalize(data.test_x[:2000])
        self.curve = []

    @torch.no_grad()
    def __call__(self, t, model, optimizer):
        if t in self.at:
            moments = first_moment(optimizer) if isinstance(optimizer, DPAdam) else {}
            self.curve.append({"step": t, "accuracy": accuracy(model, self.data),
                               "norm": activation_norm(model, self.first),
                               **moments})


# ---- one run

@lru_cache(maxsize=1)
def images(task, stage):
    data = load(task)
    if task == "cifar100":  # dealt into ten groups: the network keeps its ten outputs
        data = data.replace(train_y=data.train_y % 10, test_y=data.test_y % 10)
    return data.split(5000) if stage == "tune" else data


def optimizer_of(cell, plan=None, clip=None):
    "params -> optimizer"
    if cell["optimizer"] == "sgd":
        return partial(torch.optim.SGD, lr=cell["lr"], momentum=MOMENTUM)
    if cell["optimizer"] == "adam-corrected":
        return DPAdam.from_plan(plan, clip, lr=cell["lr"])
    return partial(DPAdam, lr=cell["lr"])


def plan_of(cell, n):
    known = {"sigma": cell["fixed_sigma"]} if cell["fixed_sigma"] else {}
    return PrivacyPlan(n=n, batch_size=cell["batch_size"], steps=cell["steps"],
                       eps=cell["budget"], delta=DELTA, **known)


def run(
    cell,       # see `cell_of`
    data=None,  # default: that of the cell
):              # list of one run, as `harness.work` wants it
    "Train once."
    keep_memory()
    data = data or images(cell["task"], cell["stage"])
    points = 10 if cell["task"] in BUDGETS else 2
    looks = Looks(data, cell["steps"], points) if cell["stage"] == "final" else None
    return [(private_run if cell["private"] else plain_run)(cell, data, looks)]


def private_run(cell, data, looks):
    half = gains_from_bfloat16("cpu")
    plan, clip, ema = plan_of(cell, len(data)), FlatClip(cell["max_norm"]), EMA(.98)
    watch = [lambda trainer: looks(trainer.t, trainer.model, trainer.optimizer)] if looks else []
    trainer = Trainer(
        network(cell), data, plan, clip=clip, seed=cell["seed"],
        engine=bf16_engine(fast_grad_sum) if half else fast_grad_sum,
        micro_batch=1024 if cell["task"] in BUDGETS else 128,
        optimizer=optimizer_of(cell, plan, clip), callbacks=[ema, *watch])
    began = time.perf_counter(), time.process_time()
    trainer.fit()
    seconds, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    found = {"curve": looks.curve} if looks else {}
    for row in found.get("curve", ()):
        row["eps"] = epsilon(q=plan.q, sigma=plan.sigma, steps=row["step"], delta=DELTA)
    if cell["init"] == "statistics":
        found["stats_found"] = weight_statistics(trainer.model)
    cell = cell | {"precision": "bf16" if half else "float32"}
    return lines_of(sys.modules[__name__], cell, trainer, seconds, cpu_seconds=round(cpu, 1),
                    test_accuracy=trainer.evaluate(), ema_accuracy=ema.evaluate(trainer), **found)


def plain_run(cell, data, looks):
    "Ordinary training on uniformly drawn batches, with a rate that falls to zero."
    half = gains_from_bfloat16("cpu")
    model, steps = network(cell), cell["steps"]
    optimizer = optimizer_of(cell)(list(model.parameters()))
    began = time.perf_counter(), time.process_time()
    train_without_privacy(model, data, optimizer, cell["batch_size"], steps,
                          torch.Generator().manual_seed(cell["seed"]), half=half, look=looks)
    seconds, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    config = cell | dict(n=len(data), schedule="linear", precision="bf16" if half else "float32")
    found = {"curve": looks.curve} if looks else {}
    return lines_without_privacy(sys.modules[__name__], config, data, seconds, step=steps,
                                 parameters=parameters(model),
                                 test_accuracy=accuracy(model, data),
                                 cpu_seconds=round(cpu, 1), **found)


# ---- what to run

FIELDS = ("part init stage task act k k2 private optimizer batch_size steps budget fixed_sigma lr "
          "max_norm seed").split()


def key(row):
    return tuple(row[name] for name in FIELDS)


def cell_of(part, task, act="tanh", **changes):
    "A private run of the size that tuning and comparison share."
    cell = dict(part=part, init="default", stage="tune", task=task, act=act, k=16, k2=32,
                private=True, optimizer="sgd", batch_size=BATCH, steps=STEPS,
                budget=BUDGETS.get(task), fixed_sigma=None, lr=4., momentum=MOMENTUM, max_norm=.1,
                seed=TUNING_SEED, stats=None)
    return cell | changes


def finals(cell, seeds=SEEDS, **changes):
    return [cell | {"stage": "final", "seed": seed, **changes} for seed in seeds]


def accuracies(recorded, cell):
    "(lr, max_norm) -> validation accuracy, of the tuning runs that share the rest."
    fixed = {name: cell[name] for name in FIELDS if name not in ("lr", "max_norm")}
    return {(row["lr"], row["max_norm"]): row["accuracy"] for row in chosen(recorded, **fixed)}


def climbed(
    recorded,
    cell,          # a tuning run: where the search begins
    norms=True,    # search the threshold too, at the same rate times threshold
):                 # cells that are to be there, best one or None
    "Go to the best neighbour until all neighbours are worse: rate x2, /2, threshold x4, /4."
    seen = accuracies(recorded, cell)
    best = cell["lr"], cell["max_norm"]
    if seen:
        best = max(seen, key=seen.get)
    lr, norm = best
    around = [best, (lr*2, norm), (lr/2, norm)]
    if norms:
        around += [(lr*norm/c, c) for c in (norm*4, norm/4) if c in THRESHOLDS]
    around = [(round(lr, 7), norm) for lr, norm in around]
    points = list(dict.fromkeys([*seen, *around]))
    cells = [cell | {"lr": lr, "max_norm": norm} for lr, norm in points]
    done = set(around) <= set(seen)
    return cells, cell | {"lr": lr, "max_norm": norm} if done else None


def tuned(recorded, cell, norms=True, seeds=SEEDS):
    "A search, and then the final runs."
    cells, best = climbed(recorded, cell, norms)
    return cells + (finals(best, seeds) if best else [])


def head(task, act):
    "Where the search for an activation begins."
    return cell_of("activations", task, act, lr=START[act]/.1)


def best_of(recorded, task, act):
    "What the search of an activation ended with; None: it has not ended."
    return climbed(recorded, head(task, act), act != "sigmoid")[1]


def activations(recorded):
    found = []
    for task in ("fashion", "mnist"):
        for act in ("tanh", "relu"):
            found += tuned(recorded, head(task, act))
    return found


def sigmoid(recorded):
    return [cell for task in TASKS
            for cell in tuned(recorded, head(task, "sigmoid"), norms=False)]


def plain_cell(task, act, **changes):
    "10 epochs without privacy."
    usual = dict(part="plain", private=False, batch_size=256, steps=2344, budget=None,
                 max_norm=None, lr=.1)
    return cell_of(**{"task": task, "act": act, **usual, **changes})


def best_rate(recorded, cell, rates):
    "Cells of all the rates; the best one, or None."
    cells = [cell | {"lr": lr} for lr in rates]
    fixed = {name: cell[name] for name in FIELDS if name != "lr"}
    lr = best_value(chosen(recorded, **fixed), "lr", list(rates))
    return cells, None if lr is None else cell | {"lr": lr}


def plain(recorded):
    "Rates are tuned on 5 epochs."
    found = []
    for act, task in [(act, task) for act in START for task in TASKS]:
        short = plain_cell(task, act, steps=1172)
        cells, best = best_rate(recorded, short, PLAIN_LRS if act != "sigmoid" else (.1, .2, .4))
        found += cells
        if best:
            found += finals(best, SEEDS if act != "sigmoid" else [0], steps=2344)
    return found


@lru_cache
def sigma_of(n, batch_size, steps, budget):
    return PrivacyPlan(n=n, batch_size=batch_size, steps=steps, eps=budget, delta=DELTA).sigma


def carried(cell, **changes):
    "The same run in another size: its rate is carried over as lesson 10 does."
    new = cell | changes
    sizes = [(c["batch_size"], c["steps"], sigma_of(60_000, c["batch_size"], c["steps"],
                                                    c["budget"])) for c in (cell, new)]
    return new | {"lr": round(matched_lr(cell["lr"], *sizes), 4)}


def long(recorded):
    "40 epochs, the recipe of the paper; a factor on the carried rates is tuned once, for tanh."
    best = best_of(recorded, "fashion", "tanh")
    if not best:
        return []
    usual = carried(best, part="long", steps=1172)
    rates = {round(usual["lr"]*factor, 4): factor for factor in (1, 2)}
    found, chosen_rate = best_rate(recorded, usual, rates)
    if not chosen_rate:
        return found
    factor = rates[chosen_rate["lr"]]
    for act in ("tanh", "relu"):
        for task in ("fashion", "mnist"):
            best = best_of(recorded, task, act)
            if best:
                new = carried(best, part="long", steps=1172)
                found += finals(new, lr=round(factor*new["lr"], 4))
    return found


def table5(recorded):
    "Fashion, eps 2.7. DP-SGD is in the record of `scaling`; the long rows have the paper's rates."
    short, late = dict(batch_size=1024, steps=410), dict(batch_size=256, steps=9375)
    found = []
    adam = cell_of("table5", "fashion", optimizer="adam", **short)
    cells, best = best_rate(recorded, adam, (.0035, .00708, .014))
    found += cells + (finals(best) if best else [])
    for optimizer, rates in (("sgd", (.05, .1, .2, .4)), ("adam", (.002, .00432, .0086))):
        cell = plain_cell("fashion", "tanh", part="table5", optimizer=optimizer, **short)
        cells, best = best_rate(recorded, cell, rates)
        found += cells + (finals(best) if best else [])
    for optimizer, lr in (("sgd", .107), ("adam", .00106)):  # theirs
        found += finals(plain_cell("fashion", "tanh", part="table5", optimizer=optimizer, lr=lr,
                                   **late))
    return found + finals(adam | late | {"lr": .00132})


def capacity(recorded):
    "Fig. 1 at the eps that it really had, 5 epochs; k filters in both layers, and k and 2k once."
    found = []
    widths = [(k, k) for k in WIDTHS] + [(16, 32), (64, 64)]
    for k, k2 in widths:
        for task in ("fashion", "mnist"):
            seeds = SEEDS if k < 64 else [0]
            best = best_of(recorded, task, "tanh")
            if not best:
                continue
            start = carried(best, part="capacity", k=k, k2=k2, steps=150, budget=CAPACITY_EPS)
            if task == "fashion":
                found += tuned(recorded, start, norms=False, seeds=seeds)
            else:  # the carried rate
                found += finals(start, seeds)
            found += finals(plain_cell(task, "tanh", part="capacity", k=k, k2=k2, steps=1172), [0])
    return found


def adam(recorded):
    "DP-Adam at the size of the activations, and Adam without privacy; on CIFAR-10 as Mean-Var."
    found = []
    for task in ("fashion", "mnist"):
        cell = cell_of("adam", task, optimizer="adam", lr=.01)
        found += tuned(recorded, cell, norms=False)
        found += finals(plain_cell(task, "tanh", part="adam", optimizer="adam", lr=.001), [0])
    cell = cell_of("adam", "cifar10", **CIFAR, optimizer="adam", lr=.01)
    return found + tuned(recorded, cell, norms=False)


def meanvar(recorded):
    "First weights drawn like those of a network that was trained, on the same data or on others."
    base = cell_of("meanvar", "cifar10", **CIFAR, lr=2.)
    cells, best = climbed(recorded, base, norms=False)
    if not best:
        return cells
    found = cells + finals(best)
    trained = best | {"init": "statistics", "stage": "final", "budget": 1e9, "fixed_sigma": .001}
    for task in ("cifar10", "cifar100"):
        found.append(trained | {"task": task})
        for row in chosen(recorded, part="meanvar", init="statistics", task=task):
            like = best | {"init": f"like {task}", "stats": row["stats_found"]}
            found += tuned(recorded, like, norms=False)
    return found


def cifar(recorded):
    "ReLU as `meanvar` has tanh with its usual draw: the same network, search, budget, seeds."
    return tuned(recorded, cell_of("cifar", "cifar10", "relu", **CIFAR, lr=2.), norms=False)


def seeds(recorded):
    "Ten seeds in all, as in their Fig. 2: the pairs are those of the search."
    found = []
    for seed in range(3, 10):
        for task in ("fashion", "mnist"):
            for act in ("tanh", "relu"):
                best = best_of(recorded, task, act)
                if best:
                    found += finals(best, [seed])
    return found


ORDER = activations, plain, sigmoid, long, table5, capacity, adam, meanvar
PARTS = {part.__name__: part for part in (*ORDER, cifar, seeds)}
PARTS["all"] = lambda recorded: [cell for part in ORDER for cell in part(recorded)]
