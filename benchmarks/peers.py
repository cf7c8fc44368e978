"""Audit a peer library as it is installed: Opacus 1.6.

    python benchmarks/peers.py [--out FILE]

A row of the record: the question, what was read, and what it means. Nothing of the library is
patched. fastDP is not on the package index, so it was not run.
"""
import argparse
import json
import time
import warnings
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from opacus import GradSampleModule, PrivacyEngine
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_course.audit import (
    dirac_canaries,
    fresh,
    noise_audit,
    replay_sensitivity,
    sampler_audit,
    torch_step,
)
from dp_course.basics import machine
from dp_course.gradients import FlatClip, loop_grad_sum
from dp_course.training import code_version

RUNS = Path(__file__).resolve().parent.parent/"runs"
BATCH, SIGMA, C = 24, 1.6138, 1.
CLAIM = dict(sigma=SIGMA, q=1/25, steps=625)
warnings.filterwarnings("ignore")


def net(inputs=8, outputs=3):
    torch.manual_seed(0)
    layers = nn.Linear(inputs, 12, bias=False), nn.Tanh(), nn.Linear(12, outputs)
    return nn.Sequential(*layers)


def begin(make=net, loss_fn=nn.functional.cross_entropy, optimizer=DPOptimizer, **settings):
    "A fresh model under an optimizer of Opacus, and one step."
    model = GradSampleModule(make())
    inner = torch.optim.SGD(model.parameters(), lr=.1)
    outer = optimizer(inner, noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=BATCH,
                      **settings)

    def train(x, y):
        outer.zero_grad()
        loss_fn(model(x), y).backward()
        outer.step()
    return model, outer, train


def examples():
    return torch.randn(BATCH, 8, generator=fresh(0)), torch.arange(BATCH) % 3


def flat_replay():
    found = replay_sensitivity(torch_step(begin), examples(), bound=C/BATCH)
    return {"question": "DPOptimizer: how far does one example move the noisy gradient?",
            "says": str(found), "ratio": found.numbers["ratio"],
            "means": "the bound is kept, and the sum is divided by the expected batch"}


def linear(outputs, y):
    return -(y*outputs[:, 0]).mean()


