"Tables of results: what is refused, what counts once, what appears by itself, what README says."
import copy
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from scipy import stats

from dp_course import training
from dp_course.cli import (
    PRESETS,
    SCANS,
    full_ladder,
    make_config,
    parse,
    power_of_test,
    result_of,
    results_table,
    seeds_for,
    summaries,
    summarize,
    verify,
)
from dp_course.privacy import PLDAccountant, PrivacyPlan, RDPAccountant, epsilon
from dp_course.training import load_runs, mean_std, read_record, run_file

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT/"runs"


def spent(plan, steps, accountant=PLDAccountant):
    return epsilon(q=plan.q, sigma=plan.sigma, steps=steps, delta=plan.delta, accountant=accountant)


def made_up(preset="resnet20-eps3", seed=0, accuracy=.5, finished=True, **overrides):
    "A record that looks real and says that it is not."
    c = make_config(preset, **overrides)
    plan = PrivacyPlan(n=50_000, batch_size=c.batch_size, steps=20, eps=c.eps, delta=c.delta)
    start = dict(
        kind="start", preset=preset, config=json.loads(json.dumps(asdict(c))),
        plan={k: getattr(plan, k) for k in "n batch_size steps eps delta q sigma".split()},
        data="cifar10, MADE UP", seed=seed, init_seed=0, device="cpu", started="never",
        machine=dict(threads=1, gpu=None))
    rows = [
        dict(kind="epoch", epoch=t, step=t, eps=spent(plan, t), lr=c.lr, clip=c.max_norm, seconds=t,
             test_accuracy=accuracy + (t == 10)*.1)
        for t in (10, 20)]
    end = dict(
        kind="end", finished=finished, why="steps", step=20, eps_pld=spent(plan, 20),
        eps_rdp=spent(plan, 20, RDPAccountant), delta=plan.delta, test_accuracy=accuracy,
        tested_on=10_000, tuning_runs=c.tuning_runs, seconds=20.)
    return [start, *rows, end]


def write(folder, *records):
    for i, record in enumerate(records):
        text = "".join(json.dumps(line) + "\n" for line in record)
        (folder/f"made-up-{i}.jsonl").write_text(text)
    return folder


@pytest.fixture
def three():
    return [made_up(seed=s, accuracy=a) for s, a in enumerate((.5, .52, .57))]


def forged(record, where, **changes):
    record = copy.deepcopy(record)
    (record[0]["plan"] if where == "plan" else record[where]).update(changes)
    return record


# ---- reading

def test_only_finished_test_set_runs_count(tmp_path, three):
    cut, tuning = made_up(seed=5, finished=False), made_up(seed=6, n_val=5000)
    staged = made_up(seed=7)
    staged[0]["config"]["stage"] = "final"
    endless = made_up(seed=9)[:-1]
    lacking = forged(made_up(seed=8), -1)
    del lacking[-1]["finished"]
    measured = [dict(kind="start", preset="x"), dict(kind="end", finished=True)]
    sweep = [*made_up(seed=10), *made_up(seed=11)]
    write(tmp_path, *three, cut, tuning, staged, endless, lacking, measured, sweep)
    (tmp_path/"empty.jsonl").write_text("")
    (tmp_path/"half.jsonl").write_text('{"kind": "st')
    found = training.recorded(tmp_path)
    assert [r[0]["seed"] for r in found.pop("resnet20-eps3")] == [0, 1, 2] and not found


def test_miniatures_are_no_rows(tmp_path, three):
    write(tmp_path, forged(three[0], 0, preset="resnet20-eps3-fast"))
    assert not [row for row in summaries(tmp_path) if row.runs]


def test_a_run_that_was_cut_short_and_went_on_counts_once(tmp_path):
    r = made_up()
    early = dict(r[-1], finished=False, step=10, test_accuracy=.6, eps_pld=r[1]["eps"])
    write(tmp_path, [*r[:2], early, dict(kind="resume", step=10), *r[2:]])
    row, = (row for row in summaries(tmp_path) if row.runs)
    assert row.runs == 1 and row.mean == 50 and math.isnan(row.std)


def test_a_mean_that_was_bought_must_be_in_the_eps():
    leaves = read_record(run_file("leaves-linear-eps3-0"))
    assert leaves[0]["config"]["centre"] == 10 and verify(leaves) is leaves
    with pytest.raises(ValueError, match="its plan spends"):
        verify(made_up("leaves-linear-eps3"))  # the eps of its steps alone


# ---- what may stand in one mean

@pytest.mark.parametrize("what", [
    dict(eps=8.), dict(lr=1.), dict(max_norm=.5), dict(momentum=.5), dict(model="wrn16_4"),
    dict(schedule="linear")])
