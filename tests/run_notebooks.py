"""`nbdev_test` as `make test` runs it: the same cells with the same flags, in two workers.

They are forked from here, so that the course is imported once. No figure is rendered (IPython only
prints what goes wrong there), and a proof that a worker has seen succeed is not repeated; `make
test-slow` runs `nbdev_test` itself.
"""
import matplotlib.pyplot  # noqa: F401
import torch._dynamo  # an optimizer imports it: two seconds
from IPython.core import pylabtools
from nbdev.test import nbdev_test
from proved import once

from dp_course.cli import main  # noqa: F401
from dp_course.training import trainer

if __name__ == "__main__":
    torch.set_num_threads(1)
    pylabtools.retina_figure = lambda figure, **options: None
    trainer.prove_separate = once(trainer.prove_separate, set())
    nbdev_test(n_workers=2, timing=True)
