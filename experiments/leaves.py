"""Tuning of the presets that begin with synthetic images, and of the ResNet-20 for a CPU.

    python -m experiments leaves linear       3 rates, 120 steps each
    python -m experiments leaves wide         twice the patches, and quarters that count twice
    python -m experiments leaves coarse       quarters that count twice, the usual patches
    python -m experiments leaves encoder      an encoder's maps beside: 3 rates, 3 weights more
    python -m experiments leaves cnn          4 settings, 120 steps
    python -m experiments leaves resnet       ResNet-20 for a CPU: 3 rates, 100 of 400 steps
    python -m experiments leaves momentum     ... the report's momentum and batch, 2 rates
    python -m experiments leaves synthetic    ... from an encoder: 3 rates, 150 of 600 steps;
                                              four views

All on 45,000 training images and judged on the 5,000 others (`n_val`), never on the test set, at
eps = 3. `resnet` takes 100 of 400 steps with batch 4096, `momentum` 150 of 800 with 2048,
`synthetic` 150 of 600; each step has the noise of its whole plan, and is worth what it will be
worth there. (The preset that came of `momentum` takes 1,000.)
Before these, 25 linear heads had looked at the same split in somebody else's trial, from which
the features and the patches' weight come: `tuning_runs` counts them.
"""
import sys
from functools import lru_cache

from dp_course.cli import load_data, make_config
from experiments.harness import tuned

NAME = "leaves"
SPLIT, N = 5000, 50_000
FIELDS = "features model epochs lr momentum schedule ema views head_steps".split()  # what is tried


@lru_cache(maxsize=1)
def images(preset, features):
    "The validation split, loaded once."
    return load_data(make_config(preset, features=features, n_val=SPLIT))


def config_of_cell(cell):
    "The preset at the same sampling rate on the smaller training set."
    given = {key: value for key, value in cell.items() if key in FIELDS}
    left = (N - SPLIT)/N
    return make_config(cell["base"], **given, n_val=SPLIT, batch_size=left*cell["batch"])


def run(
    cell,       # stage, base (a preset), seed, stop, and the fields of `Config` that are tried
    data=None,  # default: the validation split of CIFAR-10
):              # one run, as `harness.work` wants it
    "Train once and judge on the held-out images."
    config = config_of_cell(cell)
    data = data or images(config.preset, config.features)
    return tuned(sys.modules[__name__], config, data, cell, cell.get("stop"))


def key(row):
    "The batch of a record is that of the smaller set, and `batch` that of the whole one."
    batch = row.get("batch") or row["batch_size"]*N/(N - SPLIT)
    return *(row.get(name) for name in ("base", "seed", *FIELDS, "stop")), round(batch)


def grid(preset, *settings, **same):
    "A part: settings of one preset, one seed."
    config = make_config(preset)

    def cells(recorded):
        found = []
        for setting in settings:
            usual = {name: getattr(config, name) for name in FIELDS}
            told = dict(stage="tune", base=preset, seed=0, batch=config.batch_size)
            found.append(told | usual | same | setting)
        return found
    return cells


SHORT = dict(epochs=400*4096/N, stop=100)  # a plan of 400 steps of 4096
SMALLER = SHORT | dict(batch=2048, stop=150)
STARTED = SMALLER | dict(epochs=600*2048/N)

PARTS = {
    "linear": grid("leaves-linear-eps3", *(dict(lr=lr) for lr in (2., 4., 8.))),
    "wide": grid("leaves-linear-eps3", dict(), dict(model="leaves_coarse"),
                 dict(model="leaves_coarse", lr=2.), features="leaves-1600"),
    "coarse": grid("leaves-linear-eps3", *(dict(lr=lr) for lr in (1., 2., 4.)),
                   model="leaves_coarse"),
    "encoder": grid("leaves-encoder-eps3",
                    *(dict(model="leaves_linear", lr=lr) for lr in (2., 4., 8.)),
                    *(dict(model=f"leaves_{w}") for w in ("light", "heavy", "heavier"))),
    "cnn": grid("leaves-cnn-eps3", *(dict(lr=lr) for lr in (4., 8., 12.)),
                dict(lr=8., schedule="constant")),
    "resnet": grid("resnet20-cpu-eps3", *(dict(lr=lr) for lr in (1., 4., 8.)),
                   momentum=0., batch=4096, **SHORT),
    "momentum": grid("resnet20-cpu-eps3", *(dict(lr=lr) for lr in (.5, 1.)),
                     momentum=.9, **SMALLER),
    "synthetic": grid("resnet20-synthetic-eps3", *(dict(lr=lr) for lr in (.5, 1., 2.)),
                      dict(lr=1., views=4), momentum=.9, head_steps=50, **STARTED),
}
