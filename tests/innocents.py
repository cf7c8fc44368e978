"Parts of a `Trainer` of ordinary practice, which must train, and whose sums are those of a loop."
import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from leaks import N, noise, numbers, of_losses, of_rows, pictures, sequence, words
from torch import nn
from torch.nn.utils import parametrize
from toys import Picture, loss, two_views
from toys import generator as gen

from dp_course.data import Examples
from dp_course.gradients import loop_grad_sum


class Inside(nn.Module):
    "A layer or a function between two layers."
    def __init__(self, f, d=5):
        super().__init__()
        self.inner, self.out, self.f = nn.Linear(d, 8), nn.Linear(8, 10), f

    def forward(self, x):
        return self.out(self.f(self.inner(x).tanh()))


class Rows(nn.Module):
    "A function of rows, and a layer."
    def __init__(self, before, layer):
        super().__init__()
        self.before, self.layer = before, layer

    def forward(self, x):
        return self.layer(self.before(x))


class Routed(nn.Module):
    "Each token of an example takes the best two of four experts."
    def __init__(self):
        super().__init__()
        self.gate, self.out = nn.Linear(8, 4), nn.Linear(8, 10)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        score = self.gate(x)
        bound = score.topk(2, -1).values[..., -1:]
        weight = score.masked_fill(score < bound, -math.inf).softmax(-1)
        each = torch.stack([expert(x) for expert in self.experts], -1)
        return self.out((each*weight[..., None, :]).sum(-1).mean(1))


class KeepsWeights(nn.Module):
    "Keeps what it attended to, for a plot."
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 10)

    def forward(self, x):
        h, self.seen = self.inner(x, x, x)
        return self.out(h.mean(1))


class Shuffled(nn.Module):
    "Transposed convolution, pixels to channels and back, bilinear pixels between."
    def __init__(self):
        super().__init__()
        self.up, self.mid = nn.ConvTranspose2d(3, 4, 2, 2), nn.Conv2d(16, 8, 1)
        self.out = nn.Linear(2, 10)

    def forward(self, x):
        h = F.pixel_shuffle(self.mid(F.pixel_unshuffle(self.up(x), 2)), 2)
        h = F.interpolate(h, scale_factor=2, mode="bilinear")
        return self.out(h.mean((2, 3)))


class Pool(nn.Module):
    def forward(self, h):
        return h.mean(2)


class Named(nn.Module):
    "A mask beside the numbers."
    def __init__(self, f):
        super().__init__()
        self.out, self.f = nn.Linear(5, 10), f

    def forward(self, x, mask):
        return self.out(self.f(x, mask))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.out = nn.Embedding(11, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.word(x)).mT


def tagged():
    y = torch.randint(4, (N, 6), generator=gen(1))
    y[:, 4:][torch.rand(N, 2, generator=gen(2)) < .5] = -100
    return words().replace(train_y=y)


class Function(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def conv(**options):
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, **options), nn.GroupNorm(2, 6), nn.SiLU(),
                         nn.Flatten(2), Pool(), nn.Linear(6, 10))


def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet
    net = ResNet(BasicBlock, [1, 1, 1, 1], 10, norm_layer=partial(nn.GroupNorm, 4))
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    return net


def mobilenet():
    from torchvision.models.mobilenetv2 import MobileNetV2
    return MobileNetV2(10, .1, [[1, 8, 1, 1], [2, 8, 1, 2]], norm_layer=partial(nn.GroupNorm, 2),
                       dropout=0.)


def vit():
    from torchvision.models import VisionTransformer
    return VisionTransformer(6, 3, 1, 2, 8, 16, num_classes=10)


def swin():
    from torchvision.models.swin_transformer import SwinTransformerBlock
    return nn.Sequential(nn.Conv2d(3, 8, 1), Function(lambda h: h.permute(0, 2, 3, 1)),
                         SwinTransformerBlock(8, 2, [3, 3], [1, 1], stochastic_depth_prob=0.),
                         Function(lambda h: h.mean((1, 2))), nn.Linear(8, 10))


def bytes_of():
    return Examples(torch.randint(256, (N, 3, 2, 2), dtype=torch.uint8, generator=gen()),
                    torch.arange(N) % 10)


def each_tag(output, y):
    each = F.cross_entropy(output, y, reduction="none", ignore_index=-100)
    return each.sum(1)/(y != -100).sum(1).clamp(min=1)


def one_crop(x, y, g):
    "One draw for everybody looks at nobody."
    at = int(torch.randint(3, (), generator=g))
    return x.roll(at, -1), y


