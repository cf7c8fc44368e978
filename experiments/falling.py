"""What does a falling learning rate give at the end of a run? One run, gone on with twice.

    dp-train report-4096 --seed 0 --steps 598 --out FOLDER    some 80 minutes on two cores
    python -m experiments.falling FOLDER                      eight minutes

The run in FOLDER stopped short of its plan. A copy goes on at a rate that falls in equal steps to
0, with the noise of the same seed, and is tested on the way; FOLDER itself is left alone, and
`--resume` takes it to its end at the constant rate. The two together released more than one run,
so whoever publishes both has spent more than the eps of one.
"""
import json
import shutil
import tempfile
from contextlib import closing
from pathlib import Path

from dp_course.basics import keep_memory
from dp_course.cli import Job, make_config, pick_up
from experiments.harness import new_record, parser_of

TESTS = 4  # on the way down, evenly spread


class Fall:
    "Lower the rate in equal steps, to 0 behind the last one; test on the way."
    def __init__(self, trainer):
        self.begun, self.steps = trainer.t, trainer.plan.steps
        self.lr = trainer.optimizer.param_groups[0]["lr"]
        self.every = max((self.steps - self.begun)//TESTS, 1)
        self.rows = []
        self.test(trainer)

    def __call__(self, trainer):
        left = (self.steps - trainer.t)/(self.steps - self.begun)
        for group in trainer.optimizer.param_groups:
            group["lr"] = self.lr*left
        if (trainer.t - self.begun) % self.every == 0 or trainer.t == self.steps:
            self.test(trainer)

    def test(self, trainer):
        row = {
            "step": trainer.t,
            "next_lr": trainer.optimizer.param_groups[0]["lr"],
            "test_accuracy": round(trainer.evaluate(), 6),
        }
        print(f"step {row['step']}: {row['test_accuracy']:.2%}", flush=True)
        self.rows.append(row)


def fallen(folder, preset):
    "Go on with a copy of the run in `folder` while its rate falls: its tests on the way."
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        run = pick_up(Job(make_config(preset), out=copy))
        with closing(run.record):
            fall = Fall(run.trainer)
            run.trainer.callbacks.append(fall)
            run.trainer.fit(fall.steps - fall.begun)
    return fall.rows


def main():
    parser = parser_of("falling", __doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--preset", default="report-4096")
    args = parser.parse_args()
    keep_memory()
    record = new_record(__doc__, preset=args.preset)
    record["rows"] = fallen(args.folder, args.preset)
    args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
