"What `dp-train` is asked without training: list, rehearse, evaluate, predict, compare, plot."
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from toys import quiet

from dp_course.cli import (
    PRESETS,
    VERBS,
    Job,
    estimates,
    make_config,
    make_plan,
    open_release,
    rehearse,
)
from dp_course.cli.main import main
from dp_course.data import load
from dp_course.features import LeafNet
from dp_course.training import load_release, read_record, run_file, save_atomic

RELEASES = Path(__file__).resolve().parents[2]/"dp_course/releases"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    "One finished miniature."
    out = tmp_path_factory.mktemp("ended")
    return quiet(make_config("digits-eps3-fast", ema=.5), out=out, seed=3)


def said(capsys, *words):
    "What the command prints, if all goes well."
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


# --- the release


@pytest.mark.parametrize("name", ["deflated-4m-eps3", "resnet20-synthetic-4m-eps3"])
def test_a_network_that_came_with_the_course_is_found_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = open_release(name)
    twin = open_release(RELEASES/f"{name}.pt").model
    assert load_release(name, twin) == found.statement
    promised = read_record(run_file(f"{name}-0"))[-1]["statement"]
    assert promised.startswith(found.statement.partition(" Spent")[0])
    Path(name).write_text("a file of one's own comes first")
    with pytest.raises(ValueError, match="truncated or foreign"):
        load_release(name, twin)


def test_a_release_holds_all_that_is_needed_and_runs_no_code(ended):
    state = torch.load(ended["paths"]["weights"], weights_only=True)
    assert state.keys() == {"kind", "statement", "weights", "network"}
    about = state["network"]
    assert about["model"] == "digit_filters" and about["data"] == "digits"
    assert about["classes"] == list("0123456789")
    assert (about["image"], about["mean"], about["std"]) == ([1, 8, 8], [.3053], [.376])
    assert state["statement"] == ended["statement"].removesuffix(" Beside it")
    mode = ended["paths"]["weights"].stat().st_mode
    assert not list(ended["paths"]["weights"].parent.glob("*.release.pt.*")) and mode


def test_evaluate_uses_the_normalization_of_the_run(tmp_path):
    "Other constants than the data set's own, as the report's runs have them."
    end = quiet(make_config("digits-eps3-fast", pixel_std=(.1,)), out=tmp_path, seed=0)
    assert open_release(end["paths"]["weights"]).accuracy()[0] == end["test_accuracy"]


def test_evaluate_makes_features_again(tmp_path, monkeypatch):
    monkeypatch.setenv("DP_COURSE_DATA", str(tmp_path))
    end = quiet(make_config("scatter-cnn-eps3-fast"), out=tmp_path, seed=0, steps=1)
    found = open_release(end["paths"]["weights"])
    assert found.accuracy() == (end["test_accuracy"], 360)
    load_digits = load("digits")
    Image.fromarray(load_digits.test_x[5, 0].numpy()).save(tmp_path/"five.png")
    named, resized = found.predict(tmp_path/"five.png", most=10)
    assert not resized and sum(p for _, p in named) == pytest.approx(1)


def test_features_of_a_validation_split_are_made_again(tmp_path):
    config = make_config("scatter-cnn-eps3-fast", n_val=200)
    end = quiet(config, out=tmp_path, seed=0, steps=1)
    found = open_release(end["paths"]["weights"])
    assert found.about["origin"] == "scattered" and found.accuracy()[1] == 360


