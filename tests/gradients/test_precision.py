"Half precision, and what floats do to the bound: no example adds more than C."
import copy
from functools import partial

import pytest
import torch
from oracle import batch, every, head, one_at_a_time
from torch import nn
from toys import loss

from dp_course.data import count, take, tree_map
from dp_course.gradients import (
    FlatClip,
    bf16_engine,
    bf16_product_ratio,
    fast_grad_sum,
    gains_from_bfloat16,
    has_bfloat16,
    precision,
    settled_precision,
)
from dp_course.models import WSConv2d, papernot_cnn, resnet20, wide_resnet


def length(sums):
    return sum(g.double().square().sum() for g in sums.values()).sqrt().item()


HALF = {
    # A kink of .2: where bfloat16 takes another side of zero than float64, little changes. With
    # PReLU's own slope of .25 one draw in a hundred differs by more than the test allows.
    "table": (nn.Sequential(nn.Linear(8, 16), nn.PReLU(init=.8), nn.LayerNorm(16),
                            nn.Linear(16, 3)), (8,)),
    "image": (nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.PReLU(), nn.Flatten(),
                            nn.Linear(576, 3)), (3, 8, 8)),
    "wide": (nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(),
                           nn.Linear(1024, 3)), (64, 4, 4)),
    "standardized": (nn.Sequential(WSConv2d(64, 64, 3, padding=1, bias=False), nn.ReLU(),
                                   nn.Flatten(), nn.Linear(1024, 3)), (64, 4, 4)),
    "thin, standardized": (nn.Sequential(WSConv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Flatten(),
                                         nn.Linear(1024, 3)), (3, 4, 4)),
    "sequence": (head(nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True)),
                 (5, 8)),
}


@pytest.mark.quick(20)
@every
@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("k", [None, 2])
def test_models_in_bfloat16(engine, name, k):
    "Parameters of 8 bits, norms of float32, sums of float64; a clipped example uses its bound."
    layers, shape = HALF[name]
    model = copy.deepcopy(layers).bfloat16()
    x, y = batch(shape, k=k)
    x = tree_map(lambda v: v.bfloat16(), x)
    sums, norms = engine(model, loss, x, y, FlatClip(.3))
    assert norms.dtype == torch.float32 and {g.dtype for g in sums.values()} == {torch.float64}
    exact = copy.deepcopy(model).double()
    _, want = one_at_a_time(exact, loss, tree_map(torch.Tensor.double, x), y, FlatClip(.3))
    assert (norms - want).abs().max() < .05*want.max()
    for i in range(4):
        one = [take(v, slice(i, i + 1)) for v in (x, y)]
        assert .999e-2 < length(engine(model, loss, *one, FlatClip(1e-2))[0]) <= 1e-2*(1 + 1e-3)


@every
def test_bf16_engine(engine):
    model, (x, y) = HALF["image"][0], batch(HALF["image"][1])
    half, norms = bf16_engine(engine)(model, loss, x.float(), y, FlatClip(1e-2))
    _, true = engine(model, loss, x.float(), y, FlatClip(1e-2))
    assert norms.dtype == torch.float32 and {g.dtype for g in half.values()} == {torch.float64}
    assert torch.allclose(norms, true, .05, .02) and length(half) <= 4e-2*(1 + 1e-3)


@pytest.mark.parametrize("found, fast", [
    ({"avx512_bf16": True}, True), ({"amx_bf16": True, "avx512_bf16": False}, True),
    ({"avx512_f": True, "amx_int8": True}, False), ({}, False)])