def one_layer():
    model = nn.Linear(20, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def flat_noise():
    step = torch_step(lambda: begin(one_layer, linear))
    nobody = torch.zeros(4, 20), torch.zeros(4)
    found = noise_audit(step, nobody, dirac_canaries(20), bound=C/BATCH, **CLAIM)
    return {"question": "DPOptimizer: how much noise covers one example?", "says": str(found),
            "sigma at most": found.numbers["sigma at most"], "means": "as claimed"}


ADAPTIVE = dict(target_unclipped_quantile=.5, clipbound_learning_rate=.2, max_clipbound=1e3,
                min_clipbound=1e-3)


def adaptive_step(bits_std, make, loss_fn):
    "What AdaClip releases: the noisy sum, the noisy count, and the next threshold."
    def step(x, y, generator):
        made = []

        def start():
            made.append(begin(make, loss_fn, AdaClipDPOptimizer, unclipped_num_std=bits_std,
                              **ADAPTIVE))
            return made[0]
        gradient = torch_step(start)(x, y, generator)["gradient"]
        optimizer = made[0][1]
        summed = {name: BATCH*g for name, g in gradient.items()}
        return {"gradient": {**summed, "count": torch.as_tensor(optimizer.unclipped_num)},
                "log_C": torch.as_tensor(optimizer.max_grad_norm).log()}
    return step


def adaptive_noise(bits_std=1.):
    "A canary that is just not clipped moves the sum by C and the count by 1, not by 1/2."
    nobody = torch.full((4, 20), 0.), torch.full((4,), 0.)
    canaries = .999*torch.eye(20)[:1], torch.full((1,), 5.)  # one in five, times the batch of 5
    canaries = canaries[0]/canaries[1], canaries[1]
    found = noise_audit(adaptive_step(bits_std, one_layer, linear), nobody, canaries, bound=C,
                        observations=10_000, **CLAIM)
    honest = (SIGMA**-2 - (2*bits_std)**-2)  # of the gradient, by Theorem 1 for centred bits
    true = (honest + bits_std**-2)**-.5
    return {"question": f"AdaClip, count noise {bits_std}: sigma of gradient and count together?",
            "sigma at most": found.numbers["sigma at most"], "sigma claimed": SIGMA,
            "sigma by theory for bits that are not centred": true,
            "eps at least": found.numbers["eps at least"],
            "eps claimed": found.numbers["eps claimed"],
            "guessed right": found.numbers["guessed right"],
            "means": "the noise is split as Andrew et al. do for bits of 1/2, the bits are 0 and 1"}


def adaptive_theory(batch_size=4096, sigma=2.8809):
    bits_std = batch_size/20
    true = (sigma**-2 - (2*bits_std)**-2 + bits_std**-2)**-.5
    return {"question": f"AdaClip at batch {batch_size}, by theory: sigma of both together?",
            "sigma claimed": sigma, "share that is lost": 1 - true/sigma,
            "means": "with large batches the slip costs next to nothing"}


def adaptive_threshold(b):
    "Poisson sampling makes b random; where it came out small, C moves far."
    step = adaptive_step(BATCH/20, net, nn.functional.cross_entropy)
    x, y = examples()
    found = replay_sensitivity(step, (x[:b], y[:b]), bound=C)
    allowed = ADAPTIVE["clipbound_learning_rate"]/BATCH
    return {"question": f"AdaClip, {b} drawn of {BATCH} expected: how far can one example move "
                        "log C, the noise being the same?",
            "moves": found.numbers["move of log_C"], "with the expected batch": allowed,
            "means": "the noisy count is divided by the realised batch, which is private"}


def rate(n=10, batch_size=4, epochs=3000):
    "What a loader draws that was asked for batches of 4 out of 10."
    data = TensorDataset(torch.randn(n, 8, generator=fresh(0)), torch.arange(n) % 3)
    loader = DataLoader(data, batch_size=batch_size)
    model = net()
    _, optimizer, private = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=.1), data_loader=loader,
        noise_multiplier=SIGMA, max_grad_norm=C, batch_first=True)
    batches = [idx for _ in range(epochs//3) for idx in private.batch_sampler]
    asked = sampler_audit(batches, n=n, q=batch_size/n)
    own = sampler_audit(batches, n=n, q=1/len(private))
    return {"question": "make_private, 10 examples, batches of 4: what is drawn, what divides?",
            "mean batch": asked.numbers["mean size"], "divided by": optimizer.expected_batch_size,
            "q used": 1/len(private), "against q = 4/10": asked.verdict,
            "against its own q": own.verdict,
            "means": "q is 1/ceil(N/B), and the division rounds q*N down: the step is a tenth "
                     "longer than it says; the accountant knows q, so eps is right"}


class TimeFirst(nn.Module):
    "Rows come as (b,T,f); inside, time comes first, as in nn.LSTM's default."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.inner(x.transpose(0, 1))  # (T,b,6)
        return self.head(hidden.mean(0))


def time_first(b):
    "Sum of clipped gradients by Opacus, against one example at a time; T = 8."
    x, y = torch.randn(b, 8, 4, generator=fresh(1)), torch.arange(b) % 3
    wrapped = GradSampleModule(TimeFirst(), loss_reduction="sum")
    optimizer = DPOptimizer(torch.optim.SGD(wrapped.parameters(), lr=.1), noise_multiplier=0.,
                            max_grad_norm=.1, expected_batch_size=1, loss_reduction="sum")

    def summed(x):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
        optimizer.pre_step()
        return torch.cat([p.grad.flatten() for p in wrapped.parameters()])

    def losses(output, y):
        return nn.functional.cross_entropy(output, y, reduction="none")
    said = {"question": f"A time-first layer, T = 8, b = {b}: is each example clipped?"}
    try:
        before = summed(x)
    except (RuntimeError, ValueError) as error:
        return said | {"says": str(error).splitlines()[0][:100], "means": "refused, by accident"}
    right, _ = loop_grad_sum(TimeFirst(), losses, x, y, FlatClip(.1))
    gap = (before - torch.cat([g.flatten() for g in right.values()])).norm().item()
    moves = []
    for scale in (.1, 1., 10., 100., 1000., -1., -10., -100., -1000.):
        other = x.clone()
        other[0] = scale
        moves.append(summed(other))
    furthest = max((a - b).norm().item() for a in moves for b in moves)/.2  # replaced: 2 C
    return said | {"off by / C": gap/.1, "replacing one moves it, in units of 2 C": furthest,
                   "means": "no error: time steps are clipped as if they were examples"}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    day = time.strftime("%Y-%m-%d", time.gmtime())
    parser.add_argument("--out", type=Path, default=RUNS/f"{day}-audit-peers.json")
    out = parser.parse_args(argv).out
    torch.set_num_threads(1)
    rows = [flat_replay(), flat_noise(), adaptive_noise(), adaptive_noise(BATCH/20),
            adaptive_theory(), adaptive_threshold(BATCH), adaptive_threshold(4), rate(),
            time_first(8), time_first(5)]
    for row in rows:
        print(json.dumps(row, indent=1))
    about = {"date": date.today().isoformat(),
             "opacus": version("opacus"), "torch": torch.__version__,
             "fastDP": "not run: not on the package index", "code": code_version(),
             "machine": machine(("torch", "opacus"))}
    out.write_text(json.dumps({**about, "rows": rows}, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