def flipped(x, y, g):
    turn = torch.rand(len(x), 1, 1, 1, generator=g, device=x.device) < .5
    return torch.where(turn, x.flip(3), x), y


def named():
    x = {"x": torch.randn(N, 5, generator=gen()), "mask": torch.rand(N, 5, generator=gen()) < .7}
    return Examples(x, torch.arange(N) % 10)


def draws_many_ways(x, y, g):
    "Numbers for each row: lying, flat, for the chosen rows only, from a generator of arrays."
    low, high = torch.rand(2, len(x), generator=g)
    each = torch.rand(2*len(x), generator=g).view(-1, 2)
    chosen = torch.rand(len(x), generator=g) < .5
    x = x*(low + each[:, 0])[:, None]
    x[chosen] += torch.randn(int(chosen.sum()), x.shape[1], generator=g)
    arrays = np.random.default_rng(int(torch.randint(2**31, (), generator=g)))
    return x*torch.from_numpy(high.numpy() + arrays.random(len(x))).to(x)[:, None], y


def three_ways(x, y, g):
    "Shares that have as many dimensions as some batches have rows."
    kind = torch.multinomial(torch.ones(len(x), 3), 1, generator=g)
    return x*kind + torch.bernoulli(torch.full_like(x, .5), generator=g), y


def freezing(model):
    model.inner.requires_grad_(False)
    return model


def several():
    return Examples(torch.randn(N, 5, generator=gen()),
                    (torch.rand(N, 4, generator=gen(1)) < .3).float())


INNOCENTS = {
    "log1p of counts": dict(data=lambda: Examples(
        torch.randint(99, (N, 5), generator=gen()).float(), torch.arange(N) % 10,
        normalize=torch.log1p)),
    "own mean": dict(model=of_rows(lambda x: x - x.mean(1, keepdim=True))),
    "own top two": dict(model=of_rows(
        lambda x: x*(x >= x.topk(2, 1).values[:, 1:]))),
    "own NaN": dict(model=of_rows(
        lambda x: torch.where(x.isnan(), x.nanmean(1, keepdim=True).nan_to_num(), x))),
    "one-hot": dict(model=lambda: Rows(lambda x: F.one_hot(x, 11).float().mean(1),
                                       nn.Linear(11, 10)), data=words),
    "wavelength": dict(model=lambda: Rows(lambda x: torch.fft.fft2(x).real, conv()),
                       data=pictures),
    "depthwise": dict(model=lambda: conv(groups=3), data=pictures),
    "transposed, shuffled": dict(model=Shuffled, data=pictures),
    "local response": dict(model=lambda: Picture(nn.LocalResponseNorm(2)), data=pictures),
    "dropout": dict(model=lambda: Inside(nn.Dropout(.5))),
    "routed tokens": dict(model=Routed, data=sequence),
    "resnet": dict(model=resnet, data=lambda: noise(3, 16, 16)),
    "mobilenet": dict(model=mobilenet, data=lambda: noise(3, 16, 16)),
    "vit": dict(model=vit, data=pictures), "swin": dict(model=swin, data=pictures),
    "masks": dict(model=lambda: Named(lambda x, mask: x*mask), data=named),
    "focal": dict(loss_fn=of_losses(
        lambda each, *_: each*(1 - (-each.detach()).exp())**2)),
    "several labels": dict(model=lambda: nn.Linear(5, 4), data=several,
                           loss_fn=nn.MultiLabelSoftMarginLoss(reduction="none")),
    "tags": dict(model=Tagger, data=tagged, loss_fn=each_tag),
    "one crop": dict(augment=one_crop), "flips": dict(
        augment=flipped, model=lambda: conv(), data=pictures),
    "draws": dict(augment=draws_many_ways), "three ways": dict(augment=three_ways),
    "views": dict(augment=two_views),
    "half inputs": dict(data=lambda: Examples(torch.randn(N, 5, generator=gen()).half(),
                                              torch.arange(N) % 10)),
    "bytes": dict(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), data=lambda: (
        bytes_of().replace(normalize=lambda x: x/127.5 - 1))),
    "micro-batches": dict(micro_batch=7, model=lambda: Inside(nn.GroupNorm(2, 8))),
    "bf16": dict(precision="bf16", model=lambda: Inside(nn.GroupNorm(2, 8))),
    "keeps weights": dict(model=KeepsWeights, data=sequence),
    "last layer": dict(model=lambda: freezing(Inside(torch.tanh))),
}

