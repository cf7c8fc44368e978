"Experiments: one harness for every sweep; its recipes still make the recorded rows."
import hashlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dp_course.basics import near
from dp_course.cli import load_data, make_config, make_trainer, open_release
from dp_course.cli.main import main
from dp_course.data import Examples, load
from dp_course.features import load_start
from dp_course.gradients import FlatClip, loop_grad_sum
from dp_course.models import resnet20
from dp_course.privacy import epsilon
from dp_course.training import flat_row, read_record, read_runs, run_file, sweep

pytestmark = pytest.mark.usefixtures("unproved")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from experiments import (  # noqa: E402
    classes,
    clipping,
    falling,
    gpu,
    harness,
    kernels,
    ordinary,
    quarter,
    scaling,
    tricks,
    unclipped,
    views,
)

RECIPES = {recipe.NAME: recipe for recipe in (clipping, scaling, tricks, classes)}


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


# ---- the harness

def test_everything_runs_once_and_the_best_is_tested(toy):
    assert work(toy)
    assert [cell["lr"] for cell in toy.runs] == [1, 2, 3, 2, 2]
    assert work(toy) and len(toy.runs) == 5
    assert [row["stage"] for row in sweep(toy.path)] == ["tune"]*3 + ["final"]*2


def test_no_time_no_run_and_the_rest_later(toy):
    assert not work(toy, minutes=0) and not toy.runs
    assert work(toy)


def test_the_other_process_begins_at_the_other_end(toy):
    assert work(toy, reverse=True)
    assert [cell["lr"] for cell in toy.runs] == [3, 2, 1, 2, 2]
    assert [cell["seed"] for cell in toy.runs[3:]] == [2, 1]


def test_a_run_that_two_processes_made_counts_once(toy):
    for _ in range(2):
        harness.write(toy.path, toy.run(dict(stage="tune", lr=1, seed=0)))
    assert len(read_runs(toy.path)) == 2 and len(harness.rows_of(toy, toy.path)) == 1


def test_a_run_is_written_whole_or_not_at_all(toy):
    work(toy)
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
    ("clipping", "all"), ("scaling", "grid"), ("scaling", "papernot"), ("scaling", "small"),
    ("scaling", "signal"), ("tricks", "ladder-few"), ("tricks", "ladder-many"),
    ("tricks", "optimizers-few"), ("classes", "all")])
def test_what_is_recorded_is_what_the_recipe_asks_for(name, part):
    recipe = RECIPES[name]
    rows = harness.rows_of(recipe)
    recorded = set(map(recipe.key, rows))
    cells = recipe.PARTS[part](rows)
    assert cells and all(recipe.key(cell) in recorded for cell in cells)


def test_the_clipping_record_holds_the_whole_recipe():
    rows = clipping.rows()
    final = harness.chosen(rows, stage="final")
    assert {len(harness.chosen(final, method=method)) for method in clipping.METHODS} == {5}
    for row in final:
        assert row["speed"] == clipping.best_speed(row["method"], rows)
    assert clipping.best_speed("adaptive", final) is None


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


def test_a_miniature_of_scaling():
    data = load("digits")
    small = data.replace(train_x=data.normalize(data.train_x), test_x=data.normalize(data.test_x))
    cell = dict(part="grid", stage="tune", model="mlp", n=1437, batch_size=64, steps=3, lr=1.,
                momentum=0., max_norm=1., seed=100)
    padded = small.replace(train_x=torch.nn.functional.pad(small.train_x, (3, 3, 3, 3)),
                           test_x=torch.nn.functional.pad(small.test_x, (3, 3, 3, 3)))
    row = flat_row(scaling.run(cell, padded)[0])
    assert row["parameters"] == 6634 and row["split"] == "val" and row["planned"] == 3
    spent = epsilon(q=row["q"], sigma=row["sigma"], steps=3, delta=row["delta"])
    assert row["eps"] == pytest.approx(spent) and row["eps"] <= row["target_eps"] == 3.
    assert set(sweep("scaling")[0]) <= set(row)


def test_a_miniature_of_the_ladder():
    cell = dict(stage="final", setting="few", rung="+ views", lr=1., seed=0)
    row = flat_row(tricks.run(cell, load("digits"), batch_size=64, examples=3*64)[0])
    assert row["steps"] == 3 and row["k"] == 4 and row["split"] == "test"
    assert {"accuracy", "ema", "ema_no_warmup", "tail"} <= row.keys() and row["eps"] <= tricks.EPS
    assert set(tricks.rows()[-1]) <= set(row)


