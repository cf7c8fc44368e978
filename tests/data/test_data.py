"Examples of every kind, and real files, broken ones among them."
import hashlib
import pickle
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchvision import datasets
from toys import generator as gen

from dp_course.basics import data_root
from dp_course.data import (
    DataError,
    Examples,
    Views,
    as_examples,
    best_available,
    count,
    examples,
    leaves,
    load,
    tree_map,
)
from dp_course.data import datasets as data


def same(a, b):
    "Whether two trees hold the same numbers in the same types."
    pairs = list(zip(leaves(a), leaves(b), strict=True))
    return all(u.dtype == v.dtype and torch.equal(u, v) for u, v in pairs)


# every kind of input gives the same rows

N = 12
X = torch.arange(N*6, dtype=torch.float32).view(N, 6)
Y = torch.arange(N) % 3


class Items(Dataset):
    "The rows of X and Y as items."
    def __len__(self):
        return N

    def __getitem__(self, i):
        return X[i], int(Y[i])


class ByTheBatch(Items):
    "The same, but many at once, less their mean: as `with_transform` of datasets hands them out."
    def __getitems__(self, indices):
        return [(X[i] - X[indices].mean(0), int(Y[i])) for i in indices]


def memmap(folder):
    file = np.memmap(folder/"x.npy", dtype=np.float32, mode="w+", shape=(N, 6))
    file[:] = X.numpy()
    file.flush()
    return np.memmap(folder/"x.npy", dtype=np.float32, mode="r", shape=(N, 6))