# --- what was refused wrongly once


class Reversed(torch.autograd.Function):
    "Turns the gradient, and returns its input as it is; in the form that only the loop runs."
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return -g


class LowRank(nn.Module):
    def __init__(self, o, i):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(o, 2)), nn.Parameter(torch.randn(2, i))

    def forward(self, weight):
        return weight + self.up @ self.down


def lora_by_parametrize():
    net = nn.Sequential(nn.Linear(5, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 10))
    parametrize.register_parametrization(net[0], "weight", LowRank(8, 5))
    return net


class StaysFrozen(nn.Module):
    "A normalization that an overridden `train()` keeps in eval mode."
    def __init__(self):
        super().__init__()
        self.one, self.out = nn.Conv2d(3, 4, 3), nn.Linear(4, 10)
        self.norm = KeptFrozen(4).requires_grad_(False)

    def forward(self, x):
        return self.out(self.norm(self.one(x)).relu().mean((2, 3)))


class KeptFrozen(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


@dataclass
class ModelOutput(OrderedDict):
    "Hugging Face's form: a dict whose items are attributes, too."
    loss:object = None
    logits:object = None

    def __post_init__(self):
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 10)

    def forward(self, x):
        return ModelOutput(logits=self.out(x))


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.size, self.out = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(3, 5)

    def forward(self, x):
        mean, size = self.mean(x), self.size(x)
        z = mean + torch.randn_like(mean)*(size/2).exp()
        return {"x": self.out(z), "kl": (mean.square() + size.exp() - 1 - size).sum(1)/2}


def elbo(output, y):
    return (output["x"] - y).square().sum(1) + output["kl"]


class DropPath(nn.Module):
    def forward(self, h):
        keep = torch.rand(len(h), *[1]*(h.dim() - 1), device=h.device) < .5
        return h + h.sin()*keep/.5


class Temperature(nn.Module):
    "A learnt number beside the logits, which the loss reads."
    def __init__(self):
        super().__init__()
        self.out, self.t = nn.Linear(5, 10), nn.Parameter(torch.tensor(.5))

    def forward(self, x):
        return self.out(x), self.t.exp()


def spoken():
    "Sounds of 8 frames, texts of 3 letters, one after the other."
    y = {"text": torch.randint(1, 5, (N, 3), generator=gen(1)), "size": torch.arange(N) % 3 + 1}
    return Examples(torch.randn(N, 8, 4, generator=gen()), y)


def packed_ctc(output, y):
    "torch's CTC takes the letters of the whole batch in one row."
    kept = torch.arange(3) < y["size"][:, None]
    logs = output.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logs, y["text"][kept], torch.full((len(output),), 8), y["size"],
                      reduction="none")


class Sam(torch.optim.SGD):
    "Counts its steps and keeps the weights before: attributes of its own."
    def __init__(self, params):
        super().__init__(params, lr=.1)
        self.steps, self.before = 0, None

    def step(self, closure=None):
        self.steps += 1
        self.before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        return super().step()


class Lookahead(torch.optim.Optimizer):
    "Wraps another optimizer and pulls its weights back every second step."
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.steps = inner, 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow):
                p.copy_(slow.lerp_(p, .5))


INNOCENTS |= {
    "reversed": dict(model=lambda: Inside(Reversed.apply), engine=loop_grad_sum),
    "LoRA by parametrize": dict(model=lora_by_parametrize),
    "stays frozen": dict(model=StaysFrozen, data=pictures),
    "a dict with attributes": dict(model=Labelled, loss_fn=lambda o, y: loss(o.logits, y)),
    "VAE": dict(model=Vae, data=lambda: numbers(5), loss_fn=elbo),
    "DropPath": dict(model=lambda: Inside(DropPath())),
    "temperature": dict(model=Temperature, loss_fn=lambda o, y: loss(o[0]/o[1], y)),
    "packed CTC": dict(model=lambda: nn.Linear(4, 5), data=spoken, loss_fn=packed_ctc,
                       engine=loop_grad_sum),
    "SAM": dict(optimizer=Sam),
    "Lookahead": dict(optimizer=lambda params: Lookahead(torch.optim.SGD(params, lr=.1))),
    "compiled": dict(model=lambda: torch.compile(Inside(torch.tanh), backend="eager")),
}
RANDOM = "dropout", "VAE", "DropPath"  # other numbers for other batches: nothing to compare
IN_FLOAT32 = "one-hot", "bf16"  # hold numbers of their own