def test_a_miniature_of_the_classes():
    data = load("digits")
    features = data.replace(train_x=data.train_x.half()/16, test_x=data.test_x.half()/16)
    row = flat_row(classes.run(dict(stage="final", lr=.002, seed=0), features, 6, 100)[0])
    assert row["eps"] is None and not row["private"] and len(row["class_accuracy"]) == 10
    assert row["accuracy"] == pytest.approx(344/360)  # as the first version computed it
    assert set(sweep("classes")[0]) <= set(row)


# ---- recorded rows, again: exact in all but the noise, which the trainer drew otherwise then


def comes_out(row, recorded, exact):
    "The same settings, prices that a sharper accountant moves little, a like accuracy."
    for name in exact:
        assert row[name] == recorded[name], name
    for name in {"eps", "eps_rdp"} & set(row) & set(recorded):
        assert row[name] == pytest.approx(recorded[name], rel=1e-3), name
    # seeds spread by half a point; a broken step loses more than four
    assert row["accuracy"] == pytest.approx(recorded["accuracy"], rel=.05)


@pytest.mark.parametrize("method, speed, seed", [
    ("flat C=1", .5, 100), pytest.param("dynamic", 2., 100, marks=pytest.mark.slow)])
def test_a_recorded_row_of_the_clipping_sweep_comes_out_again(real, method, speed, seed):
    real("fashion")
    cell = dict(stage="tune", method=method, speed=speed, seed=seed)
    row = flat_row(clipping.run(cell)[0])
    recorded, = harness.chosen(clipping.rows(), **cell)
    comes_out(row, recorded, ("sigma", "q", "lr", "tested_on", "accountant"))


def test_a_recorded_row_of_the_scaling_sweep_comes_out_again(real):
    real("fashion")
    rows = sweep("scaling")
    cell = scaling.grid(rows)[0]
    row = flat_row(scaling.run(cell)[0])
    recorded, = (r for r in rows if scaling.key(r) == scaling.key(cell))
    comes_out(row, recorded, ("sigma", "q", "parameters", "epochs", "tested_on"))


# ---- weights by kernels

def toy_maps(n, seed):
    "Ten classes, told apart by one map and not by the other."
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 10
    says = F.one_hot(y, 10).float() + .3*torch.randn(n, 10, generator=g)
    return {"says": says.view(n, 10, 1, 1), "dice": torch.randn(n, 6, 2, 2, generator=g)}, y


def test_a_sum_of_kernels_is_the_kernel_of_weighed_maps():
    (fitted, _), (held, _) = toy_maps(40, 0), toy_maps(20, 1)
    weights = {"says": 1.5, "dice": .5}
    one = {name: kernels.kernel_of(fitted[name], held[name], columns=7) for name in fitted}
    both = [torch.cat([w*x[name].flatten(1) for name, w in weights.items()], 1)
            for x in (fitted, held)]
    want = kernels.kernel_of(*both)
    unit = want[0].diagonal().mean()
    near(kernels.mixed(one, weights), [part/unit for part in want], 1e-5)


def test_the_map_that_says_something_is_worth_its_weight():
    (fitted, y), (held, held_y) = toy_maps(300, 0), toy_maps(200, 1)
    found = {name: kernels.kernel_of(fitted[name], held[name]) for name in fitted}
    noise = kernels.noise_per_ridge(kernels.PRESET)
    assert 2e-5 < noise < 5e-5

    def accuracy(noise=noise, **weights):
        return kernels.judged(kernels.mixed(found, weights), y, held_y, noise)["accuracy"]
    assert accuracy(says=1., dice=0.) > .9
    assert accuracy(says=1., dice=0.) > accuracy(says=1., dice=3.) > accuracy(says=0., dice=1.)
    assert accuracy(says=0., dice=1.) < .25  # .1 is guessing, 200 images: .02 either way
    assert accuracy(says=1., dice=0., noise=100*noise) < .6


# ---- several looks at a test image