def test_every_setting_that_matters_makes_another_row(tmp_path, three, what):
    odd = made_up(seed=3, accuracy=.9, **what)
    with pytest.raises(ValueError, match="different settings"):
        summarize([*three, odd])
    write(tmp_path, *three, odd)
    rows = [row for row in summaries(tmp_path) if row.runs]
    (name, value), = what.items()
    assert [row.runs for row in rows] == [3, 1] and rows[0].name == "resnet20-eps3"
    assert rows[1].name == f"resnet20-eps3, {name} {value}"
    assert [row.eps for row in rows] == [3, what.get("eps", 3)]


def test_what_does_not_matter_makes_none(three):
    same = made_up(seed=3, accuracy=.5, micro_batch=7)
    same[0]["config"].update(tuning_runs=99, about="somebody else's words")
    assert summarize([*three, same]).runs == 4


def test_other_data_other_plan(three):
    elsewhere = forged(three[0], 0, data="digits (no local copy of cifar10)")
    for odd in (elsewhere, forged(three[0], "plan", n=49_000)):
        with pytest.raises(ValueError, match="different settings"):
            summarize([*three, odd])


def test_copies_count_once(three):
    once, thrice = summarize(three), summarize(three*3)
    assert once == thrice and once.runs == 3
    assert (once.mean, once.std) == pytest.approx(mean_std([50, 52, 57]))
    secret = [forged(r, 0, seed="secret", init_seed=i) for i, r in enumerate(three)]
    assert len(training.distinct(secret)) == 3 and len(training.distinct(secret*2)) == 3


# ---- what is refused

@pytest.mark.parametrize("where, change, why", [
    (-1, dict(eps_rdp=3.0), "plan spends"),
    (-1, dict(eps_pld=math.nan), "plan spends|no number of JSON"),
    ("plan", dict(sigma=1.0), "plan spends"),
    ("plan", dict(batch_size=6000.), "plan spends"),
    (-1, dict(delta=1e-3), "spent more"),
    (-1, dict(step=25), "plan spends"),  # more than the 20 steps whose eps it states
    ("plan", dict(steps=19), "spent more"),
])
def test_forgeries_are_refused(tmp_path, where, change, why):
    bad = forged(made_up(), where, **change)
    assert verify(made_up())
    with pytest.raises(ValueError, match=why):
        verify(bad)
    write(tmp_path, bad)
    with pytest.raises(ValueError, match=why):
        summaries(tmp_path)


@pytest.mark.parametrize("line", [1, 2])
def test_eps_of_every_row_is_computed_again(line):
    low = made_up()
    low[line]["eps"] *= .99
    with pytest.raises(ValueError, match=f"by step {10*line}"):
        verify(low)
    cut = made_up()
    early = dict(cut[-1], finished=False, step=10, test_accuracy=.6, eps_pld=1.5)
    with pytest.raises(ValueError, match="eps_pld is 1.5"):
        verify([*cut[:2], early, *cut[2:]])


@pytest.mark.parametrize("key", ["plan", "seed", "config"])
def test_record_that_says_too_little_is_refused(key):
    r = made_up()
    del r[0][key]
    with pytest.raises(ValueError, match=f"says nothing about {key}"):
        verify(r)
    with pytest.raises(ValueError, match="no last line"):
        verify(made_up()[:-1])
    with pytest.raises(ValueError, match="the plan's sigma"):
        verify(forged(made_up(), "plan", sigma=None))
    with pytest.raises(ValueError, match="eps_rdp is not stated"):
        verify(forged(made_up(), -1, eps_rdp=None))


def test_charging_more_than_needed_is_no_lie():
    sigma = made_up()[0]["plan"]["sigma"]
    assert verify(forged(made_up(eps=3.), "plan", sigma=sigma*1.05))


def test_of_several_runs_the_largest_eps_is_shown(three):
    eps = 1.0003*three[1][-1]["eps_pld"]  # repeated steps with another seed, say
    more = forged(three[1], -1, eps_pld=eps)
    assert summarize([three[0], more]).eps_pld == eps
    assert summarize([more, three[0]]).eps_pld == eps


def test_every_committed_record_holds():
    found = training.recorded(RUNS)
    assert sum(map(len, found.values())) >= 9
    for records in found.values():
        for record in records:
            verify(record)


# ---- tables

def test_table_shows_what_has_not_run_with_a_command_that_exists(tmp_path):
    rows = summaries(tmp_path)
    scans = {p for p in PRESETS if make_config(p).data in SCANS}  # judged in lesson 20, by Dice
    assert {row.preset for row in rows} == PRESETS.keys() - scans
    for row in rows:
        jobs = parse(row.command.split()[1:])
        assert row.command.startswith("dp-train ") and [job.seed for job in jobs] == [0, 1, 2]
        assert jobs[0].config == make_config(row.preset)
    text = repr(results_table(rows))
    assert text.count("not run yet") == len(rows) and "nan" not in text


