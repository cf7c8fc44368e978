"""Where does a run without a clip break? One run again, with the lengths of all its gradients.

    python -m experiments.unclipped    some 50 minutes on one core

`resnet20-cpu-plain` learns for 360 steps and then falls to chance (lesson 12). This repeats it, the
same seed and so the same batches, and writes a row for each step: the median length of one image's
gradient, the three longest with the images that they belong to, and the length of the mean of the
batch. Nothing is clipped, nothing is noised, nobody is protected.
"""
import json

from dp_course.basics import keep_memory
from dp_course.cli import load_data, make_config, make_trainer
from dp_course.training import Trainer
from experiments.harness import new_record, parser_of


class Measured(Trainer):
    "Keep a row of lengths for each step."
    def _clipped_sum(self, idx, t):
        total, norms = super()._clipped_sum(idx, t)
        lengths = norms.double().norm(dim=0)
        longest = lengths.topk(3)
        mean = sum(g.square().sum() for g in total.values()).sqrt()/self.plan.batch_size
        self.lengths.append({
            "step": t,
            "median": round(lengths.median().item(), 2),
            "longest": [round(length, 2) for length in longest.values.tolist()],
            "images": idx[longest.indices.to(idx.device)].tolist(),
            "mean_gradient": round(mean.item(), 3),
        })
        return total, norms


def measured(config, data, steps, seed=0, say=print):
    "The rows of the first steps of a run, and of its tests."
    trainer = make_trainer(config, data, seed, init_seed=seed)
    trainer.__class__ = Measured
    trainer.lengths = []
    for _ in range(steps):
        say(trainer.step().lengths[-1])
    return trainer.lengths


def main():
    parser = parser_of("unclipped", __doc__)
    parser.add_argument("--steps", type=int, default=390)
    args = parser.parse_args()
    keep_memory()
    config = make_config("resnet20-cpu-plain", precision="bf16")
    record = new_record(__doc__, preset=config.preset, precision=config.precision)
    record["rows"] = measured(config, load_data(config), args.steps)
    args.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
