"""What does the course's ResNet-20 reach as one trains it without privacy? (lesson 13)

    python -m experiments.ordinary [--epochs 30] [--seed 0]    an hour on one core

The network of `resnet20-cpu-eps3` and its first weights, GroupNorm and weight standardization
included; shuffled batches of 128, a random crop and mirror image of every photograph, SGD with
momentum and weight decay, a rate that falls in a straight line to 0. Nothing is clipped, nothing
is noised, nobody is protected. The settings are common ones and were not searched; the test set is
looked at after every epoch and chooses nothing. A run that was stopped goes on after its last
epoch. The weights are left beside the checkpoint, as a release whose statement promises nothing.
"""
import json
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from dp_course.basics import keep_memory
from dp_course.cli import describe_release, make_config
from dp_course.cli.setup import make_model
from dp_course.data import load, views
from dp_course.training import write_weights
from experiments.harness import new_record, parser_of

SETTINGS = dict(
    batch_size=128,
    lr=.1,
    momentum=.9,
    weight_decay=5e-4,
    crop=4,
    precision="bf16",
)


def accuracy(model, data):
    "The share of test images that the network names right."
    right = 0
    for x, y in data.test_rows(1000):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            right += (model(data.normalize(x)).argmax(1) == y).sum().item()
    return right/len(data.test_y)


def train_epoch(model, data, optimizer, schedule, generator):
    "One pass over the images in a new order, each seen through a window of its own."
    for idx in torch.randperm(len(data), generator=generator).split(SETTINGS["batch_size"]):
        x, y = data.rows(idx)
        seen = views(data.normalize(x), 1, generator, SETTINGS["crop"]).tree[:, 0]
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(seen)
        loss = cross_entropy(scores.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def trained(data, epochs, seed, checkpoint, say=print):
    "Rows of a training run, one for each epoch; go on where `checkpoint` ends."
    model = make_model(make_config("resnet20-cpu-eps3"), data, seed)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=SETTINGS["lr"],
        momentum=SETTINGS["momentum"],
        weight_decay=SETTINGS["weight_decay"])
    steps = epochs*-(-len(data)//SETTINGS["batch_size"])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1., 0., steps)
    generator = torch.Generator().manual_seed(seed)
    parts = dict(model=model, optimizer=optimizer, schedule=schedule)
    rows = []
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        generator.set_state(state["generator"])
        rows = state["rows"]
    while len(rows) < epochs:
        began = time.perf_counter()
        train_epoch(model, data, optimizer, schedule, generator)
        row = {
            "epoch": len(rows) + 1,
            "test_accuracy": round(accuracy(model, data), 4),
            "seconds": round(time.perf_counter() - began, 1),
        }
        say(row, flush=True)
        rows.append(row)
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state | dict(generator=generator.get_state(), rows=rows), checkpoint)
    return rows


def release(path, data, checkpoint):
    "Write the weights that a run ended with, and what they are."
    weights = torch.load(checkpoint, weights_only=True)["model"]
    write_weights(path, weights, "No privacy: nothing was clipped and no noise was added, so these "
                                 "weights promise nothing about the photographs behind them.")
    describe_release(path, make_config("resnet20-cpu-eps3"), data)


def main():
    parser = parser_of("ordinary", __doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("out/ordinary.checkpoint"))
    args = parser.parse_args()
    keep_memory()
    args.checkpoint.parent.mkdir(exist_ok=True)
    record = new_record(__doc__)
    record["settings"] = SETTINGS | dict(epochs=args.epochs, seed=args.seed)
    data = load("cifar10")
    record["rows"] = trained(data, args.epochs, args.seed, args.checkpoint)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    release(args.checkpoint.with_suffix(".release.pt"), data, args.checkpoint)


if __name__ == "__main__":
    main()
