"""What a start from public images buys (lesson 19): CIFAR-100 to CIFAR-10.

    python -m experiments public_start papernot   their networks, last layer, eps .32 to 2.12
    python -m experiments public_start wide       a last layer of ten times the width
    python -m experiments public_start two        the last two layers, eps 2, 4, 8, as Abadi et al.
    python -m experiments public_start whole      all parameters without privacy
    python -m experiments public_start heads      today's network: layers, units, views, batches
    python -m experiments public_start plain      the same features without privacy
    python -m experiments public_start layers     head, norms, adapters or all layers, eps = 2

First train the public networks (`dp-pretrain NAME --out DIR`), copy DIR/*.pt into `starts` beside
the data sets. What has no public network yet is skipped.

Settings are chosen on 5,000 held-out training images of CIFAR-10, at the sampling rate of the whole
set; then the test set, at the last step. A choice is made greedily, one thing after the other, and
every row of it counts as a tuning run. Features of a network are computed once and kept.
"""
import hashlib
import sys
import time
from copy import deepcopy
from functools import lru_cache, partial

import torch

from dp_course.basics import data_root
from dp_course.data import Examples, Views, load, views
from dp_course.features import (
    PublicMetric,
    describe,
    find_start,
    load_public_net,
    new_head,
    train_only,
)
from dp_course.gradients import (
    FlatClip,
    bf16_engine,
    fast_grad_sum,
    settled_precision,
)
from dp_course.models import linear_head
from dp_course.privacy import PrivacyPlan
from dp_course.training import HeadFirst, Schedule, Trainer
from experiments.harness import accuracy as accuracy_of_images
from experiments.harness import lines_of, lines_without_privacy, train_without_privacy

NAME = "public_start"
N, SPLIT, DELTA, CLIP = 50_000, 5000, 1e-5, .3
EPS = (.32, .73, 1.04, 1.48, 2.12)  # Papernot et al., Table 3
THEIRS = ("max-100", "half-rand-50", "min-rand-10", "wide-100")
SEEDS = range(3)
BASE = dict(layers="several", k=1, mean=True, power=.5, within=True, batch=8192., steps=120)


# ---- features, computed once

def raw_features(net, layers, k):
    "Of CIFAR-100's training set (first view) and both parts of CIFAR-10, on the disk."
    mark = hashlib.sha256(find_start(net).read_bytes()).hexdigest()[:12]
    path = data_root()/"public"/f"raw-{net}-{mark}-{layers}-{k}.pt"
    if not path.exists():
        model, _ = load_public_net(net)
        public, private = load("cifar100"), load("cifar10")
        found = dict(
            public=describe(model, public, public.train_x, layers)[:, 0].clone(),
            public_y=public.train_y,
            train=describe(model, public, private.train_x, layers, k),
            train_y=private.train_y,
            test=describe(model, public, private.test_x, layers, k),
            test_y=private.test_y,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, path.with_suffix(".half"))
        path.with_suffix(".half").rename(path)
    return torch.load(path, mmap=True, weights_only=True)


@lru_cache(maxsize=1)
def prepared(net, layers, k, power, within):
    "Features in a public unit: train and test (n,k,f) float16, and their labels."
    most = 1 if net in THEIRS else 4
    found = raw_features(net, "last" if net in THEIRS else "several", most)
    cut = slice(-256, None) if layers == "last" and net not in THEIRS else slice(None)
    z, y = found["public"][:, cut], found["public_y"] if within else None
    if power is None:
        length = z.float().square().sum(1).mean().sqrt()
        def metric(v):
            return v.float()*(z.shape[1]**.5/length)
    else:
        metric = PublicMetric(z, y, power)
    parts = {}
    for part in ("train", "test"):
        seen = found[part][:, :k, cut]
        parts[part] = torch.cat([metric(some).half() for some in seen.split(2000)])
        parts[f"{part}_y"] = found[f"{part}_y"]
    return parts


