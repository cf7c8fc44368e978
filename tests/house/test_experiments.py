"Experiments: one harness for every sweep; its recipes still make the recorded rows."
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dp_course.data import Examples, load
from dp_course.privacy import epsilon
from dp_course.training import flat_row, read_runs, sweep

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from experiments import (  # noqa: E402
    adam,
    clipping,
    harness,
    ladders,
    normalization,
    ordinary,
    plain,
    reviews,
    scaling,
    shifted,
    tricks,
)

RECIPES = {recipe.NAME: recipe
           for recipe in (adam, clipping, ladders, normalization, plain, scaling, shifted,
                         tricks)}


# ---- what a reader is told to run

COMMAND = r"python -m experiments[. ](\w+)|\b(benchmarks/\w+\.py)"
NOTE = (ROOT/"experiments/README.md").read_text()


def told_to_run(path):
    "The experiments and benchmarks that a notebook or a record names."
    found = re.findall(COMMAND, path.read_text(encoding="utf-8"))
    return {script or f"experiments/{name}.py" for name, script in found}


def noted(script):
    "Whether the note says which commit has a program that is no longer here."
    name = Path(script).stem
    return any(command in NOTE for command in (
        f"`python -m experiments.{name}`", f"`python -m experiments {name} ", f"`python {script}`"))


def test_what_a_reader_is_told_to_run_is_here_or_has_its_commit():
    paths = [*(ROOT/"nbs").rglob("*.ipynb"), *(ROOT/"runs").glob("*.json"),
             *(ROOT/"docs").glob("*.md")]
    lost = {script for path in paths for script in told_to_run(path)
            if not (ROOT/script).exists() and not noted(script)}
    assert not lost, "name the record and the last commit in experiments/README.md"
    assert noted("experiments/views.py") and not noted("experiments/lost.py")


# ---- the harness


@pytest.fixture
def toy(tmp_path):
    "A recipe that trains nothing: three tuning runs, then two final ones with the best."
    def run(cell):
        toy.runs.append(cell)
        start = dict(kind="start", preset="sweep-toy", config=cell, plan=None, seed=cell["seed"])
        accuracy = 1 - abs(cell["lr"] - 2)/10
        return [[start, dict(kind="end", finished=True, test_accuracy=accuracy, seconds=0.)]]

    def cells(rows):
        found = [dict(stage="tune", lr=lr, seed=0) for lr in (1, 2, 3)]
        tried = harness.chosen(rows, stage="tune")
        if len(tried) == 3:
            best = max(tried, key=lambda row: row["accuracy"])["lr"]
            found += [dict(stage="final", lr=best, seed=seed) for seed in (1, 2)]
        return found

    toy = SimpleNamespace(NAME="toy", PARTS={"all": cells}, run=run, runs=[],
                          path=tmp_path/"sweep-toy.jsonl",
                          key=lambda row: (row["stage"], row["lr"], row["seed"]))
    return toy


def work(toy, **options):
    return harness.work(toy, "all", toy.path, say=lambda *words: None, **options)


def test_everything_runs_once_and_the_best_is_tested(toy):
    assert not work(toy, minutes=0) and not toy.runs
    assert work(toy)
    assert [cell["lr"] for cell in toy.runs] == [1, 2, 3, 2, 2]
    assert work(toy) and len(toy.runs) == 5
    assert [row["stage"] for row in sweep(toy.path)] == ["tune"]*3 + ["final"]*2


def test_the_other_process_begins_at_the_other_end(toy):
    assert work(toy, reverse=True)
    assert [cell["lr"] for cell in toy.runs] == [3, 2, 1, 2, 2]


def test_a_run_is_written_whole_and_counts_once(toy):
    for _ in range(2):
        harness.write(toy.path, toy.run(dict(stage="tune", lr=1, seed=0)))
    assert len(read_runs(toy.path)) == 2 and len(harness.rows_of(toy, toy.path)) == 1
    before = toy.path.read_text()
    with pytest.raises(ValueError, match="JSON"):
        harness.write(toy.path, [[dict(kind="start"), dict(kind="end", accuracy=float("nan"))]])
    assert toy.path.read_text() == before


