"The presets on scans: a score per pixel, a unit that may be a patient, a start on phantoms."
import json

import pytest
import torch
from toys import quiet

from dp_course.cli import (
    DATA,
    compare,
    config_of,
    estimates,
    load_data,
    load_scans,
    make_config,
    make_model,
    make_plan,
    make_trainer,
    open_release,
    plot_records,
    record_words,
    registry,
    setup,
    summaries,
)
from dp_course.cli.main import main
from dp_course.data import OCT_SUBJECTS, RETINA_LAYERS, Examples, dice, phantoms
from dp_course.models import UNet, segment
from dp_course.training import read_record, recorded, run_file, save_atomic
from experiments import segmentation

FULL = ["oct-head-eps8", "oct-norms-eps8", "oct-patients-eps8"]
FAST = [f"{name}-fast" for name in FULL]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    "One finished miniature of each, by preset."
    out = tmp_path_factory.mktemp("ended")
    return {name: quiet(make_config(name), out=out, seed=3) for name in FAST}


@pytest.fixture
def scans(monkeypatch, tmp_path):
    "Drawings in the place of the ninety scans, and a start in the place of the one from phantoms."
    x, y = phantoms(90, torch.Generator().manual_seed(5), 32, 64)
    whole = Examples(x, y, name="oct", mean=(.25,), std=(.25,))
    monkeypatch.setattr(registry, "load", lambda name, root=None: whole)
    monkeypatch.setenv("DP_COURSE_DATA", str(tmp_path))
    torch.manual_seed(1)
    model = UNet(16)
    save_atomic(dict(kind="segmentation pretraining", t=1, model=model.state_dict()),
                _folder(tmp_path)/"unet16-phantoms.pt")
    return whole, model


def _folder(root):
    folder = root/"segmentation"
    folder.mkdir()
    return folder


# ---- settings

def _tuned():
    "What the sweep tried on person 1, and what that reached: (part, eps) -> {(lr, steps): Dice}."
    runs, start = {}, None
    for line in map(json.loads, run_file("sweep-segmentation").read_text().splitlines()):
        if line["kind"] == "start":
            start = line["config"]
        elif start["stage"] == "tune":
            tried = runs.setdefault((start["part"], start["eps"]), {})
            tried[start["lr"], start["steps"]] = line["test_accuracy"]
    return runs


@pytest.mark.parametrize("name, part", zip(FULL, ("head", "norms", "patients")))
def test_rate_and_steps_are_those_that_the_sweep_found(name, part):
    tried = _tuned()[part, 8.]
    config = make_config(name)
    assert max(tried, key=tried.get) == (config.lr, config.epochs)
    assert config.tuning_runs == len(tried) == len(segmentation.RATES[part, 8.])


class Told:
    "What a trainer is told; it proves nothing, and takes no step."
    def __init__(self, model, data, plan, **more):
        self.model, self.data, self.plan, self.more = model, data, plan, more
        self.callbacks, make = more["callbacks"], more["optimizer"]
        learns = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make if isinstance(make, torch.optim.Optimizer) else make(learns)


@pytest.mark.parametrize("name, part", zip(FULL, ("head", "norms", "patients")))
def test_a_preset_trains_what_the_sweep_trains(name, part, scans, monkeypatch):
    "The same people, the same unit and noise, the same start, and the same weights that learn."
    for module in (setup, segmentation):
        monkeypatch.setattr(module, "Trainer", Told)
    config = make_config(name)
    cell = segmentation.cell_of("final", part, 0, 8., config.lr, int(config.epochs))
    data = load_data(config)
    split = segmentation.split_of(cell, segmentation.narrow(scans[0]))
    assert torch.equal(data.train_x, split.train_x) and torch.equal(data.test_y, split.test_y)
    ours = make_trainer(config, data, seed=0)
    theirs = segmentation.privately(segmentation.network(cell), split, cell)
    for key, value in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[key], value)
    learn = [{key for key, p in run.model.named_parameters() if p.requires_grad}
             for run in (ours, theirs)]
    assert learn[0] == learn[1] and len(learn[0]) == (2 if part != "norms" else 38)
    for key in ("n", "batch_size", "steps", "eps", "delta", "q", "sigma", "unit"):
        assert getattr(ours.plan, key) == getattr(theirs.plan, key), key
    assert (ours.data.groups is None) == (theirs.data.groups is None) == (part != "patients")
    assert ours.more["clip"].max_norm == theirs.more["clip"].max_norm
    assert ours.more["loss_fn"] is theirs.more["loss_fn"]
    groups = [run.optimizer.param_groups[0] for run in (ours, theirs)]
    assert [(group["lr"], group["momentum"]) for group in groups] == [(config.lr, 0.)]*2
    augment = [run.more["augment"] for run in (ours, theirs)]
    if part != "norms":  # what the head sees of a scan stays as it is
        assert augment == [None, None]
        return
    x, y = data.rows(torch.arange(3))
    mine, his = (f(data.normalize(x), y, torch.Generator().manual_seed(0)) for f in augment)
    assert all(torch.equal(a.tree, b.tree) for a, b in zip(mine, his))


