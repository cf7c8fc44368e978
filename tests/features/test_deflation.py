"""Deflated rows: each image on its own, length 1, the formula, and a plan with everybody in it."""

import math
from dataclasses import replace

import pytest
import torch
from toys import generator

from dp_course.basics import near
from dp_course.cli import make_config
from dp_course.cli.config import make_plan, make_schedule
from dp_course.data import Examples, load
from dp_course.features import (
    CosineNet,
    DeepRecipe,
    DeflatedRows,
    Deflation,
    clipped_mean,
    leading_directions,
)


@pytest.fixture(scope="module")
def describe():
    recipe = replace(DeepRecipe().sketch(), leaves=4, spectrum=12, loudest=8, entries=16)
    return DeflatedRows(recipe, (1, 8, 8))


def test_a_row_is_its_image_s_own_and_as_long_as_one(describe):
    x = load("digits").train_x[:6]
    company = torch.cat([x[:1], 255 - x[1:]])
    rows, others = describe(x)["rows"].float(), describe(company)["rows"].float()
    near(rows[0], others[0], 2e-2)  # bfloat16
    assert (rows[1] - others[1]).norm() > .1
    near(rows.norm(dim=1), torch.ones(6), 2e-3)


def test_no_more_directions_are_found_than_there_are():
    directions, shares = leading_directions(torch.randn(200, 5, generator=generator()), 20)
    assert directions.shape == (5, 5) and len(shares) == 5
    near(directions.T @ directions, torch.eye(5), 1e-4)


def test_leading_directions_are_those_of_the_svd():
    x = torch.randn(30, 50, generator=generator(), dtype=torch.float64)*torch.logspace(0, -2, 50)
    directions, shares = leading_directions(x, 10)
    _, values, vectors = torch.linalg.svd(x, full_matrices=False)
    near(shares, values[:10]**2/30, 1e-9)
    near((directions.T @ vectors[:10].T).abs(), torch.eye(10, dtype=torch.float64), 1e-6)


def test_deflation_is_its_formula():
    maps = {"a": torch.randn(40, 5, 2, 2, generator=generator()), "b": torch.randn(40, 9)}
    found = Deflation(maps, {"a": 1., "b": .5}, loudest=7, tau=.01)
    v, e = found.directions, found.shares
    x = found.rows(maps)
    turned = x @ (torch.eye(29) - v @ torch.diag(1 - (.01/(e + .01)).sqrt()) @ v.T)
    near(found(maps), turned/turned.norm(dim=1, keepdim=True), 1e-2)  # bfloat16
    near(leading_directions(x, 7)[1], e, 1e-5)
    assert (found(maps) - x).norm() > .1


@pytest.mark.parametrize("newcomer", [1., 1e-4, 3e4, math.nan, math.inf])
def test_one_row_moves_the_sum_of_rows_by_no_more_than_one(newcomer):
    net = CosineNet(12, 3)
    x = torch.randn(20, 12, generator=generator()).half()
    more = torch.cat([x, newcomer*torch.ones(1, 12).half()])
    sums = [len(part)*clipped_mean(Examples(part, torch.arange(len(part)) % 3), net.bound, net.rows)
            for part in (x, more)]
    moved = (sums[1] - sums[0]).norm().item()
    assert moved <= 1 + 1e-9
    assert moved > .99 or not math.isfinite(newcomer)


@pytest.mark.parametrize("eps", [1, 2, 3, 5, 8])
def test_everybody_is_in_every_batch_and_the_mean_is_paid(eps):
    config = make_config(f"deflated-eps{eps}")
    plan = make_plan(config, 50_000)
    assert plan.q == 1 and plan.steps == 100 and plan.releases == (10.,)
    rates = sum(map(make_schedule(config, plan.steps).at, range(plan.steps)))
    near(rates/(1 - config.momentum)*config.max_norm, 40_000., 10.)
    if eps == 3:
        near(plan.sigma, 14.042, .01)