def test_the_command_line(toy, capsys):
    harness.main({"toy": toy}, ["toy", "all", "--out", str(toy.path)])
    assert "nothing is left" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        harness.main({"toy": toy}, ["toy", "nothing"])
    assert "toy has no part 'nothing': pass one of all" in capsys.readouterr().err


# ---- the recipes


@pytest.mark.parametrize("name, part", [
    ("clipping", "all"), ("ladders", "all"), ("normalization", "all"), ("plain", "all"),
    ("scaling", "grid"), ("scaling", "papernot"), ("scaling", "small"), ("scaling", "signal"),
    ("tricks", "ladder-few"), ("tricks", "ladder-many"), ("tricks", "optimizers-few"),
    ("adam", "all"), ("shifted", "all")])
def test_what_is_recorded_is_what_the_recipe_asks_for(name, part):
    recipe = RECIPES[name]
    rows = harness.rows_of(recipe)
    recorded = set(map(recipe.key, rows))
    cells = recipe.PARTS[part](rows)
    assert cells and all(recipe.key(cell) in recorded for cell in cells)


@pytest.mark.parametrize("method", [
    pytest.param(method, marks=[pytest.mark.slow]*(not method.startswith("dynamic")))
    for method in clipping.METHODS])
def test_a_miniature_of_every_clip(method):
    cell = dict(stage="final", method=method, speed=1., seed=0)
    (start, end), = clipping.run(cell, task="digits", steps=4)
    row = flat_row([start, end])
    assert row["eps"] == pytest.approx(3., abs=6e-3) and row["finished"]
    assert row["eps_rdp"] > row["eps"] and row["tested_on"] == 360
    assert set(sweep("clipping")[0]) <= set(row), "a field of the recorded rows is gone"
    json.dumps([start, end], allow_nan=False)


def resized(data, side, channels=1):
    "The digits as images of another size."
    def images(x):
        return torch.nn.functional.interpolate(x.float(), side).repeat(1, channels, 1, 1)
    return data.replace(train_x=images(data.train_x), test_x=images(data.test_x))


def test_a_miniature_of_scaling():
    cell = dict(part="grid", stage="tune", model="mlp", n=1437, batch_size=64, steps=3, lr=1.,
                momentum=0., max_norm=1., seed=100)
    row = flat_row(scaling.run(cell, resized(load("digits"), 14))[0])
    assert row["parameters"] == 6634 and row["split"] == "val" and row["planned"] == 3
    spent = epsilon(q=row["q"], sigma=row["sigma"], steps=3, delta=row["delta"])
    assert row["eps"] == pytest.approx(spent) and row["eps"] <= row["target_eps"] == 3.
    assert set(sweep("scaling")[0]) <= set(row)


def test_a_miniature_of_the_tricks():
    cell = dict(stage="final", setting="few", rung="+ views", lr=1., seed=0)
    row = flat_row(tricks.run(cell, load("digits"), batch_size=64, examples=3*64)[0])
    assert row["steps"] == 3 and row["k"] == 4 and row["split"] == "test"
    assert {"accuracy", "ema", "ema_no_warmup", "tail"} <= row.keys() and row["eps"] <= tricks.EPS
    assert set(tricks.rows()[-1]) <= set(row)


@pytest.mark.parametrize("rung", [
    pytest.param(rung, marks=[pytest.mark.slow]*(rung not in ("without privacy", "+ WS")))
    for rung in ladders.RUNGS])
def test_a_miniature_of_every_rung(rung):
    cell = dict(stage="tune", ladder="compute", rung=rung, lr=.1, seed=100)
    batch_size = ladders.RUNGS[rung]["batch_size"]
    row = flat_row(ladders.run(cell, resized(load("digits"), 32, 3), seen=2*batch_size)[0])
    assert ladders.key(row) == ladders.key(cell) and row["tested_on"] == 360
    assert row["split"] == "val" and row["finished"] and row["step"] == 2
    private = rung != "without privacy"
    assert (row["eps"] is not None) == private and ("ema" in row) == private


def falling_away(cells, best):
    "Rows of runs whose accuracy falls with the distance from the best rate, in octaves."
    for cell in cells:
        apart = abs(torch.tensor(cell["lr"]/best).log2().item())
        yield cell | dict(accuracy=.5 - .1*apart, ema=.5 - .1*apart)