KINDS = {
    "tensors": lambda folder: Examples(X, Y, X, Y),
    "arrays": lambda folder: Examples(X.numpy(), Y.numpy(), X.numpy(), Y.numpy()),
    "short labels": lambda folder: Examples(X, Y.to(torch.uint8), X, Y.numpy().astype(np.uint16)),
    "other byte order": lambda folder: Examples(X.numpy().astype(">f4"), Y.numpy().astype(">i2"),
                                                X.numpy(), Y),
    "memmap": lambda folder: Examples(memmap(folder), Y, memmap(folder), Y),
    "Dataset": lambda folder: Examples(Items(), test_x=Items()),
    "Dataset that mixes": lambda folder: Examples(ByTheBatch(), test_x=ByTheBatch()),
    "TensorDataset": lambda folder: Examples(TensorDataset(X, Y), test_x=TensorDataset(X, Y)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind(kind, tmp_path):
    d = KINDS[kind](tmp_path)
    assert len(d) == N and d.device.type == "cpu"
    for idx in (torch.tensor([0, 5, 11]), torch.tensor([7]), torch.arange(N)):
        assert same(d.rows(idx), (X[idx], Y[idx]))
    x, y = d.rows(torch.tensor([], dtype=torch.int64))
    assert x.shape == (0, 6) and y.shape == (0,) and (x.dtype, y.dtype) == (X.dtype, Y.dtype)
    pieces = list(d.test_rows(5))
    assert [len(y) for _, y in pieces] == [5, 5, 2]
    assert same(tuple(torch.cat(parts) for parts in zip(*pieces)), (X, Y))


@pytest.mark.parametrize("kind", KINDS)
def test_split_of_every_kind(kind, tmp_path):
    d = KINDS[kind](tmp_path)
    s = d.split(4, seed=1)
    assert len(s) == 8 and "validation" in s.name
    rest, held = s.rows(torch.arange(8)), list(s.test_rows(3))
    held = tuple(torch.cat(parts) for parts in zip(*held))
    order = torch.randperm(N, generator=gen(1))
    assert same(rest, (X[order[4:].sort().values], Y[order[4:].sort().values]))
    assert same(held, (X[order[:4].sort().values], Y[order[:4].sort().values]))
    for n_val in (0, N, -3):
        with pytest.raises(ValueError, match="n_val"):
            d.split(n_val)
    again = s.split(3)  # a part of a part
    assert len(again) == 5 and same(again.rows(torch.tensor([1])), again.rows(torch.tensor([1])))


@pytest.mark.parametrize("kind", KINDS)
def test_made_up_rows_of_every_kind(kind, tmp_path):
    d = KINDS[kind](tmp_path)
    x, y = d.made_up(500, gen())
    assert x.shape == (500, 6) and x.dtype == torch.float32 and abs(x.std() - 1) < .05
    assert y.dtype == torch.int64 and y[:4].tolist() == [0, 2, 0, 2]
    assert same((x, y), d.made_up(500, gen())) and not same((x, y), d.made_up(500, gen(1)))
    assert d.made_up(0, gen())[0].shape == (0, 6)


def test_trees_keep_their_form():
    x = {"image": torch.zeros(N, 3, 4, 4, dtype=torch.uint8), "parts": (X, Y[:, None].numpy())}
    d = Examples(x, {"a": Y, "b": X})
    idx = torch.tensor([3, 4])
    rows = {"image": x["image"][idx], "parts": (X[idx], Y[idx, None])}
    assert same(d.rows(idx), (rows, {"a": Y[idx], "b": X[idx]}))
    assert set(d.rows(idx)[0]) == {"image", "parts"} and isinstance(d.rows(idx)[0]["parts"], tuple)
    assert "image: (12, 3, 4, 4) uint8" in repr(d) and "no test part" in repr(d)
    made, labels = d.made_up(5, gen())
    assert made["image"].dtype == torch.uint8 and made["parts"][1].shape == (5, 1)
    assert labels["b"].shape == (5, 6)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")
def test_a_file_larger_than_memory(tmp_path):
    "64 GB that take no room on the disk; few, long rows, since each costs the system a long read."
    path, rows, width = tmp_path/"large", 2**16, 2**20
    with open(path, "wb") as file:
        file.truncate(rows*width)
        file.seek(6*width - 1)
        file.write(bytes([7]))
    code = f"from toys import look_into; look_into({str(path)!r}, {rows}, {width})"
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=tests, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    limit, found = done.stdout.splitlines()
    assert limit == "one gigabyte is too much"
    assert found == f"[7, 0] (3, {width}) (2, {width}) (30, {width})"


# made-up rows

def test_made_up_ids_and_labels_are_the_lowest_and_the_highest_of_their_place():
    columns = torch.tensor([[0, 100], [3, 105], [1, 103]])
    x, y = Examples(columns, torch.tensor([[2, 5], [4, 5], [4, 5]])).made_up(3, gen())
    assert x.tolist() == [[0, 100], [3, 105], [0, 100]] and y.tolist() == [[2, 5], [4, 5], [2, 5]]
    targets = torch.tensor([[-1., 5.], [2., torch.nan], [0., torch.inf]])
    _, y = Examples(torch.zeros(3, 2), targets).made_up(1000, gen())
    assert y.isfinite().all() and -1 <= y[:, 0].min() < -.9 and 1.9 < y[:, 0].max() <= 2


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.bool])
def test_small_types_are_kept(dtype):
    ids = torch.tensor([0, 1, 1]).to(dtype)
    x, _ = Examples(ids, ids).made_up(100, gen())
    assert x.dtype == dtype and x.int().unique().tolist() == [0, 1]


def test_made_up_pixels_have_any_grey():
    pixels = torch.full((4, 1, 8, 8), 9, dtype=torch.uint8)
    x, _ = Examples(pixels, torch.zeros(4).long()).made_up(200, gen())
    assert x.dtype == torch.uint8 and len(x.unique()) == 256


def test_probe_makes_the_rows():
    def probe(b, generator):
        return torch.randint(5, (b, 3), generator=generator), torch.ones(b)
    d = Examples(X, Y, probe=probe)
    assert same(d.made_up(4, gen()), probe(4, gen())) and d.split(2).probe is probe
    wrong = d.replace(probe=lambda b, generator: (torch.ones(b), torch.ones(b + 1)))
    with pytest.raises(ValueError, match=r"probe\(4, generator\) returned shapes .*make 4 rows"):
        wrong.made_up(4, gen())


