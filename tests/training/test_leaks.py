"What would move an example's neighbours does not, and what is innocent trains; leaks.py has both."
import copy

import leaks
import pytest
import torch
from innocents import IN_FLOAT32, INNOCENTS, RANDOM
from torch import nn
from toys import Plan, loss

from dp_course.data import call_model, flatten_views, leaves, losses_of, take, tree_map
from dp_course.gradients import FlatClip, fast_grad_sum, loop_grad_sum, trainable
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


def wide(tree, dtype):
    return tree_map(lambda v: v.to(dtype) if v.is_floating_point() else v, tree)


def by_torch(model, loss_fn, x, y):
    "The clipped sum, one example after the other, by plain autograd."
    params, total = trainable(model), {}
    for i in range(len(leaves(y)[0])):
        rows, labels, _, k = flatten_views(take(x, slice(i, i + 1)), take(y, slice(i, i + 1)))
        each = [losses_of(loss_fn, call_model(model, take(rows, slice(j, j + 1))),
                          take(labels, slice(j, j + 1)), 1) for j in range(k)]
        grads = torch.autograd.grad(torch.cat(each).mean(), list(params.values()))
        length = torch.cat([g.flatten() for g in grads]).norm()
        for name, g in zip(params, grads):
            total[name] = total.get(name, 0) + g*min(1., 1/length.item())
    return total


@pytest.mark.quick(20)
@pytest.mark.parametrize("name", INNOCENTS)
def test_innocents_train_and_their_sums_are_those_of_a_loop(name):
    run = a_run(name)
    run.fit()
    if name in RANDOM:
        return
    narrow = any(word in name for word in IN_FLOAT32)
    dtype = torch.float32 if narrow else torch.float64
    model = copy.deepcopy(run.model).to(dtype).train()
    x, y = next(iter(run._reader().micro_batches(torch.arange(5))))
    x, y = wide(x, dtype), wide(y, dtype)
    want = by_torch(model, run.loss_fn, x, y)
    for engine in {run.engine if run.engine is loop_grad_sum else fast_grad_sum, loop_grad_sum}:
        sums, _ = engine(model, run.loss_fn, x, y, FlatClip(1.))
        off = max((sums[key] - want[key]).norm().item() for key in want)
        assert off < (1e-5 if narrow else 1e-12)