def test_a_release_is_tested_with_and_without_views(tmp_path, capsys):
    assert main(["digits-eps3-fast", "--seed", "0", "--out", str(tmp_path)]) == 0
    path, = tmp_path.glob("*.release.pt")
    row = views.tested(path)
    found = open_release(path)
    once, often = found.scores(), found.scores(shifts=1, mirror=True)
    assert (row["test_accuracy"], row["tested_on"]) == (once["test_accuracy"], 360)
    assert (row["accuracy_of_views"], row["views"]) == (often["test_accuracy"], 18)
    assert row["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_record_of_the_views_belongs_to_the_records_of_the_runs():
    "Each row has the accuracy that the run itself wrote, within one image of 10,000."
    rows = json.loads(run_file("views").read_text())["rows"]
    assert {row["views"] for row in rows} == {18}
    for row in rows:
        record = read_record(run_file(row["release"].removesuffix(".release.pt")[11:]))
        assert abs(record[-1]["test_accuracy"] - row["test_accuracy"]) < 1.5e-4
        assert row["tested_on"] == record[-1]["tested_on"] == 10_000


# ---- a rate that falls at the end of a run


def test_a_copy_goes_on_at_a_falling_rate_and_the_run_is_left_alone(tmp_path):
    words = ["digits-eps3-fast", "--seed", "0", "--out", str(tmp_path), "--steps", "2"]
    assert main(words) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    rows = falling.fallen(tmp_path, "digits-eps3-fast")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    steps, lr = [row["step"] for row in rows], rows[0]["next_lr"]
    assert steps == [2, 3, 4, 5, 6] and lr > 0
    assert [row["next_lr"] for row in rows] == pytest.approx([lr, .75*lr, .5*lr, .25*lr, 0])
    stopped, = (read_record(path) for path in tmp_path.glob("*.jsonl"))
    assert rows[0]["test_accuracy"] == pytest.approx(stopped[-1]["test_accuracy"], abs=1e-6)


def test_the_record_of_the_falling_rate_begins_on_the_way_of_the_run_itself():
    "Its first test is an epoch of the run that stayed at its rate, with the same accuracy."
    record = json.loads(run_file("falling").read_text())
    rows, run = record["rows"], read_record(run_file(f"{record['preset']}-0"))
    same, = (line for line in run if line["kind"] == "epoch" and line["step"] == rows[0]["step"])
    assert abs(same["test_accuracy"] - rows[0]["test_accuracy"]) < 1.5e-4
    assert rows[-1]["step"] == run[-1]["step"] and rows[-1]["next_lr"] == 0


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


def test_the_lengths_of_an_unclipped_run_are_those_of_its_gradients():
    config = make_config("digits-eps3-fast", eps=math.inf, max_norm=1e9)
    data = load_data(config)
    row, _ = unclipped.measured(config, data, 2, say=lambda row: None)
    trainer = make_trainer(config, data, 0, init_seed=0)
    x, y = data.rows(torch.tensor(row["images"]))
    _, norms = loop_grad_sum(trainer.model, trainer.loss_fn, data.normalize(x), y, FlatClip(1e9))
    assert norms.norm(dim=0).tolist() == pytest.approx(row["longest"], abs=.01)
    assert row["median"] <= row["longest"][2]


# ---- a GPU


def test_what_a_step_costs_is_measured_over_all_images_and_their_views():
    settings = dict(micro_batch=16, views=2, batch_size=8, epochs=1., sigma=0.)
    row = gpu.measured("report-v1", settings, gpu.made_up("cpu", n=32), steps=1)
    assert row["images"] == 16 and row["gigabytes"] == ""
    assert row["images_per_second"] == pytest.approx(16/row["seconds"], rel=.05)


def test_a_trial_moves_the_head_alone_at_first_and_obeys_its_settings(monkeypatch):
    monkeypatch.setattr(quarter, "BATCH", 8)
    monkeypatch.setattr(quarter, "HEAD_STEPS", 1)
    monkeypatch.setattr(quarter, "NOISE", 1e-2)
    monkeypatch.setattr(quarter, "STEPS", 2)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(256, (32, 3, 8, 8), generator=g, dtype=torch.uint8)
    data = Examples(x, torch.arange(32) % 10, x[:20], torch.arange(20) % 10)
    seen = []  # weights, average; a pair for each step

    def weights(model, data, these):
        seen.append({name: w.clone() for name, w in these.items()})
        return .5
    monkeypatch.setattr(quarter, "accuracy", weights)
    rows = [quarter.run(quarter.TRIALS[name], data, 2, 1, say=lambda row: None)
            for name in ("preset", "falling from 2")]
    assert [row["step"] for row in rows[0]] == [1, 2]
    (first, _, second, _), (fast, *_) = seen[:4], seen[4:]
    start = resnet20()
    load_start(start, "resnet20-synthetic")
    assert torch.equal(first["0.weight"], start[0].weight), "the head alone"
    assert not torch.equal(second["0.weight"], first["0.weight"])
    near(fast["13.weight"], 2*first["13.weight"], 1e-6)
