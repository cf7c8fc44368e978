"Real files and broken ones, and the distribution of the Poisson sampler."
import gzip
import hashlib
import http.server
import math
import pickle
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision import datasets

from dp_course import data
from dp_course.core import data_root
from dp_course.data import DataError, Examples, best_available, load
from dp_course.sampling import poisson_indices


def gen(seed=0): return torch.Generator().manual_seed(seed)


# ---- poisson_indices

def test_indices_are_a_sorted_int64_set():
    idx = poisson_indices(10_000, .3, gen())
    assert idx.dtype == torch.int64 and idx.ndim == 1 and idx.device.type == "cpu"
    assert (idx[1:] > idx[:-1]).all() and idx[0] >= 0 and idx[-1] < 10_000
    assert torch.equal(idx, poisson_indices(10_000, .3, gen())) and not torch.equal(idx, poisson_indices(10_000, .3, gen(1)))


@pytest.mark.parametrize("n, q, size", [(50, 1, 50), (50, 1., 50), (50, 0, 0), (0, .5, 0), (1, 1, 1), (10**6, 1e-300, 0)])
def test_extreme_rates(n, q, size):
    idx = poisson_indices(n, q, gen())
    assert idx.dtype == torch.int64 and len(idx) == size
    if size: assert torch.equal(idx, torch.arange(size))


@pytest.mark.parametrize("q", [-1e-9, 1.0000001, math.nan, math.inf, 64])
def test_rate_that_is_no_probability(q):
    with pytest.raises(ValueError, match="batch_size/n"): poisson_indices(10, q, gen())


@pytest.mark.parametrize("n", [-1, 2.5])
def test_n_that_is_no_count(n):
    with pytest.raises(ValueError, match="number of examples"): poisson_indices(n, .5, gen())


def sampler_alarms(sample, n, q, draws, alpha=1e-6):
    """Names of the properties of independent coins that `sample()` lacks, over `draws` batches.
    Each of the four tests rejects a correct sampler with probability at most alpha."""
    x = torch.zeros(draws, n, dtype=torch.float64)
    for row in x: row[sample()] = 1
    sizes, counts = x.sum(1).numpy(), x.sum(0).numpy()
    two_sided = lambda p: 2*min(p, .5)
    p = {"rate": stats.binomtest(int(sizes.sum()), draws*n, q).pvalue}
    # one example too often or too seldom: the extreme counts, with a union bound over n
    p["example"] = 2*n*min(stats.binom.sf(counts.max() - 1, draws, q), stats.binom.cdf(counts.min(), draws, q))
    # size: (draws-1) s^2/var is close to chi-squared for n q (1-q) >> 1
    t = ((sizes - sizes.mean())**2).sum()/(n*q*(1-q))
    p["size variance"] = two_sided(min(stats.chi2.cdf(t, draws - 1), stats.chi2.sf(t, draws - 1)))
    # memory: how often an example is in two batches in a row; pairs are positively or negatively correlated if there is memory
    twice = int((x[:-1:2]*x[1::2]).sum())
    p["memory"] = stats.binomtest(twice, n*len(x[1::2]), q*q).pvalue
    return {k for k, v in p.items() if v < alpha}