def test_a_record_that_lands_fills_its_row(tmp_path, three):
    before = summaries(tmp_path)
    after = summaries(write(tmp_path, *three))
    filled = [row for row in after if row.runs]
    assert len(after) == len(before) and [row.preset for row in filled] == ["resnet20-eps3"]
    text = repr(results_table(filled))
    by_rdp = f"({filled[0].eps_rdp:.2f})"
    for part in ("| 53.00 ± 3.61 |", "MADE UP", "cpu, threads: 1", "| 0.33 |", by_rdp):
        assert part in text
    assert "±" not in repr(results_table([summarize(three[:1])]))  # one run has no spread


def test_a_preset_that_nobody_knows_any_more_still_shows(tmp_path):
    write(tmp_path, forged(made_up(), 0, preset="before-the-flood"))
    rows = [row for row in summaries(tmp_path) if row.preset == "before-the-flood"]
    assert [row.name for row in rows] == ["before-the-flood"]


def test_the_page_of_results_says_what_the_records_say():
    "Every row 'seeds | mean ± std' of a run that it names, derived again."
    row_of = r"(?m)^\| ([\w.-]+) \|.*? \| (\d+) \| ([\d.]+) ± ([\d.]+) \|"
    quoted = re.findall(row_of, (ROOT/"docs/results.md").read_text(encoding="utf-8"))
    assert len(quoted) >= 3
    found = summaries(RUNS)
    for run, *numbers in quoted:
        rows = [row for row in found if row.name == run]
        assert numbers in [[str(row.runs), f"{row.mean:.2f}", f"{row.std:.2f}"] for row in rows]


# ---- ladder and figures


def test_synthetic_images_are_said():
    said = {row.preset: row.images for row in summaries()}
    drawn = "leaves", "deflated", "synthetic", "resnet20-views"
    assert {said[name] for name in said if any(word in name for word in drawn)} == {"synthetic"}
    assert {said[name] for name in ("resnet20-eps3", "scatter-cnn-eps3", "report-v1")} == {"none"}


def test_rows_on_other_images_stay_away():
    found = summarize(load_runs("report-v1"))
    hundred = replace(found, data="cifar100")
    assert result_of(found) in full_ladder([found])
    assert result_of(hundred) not in full_ladder([hundred])


# ---- how many seeds

@pytest.mark.parametrize("n, gap", [(2, 3.), (5, 1.), (12, 1.), (20, -.7)])
def test_power_against_simulation(n, gap):
    # 20,000 pairs: standard error at most 0.0036; 5 of them: a false alarm in 1 of 400,000 runs
    g = torch.Generator().manual_seed(n)
    a, b = (.85*torch.randn(20_000, n, generator=g, dtype=torch.float64) for _ in range(2))
    b += gap
    noticed = (stats.ttest_ind(a.numpy(), b.numpy(), axis=1).pvalue < .05).mean()
    assert abs(power_of_test(n, gap, .85) - noticed) < .018


def test_power_at_its_ends():
    assert power_of_test(6, 0., 1.) == pytest.approx(.05)
    assert power_of_test(6, 0., 1., .2) == pytest.approx(.2)
    assert power_of_test(6, 100., 1.) == pytest.approx(1.)


@pytest.mark.parametrize("bad", [
    dict(runs=1, gap=1., std=1.), dict(runs=5, gap=1., std=0.), dict(runs=5, gap=1., std=math.nan)])
def test_power_refuses(bad):
    with pytest.raises(ValueError, match="two or more"):
        power_of_test(**bad)


def test_seeds_for_is_the_smallest_number_that_suffices():
    for gap, power in ((1., .8), (2., .9), (.5, .8)):
        n = seeds_for(gap, .85, power)
        assert power_of_test(n, gap, .85) >= power
        assert n == 2 or power_of_test(n - 1, gap, .85) < power
    # 12 in the normal approximation, of which books say: add one
    assert seeds_for(1., .85) == 13 and seeds_for(-1., .85) == 13
    with pytest.raises(ValueError, match="gap=0"):
        seeds_for(0., 1.)


def test_googles_accountant_finds_less_of_replacement_than_the_bound_of_lesson_13():
    "Above the price of joining or leaving, below the lesson's bound by twice that."
    google = pytest.importorskip("dp_accounting")
    plan = PrivacyPlan(n=50_000, batch_size=2000, steps=625, sigma=1.6138, delta=1e-5)
    relation = google.NeighboringRelation.REPLACE_ONE
    account = google.pld.PLDAccountant(neighboring_relation=relation)
    step = google.PoissonSampledDpEvent(plan.q, google.GaussianDpEvent(plan.sigma))
    replaced = account.compose(step, 625).get_epsilon(1e-5)
    bound = re.search(r"'replaced, a bound': ([0-9.]+)", (ROOT/"nbs/14_results.ipynb").read_text())
    assert spent(plan, 625) < replaced < float(bound[1])