# ---- recorded rows, again: exact in all but the noise, which the trainer drew otherwise then


def comes_out(row, recorded, exact):
    "The same settings, prices that a sharper accountant moves little, a like accuracy."
    for name in exact:
        assert row[name] == recorded[name], name
    for name in {"eps", "eps_rdp"} & set(row) & set(recorded):
        assert row[name] == pytest.approx(recorded[name], rel=1e-3), name
    # seeds spread by half a point; a broken step loses more than four
    assert row["accuracy"] == pytest.approx(recorded["accuracy"], rel=.05)


def test_a_recorded_row_of_the_clipping_sweep_comes_out_again(real):
    real("fashion")
    cell = dict(stage="tune", method="flat C=1", speed=.5, seed=100)
    recorded, = harness.chosen(clipping.rows(), **cell)
    row = flat_row(clipping.run(cell)[0])
    comes_out(row, recorded, ("sigma", "q", "lr", "tested_on", "accountant"))


# ---- the ResNet-20 without privacy


def test_an_ordinary_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (48, 3, 32, 32), generator=generator, dtype=torch.uint8)
    y = torch.arange(48) % 10
    data = Examples(x[:32], y[:32], test_x=x[32:], test_y=y[32:], classes=range(10))

    def stop(row, **_):
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    def run(name, say):
        return ordinary.trained(data, 2, 0, tmp_path/name, say)

    whole = run("whole", lambda row, **_: None)
    with pytest.raises(KeyboardInterrupt):
        run("cut", stop)
    rest = run("cut", lambda row, **_: None)
    assert [row["test_accuracy"] for row in rest] == [row["test_accuracy"] for row in whole]
    weights = [torch.load(tmp_path/name, weights_only=True)["model"] for name in ("whole", "cut")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


# ---- sentences of film reviews

LINES = [f"{n}\t{(-1)**n*.5}\tthe {n}th film is {'dull' if n % 2 else 'bright'}"
         for n in range(600)]


def test_a_sentence_is_praise_or_blame_and_lies_in_one_part():
    more = ["600\t0\tit is a film", "601\t-1.5\tThe 2th film is bright!", "602\t.1\tgood"]
    found = reviews.rated(LINES + more)
    assert len(found) == 601 and found["good",]
    assert all(found[words] == ("bright" in words or "good" in words) for words in found)
    parts = reviews.parts(found, tested=200, held=100)
    assert [len(y) for _, y in parts] == [200, 100, 301]
    pairs = [torch.column_stack(part) for part in parts]
    true = torch.column_stack([reviews.encoded(list(found)), torch.tensor(list(found.values()))])
    assert sorted(torch.cat(pairs).tolist()) == sorted(true.tolist())
    again = reviews.parts(found, tested=200, held=100)
    assert all(torch.equal(x, y) for x, y in zip(parts[0], again[0]))


def test_the_number_of_a_word_depends_on_no_other_sentence():
    together, alone = (reviews.encoded(words) for words in (
        [("a", "dull", "film"), ("film",)*40], [("film",)]))
    assert (together[1] == alone[0, -1]).all() and together.max() < reviews.PLACES
    *before, dull, film = together[0].tolist()
    assert film == alone[0, -1] != dull and sum(number > 0 for number in before) == 1


@pytest.mark.parametrize("model", reviews.MODELS)
@pytest.mark.parametrize("eps", [8., None])
def test_a_miniature_of_the_reviews(model, eps):
    _, held_out, train = reviews.parts(reviews.rated(LINES), tested=30, held=30)
    data = Examples(*train, *held_out, held_out=True)
    network = reviews.trained(data, model, eps, lr=.3, seed=0, steps=3)
    assert torch.isfinite(network(held_out[0])).all()


@pytest.mark.parametrize("best", [.0125, .1, .8])
def test_reviews_are_tuned_on_held_out_sentences_alone(monkeypatch, best):
    def row_of(data, **cell):
        assert data == ("held out" if cell["stage"] == "tune" else "test")
        return next(falling_away([cell], best))
    monkeypatch.setattr(reviews, "row_of", row_of)
    rows = harness.chosen(reviews.rows_of("DPLSTM", 8., "held out", "test"), stage="final")
    assert [(row["lr"], row["seed"]) for row in rows] == [(best, seed) for seed in range(3)]
