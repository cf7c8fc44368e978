"What a GPU would do, simulated on the CPU; what it does, where there is one; its stages, in small."
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from toys import loss, quiet

from dp_course.cli import PRESETS, Job, make_config, setup, train
from dp_course.data import Examples, Views
from dp_course.features import TRAININGS
from dp_course.features.pretraining import Pretraining, drawn_run, leaf_stock, public_run
from dp_course.gradients import FlatClip, fast_grad_sum, layers, loop_grad_sum
from dp_course.models import WSConv2d, resnet20
from dp_course.training import load_checked, read_record

GPU = pytest.mark.gpu
TOY_DRAWN = Pretraining(views=64, batch_size=8, images=16, size=8, precision="bf16")
TOY_PUBLIC = replace(TRAININGS["min-rand-10"], epochs=2., batch_size=16, precision="bf16")


def images(n=4, device="cpu"):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(256, (n, 3, 8, 8), generator=g, dtype=torch.uint8)
    return Examples(x, torch.arange(n) % 10, x[:2], torch.arange(2)).to(device)


@pytest.fixture
def like_cuda(monkeypatch):
    "Autocast of the CPU, in which normalizations take their input as they do under CUDA's."
    enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": enabled("cpu"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    yield
    monkeypatch.undo()


@pytest.mark.parametrize("dtype, wide", [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
    (torch.float32, torch.float32), (torch.float64, torch.float64)])
def test_a_normalization_on_cuda_widens_what_is_narrow_and_nothing_else(like_cuda, dtype, wide):
    x = torch.ones(2, 3, dtype=dtype)
    assert layers._float32_on_cuda(x).dtype == dtype, "no autocast, no cast"
    with torch.autocast("cpu", torch.bfloat16):
        assert layers._float32_on_cuda(x).dtype == wide


class WideAndNarrow(nn.Module):
    "Filters over few positions and over many, standardized and plain."
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            WSConv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3),
            WSConv2d(16, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 104, 3, stride=2),
            nn.Flatten(), nn.Linear(104, 3))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("k", [1, 3])
def test_what_a_gpu_is_given_to_do_is_what_the_loop_does(like_cuda, monkeypatch, k):
    "Filters with few positions take patches there, and all raw gradients come from two products."
    called = []
    for name in ("_gradients_by_patches", "_gradients_by_folding", "_make_all_raw"):
        whole = getattr(layers, name)
        monkeypatch.setattr(
            layers, name, lambda *args, f=whole, name=name: called.append(name) or f(*args))
    torch.manual_seed(0)
    model = WideAndNarrow().double()
    x, y = Views(torch.randn(5, k, 8, 8, 8, dtype=torch.float64)), torch.arange(5) % 3
    exact, lengths = loop_grad_sum(model, loss, x, y, FlatClip(.1))
    fast, norms = fast_grad_sum(model, loss, x, y, FlatClip(.1))
    torch.testing.assert_close(norms, lengths, rtol=1e-12, atol=0)
    for name in exact:
        torch.testing.assert_close(fast[name], exact[name], rtol=1e-10, atol=1e-12)
    assert set(called) == {"_gradients_by_patches", "_gradients_by_folding", "_make_all_raw"}


def normalized(k, b, **options):
    "A group normalization of b examples in k views; gradients of input, scale and shift."
    g = torch.Generator().manual_seed(0)
    x = torch.randn(k*b, 32, 3, 3, generator=g, dtype=torch.float64).to(**options)
    norm = nn.GroupNorm(16, 32).double().to(**options)
    tape = SimpleNamespace(b=b, views=k, found=[])
    tape.add = lambda p, gradients: tape.found.append(gradients.flat)
    x.requires_grad_()
    y = layers.FoldedGroupNorm.apply(torch.ones(1).to(x), x[:, None], tape, 16, norm.weight,
                                     norm.bias, norm.eps)
    return torch.autograd.grad(y.pow(3).sum(), x)[0], *tape.found


@pytest.mark.parametrize("k", [1, 3])
def test_more_groups_than_cudas_kernel_takes_go_back_in_pieces(monkeypatch, k):
    whole = normalized(k, 5)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(layers, "_GRID", 2*16)
    calls, kernel = [], layers._group_norm_back
    monkeypatch.setattr(layers, "_group_norm_back", lambda *args: calls.append(1) or kernel(*args))
    for a, b in zip(whole, normalized(k, 5), strict=True):
        assert a.equal(b)
    assert len(calls) == 3, "two examples, two, and one"


def test_the_record_of_a_gpu_says_what_computes_its_products():
    found = setup._tensor_cores(torch.device("cuda"))["tf32"]
    assert found == {"convolutions": torch.backends.cudnn.allow_tf32,
                     "products": torch.backends.cuda.matmul.allow_tf32}
    assert setup._tensor_cores(torch.device("cpu")) == {}


# --- where there is a GPU


@GPU
def test_the_fast_engine_agrees_with_the_loop_in_float64():
    torch.manual_seed(0)
    model, data = resnet20().double().cuda(), images(device="cuda")
    x, y = data.normalize(data.train_x).double(), data.train_y
    exact, _ = loop_grad_sum(model, loss, x, y, FlatClip(1.))
    fast, _ = fast_grad_sum(model, loss, x, y, FlatClip(1.))
    largest = max(g.abs().max() for g in exact.values())
    assert max((fast[name] - exact[name]).abs().max() for name in exact) < 1e-9*largest


@GPU
def test_a_batch_of_4100_goes_back_through_a_normalization():
    for there, here in zip(normalized(1, 4100, device="cuda"), normalized(1, 4100), strict=True):
        assert (there.cpu() - here).abs().max() < 1e-9


@GPU
def test_a_run_on_a_gpu_is_cut_short_and_goes_on(tmp_path):
    config = make_config("resnet20-cpu-eps3-fast")
    short = quiet(config, out=tmp_path, seed=0, steps=1, device="cuda")
    assert not short["finished"]
    job = Job(config, out=tmp_path, device="cuda", resume=True)
    rest = train(job, say=lambda text: None, show=False)
    lines = read_record(rest["paths"]["record"])
    assert rest["finished"] and rest["computed"] == rest["step"]
    assert lines[0]["device"] == "cuda" and "tf32" in lines[0]


@GPU
@pytest.mark.parametrize("name", PRESETS)
def test_every_miniature_takes_a_step_on_a_gpu(name, tmp_path):
    config = make_config(f"{name}-fast", n_val=0)
    assert quiet(config, out=tmp_path, seed=0, steps=1, device="cuda")["step"] == 1


@GPU
@pytest.mark.parametrize("drawn", [True, False])
def test_a_pretraining_on_a_gpu_goes_on_on_a_cpu(drawn, tmp_path):
    made = TOY_DRAWN if drawn else TOY_PUBLIC
    data = leaf_stock(TOY_DRAWN, tmp_path) if drawn else images(64)
    prepare = drawn_run if drawn else public_run
    run = prepare(made, data, tmp_path, "cuda")
    assert not run.work(1e-3, say=lambda text: None)["finished"]
    assert read_record(run.file(".jsonl"))[0]["device"] == "cuda"
    rest = prepare(made, data, tmp_path).pick_up().work(say=lambda text: None)
    assert rest["finished"] and math.isfinite(rest["loss"])
    load_checked(run.file(".pt"), "dp_course encoder 1")