def shuffled(n, batch_size, generator):
    while True: yield from torch.randperm(n, generator=generator)[:n//batch_size*batch_size].view(-1, batch_size)


@pytest.mark.parametrize("q", [.02, .2, .7])
def test_every_example_is_an_independent_coin(q):
    # false-alarm rate at most 4e-6 per q, and the seed is fixed
    assert sampler_alarms(partial(poisson_indices, 500, q, gen(3)), 500, q, 4000) == set()


def test_the_coin_test_notices_wrong_samplers():
    n, q = 500, .1
    alarms = lambda sample: sampler_alarms(sample, n, q, 4000)
    g, batches = gen(4), shuffled(n, 50, gen(5))
    assert alarms(lambda: next(batches)) == {"size variance", "memory"}
    assert alarms(lambda: torch.randperm(n, generator=g)[:50]) == {"size variance"}
    assert "rate" in alarms(lambda: poisson_indices(n, .105, g))
    assert alarms(lambda: poisson_indices(n - 1, q, g)) == {"example"}
    skewed = torch.full((n,), q); skewed[:2] = torch.tensor([.2, .0])
    assert alarms(lambda: (torch.rand(n, generator=g) < skewed).nonzero().flatten()) == {"example"}


def test_tiny_rates_are_not_rounded_up():
    # 8e7 coins with q = 1e-12: P[more than one hit] = 3.2e-9. Coins in float32 (multiples of 2^-24) would hit 4.8 times on average.
    g = gen(6)
    assert sum(len(poisson_indices(4_000_000, 1e-12, g)) for _ in range(20)) <= 1


def test_empty_batch_probability():
    # 3,000 draws of a set that is empty with probability .9^20 = .1216; false-alarm rate 1e-6
    empty = sum(len(poisson_indices(20, .1, g)) == 0 for g in [gen(7)] for _ in range(3000))
    assert stats.binomtest(empty, 3000, .9**20).pvalue > 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_indices_live_where_the_generator_is():
    assert poisson_indices(1000, .5, torch.Generator("cuda").manual_seed(0)).is_cuda


# ---- Images and the embedded digits

def test_digits_are_real_and_split_the_same_way_for_everybody():
    d = load("digits")
    assert d.train_x.shape == (1437, 1, 8, 8) and d.test_x.shape == (360, 1, 8, 8)
    assert d.train_x.dtype == torch.uint8 and d.train_y.dtype == torch.int64 and d.test_y.dtype == torch.int64
    x = torch.cat([d.train_x, d.test_x]).double()/255
    assert abs(x.mean() - d.mean[0]) < 6e-5 and abs(x.std() - d.std[0]) < 1e-3
    assert d.train_x.max() == 255 and d.train_x.min() == 0 and len(d.train_x.unique()) == 17
    assert d.test_y.bincount().tolist() == [36]*10
    fingerprint = hashlib.md5(d.train_x.numpy().tobytes() + d.train_y.numpy().tobytes()
                              + d.test_x.numpy().tobytes() + d.test_y.numpy().tobytes()).hexdigest()
    assert fingerprint == "f6efd92ff8527d484f53542a9c7e1437"


def test_normalize():
    d = load("digits")
    z = d.normalize(d.train_x)
    assert z.dtype == torch.float32 and abs(z.mean()) < .02 and abs(z.std() - 1) < .02
    assert d.normalize(z) is z and d.normalize(z.double()).dtype == torch.float64
    rgb = Examples(*[torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2).long()]*2, name="x", classes=("a",), mean=(.1, .2, .3), std=(1., 2., .5))
    want = torch.tensor([-.1, -.1, -.6]).view(3, 1, 1).expand(2, 5, 3, 4, 4)
    torch.testing.assert_close(rgb.normalize(torch.zeros(2, 5, 3, 4, 4, dtype=torch.uint8)), want)  # with views
    assert rgb.normalize(torch.zeros(0, 3, 4, 4, dtype=torch.uint8)).shape == (0, 3, 4, 4)


def test_images_is_frozen_moves_and_prints_briefly():
    d = load("digits", device="cpu")
    with pytest.raises(AttributeError): d.name = "other"
    m = d.to("meta")
    assert {t.device.type for t in (m.train_x, m.train_y, m.test_x, m.test_y)} == {"meta"} and d.train_x.device.type == "cpu"
    assert len(repr(d)) < 200 and "(1437, 1, 8, 8) uint8" in repr(d)


def test_split_holds_out_training_examples_only():
    d = load("digits")
    s = d.split(237, seed=1)
    assert len(s.train_x) == len(s.train_y) == 1200 and len(s.test_x) == len(s.test_y) == 237 and "validation" in s.name
    key = lambda x, y: sorted((a.numpy().tobytes(), int(b)) for a, b in zip(x, y))
    assert key(torch.cat([s.train_x, s.test_x]), torch.cat([s.train_y, s.test_y])) == key(d.train_x, d.train_y)
    assert torch.equal(s.test_x, d.split(237, seed=1).test_x) and not torch.equal(s.test_x, d.split(237, seed=2).test_x)
    assert s.mean == d.mean and s.classes == d.classes
    for n_val in (0, 1437, -3):
        with pytest.raises(ValueError, match="n_val"): d.split(n_val)


# ---- load: real sets

REAL = {"mnist": ((60_000, 1, 28, 28), 10_000), "fashion": ((60_000, 1, 28, 28), 10_000), "cifar10": ((50_000, 3, 32, 32), 10_000)}


