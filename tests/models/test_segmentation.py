"Segmentation: exact gradients of a U-Net under every engine, scans, phantoms, and their recipe."
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import same
from PIL import Image

from dp_course.data import (
    OCT_SUBJECTS,
    DataError,
    Examples,
    Views,
    boundary_error,
    by_person,
    dice,
    load,
    phantoms,
    pixel_loss,
)
from dp_course.data import datasets as data_module
from dp_course.features import train_only
from dp_course.gradients import (
    FlatClip,
    bookkeeping_grad_sum,
    fast_grad_sum,
    ghost_grad_sum,
    hook_grad_sum,
)
from dp_course.models import UNet

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from experiments import harness, segmentation  # noqa: E402

# not `vmap_grad_sum`: torch 2.15 refuses the backward of its convolutions in float64 (slow_conv2d)
ENGINES = hook_grad_sum, ghost_grad_sum, bookkeeping_grad_sum, fast_grad_sum


def net(**settings):
    torch.manual_seed(0)
    return UNet(**{"base": 4, "classes": 3} | settings).double()


def batch(b=3, h=16, w=16, classes=3):
    return torch.randn(b, 1, h, w).double(), torch.randint(classes, (b, h, w))


def assert_exact(model, x, y, clip):
    for engine in ENGINES:
        same(engine, model, x, y, clip, tol=1e-11, loss=pixel_loss)


# ---- exact gradients

@pytest.mark.parametrize("what, head", [("head", True), ("norms", True), ("norms", False)])
def test_parts_of_a_unet_are_exact(what, head):
    model = train_only(net(), what)
    model.head.requires_grad_(head)
    assert_exact(model, *batch(), FlatClip(.02))


def test_views_with_masks_of_their_own_are_exact():
    x, y = batch(6)
    views = Views(x.unflatten(0, (3, 2))), Views(y.unflatten(0, (3, 2)))
    assert_exact(net(), *views, FlatClip(.05))


# ---- scans

@pytest.fixture
def copy_of_oct(tmp_path, monkeypatch):
    "A made-up set in the layout of the real one, with its own checksum."
    generator = np.random.default_rng(0)
    for folder, suffix in (("images", "webp"), ("masks", "png")):
        (tmp_path/"OCTLayers"/folder).mkdir(parents=True)
        for name in data_module._OCT_NAMES:
            pixels = generator.integers(0, 9, (224, 543), dtype=np.uint8)
            if folder == "images":
                pixels = np.repeat(pixels[..., None], 3, 2)
            options = {"lossless": True, "method": 0} if suffix == "webp" else {}
            Image.fromarray(pixels).save(tmp_path/"OCTLayers"/folder/f"{name}.{suffix}", **options)
    with pytest.raises(DataError, match="together have MD5") as error:
        load("oct", root=tmp_path)
    monkeypatch.setattr(data_module, "_OCT_MD5", str(error.value).split("MD5 ")[1][:32])
    return tmp_path


def test_scans_are_cropped_in_the_middle(copy_of_oct):
    scans = load("oct", root=copy_of_oct)
    with Image.open(copy_of_oct/"OCTLayers/masks/Subject1_02.png") as image:
        mask = np.asarray(image)
    assert len(scans) == 90 and np.array_equal(scans.train_y[1], mask[:, 15:527])
    assert np.array_equal(scans.train_x[89, 0].shape, (224, 512))
    x, y = scans.rows(torch.tensor([3]))
    assert x.dtype == torch.uint8 and y.dtype == torch.int64


def test_a_missing_and_a_damaged_scan_are_named(copy_of_oct):
    victim = copy_of_oct/"OCTLayers/images/Subject5_07.webp"
    victim.write_bytes(victim.read_bytes()[:50])
    with pytest.raises(DataError, match="Subject5_07.webp"):
        load("oct", root=copy_of_oct)
    victim.unlink()
    with pytest.raises(FileNotFoundError, match="1 of 180 files are missing.*Subject5_07.*copy"):
        load("oct", root=copy_of_oct)