def test_nobody_is_on_both_sides(scans):
    data = load_data(make_config("oct-patients-eps8"))
    whole = segmentation.narrow(scans[0])
    owner = {tuple(x.flatten().tolist()): OCT_SUBJECTS[i//10] for i, x in enumerate(whole.train_x)}
    whose = [owner[tuple(x.flatten().tolist())] for x in data.train_x]
    tested = {owner[tuple(x.flatten().tolist())] for x in data.test_x}
    assert tested == {2, 3} == set(OCT_SUBJECTS) - set(whose)
    named = {group: {w for w, g in zip(whose, data.groups.tolist()) if g == group}
             for group in range(7)}
    assert all(len(names) == 1 for names in named.values()) and data.units == 7
    assert load_data(make_config("oct-head-eps8")).units == 70


def test_scans_that_are_not_there_and_a_start_that_is_not_there(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DP_COURSE_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["oct-head-eps8", "--seed", "0"]) == 2
    assert "180 files are missing" in capsys.readouterr().err
    monkeypatch.setitem(DATA, "oct", (70, (1, 32, 16), 9))  # as many, but small ones
    estimates._one.cache_clear()
    assert main(["oct-head-eps8", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "start    no encoder" in out and "python -m experiments segmentation pretrain" in out
    assert not list(tmp_path.iterdir())


def test_a_start_of_another_network_is_refused(scans, tmp_path):
    path = tmp_path/"segmentation/unet16-phantoms.pt"
    small = UNet(4)
    path.unlink()
    save_atomic(dict(kind="segmentation pretraining", model=small.state_dict()), path)
    with pytest.raises(ValueError, match="does not fit this one"):
        make_model(make_config("oct-head-eps8"), load_scans("phantoms"))


# ---- what the command does with them

@pytest.mark.parametrize("name", FAST)
def test_a_miniature_says_and_writes_what_it_did(name, ended):
    end = ended[name]
    lines = read_record(end["paths"]["record"])
    unit = "patient" if "patients" in name else "example"
    assert lines[0]["data"] == "phantoms" and config_of(lines) == make_config(
        name, precision=lines[0]["precision"])
    assert lines[0]["plan"].get("unit", "example") == end["plan"].unit == unit
    assert lines[0]["plan"].get("examples", 16) == 16
    assert lines[0]["plan"]["n"] == (8 if unit == "patient" else 16)
    assert f"one {unit}" in end["statement"]
    last = lines[-1]
    assert last["finished"] and len(last["dice"]) == 9 and last["classes"] == list(RETINA_LAYERS)
    assert last["mean_dice"] == pytest.approx(sum(last["dice"][1:8])/7, abs=1e-5)
    assert [line["mean_dice"] for line in lines if line["kind"] == "epoch"][-1] == last["mean_dice"]
    assert end["paths"]["figure"].exists() and end["paths"]["weights"].exists()


@pytest.mark.parametrize("name", FAST)
def test_scores_are_what_they_are_called(name, ended):
    "Computed again from the released weights, by other functions."
    end = ended[name]
    model = open_release(end["paths"]["weights"]).model
    data = load_scans("phantoms")
    y = data.test_y
    predicted = segment(model, data.normalize(data.test_x))
    assert end["test_accuracy"] == pytest.approx((predicted == y).double().mean().item(), abs=1e-9)
    assert end["mean_dice"] == pytest.approx(dice(predicted, y)[1:8].mean().item(), abs=1e-9)
    theirs = segmentation.scored(predicted, y)
    assert end["mean_dice"] == pytest.approx(theirs["test_accuracy"], abs=1e-9)
    assert end["dice"] == pytest.approx(theirs["dice"], abs=1e-4)


def test_only_what_learns_moves_and_alike_for_two_seeds(ended):
    first = make_model(make_config(FAST[0]), load_scans("phantoms"), 3).state_dict()
    for name in FAST:
        weights = open_release(ended[name]["paths"]["weights"]).model.state_dict()
        moved = {key for key, value in weights.items() if not torch.equal(value, first[key])}
        assert {"head.weight", "head.bias"} <= moved
        assert (len(moved) > 2) == (name == "oct-norms-eps8-fast")


@pytest.mark.slow
def test_the_command_ends_with_dice(capsys, tmp_path):
    words = ["oct-patients-eps8-fast", "--seed", "0", "--out", str(tmp_path)]
    assert main([*words, "--steps", "1"]) == 0
    cut = capsys.readouterr().out
    assert "8 patients" in cut and "Cut short" in cut
    assert main([*words, "--resume"]) == 0
    out = capsys.readouterr().out
    assert "mean Dice of the seven layers:" in out and "pigment epithelium" in out
    assert out.index("mean Dice of the seven") < out.index("share of pixels right")
    assert "test accuracy" not in out
    path, = tmp_path.glob("*.release.pt")
    whole, = tmp_path.glob("*.jsonl")
    assert main(["evaluate", str(path)]) == 0
    said = capsys.readouterr().out
    end = read_record(whole)[-1]
    assert f"mean Dice of the seven layers: {end['mean_dice']:.2%}" in said
    assert f"share of pixels right {end['test_accuracy']:.2%} of 4 images (phantoms)" in said
    assert end["statement"] in said
    assert main(["evaluate", str(path), "--mirror"]) == 2
    assert "phantoms is tested with masks" in capsys.readouterr().err
    assert main(["predict", str(path), "a.png"]) == 2
    err = capsys.readouterr().err
    assert "a layer for every pixel of a scan" in err and err.count("\n") == 1


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow]*(name != FULL[0])) for name in FULL])
def test_a_rehearsal_needs_no_scan(name, scans, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DATA, "oct", (70, (1, 32, 16), 9))  # as many, but small ones
    estimates._one.cache_clear()
    assert main([name, "--dry-run"]) == 0
    out = capsys.readouterr().out
    units = "7 patients" if "patients" in name else "70 examples"
    plan = make_plan(make_config(name), 7 if "patients" in name else 70)
    assert f"{units}, {plan.steps} steps" in out and f"sigma {plan.sigma:.4f}" in out
    learn = "3,097 parameters" if "norms" in name else "153 parameters"
    assert learn in out and "oct: there" in out


