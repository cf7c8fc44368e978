"The lesson on networks made for privacy: its parts against oracles, its recipe in miniature."
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dp_course.data import Examples
from dp_course.models import NormWatch, activation_norm, draw_like, first_moment, weight_statistics
from dp_course.training import DPAdam, flat_row

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from experiments import shoe  # noqa: E402


@pytest.fixture(scope="module")
def pictures():
    "96 random images of 28x28 pixels, and 32 to test on."
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 1, 28, 28, generator=g)
    y = torch.arange(128) % 10
    return Examples(x[:96], y[:96], x[96:], y[96:])


def test_the_norm_of_an_activation_by_hand():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1))
    model[0].weight.data = torch.tensor([[3., 0.], [0., 4.]])
    x = torch.tensor([[1., 1.], [1., -1.]])  # (3, 4) and (3, 0) after the ReLU
    assert activation_norm(model, x) == pytest.approx(4.)
    assert activation_norm(model, x, first=1) == pytest.approx(5.)


def test_the_watch_looks_at_the_first_step_and_at_every_so_many():
    class Toy:
        t, model = 0, nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    watch = NormWatch(torch.ones(4, 3), every=3)
    for Toy.t in range(1, 8):
        watch(Toy)
    assert list(watch.norms) == [1, 3, 6]


def test_the_first_moment_is_adams_own():
    "Against torch's Adam, corrected by hand."
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.zeros(50)) for _ in range(2))
    a, b = DPAdam([ours], lr=.1), torch.optim.Adam([theirs], lr=.1)
    for _ in range(7):
        ours.grad = torch.randn(50)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    state = b.state[theirs]
    m = state["exp_avg"].abs()/(1 - .9**7)
    v = state["exp_avg_sq"]/(1 - .999**7)
    found = first_moment(a)
    assert found["moment"] == pytest.approx(m.mean().item(), rel=1e-5)
    assert found["ratio"] == pytest.approx((m/v.sqrt()).mean().item(), rel=1e-5)


def test_weights_drawn_like_others_have_their_moments():
    # 8,192 weights: the mean has a standard error of std/90, the std one of std/128; six of each
    torch.manual_seed(0)
    wanted = [[.3, .02], [0., 0.], [-1., 2.], [5., 0.]]
    model = draw_like(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)), wanted)
    for (mean, std), (m, s) in zip(wanted, weight_statistics(model)):
        assert m == pytest.approx(mean, abs=6*std/90 + 1e-6)
        assert s == pytest.approx(std, abs=6*std/128 + 1e-6)
    with pytest.raises(ValueError, match="3 pairs for 4 tensors"):
        draw_like(model, wanted[:3])


def miniature(cell, pictures):
    cell = cell | dict(steps=2, batch_size=16, k=2, k2=2)
    (start, end), = shoe.run(cell, pictures)
    json.dumps([start, end], allow_nan=False)
    row = flat_row([start, end])
    assert shoe.key(row) == shoe.key(cell) and row["finished"]
    return row


@pytest.fixture
def small_delta(monkeypatch):
    monkeypatch.setattr(shoe, "DELTA", 1e-3)


@pytest.mark.parametrize("act", shoe.START)
def test_a_miniature_of_every_activation(act, pictures, small_delta):
    row = miniature(shoe.finals(shoe.head("fashion", act))[0], pictures)
    assert row["eps"] == pytest.approx(2.7, abs=6e-3)
    assert [p["step"] for p in row["curve"]] == [1, 2]
    assert row["curve"][-1]["accuracy"] == pytest.approx(row["accuracy"])
    assert 0 < row["curve"][0]["eps"] < row["curve"][1]["eps"] == pytest.approx(row["eps"])


def test_a_miniature_without_privacy(pictures):
    row = miniature(shoe.finals(shoe.plain_cell("mnist", "relu"))[0], pictures)
    assert row["eps"] is None and row["curve"][-1]["accuracy"] == row["accuracy"]


def test_a_miniature_with_adam(pictures, small_delta):
    cell = shoe.cell_of("adam", "fashion", optimizer="adam", lr=.01, stage="final")
    assert 0 < miniature(cell, pictures)["curve"][-1]["ratio"] <= 1


def test_a_miniature_of_the_statistics_and_of_what_begins_with_them(pictures, small_delta):
    cell = shoe.cell_of("meanvar", "fashion", init="statistics", stage="final", budget=1e9,
                        fixed_sigma=.001)
    row = miniature(cell, pictures)
    assert row["eps"] > 1e4 and len(row["stats_found"]) == 8
    like = shoe.cell_of("meanvar", "fashion", init="like fashion", stats=row["stats_found"])
    assert miniature(like, pictures)["eps"] == pytest.approx(2.7, abs=6e-3)


def test_the_whole_plan_ends():
    "With made-up accuracies every part comes to its end, and nothing is asked for twice."
    rows = []
    for _ in range(400):
        done = set(map(shoe.key, rows))
        todo = [c for c in shoe.PARTS["all"](rows) if shoe.key(c) not in done]
        if not todo:
            break
        for cell in todo:
            if shoe.key(cell) not in done:
                rows.append(cell | {"accuracy": 1/(1 + abs(cell["lr"] - .5)),
                                    "stats_found": [[0., 1.]]*14})
                done.add(shoe.key(cell))
    assert not todo
    assert {row["part"] for row in rows} == {part.__name__ for part in shoe.ORDER} - {"sigmoid"}
    finals = [row for row in rows if row["stage"] == "final" and row["part"] == "activations"]
    assert {(row["task"], row["act"]) for row in finals} == {
        (task, act) for task in shoe.TASKS for act in shoe.START}
