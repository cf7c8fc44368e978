"""Is a pre-training worth it? The verdict of a private linear model, added to its record.

    python -m experiments.pretraining [FOLDER/]pretrain-resnet20-0    some ten minutes of one core

The name is that of the files that `dp-pretrain` wrote, without a suffix. The encoder of the
checkpoint is frozen and described by its last two stages; so is the random network that it began
as. Four private runs at (3, 1e-5) on 45,000 of CIFAR-10's training images, two learning rates for
each, are judged on the 5,000 others; the better rate of each encoder counts.
"""
import argparse
import json
import math
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from dp_course.basics import keep_memory
from dp_course.data import leaf_images, load
from dp_course.features import Pretraining, drawn_run, encoder_parts
from dp_course.gradients import FlatClip
from dp_course.models import linear_head
from dp_course.privacy import PrivacyPlan
from dp_course.training import Record, Trainer, load_checked


def encoder_features(model, x, chunk=128):
    "(n,f): the parts of every image, described by a frozen encoder."
    rows = []
    for some in x.split(chunk):
        parts = encoder_parts(model, some)
        rows.append(torch.cat([m.flatten(1) for m in parts], 1))
    return torch.cat(rows)


def normalized_features(
    model,
    *images,   # (n,c,h,w) uint8, each
):             # one (n,f) tensor each; on leaves a row has about the length 125
    "Describe images so that every feature has mean 0 and one and the same std on leaves."
    size = images[0].shape[-1]
    leaves = encoder_features(model, leaf_images(500, size, seed=1, textured=True))
    mean, std = leaves.mean(0), leaves.std(0)
    std = std.clamp(min=.01*std.mean() + 1e-6)  # a feature that is dead on leaves stays small
    scale = 125/math.sqrt(leaves.shape[1])  # as long as the scattering features of lesson 15
    return [scale*(encoder_features(model, x) - mean)/std for x in images]


def probe(
    model,           # its weights are what is judged
    data,            # `Examples` of images, a validation split as test part
    plan,            # `PrivacyPlan`
    rates=(2., 4.),  # learning rates: the better one counts
):                   # dict: accuracy per rate
    "Train a private linear model on a frozen encoder's features."
    x, test_x = normalized_features(model, data.train_x, data.test_x)
    features = data.replace(train_x=x, test_x=test_x, normalize=None, probe=None)
    found = {}
    for lr in rates:
        head = linear_head(x.shape[1:], len(data.classes))
        optimizer = partial(torch.optim.SGD, lr=lr, momentum=.9)
        trainer = Trainer(head, features, plan, optimizer=optimizer, clip=FlatClip(.3), seed=0,
                          micro_batch=1024)
        found[lr] = trainer.fit().evaluate()
    return found


def run_of(path):
    "The run of drawings whose files begin with `path`, at its checkpoint."
    settings = load_checked(f"{path}.checkpoint", "dp_course pretraining 1")["config"]
    return drawn_run(Pretraining(**json.loads(settings)), None, path.parent).pick_up()


def judge(run, data, steps=120, say=print):
    "Compare an encoder with the random one that it began as; the verdict goes into the record."
    n = len(data)
    plan = PrivacyPlan(n=n, batch_size=.16384*n, steps=steps, eps=3., delta=1e-5)
    found = {}
    for name, model in (("pretrained", run.model), ("random", run.config.network())):
        found[name] = max(probe(model, data, plan).values())
        say(f"{name}: {found[name]:.4f} on {len(data.test_x)} held-out images")
    line = dict(step=run.t, views=run.views*run.t, probe=found, n=n, eps=3., rates_tried=2,
                probe_seed=0, finished=run.t == run.steps)
    with closing(Record(run.file(".jsonl"), resume=True)) as record:
        record.write("end", **line)
    return line


if __name__ == "__main__":
    keep_memory()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="of the files, without a suffix")
    judge(run_of(parser.parse_args().path), load("cifar10").split(5000))