def test_a_network_is_missing_where_the_data_are_there(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(estimates, "is_there", lambda name, root: "")
    monkeypatch.setattr(estimates, "find_start", lambda name: gone(name))

    def gone(name):
        raise FileNotFoundError(f"no {name}")

    rows = listed(said(capsys, "list", "--out", tmp_path))
    assert "cifar10, network missing" in rows["public-linear-eps3"]
    assert "missing" not in rows["resnet20-eps3"]


def test_a_network_of_dicts_comes_back(tmp_path):
    shapes = {"scatter": (3, 2, 2), "patches": (4, 2, 2)}
    about = {"model": "leaves_linear", "features": "leaves", "data": "digits", "image": [1, 8, 8],
             "input": {k: list(v) for k, v in shapes.items()}, "classes": ["a", "b"],
             "mean": [.5], "std": [.5]}
    net = LeafNet(shapes, 2)
    torch.nn.init.normal_(net.linear.weight)
    state = {"kind": "dp_course release 1", "statement": "-", "weights": net.state_dict()}
    save_atomic({**state, "network": about}, tmp_path/"x.release.pt")
    again = open_release(tmp_path/"x.release.pt").model.state_dict()
    assert all(torch.equal(again[k], v) for k, v in net.state_dict().items())


# --- records


def test_compare_refuses_to_average_different_settings(tmp_path, capsys):
    lines = read_record(run_file("digits-eps3-0"))
    lines[0]["plan"]["sigma"] = 1.
    odd = tmp_path/"odd.jsonl"
    odd.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["compare", "digits-eps3-1", str(odd)]) == 2
    err = capsys.readouterr().err
    assert "sigma is" in err and "no mean" in err and err.count("\n") == 1
    assert main(["plot", "digits-eps3-1", str(odd), "--to", str(tmp_path/"x.png")]) == 2
    assert not (tmp_path/"x.png").exists()


def test_compare_leaves_out_what_was_cut_short_and_says_so(tmp_path, capsys):
    cut = quiet(make_config("digits-eps3-fast"), out=tmp_path, seed=0, steps=2)
    text = said(capsys, "compare", "digits-eps3-0", cut["paths"]["record"])
    assert "left out" in text and "after step 2 of 6" in text
    assert main(["compare", str(cut["paths"]["record"])]) == 2
    assert "no finished run" in capsys.readouterr().err


# --- list and rehearsal


def listed(text):
    "Preset -> its paragraph."
    return {part.split(":")[0]: " ".join(part.split()) for part in re.split(r"\n(?=\S)", text)}


@pytest.mark.parametrize("spelling", ["list", "--list"])
def test_the_list_names_every_preset_its_data_and_its_records(spelling, capsys, tmp_path):
    shutil.copy(run_file("digits-eps3-0"), tmp_path/"2026-01-01-digits-eps3-9.jsonl")
    text = said(capsys, spelling, "--data", tmp_path, "--out", tmp_path)
    rows = listed(text)
    assert PRESETS.keys() <= rows.keys()
    assert "; 3 x 9" in rows["digits-eps3"], "a copy counts once"
    assert "cifar10 missing" in rows["resnet20-eps3"] and "missing" not in rows["digits-eps3"]
    assert "images: synthetic;" in rows["leaves-linear-eps3"]
    assert "images: none;" in rows["resnet20-eps3"]
    assert "images: public (CIFAR-100);" in rows["public-all-eps2"]
    assert " 65.54 M " in rows["resnet20-eps3"]  # 1000 steps x 4096 images x 16 views
    assert "seconds on cpu" in rows["digits-eps3"]
    assert "no record" in rows["wrn40-4-eps8"]
    assert [p.name for p in tmp_path.iterdir()] == ["2026-01-01-digits-eps3-9.jsonl"]


