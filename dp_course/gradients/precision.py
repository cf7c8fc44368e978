import statistics
import time
from functools import cache

import torch

from ..data import count, leaves, tree_map

# %% ../../nbs/workshop/gradients/tape.ipynb #4626c6e5
def _filled_up(tree, gap):
    "Put `gap` rows of zeros below a batch."
    return tree_map(lambda v: torch.cat([v, v.new_zeros(gap, *v.shape[1:])]), tree)


def fixed_shape(
    engine,    # calls its clip once, with all norms, as `fast_grad_sum` does
    rows:int,  # examples in a full micro-batch
):             # an engine
    "Fill up a short micro-batch with examples that count nothing: the device sees one shape."
    def filled(model, loss_fn, x, y, clip):
        b = count(x)
        gap = rows - b
        if gap <= 0:
            return engine(model, loss_fn, x, y, clip)

        def real(norms):
            nobody = norms.new_zeros(len(norms), gap)
            return torch.cat([clip(norms[:, :b]), nobody], 1)

        x, y = _filled_up(x, gap), _filled_up(y, gap)
        sums, norms = engine(model, loss_fn, x, y, real)
        return sums, norms[:, :b]

    return filled

# %% ../../nbs/workshop/gradients/tape.ipynb #b0f07d29
def has_bfloat16(
    device,  # as for `torch.device`
):           # bool
    "Say whether a device multiplies bfloat16, which any other has to imitate at great expense."
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not hasattr(torch.cpu, "get_capabilities"):  # an older torch
        return torch.cpu._is_avx512_bf16_supported()
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def _product_seconds(a):
    began = time.perf_counter()
    a @ a
    return time.perf_counter() - began


@cache
def bf16_product_ratio():
    "Time a matrix product in bfloat16, in units of the same in float32; once in a process."
    wide = torch.ones(512, 512)
    half = wide.bfloat16()
    for a in (half, wide):  # the first product of a kind also sets things up
        _product_seconds(a)
    ratios = [_product_seconds(half)/_product_seconds(wide) for _ in range(9)]
    return statistics.median(ratios)


def gains_from_bfloat16(
    device,  # as for `torch.device`
):           # bool
    "Say whether bfloat16 is the faster one; some processors have it and need twice the time."
    if torch.device(device).type == "cuda":
        return has_bfloat16(device)
    return has_bfloat16(device) and bf16_product_ratio() < 1

# %% ../../nbs/workshop/gradients/tape.ipynb #f1a07b34
def bf16_engine(
    engine,  # as `fast_grad_sum`
):           # an engine
    "Run an engine's network in bfloat16; norms come out in float32, sums in float64."
    def cast(model, loss_fn, x, y, clip):
        device = leaves(x)[0].device.type
        with torch.autocast(device, torch.bfloat16):
            sums, norms = engine(model, loss_fn, x, y, clip)
        return sums, norms.float()

    cast.__name__ = getattr(engine, "__name__", type(engine).__name__) + " in bfloat16"
    return cast

# %% ../../nbs/workshop/gradients/tape.ipynb #5e771ed0
PRECISIONS = ("auto", "bf16", "float32")


def settled_precision(
    asked:str,     # one of `PRECISIONS`
    device="cpu",  # as for `torch.device`
):                 # bf16 or float32
    "Turn auto into bf16 where a device is faster at it, else into float32."
    # ValueError: another word
    if asked not in PRECISIONS:
        words = ", ".join(PRECISIONS)
        raise ValueError(f"precision={asked!r} is unknown: pass one of {words}")
    if asked != "auto":
        return asked
    return "bf16" if gains_from_bfloat16(device) else "float32"