def examples(cell, parts):
    "Features as a data set; the test part is the split's while tuning."
    def seen(x):
        if not cell["mean"] and cell["k"] > 1:
            return x
        return torch.cat([some.float().mean(1).half() for some in x.split(2000)])
    data = Examples(seen(parts["train"]), parts["train_y"], test_x=seen(parts["test"]),
                    test_y=parts["test_y"], name="cifar10 (public features)",
                    classes=tuple(map(str, range(10))))
    held = min(SPLIT, len(data)//5)
    return data.split(held) if cell["stage"] == "tune" else data


# ---- one head

def as_views(x, y, generator):
    return Views(x), y


@torch.no_grad()
def accuracy(head, data):
    "Of the views' mean, where there are several."
    right = []
    for x, y in data.test_rows(2000):
        x = x.float().mean(1) if x.dim() == 3 else x.float()
        right.append(head(x).argmax(1) == y)
    return torch.cat(right).double().mean().item()


def train_head(cell, data):
    "A linear model under DP; the head begins at zero."
    left = len(data)/N if len(data) > N//2 else .5*len(data)/cell["batch"]
    plan = PrivacyPlan(n=len(data), batch_size=min(left*cell["batch"], len(data)),
                       steps=cell["steps"], eps=cell["eps"], delta=DELTA)
    return Trainer(
        linear_head(data.train_x.shape[-1:], 10), data, plan,
        optimizer=partial(torch.optim.SGD, lr=cell["lr"], momentum=.9),
        clip=FlatClip(CLIP),
        augment=as_views if data.train_x.dim() == 3 else None,
        callbacks=[Schedule(cell["lr"], "linear", plan.steps)],
        seed=cell["seed"],
        micro_batch=1024,
    ).fit()


def run_head(cell, parts=None):
    parts = parts or prepared(*(cell[name] for name in "net layers k power within".split()))
    data = examples(cell, parts)
    began = time.process_time()
    trainer = train_head(cell, data)
    seconds = time.process_time() - began
    return [lines_of(sys.modules[__name__], cell | dict(max_norm=CLIP, momentum=.9), trainer,
                     seconds, test_accuracy=accuracy(trainer.model, data))]


# ---- without privacy

def run_plain(cell, parts=None):
    "Ordinary logistic regression with Adam: what do the features hold?"
    parts = parts or prepared(*(cell[name] for name in "net layers k power within".split()))
    data = examples(cell, parts)
    began = time.process_time()
    head = linear_head(data.train_x.shape[-1:], 10)
    steps = 10*len(data)//500
    train_without_privacy(head, data, torch.optim.Adam(head.parameters(), cell["lr"]), 500, steps,
                          torch.Generator().manual_seed(cell["seed"]),
                          augment=lambda x, generator: x.float())
    found = dict(step=steps, test_accuracy=accuracy(head, data))
    return [lines_without_privacy(sys.modules[__name__], cell | dict(updates=steps), data,
                                  time.process_time() - began, **found)]


# ---- more layers than the last

def fine_tuner(cell, model, z, data):
    "A trainer whose head learns alone at first; then the layers that may."
    torch.manual_seed(cell["seed"])  # of adapters
    model = train_only(new_head(model, z, len(data.classes)), cell["what"])
    left = len(data)/N if len(data) > N//2 else .1*len(data)/cell["batch"]
    plan = PrivacyPlan(n=len(data), batch_size=left*cell["batch"], steps=cell["steps"],
                       eps=cell["eps"], delta=DELTA)
    half = settled_precision("auto") == "bf16"
    engine = bf16_engine(fast_grad_sum) if half else fast_grad_sum
    first = HeadFirst(model, cell["head_steps"])
    trainer = Trainer(
        model, data, plan,
        optimizer=partial(torch.optim.SGD, lr=cell["lr"]),
        clip=FlatClip(1.),
        engine=first.engine(engine),
        callbacks=[first, Schedule(cell["lr"], "linear", plan.steps)],
        seed=cell["seed"],
        micro_batch=128,
    )
    first.begin()
    return trainer


def run_layers(cell, model=None, z=None, data=None):
    if data is None:
        model, _ = load_public_net(cell["net"])
        public, data = load("cifar100"), load("cifar10")
        z = describe(model, public, public.train_x[:5000], "last")[:, 0]
        data = data.replace(mean=public.mean, std=public.std)  # as the network knows them
        data = data.split(SPLIT) if cell["stage"] == "tune" else data
    began = time.process_time()
    trainer = fine_tuner(cell, model, z, data).fit()
    seconds = time.process_time() - began
    precision = settled_precision("auto")
    return [lines_of(sys.modules[__name__], cell | dict(max_norm=1., precision=precision), trainer,
                     seconds, test_accuracy=trainer.evaluate())]


# ---- the last two layers of Papernot et al.'s network, and all of them without privacy

def started(net):
    "A public network with a head that begins at zero, and how its images are normalized."
    model, _ = load_public_net(net)
    public = load("cifar100")
    z = describe(model, public, public.train_x[:5000], "last")[:, 0]
    return new_head(model, z, 10), public


@lru_cache(maxsize=1)
def behind_convolutions(net):
    "CIFAR-10 as the frozen convolutions see it, and the layers behind them."
    model, public = started(net)
    *convolutions, first, relu, centre, head = model
    fully_connected = torch.nn.Sequential(first, relu, centre, head)
    below = torch.nn.Sequential(*convolutions, torch.nn.Identity())  # which `describe` leaves out
    data = load("cifar10")

    def seen(x):
        return describe(below, public, x, "last")[:, 0].float()
    data = Examples(seen(data.train_x), data.train_y, test_x=seen(data.test_x),
                    test_y=data.test_y, name="cifar10 (public convolutions)",
                    classes=data.classes)
    return data, fully_connected


def run_two(cell, data=None, model=None):
    "Two fully connected layers under DP; the first begins with its public weights."
    if data is None:
        data, model = behind_convolutions(cell["net"])
    data = data.split(SPLIT) if cell["stage"] == "tune" else data
    plan = PrivacyPlan(n=len(data), batch_size=cell["batch"]*len(data)/N, steps=cell["steps"],
                       eps=cell["eps"], delta=DELTA)
    trainer = Trainer(deepcopy(model), data, plan, clip=FlatClip(1.), seed=cell["seed"],
                      optimizer=partial(torch.optim.SGD, lr=cell["lr"]),
                      callbacks=[Schedule(cell["lr"], "linear", plan.steps)], micro_batch=512)
    began = time.process_time()
    trainer.fit()
    return [lines_of(sys.modules[__name__], cell | dict(max_norm=1.), trainer,
                     time.process_time() - began, test_accuracy=trainer.evaluate())]


def one_view(x, generator):
    return views(x, 1, generator).tree[:, 0]


def run_whole(cell):
    "Ordinary training of all layers, on shifted and mirrored images."
    model, public = started(cell["net"])
    model.requires_grad_(True)
    data = load("cifar10").replace(mean=public.mean, std=public.std)
    data = data.split(SPLIT) if cell["stage"] == "tune" else data
    optimizer = torch.optim.SGD(model.parameters(), cell["lr"], momentum=.9, nesterov=True,
                                weight_decay=5e-4)
    half = settled_precision("auto") == "bf16"
    steps, began = int(cell["steps"]), time.process_time()
    train_without_privacy(model, data, optimizer, int(cell["batch"]), steps,
                          torch.Generator().manual_seed(cell["seed"]), one_view, half)
    settings = cell | dict(precision="bf16" if half else "float32", momentum=.9)
    return [lines_without_privacy(sys.modules[__name__], settings, data,
                                  time.process_time() - began, step=steps,
                                  test_accuracy=accuracy_of_images(model, data))]


RUN = {"head": run_head, "plain": run_plain, "layers": run_layers, "two": run_two,
       "whole": run_whole}


def run(cell, **given):
    "One run, as `harness.work` wants it."
    cell = cell | dict(split="val" if cell["stage"] == "tune" else "test")
    return RUN[cell["kind_of_run"]](cell, **given)


# ---- what to run

FIELDS = ("kind_of_run stage net layers k mean power within batch steps lr what head_steps "
          "seed").split()


def key(row):
    "Of a cell, or of a row, whose `eps` is what was spent."
    budget = row["target_eps"] if "target_eps" in row else row["eps"]
    return budget, *(row.get(name) for name in FIELDS)


def is_there(net):
    "Has the public network been trained on this machine?"
    try:
        return bool(find_start(net))
    except FileNotFoundError:
        return False


def best_of(recorded, cells):
    "The cell with the best validation accuracy, once all of them are recorded."
    found = {key(row): row["accuracy"] for row in recorded}
    if not cells or not all(key(cell) in found for cell in cells):
        return None
    return max(cells, key=lambda cell: found[key(cell)])


def greedy(recorded, cell, *turns):
    "Try changes one turn after the other, each on the best of the turn before."
    cells, best = [cell], cell
    for turn in turns:
        tried = [best, *(best | change for change in turn)]
        cells += tried
        best = best_of(recorded, tried)
        if best is None:
            return cells, None
    return cells, best


def rates(*values):
    return [dict(lr=lr) for lr in values]


def tuned(recorded, cell, *turns):
    "A greedy search, and three seeds of what it ends with."
    cells, best = greedy(recorded, cell, *turns)
    return cells + [best | dict(stage="final", seed=seed) for seed in SEEDS if best]


def head_cell(net, **more):
    return dict(kind_of_run="head", stage="tune", net=net, **BASE, lr=8., eps=2.12, seed=0) | more


def tuning_papernot(recorded):
    "Rate and unit at the largest budget; at the others the rate. Cells, and eps -> the best."
    first = head_cell("max-100", layers="last", power=.25)
    turns = rates(4., 16.), [dict(power=0.), dict(power=.5)], [dict(within=False)]
    cells, best = greedy(recorded, first, *turns)
    if best is None:
        return cells, {}
    found = {2.12: best}
    smaller = rates(*(best["lr"]/part for part in (2, 4, 8, 16)))
    for eps in EPS[:-1]:
        more, found[eps] = greedy(recorded, best | dict(eps=eps), smaller)
        cells += more
    return cells, {} if None in found.values() else found


def papernot(recorded):
    "Tables 3 and 4, three seeds; what the public unit is worth."
    if not is_there("max-100"):
        return []
    cells, best = tuning_papernot(recorded)
    if not best:
        return cells
    final = [best[eps] | dict(stage="final", seed=seed) for seed in SEEDS for eps in reversed(EPS)]
    others = [cell | dict(net=net) for net in THEIRS[1:3] if is_there(net) for cell in final]
    unit = [final[0] | dict(power=None), final[0] | dict(power=0.)]
    return cells + final + others + unit


def wide(recorded):
    "Each width with its own rate; without the unit: 10,240 features have 10,240^2 covariances."
    cells = []
    for net in filter(is_there, ("max-100", "wide-100")):
        first = head_cell(net, layers="last", power=0., within=False)
        cells += tuned(recorded, first, rates(4., 16.), rates(2., 32.))
    return cells


def two(recorded):
    "Abadi et al. move CIFAR-100 to CIFAR-10, too, and train two layers: five rates each."
    if not is_there("max-100"):
        return []
    cells = []
    for eps in (2., 4., 8.):
        first = dict(kind_of_run="two", stage="tune", net="max-100", what="two", batch=2048.,
                     steps=100, lr=1., eps=eps, seed=0)
        cells += tuned(recorded, first, rates(.5, 2.), rates(.25, 4.))
    return cells


def whole(recorded):
    "One rate, one seed: their line without privacy is one number, too."
    cell = dict(kind_of_run="whole", stage="final", net="max-100", what="all", batch=128.,
                steps=10*N//128, lr=.02, eps=None, seed=0)
    return [cell] if is_there("max-100") else []


TURNS = (
    rates(4., 16.),
    [dict(layers="last")],
    [dict(power=.25), dict(power=0.)],
    [dict(within=False)],
    [dict(k=2), dict(k=4), dict(k=4, mean=False)],
    [dict(batch=float(N), steps=40), dict(batch=float(N), steps=40, lr=16.)],
)


def tuning_heads(recorded):
    return greedy(recorded, head_cell("public-net", eps=2.), *TURNS)


def heads(recorded):
    "Choose at eps = 2; three seeds at 2 and 3, one at 1 and 8."
    if not is_there("public-net"):
        return []
    cells, best = tuning_heads(recorded)
    if best is None:
        return cells
    final = best | dict(stage="final")
    many = [final | dict(eps=eps, seed=seed) for seed in SEEDS for eps in (2., 3.)]
    last = dict(layers="last", k=1, mean=True)
    return cells + many + [final | dict(eps=1.), final | dict(eps=8.), final | last | dict(eps=2.)]


def plain(recorded):
    "The same features without privacy; the rate is chosen on the split."
    cells = []
    bests = [tuning_papernot(recorded)[1].get(2.12) if is_there("max-100") else None,
             tuning_heads(recorded)[1] if is_there("public-net") else None]
    for best in filter(None, bests):
        same = best | dict(kind_of_run="plain", eps=None, mean=True, steps=None, batch=500.)
        tried, found = greedy(recorded, same | dict(lr=1e-3), rates(3e-4, 3e-3))
        cells += tried
        if found:
            cells.append(found | dict(stage="final"))
    return cells


def layers(recorded):
    "Head, norms, adapters, all: two rates each on the split, then the best kind on the test set."
    if not is_there("public-net"):
        return []
    first = dict(kind_of_run="layers", stage="tune", net="public-net", batch=4096., steps=28,
                 head_steps=12, lr=2., eps=2., what="all", seed=0)
    tried = [first | dict(what=what, lr=lr) for lr in (2., 8.)
             for what in ("all", "head", "norms", "adapters")]
    best = best_of(recorded, tried)
    return tried + ([best | dict(stage="final")] if best else [])


PARTS = {"papernot": papernot, "wide": wide, "two": two, "whole": whole, "heads": heads,
         "plain": plain, "layers": layers}
