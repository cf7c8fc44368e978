"""What does a private step cost on a GPU, whatever the images are?

    python -m experiments.gpu [--device cuda] [--steps 3]    less than a minute on a GPU

Made-up images of CIFAR-10's size, the presets' own networks, engines, noise and proof. The first
step, which loads kernels, is not counted. All layers learn, also where a preset's first steps would
move the head alone. Then filters of 3x3 by themselves: every example's gradient by folding the
examples into channels, and by patches.
"""
import json
import time

import torch
from torch import nn

from dp_course.basics import synchronize
from dp_course.cli import make_config
from dp_course.cli.setup import make_trainer
from dp_course.data import Examples
from dp_course.gradients.layers import _gradients_by_folding, _gradients_by_patches
from experiments.harness import new_record, parser_of

_VIEWS = dict(views=4, head_steps=0)
RUNS = [("report-v1", dict(micro_batch=608)),
        ("report-2048", dict(micro_batch=2176)),
        ("resnet20-synthetic-eps3", dict(_VIEWS, micro_batch=2228, precision="bf16")),
        ("resnet20-synthetic-eps3", dict(_VIEWS, micro_batch=4456, precision="bf16")),
        ("report-wrn16-4", dict(micro_batch=1088))]

_NARROW = dict(b=4096, views=2, dtype=torch.bfloat16)  # of resnet20-views-eps3
_WIDE = dict(b=1088, views=1, dtype=torch.float32)     # of report-wrn16-4
FILTERS = [dict(_NARROW, channels=(16, 16), pixels=32),
           dict(_NARROW, channels=(32, 32), pixels=16),
           dict(_NARROW, channels=(64, 64), pixels=8),
           dict(_WIDE, channels=(64, 64), pixels=32),
           dict(_WIDE, channels=(128, 128), pixels=16),
           dict(_WIDE, channels=(256, 256), pixels=8)]


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


def milliseconds(work, device, times=3):
    "The mean of some calls after the first."
    work()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return round(1e3*(time.perf_counter() - began)/times, 2)


def both_ways(device, b, views, dtype, channels, pixels):
    "Milliseconds of the gradients of a filter, folded and from patches."
    i, o = channels
    conv = nn.Conv2d(i, o, 3, padding=1, bias=False, device=device)
    x = torch.randn(views*b, i, pixels, pixels, device=device, dtype=dtype)
    g = torch.randn(views*b, o, pixels, pixels, device=device, dtype=dtype)
    return dict(
        images=b, views=views, channels=channels, pixels=pixels,
        precision=str(dtype).removeprefix("torch."),
        folded=milliseconds(lambda: _gradients_by_folding(conv, x, g, b, (1, 1)), device),
        patches=milliseconds(lambda: _gradients_by_patches(conv, x, g, b, (1, 1)), device),
    )


def main():
    parser = parser_of("gpu", __doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    record = new_record(__doc__, steps=args.steps) | dict(rows=[])
    data = made_up(args.device)
    for preset, settings in RUNS:
        if data.train_y.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        row = measured(preset, settings, data, args.steps)
        print(row, flush=True)
        record["rows"].append(row)
    record["filters"] = [both_ways(torch.device(args.device), **of) for of in FILTERS]
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
