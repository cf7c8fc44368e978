"The recipe of the two ladders: what it asks for, in which order, and that every rung runs."
import sys
from pathlib import Path

import pytest
import torch

from dp_course.data import load
from dp_course.training import flat_row

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from experiments import ladders  # noqa: E402

pytestmark = pytest.mark.usefixtures("unproved")


def record(cells, best):
    "Rows of runs whose accuracy falls with the distance from the best rate, in octaves."
    for cell in cells:
        apart = abs(torch.tensor(cell["lr"]/best).log2().item())
        yield cell | dict(accuracy=.5 - .1*apart, ema=.5 - .1*apart)


@pytest.mark.parametrize("best", [.125, 2., 16.])
def test_a_rate_is_final_when_it_has_a_worse_neighbour_on_either_side(best):
    rows, rounds = [], 0
    while True:
        done = set(map(ladders.key, rows))
        todo = [c for c in ladders.cells_of(rows, "steps", "+ WS") if ladders.key(c) not in done]
        if not todo:
            break
        rows += record(todo, best)
        rounds += 1
    final = [row for row in rows if row["stage"] == "final"]
    tuned = {row["lr"] for row in rows if row["stage"] == "tune"}
    assert {row["lr"] for row in final} == {best} and {best/2, 2*best} <= tuned
    assert sorted(row["seed"] for row in final) == list(range(5)) and rounds < 8
    for lr in tuned:
        assert len([row for row in rows if row["lr"] == lr and row["stage"] == "tune"]) == 2


def test_one_seed_alone_chooses_nothing():
    rows = list(record([c for c in ladders.cells_of([], "steps", "+ WS") if c["seed"] == 100], 2.))
    assert ladders.best_rate(rows, "steps", "+ WS") is None
    assert not [c for c in ladders.cells_of(rows, "steps", "+ WS") if c["stage"] == "final"]


def test_views_train_at_the_best_rate_of_ema_too():
    cells = ladders.cells_of([], "steps", "+ views")
    cells += [cell | dict(lr=8.) for cell in cells if cell["lr"] == 4.]
    rows = [row | dict(ema=.5 - .1*abs(torch.tensor(row["lr"]/4.).log2().item()))
            for row in record(cells, 2.)]
    final = [c for c in ladders.cells_of(rows, "steps", "+ views") if c["stage"] == "final"]
    assert {c["lr"] for c in final} == {2., 4.} and len(final) == 10


@pytest.mark.parametrize("rung", [
    pytest.param(rung, marks=[pytest.mark.slow]*(rung not in ("without privacy", "+ WS")))
    for rung in ladders.RUNGS])
def test_a_miniature_of_every_rung(rung):
    digits = load("digits")
    data = digits.replace(
        train_x=torch.nn.functional.interpolate(digits.train_x.float(), 32).repeat(1, 3, 1, 1),
        test_x=torch.nn.functional.interpolate(digits.test_x.float(), 32).repeat(1, 3, 1, 1))
    cell = dict(stage="tune", ladder="compute", rung=rung, lr=.1, seed=100)
    batch_size = ladders.RUNGS[rung]["batch_size"]
    row = flat_row(ladders.run(cell, data, seen=2*batch_size)[0])
    assert ladders.key(row) == ladders.key(cell) and row["tested_on"] == 360
    assert row["split"] == "val" and row["finished"] and row["step"] == 2
    private = rung != "without privacy"
    assert (row["eps"] is not None) == private and ("ema" in row) == private


def test_the_network_is_as_large_as_it_says():
    assert sum(p.numel() for p in ladders.small_net().parameters()) == 70_826
