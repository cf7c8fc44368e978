"Records: what the reader takes and refuses, what lies in runs/, how old files became new ones."
import json
import os
import subprocess
from pathlib import Path

import pytest

from dp_course.privacy import epsilon
from dp_course.training import records as R

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT/"runs"
FILES = sorted(RUNS.glob("*.jsonl"))
ROWS = {"clipping": 176, "scaling": 423, "tricks": 113, "classes": 6, "digits-eps3-tuning": 19,
        "scatter-cnn-eps3-tuning": 8, "scatter-linear-eps3-tuning": 12}
START = {"kind": "start", "preset": "demo", "config": {"lr": 1.}, "data": "digits", "plan": None,
         "seed": 0}


def written(path, *lines):
    "A file of these lines; a string is written as it is."
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


# ---- every file in runs/

@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_record_is_read_by_the_public_reader(path):
    runs = R.read_runs(path)
    assert runs
    for start, *_, end in runs:
        assert {"preset", "config", "plan"} <= start.keys()
        assert end["kind"] == "end" and "finished" in end
        if start["plan"] is not None:
            assert {"n", "eps"} <= start["plan"].keys()
        if start["config"] is not None:
            assert "seed" in start and "data" in start


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.json")), ids=lambda path: path.stem)
def test_tables_are_objects_that_name_their_machine(path):
    table = json.loads(R.run_file(path.stem).read_text())
    assert ("date" in table or "started" in table) and ("machine" in table or "versions" in table)


# ---- sweeps

@pytest.mark.parametrize("name", ROWS)
def test_a_sweep_is_a_table(name):
    rows = R.sweep(name)
    assert len(rows) == ROWS[name]
    assert {row["stage"] for row in rows} <= {"tune", "final", "measure"}
    for row in rows:
        assert "kind" not in row
        if {"q", "batch_size"} <= row.keys() and row["stage"] != "measure":
            assert row["q"] == pytest.approx(row["batch_size"]/row["n"], rel=1e-12)
        if row["eps"] is not None:
            assert row["eps"] == row["eps_pld"] and row["accuracy"] == row["test_accuracy"]
    for row in rows[::12]:
        if row["eps"] is not None and row["stage"] != "measure":
            spent = epsilon(**{name: row[name] for name in ("q", "sigma", "steps", "delta")})
            assert spent == pytest.approx(row["eps"], rel=1e-3)


# ---- what is refused, and where

@pytest.mark.parametrize("bad, why", [
    ("3.5", "is a float"),
    ("null", "is a NoneType"),
    ({"step": 3}, "has kind None"),
    ("", "is no JSON"),
    ("\udcff", "is no JSON"), ("["*100_000, "is no JSON"), ("\x00\x00\x00", "is no JSON"),
    ('{"kind": "epoch", "step": NaN}', "NaN"), ('{"kind": "epoch", "eps": Infinity}', "Infinity"),
    ({"kind": "epoch", "step": 1, "test_accuracy": 1.01}, "between 0 and 1"),
    ({"kind": "epoch", "step": 1, "test_accuracy": True}, "between 0 and 1"),
    ({"kind": "epoch", "step": 1, "eps": -.5}, "0 or more"),
    ({"kind": "end", "finished": 1}, "true or"),
])
def test_a_bad_line_is_named(tmp_path, bad, why):
    path = tmp_path/"x.jsonl"
    text = bad if isinstance(bad, str) else json.dumps(bad)
    path.write_bytes(f"{json.dumps(START)}\n{text}\n".encode(errors="surrogateescape"))
    for read in (R.read_runs, R.read_record):
        with pytest.raises(ValueError, match=why) as refused:
            read(path)
        assert str(refused.value).startswith(f"{path}, line 2, ") and len(str(refused.value)) < 300


def test_two_runs_are_no_record(tmp_path):
    path = written(tmp_path/"x.jsonl", START, {"kind": "epoch", "step": 1}, START)
    assert [len(run) for run in R.read_runs(path)] == [2, 1]
    with pytest.raises(ValueError, match="line 3, starts a second run"):
        R.read_record(path)


def test_half_a_last_line_is_dropped(tmp_path):
    path = written(tmp_path/"x.jsonl", START)
    with open(path, "a") as file:
        file.write('{"kind": "epo')
    assert R.read_record(path) == [START]
    (tmp_path/"empty.jsonl").write_text("")
    assert R.read_record(tmp_path/"empty.jsonl") == []


def test_a_foreign_file_in_the_folder_is_named(tmp_path):
    written(tmp_path/"notes.jsonl", {"idea": "more seeds"})
    with pytest.raises(ValueError, match="notes.jsonl, line 1, has kind None"):
        R.recorded(tmp_path)


# ---- finding

@pytest.mark.parametrize("name", [
    "digits-eps3-0", "2026-11-23-digits-eps3-0", "digits-eps3-0.jsonl",
    "2026-11-23-digits-eps3-0.jsonl", "*-digits-eps3-0.jsonl"])
def test_a_record_is_found_by_any_of_its_names(name):
    assert R.run_file(name) == RUNS/"2026-11-23-digits-eps3-0.jsonl"


def test_a_name_is_not_part_of_another():
    assert R.run_file("bench-cpu").suffix == ".json"
    for wrong in ("eps3-0", "digits-eps3", ""):
        with pytest.raises(FileNotFoundError, match="neither in the package .* nor in a checkout"):
            R.run_file(wrong)


def test_the_package_comes_first_and_the_newest_wins(monkeypatch, tmp_path):
    package, checkout = tmp_path/"dp_course/runs", tmp_path/"runs"
    monkeypatch.setattr(R, "runs_folders", lambda: [package, checkout])
    checkout.mkdir()
    written(checkout/"2026-01-01-a-0.jsonl", START)
    assert R.run_file("a-0").parent == checkout
    package.mkdir(parents=True)
    for date in ("2025-01-01", "2025-03-01", "2025-02-01"):
        written(package/f"{date}-a-0.jsonl", START)
    assert R.run_file("a-0") == package/"2025-03-01-a-0.jsonl"


def test_records_are_found_from_any_folder(monkeypatch, tmp_path):
    here = R.recorded()
    monkeypatch.chdir(tmp_path)
    assert R.recorded() == here and len(here["digits-eps3"]) >= 3


# ---- which runs may be averaged


def test_a_newer_field_that_is_off_changes_nothing():
    record = R.load_runs("digits-eps3")[0]
    start, *rest = json.loads(json.dumps(record))
    start["config"] |= {"sigma": 0., "precision": "bf16", "new": ""}
    assert R.settings([start, *rest]) == R.settings(record)
    for odd in (start | {"precision": "bf16"}, start | {"config": start["config"] | {"sigma": 2.}}):
        assert R.settings([odd, *rest]) != R.settings(record)


# ---- writing

@pytest.mark.skipif(not (ROOT/".git").exists(), reason="no checkout")
def test_the_code_version_names_the_commit(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert R.code_version()["commit"].rstrip("+") == head.stdout.strip()[:12]
    monkeypatch.setitem(os.environ, "PATH", "")
    assert set(R.code_version()) == {"version"}
