"""`nbdev_test` as `make test` runs it: the same cells with the same flags, in two workers.

    python tests/run_notebooks.py [nbs/06_trainer.ipynb]    all notebooks, or one

They are forked from here, so that the course is imported once. No figure is rendered (IPython only
prints what goes wrong there), and solutions are judged in tests/exercises; `make test-slow` runs
`nbdev_test` itself.
"""
import sys

import matplotlib.pyplot  # noqa: F401
import opacus  # noqa: F401
import scipy.stats  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch._dynamo  # an optimizer imports it: two seconds
from IPython.core import pylabtools
from nbdev import test

from dp_course.cli import main, summaries  # noqa: F401


class Shell(test.CaptureShell):
    "Runs a solution without the check in its last line."
    def run_all(self, nb, **options):
        for cell in nb.cells:
            if cell.source.startswith("# solution\n"):
                cell.source = cell.source.rstrip().rpartition("\n")[0]
        super().run_all(nb, **options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    pylabtools.retina_figure = lambda figure, **options: None
    test.CaptureShell = Shell
    summaries()  # the eps of every record, once: the workers inherit what is remembered
    path = sys.argv[1] if len(sys.argv) > 1 else None
    test.nbdev_test(path, n_workers=2, timing=True)
