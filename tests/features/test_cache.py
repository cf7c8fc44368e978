"The one store of features: damage, halves, full disks."
import errno
import warnings

import numpy as np
import pytest
from toys import first_digits

from dp_course.features import LeafRecipe, cache, leafed


def make(folder):
    "Features of two kinds, whose files lie beside each other."
    return leafed(first_digits(), LeafRecipe(patches=10, synthetic=20), folder)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    "A folder, and its content."
    folder = tmp_path_factory.mktemp("leaves")
    return folder, make(folder)


def maps_of(data):
    "Every map of both parts, as arrays."
    return [np.asarray(m) for x in (data.train_x, data.test_x) for m in x.values()]


def warned(folder, want):
    "What is said when the features are asked for again, which come out the same in any case."
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        again = maps_of(make(folder))
    assert all(np.array_equal(*pair) for pair in zip(again, maps_of(want), strict=True))
    return [str(w.message) for w in seen]


def test_damage_is_said_and_mended(kept):
    folder, _ = kept
    marker, = (p for p in folder.iterdir() if p.suffix == "")
    array = max(folder.glob("*.npy"), key=lambda p: p.stat().st_size)
    good, names = array.read_bytes(), sorted(folder.iterdir())
    middle = len(good)//2
    flipped = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1:]
    for bad in (good[:1000], b"", good[:-1], flipped):
        array.unlink()
        array.write_bytes(bad)
        first = warned(*kept)
        assert len(first) == 1 and "damaged" in first[0] and marker.name in first[0]
        assert warned(*kept) == []
    for bad in ("{", "{}", "[]", "3", '{"scatter": "another digest"}'):
        marker.write_text(bad)
        assert "damaged" in warned(*kept)[0]
    assert sorted(folder.iterdir()) == names  # no spare, no temporary file


def test_half_a_computation_is_not_taken_for_a_whole_one(kept, monkeypatch):
    folder, _ = kept
    marker, = (p for p in folder.iterdir() if p.suffix == "")
    marker.unlink()  # it is written last
    assert warned(*kept) == [] and marker.exists()
    monkeypatch.setattr(cache, "_described", None)  # nothing is computed again
    assert warned(*kept) == []


def test_who_reads_old_features_keeps_them(kept):
    "Another process may have mapped the file that is made anew."
    folder, want = kept
    before = [m.copy() for m in maps_of(want)]
    for path in folder.iterdir():
        if path.suffix == "":
            path.unlink()
    make(folder)
    assert all(np.array_equal(*pair) for pair in zip(maps_of(want), before, strict=True))


def test_a_full_disk_costs_only_the_cache(kept, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", full)
    said, = warned(tmp_path, kept[1])
    assert "not kept" in said and "No space left" in said
    assert not list(tmp_path.iterdir())