@pytest.mark.parametrize("name", REAL)
def test_real_sets(real, name):
    d, (shape, m) = real(name), REAL[name]
    assert d.name == name and d.train_x.shape == shape and d.test_x.shape == (m, *shape[1:])
    assert {d.train_x.dtype, d.test_x.dtype} == {torch.uint8} and {d.train_y.dtype, d.test_y.dtype} == {torch.int64}
    assert d.train_x.is_contiguous() and len(d.classes) == 10 and d.train_y.unique().tolist() == list(range(10))
    for c, mean, std in zip(range(shape[1]), d.mean, d.std):  # the public constants are the training set's, to the digits given
        h = np.bincount(d.train_x[:, c].numpy().ravel(), minlength=256)/d.train_x[:, c].numel()
        v = np.arange(256)/255
        assert abs(h @ v - mean) < 6e-5 and abs((h @ (v - h @ v)**2)**.5 - std) < 6e-5


def test_cifar10_is_torchvisions(real):
    d, tv = real("cifar10"), datasets.CIFAR10(data_root(), train=False)
    image, label = tv[7]
    assert np.array_equal(np.asarray(image), d.test_x[7].permute(1, 2, 0).numpy()) and label == d.test_y[7]
    assert d.classes == tuple(tv.classes)


def test_mnist_is_torchvisions(real):
    d, tv = real("fashion"), datasets.FashionMNIST(data_root(), train=True)
    image, label = tv[59_999]
    assert np.array_equal(np.asarray(image), d.train_x[59_999, 0].numpy()) and label == d.train_y[59_999]


# ---- load: bad input

def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="digits, mnist, fashion, cifar10, cifar100"): load("imagenet")


@pytest.mark.parametrize("name, folder", [("mnist", "MNIST/raw"), ("Fashion-MNIST", "FashionMNIST/raw"), ("cifar10", "cifar-10-batches-py"),
                                          ("cifar100", "cifar-100-python")])
def test_missing_folder_names_folder_files_and_command(tmp_path, name, folder):
    with pytest.raises(FileNotFoundError) as e: load(name, root=tmp_path)
    text, key = str(e.value), name.lower().replace("-mnist", "")
    assert str(tmp_path/folder) in text and f"load('{key}', root='{tmp_path}', download=True)" in text
    assert all(f in text for f in data._SOURCES[key].files)


