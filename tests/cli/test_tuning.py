"The tuning of the presets: a validation split, the preset's own sampling rate, rows that repeat."
import pytest

from dp_course.cli import make_config
from dp_course.data import load
from dp_course.training import sweep
from experiments import tuning
from experiments.harness import chosen


def test_it_is_judged_on_held_out_training_digits_at_the_rate_of_the_preset():
    data = tuning.examples("digits-eps3")
    config = tuning.config_of_cell(tuning.cell_of("digits-eps3"))
    assert (len(data), len(data.test_y)) == (1150, 287)
    assert config.batch_size/len(data) == pytest.approx(240/1437)
    test = {bytes(x.flatten().tolist()) for x in load("digits").test_x}
    shared = [x for x in data.test_x if bytes(x.flatten().tolist()) in test]
    assert not shared, "no test image is looked at"


def test_a_recorded_row_comes_out_again():
    cell = tuning.cell_of("digits-eps3", lr=.2)
    recorded, = [row for row in sweep("tuning") if tuning.key(row) == tuning.key(cell)]
    (start, end), = tuning.run(cell)
    assert tuning.key(start["config"]) == tuning.key(cell)
    assert end["eps_pld"] == pytest.approx(recorded["eps"], abs=1e-9) and end["eps_pld"] <= 3
    # other threads add up in another order, and another sum gets other noise
    assert end["test_accuracy"] == pytest.approx(recorded["accuracy"], abs=.05)


def test_the_record_is_whole_and_the_preset_is_its_best():
    rows = chosen(sweep("tuning"), base="digits-eps3")
    cells = tuning.PARTS["digits"](rows)
    assert {tuning.key(row) for row in rows} == {tuning.key(cell) for cell in cells}
    best = max(chosen(rows, seed=0), key=lambda row: row["accuracy"])
    now = make_config("digits-eps3")
    assert (best["lr"], best["batch"], best["schedule"]) == (now.lr, now.batch_size, now.schedule)


@pytest.mark.parametrize("part, count", [("linear", 11), ("cnn", 5)])
def test_what_is_recorded_of_scattering_is_a_cell(part, count):
    cells = tuning.PARTS[part]([])
    keys = {tuning.key(cell) for cell in cells}
    rows = chosen(sweep("tuning"), base=cells[0]["base"])
    assert len(keys) == count and keys >= {tuning.key(row) for row in rows}