def test_a_rehearsal_tells_the_plan_and_leaves_no_trace(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = said(capsys, "digits-eps3", "--dry-run", "--set", "epochs=6", "--out", "here")
    plan = make_plan(make_config("digits-eps3", epochs=6.), 1437)
    assert f"{plan.steps} steps of about 240" in text and f"sigma {plan.sigma:.4f}" in text
    for word in ("a step", "in all", "memory", "MiB", "digits: there", "nothing is spent"):
        assert word in text
    assert not list(tmp_path.iterdir())


def test_a_rehearsal_needs_no_data_and_takes_no_long_step(monkeypatch, tmp_path):
    monkeypatch.setattr(estimates, "SHORT", 0.)
    config = replace(make_config("resnet20-cpu-eps3"), micro_batch=8)
    text = rehearse(Job(config, root=str(tmp_path), steps=10))
    assert "measured on 8 made-up examples" in text and "for 10 steps" in text
    assert "272,474 parameters" in text and "cifar10: cifar10: no folder" in text


# --- settings, one by one


def test_constants_must_fit_the_channels(tmp_path):
    with pytest.raises(ValueError, match="2 constants.*images of 1 channels"):
        quiet(make_config("digits-eps3-fast", pixel_std=(.1, .2)), out=tmp_path)


# --- what is refused


@pytest.fixture(scope="module")
def files(ended, tmp_path_factory):
    "Files that are no good, by name."
    folder = tmp_path_factory.mktemp("files")
    state = torch.load(ended["paths"]["weights"], weights_only=True)
    strange = {**state, "network": {**state["network"], "model": "resnet99"}}
    save_atomic(strange, folder/"strange.release.pt")
    other = {**state, "network": {**state["network"], "model": "resnet20"}}
    save_atomic(other, folder/"other.release.pt")
    whole = ended["paths"]["weights"].read_bytes()
    (folder/"half.release.pt").write_bytes(whole[:len(whole)//2])
    (folder/"notes.jsonl").write_text("no record\n")
    shutil.copy(ended["paths"]["weights"], folder/"good.release.pt")
    return folder


MISTAKES = {
    "train digits-eps": ["unknown preset 'digits-eps'", "did you mean digits-eps3?", "report-4096"],
    "release": ["nothing to resume", "digits-eps3"],
    "--delta 0": ["delta", "0.0"],
    "--seed -1": ["seed must be 0 or more"],
    "--batch-size 5000": ["batch_size", "5000", "1437"],
    "--n-val 1437": ["n_val"],
    "--device abacus": ["no such device", "abacus", "cpu"],
    "--resume": ["nothing to resume", "digits-eps3"],
    "resnet20-eps3 --data nowhere": ["nowhere", "data_batch_1", "download=True"],
    "--set tuning_runs=-3": ["tuning_runs must be 0 or more"],
    "--set pixel_std=0": ["pixel_std must be numbers above 0"],
    "--set data=Digits": ["unknown data 'Digits': pass one of digits, mnist"],
    "oct-head-eps8-fast --set unit=scan": ["unknown unit 'scan': pass one of"],
    "oct-head-eps8-fast --set learns=tail": ["unknown learns 'tail'"],
    "oct-head-eps8-fast --set unit=patient": ["batch_size=16"],
    "evaluate strange.release.pt": ["resnet99"],
    "evaluate other.release.pt": ["fit no network"],
    "evaluate half.release.pt": ["truncated or foreign"],
    "evaluate good.release.pt --flux": ["--flux", "--help"],
    "predict good.release.pt nowhere.png": ["there is no nowhere.png"],
    "compare": ["RECORD"],
    "compare notes.jsonl": ["notes.jsonl", "not a record"],
    "compare sweep-clipping": ["starts a second run"],
    "compare bench-cpu": ["is no JSON"],
    "plot digits-eps3-0 --to no/where.png": ["no/where.png"],
    "--list --eps": ["--eps"],
    "--dry-run --resume": ["--dry-run", "leave --resume out"],
    "--set flip=maybe": ["--flip", "maybe"],
    "--set model=resnet99": ["unknown model 'resnet99'"],
    "--set preset=x": ["pass FIELD=VALUE"],
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_gets_one_line_and_exit_code_2(typed, files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    before = sorted(files.iterdir())
    assert main(typed.split()) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and err.startswith("dp-train: ") and not out
    for word in MISTAKES[typed]:
        assert word in err.replace("1,437", "1437")
    assert sorted(files.iterdir()) == before


def test_help_of_every_verb_ends_well(capsys):
    for verb in VERBS:
        assert verb in said(capsys, verb, "--help")
