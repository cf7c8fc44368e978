"""What the benchmark compares us with computes what it should.

No times here. Opacus falls back to torch.func for a weight-standardized convolution unless it is
given a rule for it; the benchmark gives it one, and a wrong rule would make a wrong opponent.
"""
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dp_course.models import WSConv2d

BENCH = Path(__file__).parents[2]/"benchmarks/bench.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def network(bias, stride):
    torch.manual_seed(0)
    return nn.Sequential(
        WSConv2d(3, 4, 3, stride=stride, padding=1, bias=bias), nn.GroupNorm(2, 4), nn.ReLU(),
        WSConv2d(4, 6, 3, bias=bias), nn.Flatten(), nn.LazyLinear(5)).double()


def network_like(model, bias, stride):
    "The same network again: Opacus marks the one that it has wrapped."
    twin = network(bias, stride)
    twin(torch.zeros(1, 3, 8, 8, dtype=torch.float64))
    twin.load_state_dict(model.state_dict())
    return twin


def per_example(model, x, y):
    "Gradients that backward() leaves in `grad_sample`, by name."
    F.cross_entropy(model(x), y, reduction="sum").backward()
    return {name: p.grad_sample.clone() for name, p in model.named_parameters()}


def test_every_engine_of_ours_takes_a_step(bench, monkeypatch):
    monkeypatch.setitem(bench.CASES, "tiny", (bench.papernot_cnn, bench.DIGIT, 2, None))
    for name in ["plain SGD", *bench.OURS]:
        bench.make("tiny", name, "cpu")()


@pytest.mark.parametrize("bias, stride", [(True, 1), (False, 2)])
def test_the_rule_that_opacus_gets_for_weight_standardization(bench, bias, stride):
    "The same per-example gradients as torch.func, in every parameter."
    from opacus.grad_sample import GradSampleModule
    g = torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, 8, 8, generator=g, dtype=torch.float64)
    y = torch.randint(5, (5,), generator=g)
    model = network(bias, stride)
    model(x)  # the lazy layer
    before = dict(GradSampleModule.GRAD_SAMPLERS)
    wanted = per_example(
        GradSampleModule(network_like(model, bias, stride), loss_reduction="sum",
                         force_functorch=True), x, y)
    with bench.registered(bench.standardized_rule):
        found = per_example(GradSampleModule(model, loss_reduction="sum"), x, y)
    assert GradSampleModule.GRAD_SAMPLERS == before  # nothing stays behind
    assert wanted.keys() == found.keys() and len(found) == 8 - 2*(not bias)
    for name, grads in wanted.items():
        assert grads.shape[0] == 5 and grads.abs().max() > 1e-6, name
        torch.testing.assert_close(found[name], grads, rtol=1e-9, atol=1e-12, msg=name)