def test_owners_may_be_names_and_stay_with_the_training_rows():
    names = [name for name in "abcd" for _ in range(2)]
    x = torch.arange(8, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 16, 16).contiguous()
    data = by_person(Examples(x, x[:, 0].long(), groups=names), names, "c")
    assert data.test_x[:, 0, 0, 0].tolist() == [4, 5]
    assert len(data) == 6 and data.units == 3


def test_dice_by_hand():
    truth = torch.tensor([[[0, 1], [1, 1], [2, 2]]])
    said = torch.tensor([[[0, 0], [1, 1], [2, 1]]])
    assert dice(said, truth, 4).tolist() == pytest.approx([2/3, 4/6, 2/3, 1.])
    assert boundary_error(said, truth, 3).tolist() == pytest.approx([.5, .5])


# ---- the recipe

@pytest.fixture
def small(tmp_path, monkeypatch):
    "The recipe on phantoms of nine people, two scans each."
    monkeypatch.setenv("DP_COURSE_DATA", str(tmp_path))
    monkeypatch.setattr(segmentation, "SIZES", dict(base=4, rows=32, columns=16, per_person=2))
    x, y = phantoms(18, torch.Generator().manual_seed(0), 32, 16)
    monkeypatch.setattr(segmentation, "scans", lambda: Examples(x, y, name="phantoms"))
    monkeypatch.setattr(segmentation, "PHANTOM_STEPS", 4)
    monkeypatch.setattr(segmentation, "PLAIN", dict.fromkeys(segmentation.PLAIN, 1))
    monkeypatch.setattr(segmentation, "HELD", {0: (2, 3)})
    rates = {("head", 8.): [(4., 1)], ("norms", 200.): [(1., 1)],
             ("patients", 8.): [(1., 1)]}
    monkeypatch.setattr(segmentation, "RATES", rates)  # each trainer proves a U-Net: seconds
    monkeypatch.setattr(segmentation, "CEILINGS", {"head-views": (.004,)})
    return tmp_path/"sweep-segmentation.jsonl"


@pytest.mark.slow
def test_every_part_of_the_recipe_runs_and_is_not_repeated(small):
    for part in list(segmentation.PARTS)[:-1]:  # the last is everything
        assert harness.work(segmentation, part, small, say=lambda *words: None)
    rows = harness.rows_of(segmentation, small)
    assert len(rows) == len(small.read_text().splitlines())/2
    private = [row for row in rows if row["target_eps"]]
    assert all(row["eps"] <= row["target_eps"] and row["q"] == 1 for row in private)
    assert {row["n"] for row in private if row["stage"] == "final"} == {14, 7}
    assert {row["n"] for row in private if row["stage"] == "tune"} == {12, 6}
    assert all(len(row["dice"]) == 9 and len(row["boundary"]) == 8 for row in rows)
    before = small.read_text()
    assert harness.work(segmentation, "everything", small, say=lambda *words: None)
    assert small.read_text() == before


def test_person_one_chooses_and_is_never_tested_on():
    tested = [person for held in segmentation.HELD.values() for person in held]
    assert sorted(tested) == sorted(set(OCT_SUBJECTS) - {1}) and len(tested) == 8


@pytest.mark.slow
def test_pretraining_goes_on_where_it_was_stopped(small, tmp_path):
    cell = segmentation.cell_of("pretrain", "phantoms")
    whole = segmentation.pretrain(cell, steps=3, path=tmp_path/"whole.pt")
    state = torch.load(tmp_path/"whole.pt", weights_only=True)
    assert state["t"] == 3 and json.dumps(whole)
    again = segmentation.pretrain(cell, steps=3, path=tmp_path/"whole.pt")
    assert again[0][1]["dice"] == whole[0][1]["dice"]
