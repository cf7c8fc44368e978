"""Peak memory over the batch, engine by engine: a ResNet-20 on 32x32 images.

    python benchmarks/memory.py     some three minutes of one core; writes runs/DATE-memory.json

Each number is the peak of a process that takes one step with one engine, above the imported
libraries. It does not depend on what else the machine does.
"""
import json
import sys
import time
from functools import partial
from pathlib import Path

import bench
import torch

from dp_course.basics import machine
from dp_course.models import resnet20
from dp_course.training import code_version

BATCHES = 16, 64, 256
ENGINES = ("plain SGD", "fast_grad_sum", "ghost_grad_sum", "bookkeeping_grad_sum", "hook_grad_sum",
           "opacus hooks", "vmap_grad_sum")
RUNS = Path(__file__).resolve().parent.parent/"runs"


def peak_of(batch, name):
    peak, = bench.peaks(1, __file__, batch, name)
    return peak


def main():
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        bench.CASES["this"] = resnet20, bench.IMAGE, int(sys.argv[1]), None
        return bench.print_peak(partial(bench.make, "this", sys.argv[2], "cpu"), steps=1)
    rows = {}
    for name in ENGINES:
        rows[name] = {str(batch): peak_of(batch, name) for batch in BATCHES}
        print(name, rows[name], flush=True)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    record = {"date": day, "how": __doc__, "code": code_version(), "machine": machine(),
              "network": "resnet20", "rows": rows}
    (RUNS/f"{day}-memory.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
