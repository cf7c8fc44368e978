"What would move an example's neighbours does not, and what is innocent trains; leaks.py has both."
import copy

import leaks
import pytest
import torch
from innocents import INNOCENTS, RANDOM
from oracle import same
from torch import nn
from toys import Plan, loss

from dp_course.data import tree_map
from dp_course.gradients import FlatClip, fast_grad_sum, loop_grad_sum
from dp_course.training import Trainer

pytestmark = pytest.mark.filterwarnings("ignore")
ENGINES = pytest.mark.parametrize("engine", [fast_grad_sum, loop_grad_sum])


@pytest.mark.quick(60)
@ENGINES
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow]*name.startswith("waits")) for name in leaks.LEAKS])
def test_no_row_moves_the_others(name, engine):
    assert leaks.answer(name, leaks.LEAKS[name], engine) != "moved"


@ENGINES
@pytest.mark.parametrize("name", leaks.NAMED)
def test_the_limits_are_limits(name, engine):
    "What is said not to be seen is not seen; and the table of leaks can find what moves."
    options, engines = leaks.NAMED[name]
    assert (leaks.answer(name, options, engine) == "moved") == (engine in engines)


def a_run(name):
    options = dict(INNOCENTS[name])
    torch.manual_seed(0)
    make, data = options.pop("model", lambda: nn.Linear(5, 10)), options.pop("data", None)
    data = data() if data else leaks.noise(5)
    return Trainer(make(), data, Plan(leaks.N, 8, 2, 1.), **{"loss_fn": loss, **options})


def wide(tree):
    return tree_map(lambda v: v.double() if v.is_floating_point() else v, tree)


@pytest.mark.quick(20)
@pytest.mark.parametrize("name", INNOCENTS)
def test_innocents_train_and_their_sums_are_those_of_a_loop(name):
    run = a_run(name)
    run.fit()
    if name in RANDOM:
        return
    model = copy.deepcopy(run.model).double().train()
    x, y = map(wide, next(iter(run._reader().micro_batches(torch.arange(5)))))
    for engine in {run.engine if run.engine is loop_grad_sum else fast_grad_sum, loop_grad_sum}:
        same(engine, model, x, y, FlatClip(1.), loss=run.loss_fn)
