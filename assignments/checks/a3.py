"A3: DP-SGD from scratch, then faster than the loop."
import math
import statistics
import time

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, one_hot, softmax

from checks import SEED, points  # noqa: F401  (for the notebook)
from checks.a1 import judge_case
from dp_course.exercises import Trial, gap


def normals(trial, *shape):
    return torch.randn(*shape, generator=trial.generator, dtype=torch.float64)


# --- 1


def clipped(grads, max_norm):
    grads = torch.where(grads.isfinite().all(1, keepdim=True), grads, 0.)
    norms = grads.norm(dim=1, keepdim=True)
    return ((max_norm/norms.clamp(min=1e-30)).clamp(max=1)*grads).sum(0)


def _clip_the_sum(grads, max_norm):
    total = grads.sum(0)
    return total*min(1., max_norm/max(1e-30, total.norm().item()))


def check_clipped_sum(your_function, seed=None):
    "Every row bounded by itself."
    slips = {
        "clip every example, not their sum": _clip_the_sum,
        "short gradients stay as they are":
            lambda grads, c: (c*grads/grads.norm(dim=1, keepdim=True)).sum(0),
        "bound the length of the row, not each coordinate":
            lambda grads, c: grads.clamp(-c, c).sum(0),
        "a sum, not a mean": lambda grads, c: clipped(grads, c)/len(grads)}
    trial = Trial(your_function, "check_clipped_sum", seed, (
        "The factor of an example is 1 if it is short, and max_norm/norm if it is long.",
        "norms = grads.norm(dim=1, keepdim=True); factors = (max_norm/norms).clamp(max=1).",
        "Before that, put zeros where a row is not finite: `torch.where(grads.isfinite().all(1, "
        "keepdim=True), grads, 0.)`; and keep the norms from being 0."))
    with trial.holds("long ones and short ones"):
        scale = torch.rand(20, 1, generator=trial.generator)*3
        judge_case(trial, clipped, slips, normals(trial, 20, 6)*scale, 2.)
    with trial.holds("one example, float32"):
        trial.same(clipped, 5*normals(trial, 1, 9).float(), .5, rtol=1e-4)
    with trial.holds("a gradient of zero"):
        trial.same(clipped, torch.cat([torch.zeros(1, 4).double(), normals(trial, 2, 4)]), 1.)
    with trial.holds("nobody"):
        trial.same(clipped, torch.zeros(0, 5), 1.)
    with trial.holds("one NaN, one infinity, and the rest as usual"):
        grads = normals(trial, 5, 4)
        grads[1, 2], grads[3, 0] = math.nan, math.inf
        got = trial(grads, 1.)
        found = gap(got, clipped(grads, 1.))
        trial.need(not found, found, "one bad example must not spoil the sum: it counts nothing")
    return trial.card()


# --- 2


def check_noisy_mean(your_function, seed=None):
    "Noise of the right size, then the expected batch size."
    trial = Trial(your_function, "check_noisy_mean", seed, (
        "How far can one example move the clipped sum? The noise is sigma times that.",
        "std = sigma*max_norm, and everything, noise too, is divided by batch_size.",
        "`(total + sigma*max_norm*torch.randn(total.shape, generator=generator))/batch_size`"))

    def judged(total, max_norm, sigma, batch_size):
        got = trial(total, max_norm, sigma, batch_size, trial.fresh_generator())
        got = torch.as_tensor(got).double()
        trial.need(got.shape == total.shape, f"shape {tuple(got.shape)}",
                   "noise for every coordinate, in the shape of the sum")
        noise = got - total.double()/batch_size
        right = sigma*max_norm/batch_size
        ratio, room = noise.std().item()/right, 4.4/math.sqrt(2*len(total))
        why = ""
        if abs(ratio/batch_size - 1) < .1:
            why = "divide the noise by the batch size, too"
        elif abs(ratio - 1/max_norm) < .1/max_norm and max_norm != 1:
            why = "sigma is a multiplier: the noise is sigma times max_norm"
        elif abs(ratio*batch_size - 1) < .2:
            why = "the noise is divided by the batch size twice"
        trial.need(abs(ratio - 1) < room, f"the noise is {ratio:.4g} times what it should be", why)
        off = noise.mean().item()/right*math.sqrt(len(total))
        trial.need(abs(off) < 4.8, f"on average {off:.2g} standard errors from the mean",
                   "divide the sum by the expected batch size")
    with trial.holds("a clip of 3, noise of 2, batches of 50"):
        judged(normals(trial, 4000), 3., 2., 50.)
    with trial.holds("a clip of 0.1"):
        judged(normals(trial, 4000).float(), .1, 1., 20.)
    with trial.holds("an empty batch: the sum is 0, the noise is not"):
        judged(torch.zeros(4000), 2., 1., 30.)
    with trial.holds("no noise asked for: the plain mean"):
        total = normals(trial, 5)
        found = gap(trial(total, 1., 0., 4., trial.fresh_generator()), total/4)
        trial.need(not found, found, "divide the sum by the expected batch size")
    with trial.holds("all randomness comes from the generator"):
        one, two, other = (trial(torch.zeros(3), 1., 1., 1., torch.Generator().manual_seed(s))
                           for s in (7, 7, 8))
        trial.need(torch.equal(one, two) and not torch.equal(one, other), "seeds 7, 7, 8",
                   "pass generator=generator to torch.randn")
    return trial.card()


