"""What does a private step cost on a GPU, whatever the images are?

    python -m experiments.gpu [--device cuda] [--steps 3]    less than a minute on a GPU

Made-up images of CIFAR-10's size, the presets' own networks, engines, noise and proof. The first
step, which loads kernels, is not counted. All layers learn, also where a preset's first steps would
move the head alone.
"""
import argparse
import json
import time
from pathlib import Path

import torch

from dp_course.basics import machine, synchronize
from dp_course.cli import make_config
from dp_course.cli.setup import make_trainer
from dp_course.data import Examples
from dp_course.training import code_version

_VIEWS = dict(views=4, head_steps=0)
RUNS = [("report-v1", dict(micro_batch=608)),
        ("report-2048", dict(micro_batch=2176)),
        ("resnet20-synthetic-eps3", dict(_VIEWS, micro_batch=2228, precision="bf16")),
        ("resnet20-synthetic-eps3", dict(_VIEWS, micro_batch=4456, precision="bf16")),
        ("resnet20-synthetic-eps3", dict(_VIEWS, micro_batch=4456)),
        ("report-wrn16-4", dict(micro_batch=1088))]


def made_up(device, n=50_000):
    "Images of CIFAR-10's size and number."
    g = torch.Generator().manual_seed(0)
    x = torch.randint(256, (n, 3, 32, 32), generator=g, dtype=torch.uint8)
    y = torch.arange(n) % 10
    classes = [str(c) for c in range(10)]
    return Examples(x, y, x[:100], y[:100], name="cifar10", classes=classes).to(device)


def measured(preset, settings, data, steps):
    "The seconds of a step, and the memory that it takes."
    trainer = make_trainer(make_config(preset, **settings), data, seed=0)
    trainer.step()
    synchronize(trainer.device)
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    synchronize(trainer.device)
    seconds = (time.perf_counter() - began)/steps
    images = trainer.plan.batch_size*max(1, settings.get("views", 0))
    return dict(
        preset=preset,
        **settings,
        images=round(images),
        seconds=round(seconds, 4),
        images_per_second=round(images/seconds),
        gigabytes=round(torch.cuda.max_memory_allocated()/2**30, 1) if data.train_y.is_cuda else "",
    )


def main():
    day = time.strftime("%Y-%m-%d", time.gmtime())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(f"runs/{day}-gpu.json"))
    args = parser.parse_args()
    record = dict(date=day, how=__doc__, steps=args.steps, code=code_version(), machine=machine(),
                  rows=[])
    data = made_up(args.device)
    for preset, settings in RUNS:
        if data.train_y.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        row = measured(preset, settings, data, args.steps)
        print(row, flush=True)
        record["rows"].append(row)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