@pytest.mark.slow
def test_seeds_are_summed_up_by_dice(ended, tmp_path, capsys):
    assert main(["oct-head-eps8-fast", "--seeds", "2", "--seed", "0", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    records = sorted(tmp_path.glob("*.jsonl"))
    shares = [100*read_record(path)[-1]["mean_dice"] for path in records]
    mean = sum(shares)/2
    assert f"2 finished runs: mean Dice {mean:.2f}" in out
    assert f"{mean:.2f} +-" in compare(records) and "(Dice)" in compare(records)
    figure = plot_records(records)
    assert figure.axes[0].get_ylabel() == "mean Dice (%)"
    listed = record_words([read_record(path) for path in records])
    assert listed.startswith(f"2 x {mean:.1f} Dice, at most")


# ---- nothing changes for the others

def test_scans_stay_out_of_the_tables(tmp_path, ended):
    assert not [row for row in summaries() if row.preset.startswith("oct")]
    path = ended[FAST[0]]["paths"]["record"]
    renamed = path.read_text().replace("oct-head-eps8-fast", "oct-head-eps8")
    lines = [json.loads(line) for line in renamed.splitlines()]
    for line in lines:
        line.pop("check")
    (tmp_path/"2026-01-01-oct-head-eps8-3.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines))
    assert "oct-head-eps8" in recorded(tmp_path)
    assert not [row for row in summaries(tmp_path) if row.preset.startswith("oct")]