def test_a_large_set_is_looked_at_in_part(monkeypatch):
    monkeypatch.setattr(examples, "_LOOK_BYTES", 4*8)
    x, _ = Examples(np.arange(1000), torch.arange(1000)).made_up(2, gen())
    assert x.tolist() == [0, 750]  # the first and the last of four rows


# normalize

def test_normalize_changes_pixels_and_nothing_else():
    d = Examples(X, Y)
    tree = {"pixels": torch.tensor([[0, 255]], dtype=torch.uint8), "ids": Y, "floats": (X,)}
    z = d.normalize(tree)
    assert z["pixels"].tolist() == [[-1., 1.]] and z["ids"] is Y and z["floats"][0] is X
    own = d.replace(normalize=lambda x: x + 1)
    assert same(own.normalize(X), X + 1) and same(own.split(2).normalize(X), X + 1)


class OneBuffer(Items):
    "Hands out the same tensor, or array, with other numbers in it."
    def __init__(self, buffer):
        self.buffer = buffer

    def __getitem__(self, i):
        self.buffer[...] = X[i] if isinstance(self.buffer, torch.Tensor) else X[i].numpy()
        return self.buffer, Y[i]


@pytest.mark.parametrize("buffer", [torch.zeros_like(X[0]), np.zeros_like(X[0].numpy())])
def test_items_that_share_their_memory_are_read_apart(buffer):
    x, _ = Examples(OneBuffer(buffer)).rows(torch.arange(5))
    assert torch.equal(x, X[:5])


# what is refused, in the caller's words

class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y)


class NoLength(Dataset):
    def __getitem__(self, i):
        return X[i], Y[i]


class Empty(Items):
    def __len__(self):
        return 0


REFUSED = {
    "x has 12 rows, y has 11 rows": lambda: Examples(X, Y[:-1]),
    "x has 11 and 12 rows, y has 12 rows": lambda: Examples({"a": X, "b": X[1:]}, Y),
    "test_x has 12 rows, test_y has 2 rows": lambda: Examples(X, Y, X, Y[:2]),
    "x has 0 rows, y has 0 rows: pass at least one": lambda: Examples(X[:0], Y[:0]),
    "test_x has 0 rows": lambda: Examples(X, Y, X[:0], Y[:0]),
    "x has 0 rows: pass at least one": lambda: Examples(Empty()),
    "x came without y: pass one label per row": lambda: Examples(X),
    "test_x came without test_y": lambda: Examples(X, Y, X),
    "test_y came without test_x": lambda: Examples(X, Y, None, Y),
    "x is a DataLoader, which chooses": lambda: Examples(DataLoader(Items())),
    "test_x is a DataLoader": lambda: Examples(X, Y, DataLoader(Items()), Y),
    "y is a DataLoader": lambda: Examples(X, DataLoader(Items())),
    "x is a Stream without index or length": lambda: Examples(Stream()),
    "x is a NoLength without index or length": lambda: Examples(NoLength()),
    "x is a Dataset, whose items are": lambda: Examples(Items(), Y),
    "y is a Items: pass a tensor or an array": lambda: Examples(X, Items()),
    "x is a masked array": lambda: Examples(np.ma.masked_array(X.numpy(), X.numpy() > 0), Y),
    "x holds a datetime: pass tensors": lambda: Examples([datetime.now()], Y[:1]),
    "y holds a datetime: pass tensors": lambda: Examples(X[:1], [datetime.now()]),
    "is a path: read it first": lambda: Examples("file.npy", Y),
    "x holds an array of <U1: pass numbers": lambda: Examples(np.array(["a"]*N), Y),
    "x holds a single number": lambda: Examples(torch.tensor(3.), Y),
    "x is uint8, test_x is float32": lambda: Examples(X.to(torch.uint8), Y, X, Y),
    "std=0.0: pass a positive number": lambda: Examples(X, Y, std=0.),
    "mean='dark': pass a number": lambda: Examples(X, Y, mean="dark"),
    "classes=10: pass the names": lambda: Examples(X, Y, classes=10),
    "normalize=255 is no function": lambda: Examples(X, Y, normalize=255),
    "n_val=0.2 is no whole number": lambda: Examples(X, Y).split(.2),
    "replace takes no x=tensor(": lambda: Examples(X, Y).replace(x=X),
    "groups='all' are no ids": lambda: Examples(X, Y, groups="all"),
    "there is no test part": lambda: Examples(X, Y).test_rows(),
    "int is no data set": lambda: as_examples(3),
    "Tensor is no data set": lambda: as_examples(X),
    "x is a DataLoader": lambda: as_examples(DataLoader(Items())),
    "it must be a pair": lambda: bad_items(X[0]),
    "don't stack to a batch": lambda: bad_items((object(), 1)),
    "first dimensions are []": lambda: count({}),
    "[(3,)] are no views": lambda: Views(torch.zeros(3)),
    "[(3, 0, 2)] are no views": lambda: Views(torch.zeros(3, 0, 2)),
    "[(3, 2), (3, 4)] are no views": lambda: Views((torch.zeros(3, 2), torch.zeros(3, 4))),
    "[] are no views": lambda: Views({}),
    "an item of the Dataset holds a str": lambda: bad_items((X[0], "cat")),
}