def test_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("DP_COURSE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="MNIST/raw") as e: load("mnist")
    assert str(tmp_path) in str(e.value) and "DP_COURSE_DATA" in str(e.value)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    "MNIST and CIFAR-100 in torchvision's layout, three and two images large, whose checksums the loader expects."
    from dataclasses import replace
    rng = np.random.default_rng(0)
    def idx(magic, a): return bytes([0, 0, 8, magic]) + b"".join(n.to_bytes(4, "big") for n in a.shape) + a.tobytes()
    blobs = [idx(3, rng.integers(0, 256, (3, 28, 28), np.uint8)), idx(1, np.array([1, 2, 3], np.uint8))]*2
    raw = tmp_path/"MNIST/raw"; raw.mkdir(parents=True)
    for n, b in zip(data._IDX, blobs): (raw/n).write_bytes(b)
    batch = lambda: pickle.dumps({"data": rng.integers(0, 256, (2, 3072), np.uint8), "fine_labels": [5, 99]})
    files = {"train": batch(), "test": batch(), "meta": pickle.dumps({"fine_label_names": [f"c{i}" for i in range(100)]})}
    cifar = tmp_path/"cifar-100-python"; cifar.mkdir()
    for n, b in files.items(): (cifar/n).write_bytes(b)
    md5 = lambda b: hashlib.md5(b).hexdigest()
    monkeypatch.setattr(datasets.CIFAR100, "train_list", [["train", md5(files["train"])]])
    monkeypatch.setattr(datasets.CIFAR100, "test_list", [["test", md5(files["test"])]])
    monkeypatch.setattr(datasets.CIFAR100, "meta", {"filename": "meta", "key": "fine_label_names", "md5": md5(files["meta"])})
    monkeypatch.setitem(data._SOURCES, "cifar100", replace(data._SOURCES["cifar100"], files=data._cifar_files(datasets.CIFAR100)))
    monkeypatch.setitem(data._SOURCES, "mnist", replace(data._SOURCES["mnist"], files={n: (len(b), md5(b)) for n, b in zip(data._IDX, blobs)}))
    return tmp_path


def test_tiny_copies_load(tiny):
    d = load("cifar100", root=tiny)
    assert d.train_x.shape == (2, 3, 32, 32) and d.train_y.tolist() == [5, 99] and len(d.classes) == 100
    assert load("mnist", root=tiny).train_y.tolist() == [1, 2, 3]


def damage(path, how):
    b = path.read_bytes()
    if how == "truncated": path.write_bytes(b[:-7])
    elif how == "longer": path.write_bytes(b + b"\0")
    elif how == "one bit": path.write_bytes(b[:-1] + bytes([b[-1] ^ 1]))
    elif how == "magic": path.write_bytes(b"\1" + b[1:])
    elif how == "empty": path.write_bytes(b"")


@pytest.mark.parametrize("how", ["truncated", "longer", "one bit", "magic", "empty"])
@pytest.mark.parametrize("name, file", [("mnist", "MNIST/raw/t10k-images-idx3-ubyte"), ("mnist", "MNIST/raw/train-labels-idx1-ubyte"),
                                        ("cifar100", "cifar-100-python/test"), ("cifar100", "cifar-100-python/meta")])
def test_damaged_file_gives_one_error_with_file_expectation_and_command(tiny, name, file, how):
    damage(tiny/file, how)
    with pytest.raises(DataError) as e: load(name, root=tiny)
    text = str(e.value)
    assert isinstance(e.value, OSError) and "\n" not in text and str(tiny/file) in text and "expected" in text and "download=True" in text
    size, md5 = data._SOURCES[name].files[Path(file).name]
    assert md5 in text or f"expected {size:,}" in text
    with pytest.raises(DataError): best_available(name, root=tiny)   # broken is not the same as absent


def test_missing_file_is_named(tiny):
    (tiny/"MNIST/raw/train-images-idx3-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte is missing") as e: load("mnist", root=tiny)
    assert "t10k" not in str(e.value)


def test_legacy_torchvision_cache_is_not_read(tiny):
    folder = tiny/"MNIST/processed"; folder.mkdir()
    for f in ("training.pt", "test.pt"): torch.save((torch.zeros(9, 28, 28, dtype=torch.uint8), torch.zeros(9).long()), folder/f)
    assert len(load("mnist", root=tiny).train_x) == 3   # torchvision's own class would return the nine zeros, unchecked


@pytest.fixture
def host(tmp_path):
    "A folder, and the address at which this machine alone can fetch its files."
    folder = tmp_path/"host"; folder.mkdir()
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_download_replaces_a_damaged_file(tiny, host, monkeypatch, capfd):
    "torchvision alone would take the truncated file for a good one."
    folder, url = host
    for v in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"): monkeypatch.delenv(v, raising=False)
    for n in data._IDX: (folder/f"{n}.gz").write_bytes(gzip.compress((tiny/"MNIST/raw"/n).read_bytes()))
    monkeypatch.setattr(datasets.MNIST, "mirrors", [url])
    monkeypatch.setattr(datasets.MNIST, "resources",
                        [(f"{n}.gz", hashlib.md5((folder/f"{n}.gz").read_bytes()).hexdigest()) for n in data._IDX])
    damage(tiny/"MNIST/raw/train-images-idx3-ubyte", "truncated")
    assert load("mnist", root=tiny, download=True).train_y.tolist() == [1, 2, 3]
    assert "100%" in capfd.readouterr().err                              # progress
    (folder/"t10k-labels-idx1-ubyte.gz").write_bytes(b"something else")  # the host serves a wrong file
    for suffix in ("", ".gz"): (tiny/f"MNIST/raw/t10k-labels-idx1-ubyte{suffix}").unlink()
    with pytest.raises(DataError, match="download into"): load("mnist", root=tiny, download=True)


def test_nothing_is_fetched_unless_asked(tmp_path, monkeypatch):
    import urllib.request
    def refuse(*a, **k): raise AssertionError("network touched")
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    for name in data._SOURCES:
        with pytest.raises(FileNotFoundError): load(name, root=tmp_path)
    assert best_available("cifar10", "fashion", root=tmp_path).name == "digits (no local copy of cifar10)"
    assert best_available("digits", root=tmp_path).name == "digits" == best_available(root=tmp_path).name


def test_fallback_order(tiny):
    assert best_available("cifar10", "mnist", root=tiny).name == "mnist (no local copy of cifar10)"
    assert best_available("mnist", root=tiny).name == "mnist"