# --- 3 and 4


def flat(function):
    "A function whose pair of tensors comes as one vector: `same` compares numbers."
    def call(*args):
        got = function(*args)
        pair = isinstance(got, (tuple, list)) and len(got) == 2
        if pair and all(isinstance(part, torch.Tensor) for part in got):
            return torch.cat([part.detach().flatten() for part in got])
        return got
    return call if callable(function) else function


def sums(W, b, x, y, max_norm, joint=True, clip=True, bias=True):
    "The right clipped sums, or wrong ones."
    g = softmax(x@W.T + b, 1) - one_hot(y, len(b)).to(x.dtype)
    norms = g.norm(dim=1)*(x.square().sum(1) + bias).sqrt()

    def factor(norms):
        ones = torch.ones_like(norms)
        return (max_norm/norms.clamp(min=1e-30)).clamp(max=1) if clip else ones
    both = factor(norms)
    by_W = both if joint else factor(g.norm(dim=1)*x.norm(dim=1))
    by_b = both if joint else factor(g.norm(dim=1))
    return (by_W[:, None]*g).T@x, (by_b[:, None]*g).sum(0)


def _batch_clip(W, b, x, y, max_norm):
    parts = sums(W, b, x, y, max_norm, clip=False)
    norm = math.sqrt(sum(part.square().sum().item() for part in parts))
    return tuple(part*min(1., max_norm/max(norm, 1e-30)) for part in parts)


SLIPS = {text: flat(slip) for text, slip in {
    "one norm over W and b together, not one each":
        lambda *args: sums(*args, joint=False),
    "clip every example before adding up": _batch_clip,
    "nothing is clipped": lambda *args: sums(*args, clip=False),
    "the bias belongs to the gradient: its norm is ||g|| times sqrt(||x||^2 + 1)":
        lambda *args: sums(*args, bias=False),
    "a sum, not a mean": lambda W, b, x, y, c: tuple(
        part/len(x) for part in sums(W, b, x, y, c)),
}.items()}


def _cases(trial):
    "Properties that the loop and the fast sum share."
    def model(c, i):
        return .3*normals(trial, c, i), normals(trial, c)

    def data(n, c, i):
        y = torch.randint(c, (n,), generator=trial.generator)
        return normals(trial, n, i)*torch.rand(n, 1, generator=trial.generator), y
    with trial.holds("a batch of 12"):
        judge_case(trial, flat(sums), SLIPS, *model(4, 5), *data(12, 4, 5), .8)
    with trial.holds("inputs as short as the bias, where it matters most"):
        x, y = data(10, 3, 2)
        judge_case(trial, flat(sums), SLIPS, *model(3, 2), .3*x, y, .3)
    with trial.holds("a clip that nobody reaches"):
        trial.same(flat(sums), *model(3, 4), *data(6, 3, 4), 1e6)
    with trial.holds("nobody at all"):
        trial.same(flat(sums), *model(3, 4), torch.zeros(0, 4).double(),
                   torch.zeros(0, dtype=torch.long), 1.)


def check_loop_sum(your_function, seed=None):
    "The loop."
    trial = Trial(flat(your_function), "check_loop_sum", seed, (
        "For each example: loss, two gradients, one norm over both, one factor for both.",
        "norm = (g_W.square().sum() + g_b.square().sum()).sqrt()",
        "`total_W += factor*g_W; total_b += factor*g_b` with factor = (max_norm/norm)"
        ".clamp(max=1), starting from zeros."))
    _cases(trial)
    return trial.card()


def _loop(W, b, x, y, max_norm):
    "As slow as a loop with autograd is."
    W, b = W.requires_grad_(), b.requires_grad_()
    total = [torch.zeros_like(W), torch.zeros_like(b)]
    for row, label in zip(x, y):
        loss = cross_entropy(row[None]@W.T + b, label[None])
        grads = torch.autograd.grad(loss, (W, b))
        norm = math.sqrt(sum(g.square().sum().item() for g in grads))
        for part, g in zip(total, grads):
            part += min(1, max_norm/max(norm, 1e-30))*g
    return total


def speed_ratio(function, rounds=3):
    "How many times a function's time the loop takes: one thread, the least of three rounds."
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 64, generator=generator)
    y = torch.randint(10, (512,), generator=generator)
    threads, least = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        for f in [_loop, function]*rounds:
            args = torch.zeros(10, 64), torch.zeros(10), x.clone(), y.clone(), 1.
            began = time.perf_counter()  # the student's process has a clock of its own
            f(*args)
            seconds = time.perf_counter() - began
            least[f] = min(seconds, least.get(f, math.inf))
    finally:
        torch.set_num_threads(threads)
    return least[_loop]/max(least[function], 1e-9)