def bad_items(item):
    class Bad(Items):
        def __getitem__(self, i):
            return item
    return Examples(Bad()).rows(torch.tensor([0]))


@pytest.mark.parametrize("words", REFUSED)
def test_refused_in_the_callers_words(words):
    with pytest.raises(ValueError) as error:
        REFUSED[words]()
    assert words in str(error.value)


# the object

def test_examples_do_not_change_and_print_briefly():
    d = load("digits", device="cpu")
    for name in ("name", "train_x", "anything"):
        with pytest.raises(AttributeError, match=f"use data.replace\\({name}="):
            setattr(d, name, "other")
    assert len(repr(d)) < 200 and "(1437, 1, 8, 8) uint8" in repr(d)
    assert d.replace(name="other").name == "other" and d.name == "digits"
    with pytest.raises(ValueError, match="replace takes no nmae='other': it takes normalize"):
        d.replace(nmae="other")


def test_to_moves_tensors_and_leaves_files_where_they_are():
    d = load("digits")
    m = d.to("meta")
    moved = (m.train_x, m.train_y, m.test_x, m.test_y)
    assert {t.device.type for t in moved} == {"meta"} == {m.device.type}
    assert d.train_x.device.type == "cpu"
    mixed = Examples((X.numpy(), X), Y).to("meta")
    assert isinstance(mixed.train_x[0], np.ndarray) and mixed.train_x[1].is_meta
    items = Items()
    assert Examples(items).to("meta").train_x is items


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_live_where_the_data_are():
    d = Examples(X, Y).to("cuda")
    assert d.rows(torch.tensor([1]))[0].is_cuda and d.device.type == "cuda"
    assert same(tree_map(torch.Tensor.cpu, Examples(X.numpy(), Y).rows(torch.tensor([1]).cuda())),
                (X[1:2], Y[1:2]))


# the embedded digits

def test_digits_are_real_and_split_the_same_way_for_everybody():
    d = load("digits")
    parts = (d.train_x, d.train_y, d.test_x, d.test_y)
    assert d.train_x.shape == (1437, 1, 8, 8) and d.test_x.shape == (360, 1, 8, 8)
    assert [t.dtype for t in parts] == [torch.uint8, torch.int64]*2
    x = torch.cat([d.train_x, d.test_x]).double()/255
    assert abs(x.mean() - d.mean[0]) < 6e-5 and abs(x.std() - d.std[0]) < 1e-3
    assert d.train_x.max() == 255 and d.train_x.min() == 0 and len(d.train_x.unique()) == 17
    assert d.test_y.bincount().tolist() == [36]*10
    fingerprint = hashlib.md5(b"".join(t.numpy().tobytes() for t in parts)).hexdigest()
    assert fingerprint == "f6efd92ff8527d484f53542a9c7e1437"