def test_bfloat16_is_found_by_the_processor_s_own_word(monkeypatch, found, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    monkeypatch.setattr(precision, "bf16_product_ratio", lambda: .4)
    assert has_bfloat16("cpu") is has_bfloat16(torch.device("cpu")) is fast
    word = "bf16" if fast else "float32"
    assert settled_precision("auto") == word and settled_precision("bf16") == "bf16"


@pytest.mark.parametrize("has, ratio, gains", [
    (True, .4, True), (True, 1.9, False), (False, .4, False), (False, 1.9, False)])
def test_auto_takes_bfloat16_only_where_it_is_the_faster_one(monkeypatch, has, ratio, gains):
    "A Xeon without AMX has bfloat16 and multiplies it at half the speed of float32."
    monkeypatch.setattr(precision, "has_bfloat16", lambda device: has)
    monkeypatch.setattr(precision, "bf16_product_ratio", lambda: ratio)
    assert gains_from_bfloat16("cpu") is gains_from_bfloat16(torch.device("cpu")) is gains
    assert settled_precision("auto") == ("bf16" if gains else "float32")
    assert settled_precision("bf16") == "bf16"  # who asks for it gets it, slow or not
    assert gains_from_bfloat16("cuda") is has   # a GPU is not timed


def test_the_trial_that_auto_goes_by_is_the_median_of_its_rounds(monkeypatch):
    "One slow round, the first of each kind or a neighbour's burst, decides nothing."
    seconds = {torch.float32: iter([9, *[2.]*9]), torch.bfloat16: iter([9, 50, *[1.]*7, 50])}
    monkeypatch.setattr(precision, "_product_seconds", lambda a: next(seconds[a.dtype]))
    assert bf16_product_ratio.__wrapped__() == .5
    assert not [left for rest in seconds.values() for left in rest]


def test_an_older_torch_is_asked_for_avx512_only(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert has_bfloat16("cpu") is True


@every
@pytest.mark.parametrize("bias", [1e2, 1e4, 1e6])
def test_a_large_bias_hides_no_gradient(engine, bias):
    "A standardized convolution's output says <G,w^> only without its bias, which would drown it."
    worst = 0
    for seed in range(10):
        torch.manual_seed(seed)
        m, base, v = WSConv2d(64, 64, 3, padding=1), torch.randn(1, 64, 3, 3), torch.randn(64)
        m.weight.data = base + 1e-3*torch.randn(64, 64, 3, 3)
        m.bias.data.fill_(bias)
        m.bias.requires_grad_(False)
        x = 1e-3*torch.randn(1, 64, 4, 4)
        x[0, :, :3, :3] += base[0]
        sums, _ = engine(m, lambda out, y: out[:, :, 1, 1] @ v, x, torch.zeros(1), FlatClip(1e-3))
        worst = max(worst, length(sums)/1e-3)
    assert .5 < worst <= 1 + 1e-3


# --- what floats do to the bound: examples made so that float32, or less, loses their gradient


def per_number(out, y):
    "A loss whose gradient by the output is the label."
    return (out*y).flatten(1).sum(1)


def cancelling_views(t, i, o, scale=1., seed=0):
    "Positions that are nearly multiples of one another, with gradients that cancel: hard rows."
    g = torch.Generator().manual_seed(seed)
    size = torch.rand(8, t, 1, generator=g) + .5
    x = scale*size*torch.rand(8, 1, i, generator=g)
    x = x*(1 + torch.tensor([0, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, .1])[:, None, None]
           * torch.randn(8, t, i, generator=g))
    v = torch.randn(8, t, o, generator=g)
    return x, v - (size*v).sum(1, keepdim=True)/size.square().sum(1, keepdim=True)*size


def most_moved(engine, model, loss, x, y, bound=1e-2):
    "By how much a row moves the released sum of all the others, in units of the bound."
    clip = FlatClip(bound)
    everybody, _ = engine(model, loss, x, y, clip)
    moves = []
    for i in range(count(x)):
        rest = [j for j in range(count(x)) if j != i]
        without, _ = engine(model, loss, take(x, rest), take(y, rest), clip)
        moves.append(length({n: everybody[n].double() - without[n].double() for n in without}))
    return max(moves)/bound


SLACK = 1 + 1e-3


@pytest.mark.quick(6)
@every
@pytest.mark.parametrize("t, i, o", [(2, 100_000, 8), (3, 3000, 80), (30, 64, 64)])
def test_cancelling_positions_of_a_linear_layer(engine, t, i, o):
    worst, least = 0, 9
    for seed in range(1 if i > 50_000 else 3):
        x, v = cancelling_views(t, i, o, seed=seed)
        model = nn.Linear(i, o, bias=False)
        worst = max(worst, most_moved(engine, model, per_number, x, v))
        least = min(least, length(engine(model, per_number, x[4:5], v[4:5], FlatClip(1e-3))[0]))
    assert worst <= SLACK
    assert least >= .99e-3  # nor is it clipped for what rounding might have hidden


def along_its_filters(conv, extent):
    "Images and gradients for which a standardized filter's gradient nearly points along it."
    i, k = conv.in_channels, conv.kernel_size[0]
    filters = conv.standardized().detach()
    x = 1e-3*torch.randn(8, i, extent, extent)
    for row, e in enumerate((0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, .1, 1.)):
        x[row, :, :k, :k] += filters[row % len(filters)] + e*torch.randn(i, k, k)
        x[row] *= 10.**(row - 3)
    return x


@pytest.mark.quick(16)
@every
@pytest.mark.parametrize("mean", [0., 3e3])
@pytest.mark.parametrize("shape", [(64, 64, 4), (16, 16, 8)])  # inner products; kept
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bf16"])
def test_gradients_along_a_standardized_filter(engine, mean, shape, half):
    i, o, extent = shape
    conv = WSConv2d(i, o, 3, bias=False)
    conv.weight.data += mean
    x = along_its_filters(conv, extent)

    def corner(out, y):
        return out[:, :, 0, 0].float() @ torch.ones(o) + 1e-3*out[:, :, 1, 1].float() @ y[0]

    if half:
        engine = bf16_engine(engine)
    assert most_moved(engine, conv, corner, x, torch.randn(8, o), 1e-3) <= SLACK


def adversarial_images(shape, seed=1):
    "Images like others, tiny, huge, and constant but for little: ten decades side by side."
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, *shape, generator=g)
    x[1] *= 1e4
    x[2] = 100 + 1e-2*x[2]
    x[3] = 50 + 1e-4*x[3]
    x[4] *= 1e-4
    x[5] = x[6] + 1e-3*x[5]
    return x, torch.randint(3, (8,), generator=g)


BOUNDED = {
    "resnet20": (partial(resnet20, 3), (3, 8, 8)),
    "wide": (partial(wide_resnet, 10, 4, 3), (3, 8, 8)),
    "papernot": (partial(papernot_cnn, 16, classes=3, image_size=14), (1, 14, 14)),
    "dense": (lambda: nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 3)), (20,)),
    "words": (lambda: head(nn.TransformerEncoderLayer(8, 2, 16, dropout=0., batch_first=True)),
              (5, 8)),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_an_example_moves_the_bfloat16_sum_by_no_more_than_the_bound(name):
    "Neighbours count, too: their gradients must come out the same without the row."
    make, shape = BOUNDED[name]
    x, y = adversarial_images(shape)
    for bound in (1e-3, 3.):
        assert most_moved(bf16_engine(fast_grad_sum), make(), loss, x, y, bound) <= SLACK
