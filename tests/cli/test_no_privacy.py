"Runs whose noise is switched off: nothing that they say or write may pass for a promise."
import copy
import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from dp_course import PrivacyPlan
from dp_course.cli import (
    PRESETS,
    Config,
    Job,
    NoPrivacy,
    compare,
    config_of,
    load_data,
    make_config,
    make_plan,
    make_trainer,
    plot_records,
    verify,
)
from dp_course.cli.main import main
from dp_course.training import STEPS, Entry, Ledger, load_checked, read_record, recorded

OPEN = [name for name in PRESETS if make_config(name).eps == math.inf]


def said(capsys):
    "What was printed: every line of it must say that there is no privacy."
    out, err = capsys.readouterr()
    assert not err
    return [line for line in out.splitlines() if line.strip()]


def test_the_presets_differ_from_the_private_ones_in_noise_and_clip_and_one_rate():
    own_rate = {"resnet20-cpu": dict(lr=.5, tuning_runs=4), "leaves-encoder": {}}
    for family in own_rate:
        private = make_config(f"{family}-eps3")
        clipped, plain = make_config(f"{family}-clip"), make_config(f"{family}-plain")
        same = dict(preset="", about="", eps=3.)
        assert replace(clipped, **same) == replace(private, **same)
        same |= dict(max_norm=1., **own_rate[family])
        assert replace(plain, **same) == replace(private, **same)
        assert plain.max_norm == 1e9
        here, there = make_plan(plain, 50_000), make_plan(private, 50_000)
        assert (here.q, here.steps, here.delta) == (there.q, there.steps, there.delta)
        assert here.sigma == 0 and here.eps == math.inf and not isinstance(here, PrivacyPlan)
    for name in OPEN:
        assert "no privacy" in PRESETS[name]["about"]


@pytest.mark.parametrize("name, given", [
    ("digits-eps3-fast", dict(eps=math.inf)),
    pytest.param("leaves-encoder-clip-fast", {}, marks=pytest.mark.slow)])
def test_every_line_says_it_and_no_line_of_the_record_has_an_eps(name, given, tmp_path, capsys):
    typed = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    assert main([name, *typed, "--seed", "0", "--out", str(tmp_path)]) == 0
    lines = said(capsys)
    assert len(lines) > 5 and all("no privacy" in line.lower() for line in lines)
    path, = tmp_path.glob("*.jsonl")
    record = read_record(path)
    for line in record:
        assert all(line[key] is None for key in ("eps", "eps_pld", "eps_rdp") if key in line)
    assert record[0]["config"]["eps"] is None and record[0]["plan"]["eps"] is None
    assert record[0]["plan"]["sigma"] == 0
    assert record[-1]["statement"].startswith("No privacy")
    assert config_of(record) == replace(
        make_config(name, **given), precision=record[0]["precision"])
    assert verify(record) is record and [record] in recorded(tmp_path).values()
    release, = tmp_path.glob("*.release.pt")
    assert load_checked(release, "dp_course release 1")["statement"].startswith("No privacy")
    assert "no privacy" in compare([path]) and plot_records([path]).axes


def test_two_seeds_are_not_composed(tmp_path, capsys):
    words = ["digits-eps3-fast", "--eps", "inf", "--seed", "0", "--seeds", "2"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    lines = said(capsys)
    assert all("no privacy" in line.lower() for line in lines)
    assert not any("spends" in line for line in lines)


def test_a_run_without_noise_goes_on_to_the_same_bits(tmp_path, capsys):
    words = ["digits-eps3-fast", "--eps", "inf", "--seed", "0", "--out"]
    assert main([*words, str(tmp_path/"whole")]) == 0
    assert main([*words, str(tmp_path/"cut"), "--steps", "2"]) == 0
    with pytest.raises(AssertionError):
        assert main(["digits-eps3-fast", "--eps", "3", "--resume", "--out",
                     str(tmp_path/"cut")]) == 0
    capsys.readouterr()
    assert main([*words[:-3], "--resume", "--out", str(tmp_path/"cut")]) == 0
    assert all("no privacy" in line.lower() for line in said(capsys))
    whole, cut = (load_checked(next((tmp_path/part).glob("*.release.pt")), "dp_course release 1")
                  for part in ("whole", "cut"))
    for name, v in whole["weights"].items():
        assert torch.equal(v, cut["weights"][name])
    assert main(["digits-eps3-fast", "--eps", "inf", "--dry-run"]) == 0
    assert all("no privacy" in line.lower() for line in said(capsys))


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    "The record of a run without noise."
    out = tmp_path_factory.mktemp("open")
    assert main(["digits-eps3-fast", "--eps", "inf", "--seed", "0", "--out", str(out)]) == 0
    return read_record(next(out.glob("*.jsonl")))


@pytest.mark.parametrize("change, complaint", [
    (dict(eps=3.), "yet promises"), (dict(eps_pld=2.), "yet promises"),
    (dict(plan_eps=3.), "yet promises"), (dict(plan_sigma=1.), "nothing about the plan's eps"),
    (dict(test_accuracy=.99), "not that of the last step")])
def test_a_record_without_noise_that_promises_something_is_refused(change, complaint, lines):
    record = copy.deepcopy(lines)
    for key, value in change.items():
        where, key = (record[0]["plan"], key[5:]) if key.startswith("plan_") else (record[-1], key)
        where[key] = value
    with pytest.raises(ValueError, match=complaint):
        verify(record)


def test_the_clip_alone_is_the_private_step_without_its_noise():
    "One step at sigma 0 moves the weights by lr times the clipped sum, divided by the batch."
    config = make_config("digits-eps3-fast", eps=math.inf, momentum=0.)
    trainer = make_trainer(config, load_data(config), seed=0)
    before = {name: p.detach().clone() for name, p in trainer.params.items()}
    total, _ = trainer._clipped_sum(trainer._draw(0), 0)
    trainer.step()
    for name, p in trainer.params.items():
        expected = before[name] - config.lr*total[name]/config.batch_size
        assert torch.allclose(p.double(), expected.double(), atol=1e-6)
    assert trainer.epsilon() == math.inf and trainer.statement().startswith("No privacy")


def test_a_setting_with_noise_and_without_it_is_refused(capsys, tmp_path):
    assert main(["report-2048", "--eps", "inf", "--out", str(tmp_path)]) == 2
    assert "leave out one of them" in capsys.readouterr().err
    for eps in ("nan", "-inf", "0"):
        assert main(["digits-eps3", "--eps", eps, "--out", str(tmp_path)]) == 2
    plan = make_plan(Config(eps=math.inf), 50_000)
    assert isinstance(plan, NoPrivacy) and plan.epsilon_after(0) == 0
    assert json.loads(json.dumps(asdict(plan)))["n"] == 50_000
    assert Job(Config()).config.eps == 3


def test_a_step_that_a_resumed_run_repeats_costs_nothing():
    "Other bits on another machine: a private run pays twice, one without privacy goes on."
    plan = make_plan(make_config("digits-eps3-fast", eps=math.inf), 1437)
    ledger = Ledger(plan)
    for t in range(plan.steps):
        ledger.charge(Entry(STEPS, plan.q, plan.sigma, "s", t, "a"))
    ledger.charge(Entry(STEPS, plan.q, plan.sigma, "s", plan.steps - 1, "b"))
    assert ledger.computed == plan.steps + 1
    assert (ledger.left(plan.steps - 1), ledger.left(plan.steps)) == (1, 0)