# load: real sets

REAL = {"mnist": (60_000, 1, 28, 28), "fashion": (60_000, 1, 28, 28),
        "cifar10": (50_000, 3, 32, 32)}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow]*(name != "mnist")) for name in REAL])
def test_real_sets(real, name):
    d, shape = real(name), REAL[name]
    assert d.name == name and d.train_x.shape == shape and d.test_x.shape == (10_000, *shape[1:])
    assert d.train_x.is_contiguous() and len(d.classes) == 10
    assert d.train_y.unique().tolist() == list(range(10))
    values = np.arange(256)/255
    for c, mean, std in zip(range(shape[1]), d.mean, d.std):
        # the public constants are the training set's, to the digits given
        channel = d.train_x[:, c].numpy().ravel()
        share = np.bincount(channel, minlength=256)/len(channel)
        assert abs(share @ values - mean) < 6e-5
        assert abs((share @ (values - share @ values)**2)**.5 - std) < 6e-5


@pytest.mark.parametrize("name, kind", [("cifar10", "CIFAR10"), ("fashion", "FashionMNIST")])
def test_images_are_torchvisions(real, name, kind):
    d, tv = real(name), getattr(datasets, kind)(data_root(), train=False)
    image, label = tv[7]
    mine = d.test_x[7].permute(1, 2, 0).squeeze(2)
    assert np.array_equal(np.asarray(image), mine.numpy()) and label == d.test_y[7]


# load: bad input


FOLDERS = [("mnist", "MNIST/raw"), ("fashion", "FashionMNIST/raw"),
           ("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")]


@pytest.mark.parametrize("name, folder", FOLDERS)
def test_missing_folder_names_folder_files_and_command(tmp_path, name, folder):
    with pytest.raises(FileNotFoundError) as e:
        load(name, root=tmp_path)
    text = str(e.value)
    assert str(tmp_path/folder) in text
    assert f"load('{name}', root='{tmp_path}', download=True)" in text
    assert all(f in text for f in data._SOURCES[name].files)


def md5(content):
    return hashlib.md5(content).hexdigest()


def idx_file(magic, array):
    "An array in MNIST's format."
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, 8, magic]) + sizes + array.tobytes()


def tiny_mnist(folder, rng, monkeypatch):
    images = rng.integers(0, 256, (3, 28, 28), np.uint8)
    contents = [idx_file(3, images), idx_file(1, np.array([1, 2, 3], np.uint8))]*2
    folder.mkdir(parents=True)
    for name, content in zip(data._IDX, contents):
        (folder/name).write_bytes(content)
    files = {name: md5(content) for name, content in zip(data._IDX, contents)}
    monkeypatch.setitem(data._SOURCES, "mnist", replace(data._SOURCES["mnist"], files=files))


def tiny_cifar(folder, rng, monkeypatch):
    files = {name: pickle.dumps({"data": rng.integers(0, 256, (2, 3072), np.uint8),
                                 "fine_labels": [5, 99]}) for name in ("train", "test")}
    files["meta"] = pickle.dumps({"fine_label_names": [f"c{i}" for i in range(100)]})
    folder.mkdir()
    for name, content in files.items():
        (folder/name).write_bytes(content)
    meta = {"filename": "meta", "key": "fine_label_names", "md5": md5(files["meta"])}
    monkeypatch.setattr(datasets.CIFAR100, "train_list", [["train", md5(files["train"])]])
    monkeypatch.setattr(datasets.CIFAR100, "test_list", [["test", md5(files["test"])]])
    monkeypatch.setattr(datasets.CIFAR100, "meta", meta)
    sums = {name: md5(content) for name, content in files.items()}
    source = replace(data._SOURCES["cifar100"], files=sums)
    monkeypatch.setitem(data._SOURCES, "cifar100", source)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    "MNIST and CIFAR-100 in torchvision's layout, three and two images large, with their checksums."
    rng = np.random.default_rng(0)
    tiny_mnist(tmp_path/"MNIST/raw", rng, monkeypatch)
    tiny_cifar(tmp_path/"cifar-100-python", rng, monkeypatch)
    return tmp_path


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_checksums_of_cifar_are_torchvisions(name):
    source = data._SOURCES[name]
    theirs = source.dataset()
    meta = theirs.meta["filename"], theirs.meta["md5"]
    listed = dict([*theirs.train_list, *theirs.test_list, meta])
    assert source.files == listed


