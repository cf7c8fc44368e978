"""Tuning of the presets on digits and on scattering features, on a validation split.

    python -m experiments tuning digits     9 rates and batches, 2 others, the best two 3 times
    python -m experiments tuning linear     scatter-linear: 4 rates, 2 schedules, half the batch,
                                            fewer steps (240, 120); 2 to 4 minutes each
    python -m experiments tuning cnn        scatter-cnn: 3 rates, 2 schedules; 6 minutes each

287 of the 1,437 digits, or 5,000 of the 50,000 CIFAR-10 images, are held out of the *training* set
and judged on; the test set is not looked at. The sampling rate is that of the whole set, and eps is
3. The presets were chosen by earlier runs whose code is lost (runs/*-tuning.jsonl: 19, 12 and 8);
three of the 19 used a network that is gone, and most of the 8 tried networks. What a preset can
still say is tried here again, and all of it is repeatable.
"""
import sys
from functools import lru_cache

from dp_course.cli import load_data, make_config
from experiments.harness import chosen, tuned

NAME = "tuning"
SIZES = {"digits": (1437, 287), "cifar10": (50_000, 5000)}  # training set, held out of it
FIELDS = "lr schedule batch_size epochs max_norm".split()  # what is tried


@lru_cache(maxsize=1)
def examples(preset):
    "The validation split, loaded once."
    return load_data(make_config(preset, n_val=SIZES[make_config(preset).data][1]))


def config_of_cell(cell):
    "A preset at the same sampling rate on the smaller training set."
    given = {key: cell[key] for key in FIELDS}
    n, held = SIZES[make_config(cell["base"]).data]
    given["batch_size"] *= (n - held)/n
    return make_config(cell["base"], **given, n_val=held)


def run(
    cell,       # stage, base (a preset), seed, and the fields of `Config` that are tried
    data=None,  # default: the validation split of the preset's data set
):              # one run, as `harness.work` wants it
    "Train once and judge on the held-out images."
    return tuned(sys.modules[__name__], config_of_cell(cell), data or examples(cell["base"]), cell)


def key(row):
    "The batch of a record is that of the smaller set, and `batch` that of the whole one."
    names = "base seed lr schedule batch epochs max_norm".split()
    return tuple(row.get(name) for name in names)


def cell_of(preset, seed=0, **setting):
    "A cell: the preset's own numbers but for those that are tried."
    config = make_config(preset)
    usual = {name: getattr(config, name) for name in FIELDS}
    cell = dict(stage="tune", base=preset, seed=seed) | usual | setting
    return cell | {"batch": cell["batch_size"]}


def grid(preset, *settings, **same):
    "A part: settings of one preset, one seed."
    return lambda recorded: [cell_of(preset, **(same | setting)) for setting in settings]


def steps(count, batch=8192):
    "So many steps, in epochs of CIFAR-10."
    return dict(epochs=count*batch/50_000)


def digits(recorded):
    "All settings once; the best two, when all are there, with two more seeds."
    name = "digits-eps3"
    cells = [cell_of(name, lr=lr, batch_size=b) for b in (120., 240., 479.) for lr in (.2, .4, .8)]
    cells += [cell_of(name, schedule="constant"), cell_of(name, max_norm=.5)]
    first = chosen(recorded, base=name, seed=0)
    if len(first) < len(cells):
        return cells
    best = sorted(first, key=lambda row: -row["accuracy"])[:2]
    wanted = [{**{field: row[field] for field in FIELDS}, "batch_size": row["batch"]}
              for row in best]
    return cells + [cell_of(name, seed, **setting) for setting in wanted for seed in (1, 2)]


PARTS = {
    "digits": digits,
    "linear": grid("scatter-linear-eps3", *(dict(lr=lr) for lr in (.6, 1.2, 2.4, 4.8)),
                   dict(lr=2.4, schedule="linear"), dict(lr=4.8, schedule="linear"),
                   dict(batch_size=4096, **steps(360, 4096)),
                   *(steps(count) for count in (240, 120)),
                   *(dict(lr=2.4, schedule="linear", **steps(count)) for count in (240, 120)),
                   **steps(360)),
    "cnn": grid("scatter-cnn-eps3", *(dict(lr=lr) for lr in (4., 8., 12.)),
                dict(lr=4., schedule="constant"), dict(lr=8., max_norm=.1)),
}