def check_fast_sum(your_function, seed=None):
    "The same numbers, faster."
    trial = Trial(flat(your_function), "check_fast_sum", seed, (
        "g = softmax(x@W.T + b, 1) - one_hot(y): (n,c), all examples at once.",
        "norms = g.norm(dim=1)*(x.square().sum(1) + 1).sqrt(): no outer product is needed.",
        "Multiply the rows of g by their factors; the sums are `g.T@x` and `g.sum(0)`."))
    _cases(trial)
    with trial.holds("at 512 examples five times as fast as a loop"):
        trial(torch.zeros(2, 3), torch.zeros(2), torch.ones(1, 3), torch.tensor([0]), 1.)
        ratio = speed_ratio(your_function)
        trial.need(ratio > 5, f"{ratio:.2g} times as fast as the loop",
                   "there is still a loop over examples: work on the whole batch at once")
    return trial.card()


# --- 5


def _spread(trial, q, sigma, steps, lr, max_norm, n, x=None):
    "Standard deviation of what noise alone does to the weights, over that of one noise."
    x = torch.zeros(n, 400).double() if x is None else x
    y = torch.zeros(n, dtype=torch.long)
    W, _ = trial(x, y, 10, q, sigma, steps, lr, max_norm, trial.fresh_generator())
    trial.need(tuple(W.shape) == (10, x.shape[1]), f"W has the shape {tuple(W.shape)}")
    return W.double().std().item()/(lr*sigma*max_norm/(q*n))


def check_train(your_function, seed=None):
    "A whole run."
    trial = Trial(your_function, "check_train", seed, (
        "chosen = torch.rand(n, generator=generator) < q, anew in every step.",
        "Sum, noise of std sigma*max_norm on W and on b, divide by q*n, whatever the batch is.",
        "`mean = noisy_mean(total, max_norm, sigma, q*n, generator)`, `W = W - lr*mean`: in every "
        "step, also when nobody was drawn."))
    with trial.holds("noise adds up over steps: sqrt(steps) times that of one"):
        for steps in (1, 16):
            ratio = _spread(trial, 1., 2., steps, .5, 3., 20)/math.sqrt(steps)
            why = "the noise has std sigma*max_norm/(q*n), fresh in every step"
            if abs(ratio - math.sqrt(steps)) < .2*math.sqrt(steps) and steps > 1:
                why = "the same noise in every step: draw it anew"
            if ratio == 0:
                why = "there is no noise"
            trial.need(abs(ratio - 1) < 4.4/math.sqrt(8000),
                       f"after {steps} steps {ratio:.4g} times what it should be", why)
    with trial.holds("empty batches: noise all the same"):
        ratio = _spread(trial, .01, 1., 25, 1., 1., 10)/5
        trial.need(abs(ratio - 1) < .1, f"the noise is {ratio:.4g} times what it should be",
                   "a step without examples still adds its noise, divided by the expected q*n, "
                   "not by the batch that came up")
    with trial.holds("without noise, everybody drawn: plain descent with clipped gradients"):
        x, y = normals(trial, 30, 4), torch.arange(30) % 3
        W, b = torch.zeros(3, 4).double(), torch.zeros(3).double()
        for _ in range(5):
            g_W, g_b = sums(W, b, x, y, .5)
            W, b = W - g_W/30, b - g_b/30
        got = trial(x, y, 3, 1., 0., 5, 1., .5, trial.fresh_generator())
        found = gap(flat(lambda: got)(), torch.cat([W.flatten(), b]), 1e-4)
        trial.need(not found, found, "start from zeros, step against the mean, clip each example")
    with trial.holds("batches are made of coins: their sizes vary, by nq(1-q)"):
        sizes = []
        for _ in range(60):
            _, b = trial(torch.zeros(400, 1).double(), torch.zeros(400, dtype=torch.long), 2, .25,
                         0., 1, 1., 10., trial.fresh_generator())
            sizes.append(b[0].item()/.5*100)  # each example moves b[0] by half of 1/(q n)
        mean, variance = statistics.mean(sizes), statistics.variance(sizes)
        trial.need(abs(mean - 100) < 5, f"batches of {mean:.4g}, expected 100",
                   "draw with probability q, and divide by q*n, not by the batch that came up")
        trial.need(30 < variance < 160, f"batch sizes vary by {variance:.3g}, coins by 75",
                   "a fixed batch size is not Poisson sampling: toss a coin for every example, "
                   "and divide by q*n, not by the batch that came up")
    with trial.holds("digits, at about eps = 3: more than 80 % on images it has not seen"):
        x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
        x = x.float()/16
        W, b = trial(x[:1400], y[:1400], 10, .1, 1.3, 120, 2., 1., trial.fresh_generator())
        right = ((x[1400:]@W.T + b).argmax(1) == y[1400:]).double().mean().item()
        trial.need(right > .8, f"{right:.1%}", "it runs, and does not learn: check the sign")
    return trial.card()