def test_tiny_copies_load(tiny):
    d = load("cifar100", root=tiny)
    assert d.train_x.shape == (2, 3, 32, 32) and d.train_y.tolist() == [5, 99]
    assert len(d.classes) == 100
    assert load("mnist", root=tiny).train_y.tolist() == [1, 2, 3]


DAMAGE = {
    "truncated": lambda content: content[:-7],
    "one bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "empty": lambda content: b"",
}
VICTIMS = [("mnist", "MNIST/raw/t10k-images-idx3-ubyte"), ("cifar100", "cifar-100-python/meta")]


def damage(path, how):
    path.write_bytes(DAMAGE[how](path.read_bytes()))


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name, file", VICTIMS)
def test_damaged_file_gives_one_error_with_file_expectation_and_command(tiny, name, file, how):
    damage(tiny/file, how)
    with pytest.raises(DataError) as e:
        load(name, root=tiny)
    text = str(e.value)
    assert isinstance(e.value, OSError) and "\n" not in text
    assert str(tiny/file) in text and "expected" in text and "download=True" in text
    assert data._SOURCES[name].files[Path(file).name] in text
    with pytest.raises(DataError):
        best_available(name, root=tiny)  # broken is not the same as absent


def test_damaged_files_beside_a_missing_one_are_not_taken_for_an_absent_set(tiny):
    (name, file), *_ = [victim for victim in VICTIMS if victim[0] == "mnist"]
    damage(tiny/file, next(iter(DAMAGE)))
    others = [tiny/f"MNIST/raw/{other}" for other in data._SOURCES["mnist"].files]
    next(path for path in others if path != tiny/file).unlink()
    with pytest.raises(DataError, match="is missing"):
        best_available("mnist", root=tiny)


def test_download_replaces_a_damaged_file(tiny, monkeypatch):
    "torchvision alone would take the truncated file for a good one."
    victim = tiny/"MNIST/raw/train-images-idx3-ubyte"
    good = victim.read_bytes()

    def download(self):
        assert not victim.exists()  # torchvision keeps what it finds
        victim.write_bytes(good)
    monkeypatch.setattr(datasets.MNIST, "download", download)
    damage(victim, "truncated")
    assert load("mnist", root=tiny, download=True).train_y.tolist() == [1, 2, 3]

    def wrong_host(self):
        raise RuntimeError("File not found or corrupted.")
    monkeypatch.setattr(datasets.MNIST, "download", wrong_host)
    damage(victim, "truncated")
    with pytest.raises(DataError, match="download into"):
        load("mnist", root=tiny, download=True)


def test_nothing_is_fetched_unless_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_download", None)
    for name in data._SOURCES:
        with pytest.raises(FileNotFoundError):
            load(name, root=tmp_path)
    fallback = best_available("cifar10", "fashion", root=tmp_path)
    assert fallback.name == "digits (no local copy of cifar10)"
    assert best_available("digits", root=tmp_path).name == "digits"
    assert best_available(root=tmp_path).name == "digits"


def test_fallback_order(tiny):
    assert best_available("cifar10", "mnist", root=tiny).name == "mnist (no local copy of cifar10)"
    assert best_available("mnist", root=tiny).name == "mnist"
