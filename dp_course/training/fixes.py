"""Layers that a private run refuses, and what may stand in their place."""
import copy

import torch
from torch import nn

from ..basics import check_kind
from .checks import is_frozen_norm

class FrozenNorm(nn.Module):
    "A batch normalization that learns nothing any more: a fixed scale and shift per channel."
    def __init__(
        self,
        norm,  # `nn.BatchNorm1d`, 2d or 3d, with running statistics
    ):
        super().__init__()
        scale = (norm.running_var + norm.eps).rsqrt()
        if norm.affine:
            scale = scale*norm.weight.detach()
        shift = -norm.running_mean*scale
        if norm.affine:
            shift = shift + norm.bias.detach()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x):  # (b,c,...)
        shape = 1, -1, *[1]*(x.dim() - 2)
        return x*self.scale.view(shape) + self.shift.view(shape)


def _like(layer, made):
    "Put a replacement where the layer's numbers are, in their precision."
    for t in (*layer.parameters(), *layer.buffers()):
        if t.is_floating_point():
            return made.to(t)
    return made


def _group_norm(norm):
    "As many groups of at least two channels as 32 allow."
    c = norm.num_features
    groups = max(g for g in range(1, min(32, max(1, c//2)) + 1) if c % g == 0)
    return nn.GroupNorm(groups, c, norm.eps)


def _has_no_twin(layer):
    "Is this a recurrent layer of a kind that Opacus does not have?"
    return getattr(layer, "proj_size", 0) > 0 or getattr(layer, "nonlinearity", "tanh") != "tanh"


def _private_recurrent(layer, recurrent):
    "The layer of Opacus with the same weights, which keeps examples apart."
    kind = getattr(recurrent, f"DP{type(layer).__name__}")
    names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout",
             "bidirectional")
    made = kind(**{name: getattr(layer, name) for name in names})
    made.load_state_dict(layer.state_dict())
    return made


def _fixed(layer, recurrent):
    "What may stand in a layer's place, and the reason; or None."
    if is_frozen_norm(layer):
        return FrozenNorm(layer), "frozen: a fixed scale and shift"
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and hasattr(layer, "num_features"):
        return _group_norm(layer), "computes with the whole batch"
    if type(layer) in (nn.LSTM, nn.GRU, nn.RNN):
        if recurrent is None or _has_no_twin(layer):
            return None
        return _private_recurrent(layer, recurrent), "keeps no example's gradient apart"
    twin = copy.copy(layer)
    if getattr(layer, "track_running_stats", False):
        twin = type(layer)(layer.num_features, layer.eps, affine=layer.affine)
        if layer.affine:
            twin.load_state_dict({"weight": layer.weight, "bias": layer.bias})
        return twin, "keeps running statistics"
    if isinstance(layer, nn.Embedding) and (layer.max_norm or layer.scale_grad_by_freq):
        twin.max_norm, twin.scale_grad_by_freq = None, False
        return twin, "shrinks or weighs rows by the batch"
    return None


def fix(
    model,           # `nn.Module`: its layers are replaced in place
    recurrent=None,  # a module with DPLSTM, DPGRU and DPRNN: `opacus.layers`
):                   # list of sentences: what was replaced by what, and why
    "Replace the layers that a private run refuses by such that keep examples apart."
    # ValueError: the model itself is such a layer
    check_kind("is no network: pass an nn.Module", nn.Module, model=model)
    done, found = [], {}  # id of a layer, which may stand in several places -> what replaces it
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        if id(layer) not in found:
            found[id(layer)] = _fixed(layer, recurrent)
        made = found[id(layer)]
        if made is None:
            if type(layer) in (nn.LSTM, nn.GRU, nn.RNN):
                way = "" if _has_no_twin(layer) else "pass recurrent=opacus.layers, or "
                done.append(f"{path}: {type(layer).__name__} stays ({way}train with "
                            "batch_first=True and engine=loop_grad_sum)")
            continue
        if not path:
            raise ValueError(f"the model is a {type(layer).__name__}: put it into an nn.Sequential"
                             ", in which it can be replaced")
        parent, _, name = path.rpartition(".")
        fresh, why = made
        fresh = _like(layer, fresh).train(layer.training)
        setattr(model.get_submodule(parent), name, fresh)
        done.append(f"{path}: {type(layer).__name__} -> {type(fresh).__name__} ({why})")
    return done

