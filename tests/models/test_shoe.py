"The lesson on networks made for privacy: its parts against oracles, its recipe in miniature."
import json
import math
import operator
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from toys import code_of

from dp_course.data import Examples
from dp_course.models import (
    NormWatch,
    activation_norm,
    draw_like,
    first_moment,
    papernot_cnn,
    weight_statistics,
)
from dp_course.training import DPAdam, flat_row, sweep

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from experiments import shoe  # noqa: E402


@pytest.fixture(scope="module")
def pictures():
    "96 random images of 28x28 pixels, and 32 to test on."
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 1, 28, 28, generator=g)
    y = torch.arange(128) % 10
    return Examples(x[:96], y[:96], x[96:], y[96:])


@pytest.mark.parametrize("act", ["tanh", "relu", nn.Sigmoid()])
@pytest.mark.parametrize("k, k2", [(1, 1), (2, 5), (16, 32)])
def test_widths_are_free(k, k2, act):
    model = papernot_cnn(k, act, k2=k2)
    expected = 65*k + k2*(16*k + 1) + 32*(16*k2 + 1) + 330
    assert sum(p.numel() for p in model.parameters()) == expected
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


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


def test_the_search_ends_where_all_neighbours_are_worse():
    "A made-up landscape over rate times threshold and threshold, its top at 6.4 and 0.4."
    def height(cell):
        speed = cell["lr"]*cell["max_norm"]
        return -abs(math.log2(speed/6.4)) - abs(math.log2(cell["max_norm"]/.4))
    rows = []
    start = shoe.head("fashion", "tanh")
    for _ in range(30):
        cells, best = shoe.climbed(rows, start)
        new = [c for c in cells if shoe.key(c) not in set(map(shoe.key, rows))]
        if best:
            break
        rows.append(new[0] | {"accuracy": height(new[0])})
    assert (best["lr"], best["max_norm"]) == (16., .4) and not new
    tried = {(row["lr"], row["max_norm"]) for row in rows}
    assert {(8., .4), (32., .4), (4., 1.6), (64., .1)} <= tried


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


# ---- what the lesson says of a record that is not whole

RACE = 'fig, axes = panels([f"{name}: each'
SHOWN = ("ROWS =", "TASKS =", "titles =", "# How many runs did each get",
         RACE, "def race", "KS =", "fig, axes = panels([\"Adam", "def at_the_end",
         "STARTS =", "def gap(", "def last", "def moments",
         "def transfer", "usual, like")


def lesson(rows, monkeypatch):
    "The cells that read the record, run on made-up rows: their names, and what the figures say."
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    monkeypatch.setattr(plt, "show", lambda: None)
    path = Path(__file__).resolve().parents[2]/"nbs/18_architecture.ipynb"
    imports, cells = code_of(path)
    names = {"everything": type("Data", (), {"name": "toys"}), "watches": {}}
    exec(imports, names)
    names["sweep"] = lambda name: rows if name == "shoe" else sweep(name)
    said = {}
    for start in SHOWN:
        cell, = [cell for cell in cells if cell.startswith(start)]
        names.pop("fig", None)
        exec(cell, names)
        for ax in names["fig"].axes if "fig" in names else ():
            labels = ax.get_legend() and [t.get_text() for t in ax.get_legend().get_texts()]
            words = " ".join([ax.get_xlabel(), *(t.get_text() for t in ax.texts)])
            said.setdefault(start, []).append((words, labels))
    plt.close("all")
    return names, said


def row(part, stage="final", **said):
    look = {"step": 1, "eps": .1, "accuracy": .7, "norm": 20., "moment": .1, "ratio": .5}
    usual = dict(part=part, stage=stage, task="fashion", act="tanh", k=16, k2=32, private=True,
                 optimizer="sgd", batch_size=2048, lr=4., max_norm=.1, seed=0, accuracy=.8)
    return usual | {"curve": [look | {"norm": 10.}, look | {"step": 2, "eps": 2.7}]} | said


def three(part, accuracy, **said):
    return [row(part, seed=seed, accuracy=accuracy + seed/1000, **said) for seed in range(3)]


def judged(names):
    return {claim: (ours, word) for claim, _, (ours, word) in names["CLAIMS"]}


def recorded(but=()):
    "The real record, but for made-up rows in place of the same runs."
    same = operator.itemgetter("part", "stage", "task", "act", "private")
    replaced = {same(row) for row in but}
    return [row for row in sweep("shoe") if same(row) not in replaced] + list(but)


def test_the_record_holds_all_that_the_lesson_asks_for(monkeypatch):
    names, said = lesson(recorded(), monkeypatch)
    assert len(said) == 5 and len(names["CLAIMS"]) == 14
    for panels in said.values():
        assert any(labels for _, labels in panels)
    (_, _), (_, labels) = said[RACE]  # the last panel has the legend of both
    acts = {"tanh", "relu", "sigmoid"}
    assert acts | {f"{act}, plain" for act in acts} <= set(labels)
    assert {"tanh, theirs", "relu, 40 epochs"} <= set(labels)
    (_, _), (_, labels) = said["KS ="]
    assert sorted(labels) == ["16 and 32", "eps = 1.12", "plain", "their best, with privacy"]
    assert names["race"]("fashion", "sigmoid")["ours, 40 epochs"] == ""
    assert names["searched"]("mnist", "relu")["tuning runs"] == 7


@pytest.mark.parametrize("moment, ratio, word", [(.2, .4, "holds"), (.05, .9, "no")])
def test_the_first_moment_is_judged_and_not_the_ratio(moment, ratio, word, monkeypatch):
    look = {"step": 2, "accuracy": .8, "norm": 1., "moment": moment, "ratio": ratio}
    rows = three("adam", .8, curve=[look]) + [row("adam", private=False)]
    names, _ = lesson(recorded(rows), monkeypatch)
    ours, found = judged(names)["Adam's first moment is larger under DP"]
    assert found == word and ours == f"m: 0.1 -> {moment:g} (over root v: 0.50 -> {ratio:.2f})"


@pytest.mark.parametrize("accuracy, word", [(.80, "holds: it is worse"), (.90, "no: better"),
                                            (.85, "holds: no difference seen")])
def test_no_better_is_another_claim_than_equal(accuracy, word, monkeypatch):
    names, _ = lesson(recorded(three("activations", .85) + three("adam", accuracy)), monkeypatch)
    assert judged(names)["DP-Adam is no better than DP-SGD"][1] == word


def test_rates_are_compared_times_their_thresholds(monkeypatch):
    rows = (three("activations", .8, act="sigmoid", lr=16., max_norm=.1)
            + three("activations", .8, lr=1., max_norm=.4))
    names, _ = lesson(recorded(rows), monkeypatch)
    assert judged(names)["a sigmoid needs a larger rate"] == ("rate x C: 4x", "holds")


def test_both_data_sets_are_held_to_their_means_with_their_spread(monkeypatch):
    rows = three("long", .857) + three("long", .979, task="mnist")
    names, _ = lesson(recorded(rows), monkeypatch)
    found = judged(names)
    assert found["tanh reaches their mean, Fashion"] == ("+0.30 +- 0.12 points", "holds")
    assert found["tanh reaches their mean, MNIST"] == ("+0.00 +- 0.12 points", "no difference seen")
