"Small plans, data and networks that several test modules share."
import math
import resource
import socket
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dp_course.cli import Job, train
from dp_course.data import Examples, Views, load
from dp_course.privacy import RDPAccountant
from dp_course.training import Trainer, read_record

loss = partial(F.cross_entropy, reduction="none")
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def quiet(config, **asked):
    "Run a training without a word: what `run` returns."
    return train(Job(config, **asked), say=lambda text: None, show=False)


def first_digits(n=60, tested=20):
    "The first of scikit-learn's digits."
    d = load("digits")
    return d.replace(train_x=d.train_x[:n], train_y=d.train_y[:n],
                     test_x=d.test_x[:tested], test_y=d.test_y[:tested])


def digits_between(low, high):
    "The digits from `low` to below `high`, as a data set of their own."
    d = load("digits")
    parts = {}
    for part in ("train", "test"):
        x, y = getattr(d, f"{part}_x"), getattr(d, f"{part}_y")
        some = (y >= low) & (y < high)
        parts |= {f"{part}_x": x[some], f"{part}_y": y[some] - low}
    return d.replace(**parts, name=f"digits {low}-{high - 1}",
                     classes=tuple(map(str, range(low, high))))


@dataclass
class Plan:
    "A plan that says what it is: no promise at all (eps is infinite), so that noise can be off."
    n:int
    batch_size:float
    steps:int
    sigma:float = 0.
    eps:float = math.inf
    delta:float = 1e-5
    accountant:type = RDPAccountant

    @property
    def q(self):
        return self.batch_size/self.n


def toy(n=12, classes=3, shape=(5,), dtype=torch.float64, seed=0):
    "Noise with random labels; the test part is the training part."
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=g, dtype=dtype)
    y = torch.randint(classes, (n,), generator=g)
    return Examples(x, y, x, y)


def linear(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(5, 3).to(dtype)


def digit_net(seed=0):
    "Softmax regression on the digits."
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def jitter(x, y, g):
    return x + .1*torch.randn(x.shape, generator=g, dtype=x.dtype), y


def two_views(x, y, g):
    return Views(torch.stack([x, jitter(x, y, g)[0]], 1)), y


class Picture(nn.Module):
    "A layer or a function between two convolutions."
    def __init__(self, between):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.between, self.out = between, nn.Linear(4, 10)

    def forward(self, x):
        return self.out(self.two(self.between(self.one(x))).relu().mean((2, 3)))


def conv():
    "A frozen bias and a frozen weight are in it."
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
                        nn.Conv2d(4, 4, 3, stride=2, bias=False), nn.Flatten(), nn.Linear(16, 3))
    net[0].bias.requires_grad_(False)
    net[3].weight.requires_grad_(False)
    return net


def trainer(plan=None, n=12, model=None, engine=None, **options):
    "A trainer of a linear model; an `engine` takes its place after the checks."
    made = Trainer(model or linear(), toy(n), plan or Plan(n, 4, 8, 1.), **options)
    if engine:
        behind(made, engine=engine)
    return made


def behind(trainer, **parts):
    "Put other parts into a trainer than those that it has checked, which it refuses by itself."
    vars(trainer).update(parts)


def same(a, b):
    "Do two networks have the same bits?"
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(u, v) for u, v in pairs)


def released(path):
    "The weights in a file that may leave."
    return torch.load(path, weights_only=True)["weights"]


def equal(a, b):
    "Do two dicts of tensors have the same bits?"
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def finished_in(folder):
    "The finished records in a folder; every file there must be readable."
    return [path for path in sorted(folder.glob("*.jsonl"))
            if (read_record(path) or [{}])[-1].get("finished")]


class Bomb:
    "Goes off where somebody unpickles it."
    went_off = False

    def __reduce__(self):
        return setattr, (Bomb, "went_off", True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def look_into(path, rows, width):
    "Work on a file of so many rows in a process that may allocate 256 MB more; prints what it saw."
    x = np.memmap(path, dtype=np.uint8, mode="r", shape=(rows, width))
    y = np.zeros(rows, dtype=np.int64)
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    in_use = int(status["VmData"].split()[0])*1024
    resource.setrlimit(resource.RLIMIT_DATA, (in_use + 2**28,)*2)
    try:
        np.array(x[:rows//64])
    except MemoryError:
        print("one gigabyte is too much")
    d = Examples(x, y, x, y)
    read = d.rows(torch.tensor([5, rows - 1]))[0]
    made = d.made_up(3, torch.Generator())[0]
    held = d.split(1000).rows(torch.arange(2))[0]
    tested = next(d.test_rows(30))[0]
    print(read[:, -1].tolist(), *(tuple(v.shape) for v in (made, held, tested)))
