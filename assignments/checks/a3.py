"A3: DP-SGD from scratch, then faster than the loop."
import math
import time
from functools import wraps

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, normalize, one_hot, softmax

from checks import SEED, points  # noqa: F401  (for the notebook)
from dp_course.exercises import Refused, Trial, gap, has_no_end, is_noise, judge_generator

RTOL = 1e-3  # float32, as in the examples that students see


def normals(trial, *shape):
    return torch.randn(*shape, generator=trial.generator)


def judge_case(trial, truth, slips, *args):
    "One case; the diagnosis is the slip that gives this very answer."
    got, want = trial(*args), truth(*args)
    found = gap(got, want, RTOL)
    if not gap(torch.as_tensor(got).shape, want.shape):  # float32 loses what large terms cancel
        far = (torch.as_tensor(got) - want).abs().max()/want.abs().max()
        found = "" if far <= 1e-6 else found
    named = (text for text, slip in slips.items() if not gap(got, slip(*args), 1e-4))
    trial.need(not found, found, next(named, "") if found else "")


def bounded(trial, total, base, newcomers, max_norm):
    "The guarantee itself: one more example moves a sum by `max_norm` at most."
    # total(*rows) -> clipped sum; base, newcomers: tuples of tensors of rows
    before = torch.as_tensor(total(*base)).double()
    for first, last in [(base, new) for new in newcomers] + [(new, base) for new in newcomers]:
        after = torch.as_tensor(total(*(torch.cat(pair) for pair in zip(first, last)))).double()
        trial.need(after.shape == before.shape, f"the shapes {tuple(before.shape)} and "
                   f"{tuple(after.shape)}", "a sum has one shape, whoever is in it")
        move = (after - before).norm().item()/max_norm
        trial.need(move <= 1 + RTOL, f"one more example moves the sum by {move:.4g} max_norm",
                   "clip every example by itself, all of its gradient together, before anything "
                   "is added up", leaks=True)


# --- 1


def clipped(grads, max_norm):
    grads = torch.where(grads.isfinite().all(1, keepdim=True), grads, 0.)
    norms = grads.norm(dim=1, keepdim=True)
    return ((max_norm/norms.clamp(min=1e-30)).clamp(max=1)*grads).sum(0)


def _clip_the_sum(grads, max_norm):
    total = grads.sum(0)
    return total*min(1., max_norm/max(1e-30, total.norm().item()))


STRETCHED = {  # of `clipped`: short gradients are changed
    "short gradients stay as they are":
        lambda grads, c: (c*grads/grads.norm(dim=1, keepdim=True)).sum(0),
    "short gradients stay as they are: the factor is at most 1, not 2":
        lambda grads, c: ((c/grads.norm(dim=1, keepdim=True)).clamp(max=2)*grads).sum(0),
    "a norm below 1 is a norm as any other: only 0 must not divide":
        lambda grads, c: (c/grads.norm(dim=1, keepdim=True).clamp(min=1)).clamp(max=1).mul(
            grads).sum(0)}


def short_and_long(trial, n, i, max_norm):
    "(n, i) gradients, half of them shorter than `max_norm`."
    lengths = max_norm*torch.cat([torch.linspace(.1, .9, n//2), torch.linspace(1.2, 9, n - n//2)])
    return lengths[:, None]*normalize(normals(trial, n, i))


def check_clipped_sum(your_function, seed=None):
    "Every row bounded by itself."
    slips = STRETCHED | {
        "clip every example, not their sum": _clip_the_sum,
        "bound the length of the row, not each coordinate":
            lambda grads, c: grads.clamp(-c, c).sum(0),
        "the length is the root of the sum of squares, not the sum of |entries|":
            lambda grads, c: (grads*(c/grads.abs().sum(1, keepdim=True)).clamp(max=1)).sum(0),
        "a sum, not a mean": lambda grads, c: clipped(grads, c)/len(grads)}
    trial = Trial(your_function, "check_clipped_sum", seed, (
        "The factor of an example is 1 if it is short, and max_norm/norm if it is long.",
        "norms = grads.norm(dim=1, keepdim=True); factors = (max_norm/norms).clamp(max=1).",
        "Before that, put zeros where a row is not finite: `torch.where(grads.isfinite().all(1, "
        "keepdim=True), grads, 0.)`; and keep the norms from being 0."))
    with trial.holds("long ones and short ones"):
        scale = torch.rand(20, 1, generator=trial.generator)*3
        judge_case(trial, clipped, slips, normals(trial, 20, 6)*scale, 2.)
        judge_case(trial, clipped, slips, short_and_long(trial, 20, 6, .3), .3)
    with trial.holds("one more example moves the sum by max_norm at most"):
        rows = normals(trial, 6, 4)
        huge = [(-1e6*rows.sum(0, keepdim=True),), (1e3*normals(trial, 1, 4),)]
        bounded(trial, lambda grads: trial(grads, .5), (rows,), huge, .5)
    with trial.holds("one example"):
        trial.same(clipped, 5*normals(trial, 1, 9), .5, rtol=RTOL)
    with trial.holds("a gradient of zero"):
        trial.same(clipped, torch.cat([torch.zeros(1, 4), normals(trial, 2, 4)]), 1., rtol=RTOL)
    with trial.holds("nobody"):
        trial.same(clipped, torch.zeros(0, 5), 1.)
    with trial.holds("one NaN, one infinity, and the rest as usual"):
        grads = normals(trial, 5, 4)
        grads[1, 2], grads[3, 0] = math.nan, math.inf
        got = trial(grads, 1.)
        found = gap(got, clipped(grads, 1.), RTOL)
        trial.need(not found, found, "one bad example must not spoil the sum: it counts nothing",
                   leaks=True)
    return trial.card()


# --- 2 and 3


def tensors(function):
    "A function whose pair of arrays comes as a pair of tensors."
    @wraps(function)
    def call(*args):
        got = function(*args)
        if isinstance(got, (tuple, list)) and len(got) == 2:
            return tuple(torch.as_tensor(part).detach() for part in got)
        return got
    return call if callable(function) else function


def flat(function):
    "A function whose pair comes as one vector: `same` compares numbers."
    @wraps(function)
    def call(*args):
        got = tensors(function)(*args)
        return torch.cat([part.flatten() for part in got]) if isinstance(got, tuple) else got
    return call if callable(function) else function


def sums(W, b, x, y, max_norm, joint=True, clip=True, bias=True, most=1., length=None,
         labelled=True, over=1):
    "The right clipped sums, or wrong ones."
    g = softmax(x@W.T + b, over) - labelled*one_hot(y, len(b)).to(x.dtype)
    norms = length(g, x) if length else g.norm(dim=1)*(x.square().sum(1) + bias).sqrt()

    def factor(norms):
        ones = torch.ones_like(norms)
        return (max_norm/norms.clamp(min=1e-30)).clamp(max=most) if clip else ones
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
    "short gradients stay as they are: the factor is at most 1":
        lambda *args: sums(*args, most=1e30),
    "the norm over both is the root of the sum of squares, not a sum of norms":
        lambda *args: sums(*args, length=lambda g, x: g.norm(dim=1)*(x.norm(dim=1) + 1)),
    "the root is missing: ||g|| times sqrt(||x||^2 + 1)":
        lambda *args: sums(*args, length=lambda g, x: g.norm(dim=1)*(x.square().sum(1) + 1)),
    "that is the squared norm: take its root": lambda *args: sums(
        *args, length=lambda g, x: g.square().sum(1)*(x.square().sum(1) + 1)),
    "the label is missing: softmax minus one_hot(y)":
        lambda *args: sums(*args, labelled=False),
    "softmax is over the classes, dim 1": lambda *args: sums(*args, over=0),
    "the pair is (for W, for b), in this order": lambda *args: sums(*args)[::-1],
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
    with trial.holds("one more example moves the sum by max_norm at most"):
        theirs = model(3, 4)
        newcomers = [(size*normals(trial, 1, 4), torch.tensor([label]))
                     for size in (.1, 1., 1e4, -1e4) for label in range(3)]
        bounded(trial, lambda x, y: trial(*theirs, x, y, .1), data(6, 3, 4), newcomers, .1)
    with trial.holds("a clip that nobody reaches"):
        trial.same(flat(sums), *model(3, 4), *data(6, 3, 4), 1e6, rtol=RTOL)
    with trial.holds("nobody at all"):
        trial.same(flat(sums), *model(3, 4), torch.zeros(0, 4), torch.zeros(0, dtype=torch.long),
                   1.)


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
    threads, least = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        for f in [_loop, function]*rounds:  # whoever remembers an answer has none for the next
            x = torch.randn(512, 64, generator=generator)
            y = torch.randint(10, (512,), generator=generator)
            args = torch.zeros(10, 64), torch.zeros(10), x.clone(), y.clone(), 1.
            began = time.perf_counter()  # the student's process has a clock of its own
            got = f(*args)
            seconds = time.perf_counter() - began
            least[f] = min(seconds, least.get(f, math.inf))
            right = sums(torch.zeros(10, 64), torch.zeros(10), x, y, 1.)
            found = gap(flat(lambda: got)(), flat(lambda: right)(), 1e-2, 1e-3)
            if f is function and found:
                raise Refused(f"at 512 examples: {found}", "what is timed must be right, too")
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


# --- 4


def _judge_noise(trial, q, steps, n, classes):
    "Noise on every tensor: right within 4.4 standard errors, which chance exceeds once in 100,000."
    # Two runs on the same rows: what differs is noise; sigma is so large that it hides the rest
    lr, sigma, max_norm = .5, 20., 3.
    x, y = normals(trial, n, 2), torch.arange(n) % classes
    (W, b), (V, c) = (trial(x, y, classes, q, sigma, steps, lr, max_norm, trial.fresh_generator())
                      for _ in range(2))
    shapes = tuple(W.shape), tuple(b.shape)
    trial.need(shapes == ((classes, 2), (classes,)), f"W and b have the shapes {shapes}")
    one = math.sqrt(2*steps)*lr*sigma*max_norm/(q*n)
    parts = {"W": (W - V).double()/one, "b": (b - c).double()/one}
    for name, part in parts.items():
        ratio = part.std().item()
        why = "the noise has std sigma*max_norm/(q*n), on every weight and every bias"
        if ratio < .01:
            why = (f"there is no noise on {name}, or always the same: draw it anew for every "
                   "number that is released")
        elif steps > 1 and abs(ratio - math.sqrt(steps)) < .2*math.sqrt(steps):
            why = "the same noise in every step: draw it anew"
        trial.need(abs(ratio - 1) < 4.4/math.sqrt(2*part.numel()), f"after {steps} steps the noise "
                   f"on {name} is {ratio:.4g} times what it should be", why,
                   leaks=ratio < 1 or steps > 1)  # one step was right: noises know of each other
    if steps == 1:  # also before two of them are mixed
        parts = {"W": W.double()/one*math.sqrt(2), "b": b.double()/one*math.sqrt(2)}
    is_noise(trial, parts["W"].T.flatten(), parts["b"])


def _judge_long_noise(trial, n=4, classes=20_000, runs=8):
    "Noise has no end; rows of zeros leave nothing else on W."
    x, y = torch.zeros(n, 3), torch.arange(n)
    ends = [trial(x, y, classes, 1., 1., 1, n, 1., trial.fresh_generator())[0] for _ in range(runs)]
    has_no_end(trial, *(W.flatten() for W in ends))


def _judge_sums(trial, steps=16, runs=20):
    "The sum of a step's noises is as new in every step as they are, however they are shuffled."
    x, y = torch.zeros(4, 2), torch.arange(4)
    ends = [trial(x, y, 50, 1., 1., steps, 4., 1., trial.fresh_generator())[0] for _ in range(runs)]
    sums = torch.stack([W.double().sum() for W in ends])/math.sqrt(100*steps)
    ratio = sums.square().mean().item()  # some 16 where they are; 3 comes by chance once in 100,000
    trial.need(ratio < 3, f"over {steps} steps the sum of all noises varies {ratio:.3g} times as "
               "much as it should", "the same noise in every step, in another order: draw it anew",
               leaks=True)


def _judge_one_look(trial, n=20):
    "Gradients are settled before their noise is known: with one seed, more noise is a longer way."
    x, y, lr, max_norm = normals(trial, n, 3), torch.arange(n) % 3, 1e3, .5
    seed = trial.fresh_generator().initial_seed()

    def end(sigma):
        generator = torch.Generator().manual_seed(seed)
        return flat(lambda: trial(x, y, 3, 1., sigma, 1, lr, max_norm, generator))().double()
    bend = (end(20.) - 3*end(10.) + 2*end(5.)).abs().max().item()*n/(lr*max_norm)
    trial.need(bend < .01, f"with its noise the gradients of a step change by {bend:.3g} max_norm",
               "a batch is read once, before its noise is drawn: one noise hides one look",
               leaks=True)


def _judge_iterates(trial, n=100, runs=12):
    "The noise of a step decides on which side the next one begins."
    # Half of the labels are 0, half are 1: without noise every step is zero
    x, y, lr, max_norm = torch.zeros(n, 1), torch.arange(n) % 2, 1e4, .1
    moves = [trial(x, y, 2, 1., 1., 2, lr, max_norm, trial.fresh_generator())[1].abs().max().item()
             for _ in range(runs)]
    most = max(moves)*n/(lr*max_norm)  # some 35; in units of one step's noise
    trial.need(most > 10, f"a second step that the noise of the first should send 35 noises far "
               f"goes {most:.3g}", "every step starts from the noisy weights of the one before: "
               "noise that comes at the end hides one step, not the way", leaks=True)


def _judge_luck(trial, n=100, runs=150):
    "Whoever tosses twice and keeps what fits the data better has noise that goes the data's way."
    x, y = torch.zeros(n, 1), torch.zeros(n, dtype=torch.long)
    ends = [trial(x, y, 2, 1., 1., 1, 1., .1, trial.fresh_generator())[1] for _ in range(runs)]
    step = sums(torch.zeros(2, 1), torch.zeros(2), x, y, .1)[1]
    z = (torch.stack(ends).double()*n + step)/.1
    luck = (z[:, 0] - z[:, 1]).mean().item()*math.sqrt(runs/2)
    trial.need(abs(luck) < 4.4, f"on average the noise goes {luck:.3g} standard errors towards the "
               "labels", "noise that was chosen tells what it was chosen for: toss once",
               leaks=True)


def _drawn(trial, n, q, steps, runs):
    "How often every example was drawn, run by run: each row is a feature of its own."
    x, y, lr = torch.eye(n), (torch.arange(n) % 4 == 0).long(), 1e-3
    ends = [trial(x, y, 2, q, 0., steps, lr, 10., trial.fresh_generator())[0] for _ in range(runs)]
    return torch.stack([W[y, torch.arange(n)] for W in ends]).double()/lr*2*q*n


def _by_n(drawn, q):
    "Is every mark q, not 1: was a step divided by n? No noise is in it, and no luck."
    least = drawn[drawn.abs() > .01].abs()
    return len(least) > 0 and abs(least.min().item()/q - 1) < .05


def _stretched(drawn):
    "Does every draw count the same, and not 1? Then gradients are too long, or too short."
    marks = drawn[drawn > .01]
    times = marks/marks.min() if len(marks) else marks
    whole = len(times.round().unique()) > 2 and (times - times.round()).abs().max() < .05
    return bool(whole) and abs(marks.min().item() - 1) > .05


def _judge_coins(trial, drawn, q, steps):
    "Who was drawn, and how often: coins know nothing of each other."
    # Each bound is 4.4 standard errors of the coins or more: chance exceeds it once in 100,000
    runs, n = drawn.shape
    sizes, coins = drawn.sum(1)/steps, n*q*(1 - q)
    mean, variance = sizes.mean().item(), sizes.var().item()*steps
    trial.need(not _by_n(drawn, q), f"a step is {mean/(n*q):.3g} times as long as it should be",
               "divide by the expected batch q*n, not by n")
    trial.need(not _stretched(drawn), "all who are drawn move the weights too far, or not enough",
               "short gradients stay as they are, and q*n divides")
    trial.need(variance > .45*coins, f"batch sizes vary by {variance:.3g}, coins by {coins:.3g}",
               "a shuffle or a fixed size is not Poisson sampling: toss a coin for every example, "
               "and divide by q*n, not by the batch that came up", leaks=True)
    off = (drawn - steps*q)/math.sqrt(steps*q*(1 - q))
    own, near = off.square().mean().item(), (off[:, 1:]*off[:, :-1]).mean().item()
    trial.need(abs(mean - n*q) < 2, f"batches of {mean:.4g}, expected {n*q:g}",
               "draw with probability q, and divide by q*n", leaks=mean > n*q)
    most = off.mean(0).abs().max().item()*math.sqrt(runs)
    trial.need(most < 5.5 or own > 2, f"somebody is not drawn with probability q: {most:.3g} "
               "standard errors from it", "the same q for everybody, whatever her row or her "
               "label is", leaks=True)
    trial.need(own < 1.1, f"how often somebody is drawn varies {own:.3g} times as much as by coins",
               "toss the coins anew in every step", leaks=True)
    trial.need(own > .9, f"how often somebody is drawn varies {own:.3g} times as much as by coins",
               "who was drawn before is as likely as anybody else: toss the coins anew",
               leaks=True)
    trial.need(abs(near) < .07 and variance < 1.9*coins, f"neighbours are drawn together: their "
               f"correlation is {near:.2g}, and batch sizes vary by {variance:.3g}, coins by "
               f"{coins:.3g}", "a coin of her own for every example", leaks=True)


def check_train(your_function, seed=None):
    "A whole run."
    trial = Trial(tensors(your_function), "check_train", seed, (
        "chosen = torch.rand(n, generator=generator) < q, anew in every step.",
        "Sum, noise of std sigma*max_norm on W and on b, divide by q*n, whatever the batch is.",
        "`mean = (total + sigma*max_norm*noise)/(q*n)`, `W = W - lr*mean`: in every step, also "
        "when nobody was drawn."))
    with trial.holds("with a rate of zero it ends where it starts: at zero"):
        x, y = normals(trial, 9, 4), torch.arange(9) % 3
        end = flat(lambda: trial(x, y, 3, .5, 1., 3, 0., .5, trial.fresh_generator()))()
        trial.need(not end.any(), f"it ends at {end.abs().max():.3g}",
                   "start from zeros: any other start has looked at the data", leaks=True)
    with trial.holds("noise on every weight and bias; it adds up over steps: sqrt(steps) times"):
        for steps in (1, 16):
            _judge_noise(trial, 1., steps, 20, 2000)
        _judge_sums(trial)
        _judge_long_noise(trial)
    with trial.holds("all randomness comes from the generator"):
        x, y = torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)
        judge_generator(trial, flat(lambda g: trial(x, y, 3, .5, 1., 3, 1., 1., g)))
    q, by_n = .25, False
    with trial.holds("batches are made of coins: one for every example, anew in every step"):
        drawn = _drawn(trial, n=64, q=q, steps=4, runs=100)
        by_n = _by_n(drawn, q)
        _judge_coins(trial, drawn, q, steps=4)
    with trial.holds("empty batches: noise all the same, and nothing else"):
        end = flat(lambda: trial(torch.ones(1, 2), torch.tensor([1]), 3, 1e-5, 0., 1, 1., 1.,
                                 trial.fresh_generator()))()
        trial.need(not end.any(), "somebody who was not drawn took part", "a batch may be empty: "
                   "nobody is drawn to fill it", leaks=True)
        x, y = torch.zeros(4, 400), torch.zeros(4, dtype=torch.long)
        W, _ = trial(x, y, 10, q, 1., 100, 1., 1., trial.fresh_generator())
        ratio = W.double().std().item()/10
        # Divided by n, a step has q times the noise: a slip that leaks nothing. The standard error
        # of the ratio is 1.1 %, so chance passes 5 % once in 100,000 times; of 200 seeds of the
        # right answer none was refused, of 200 divided by n none leaked (both < 1.5 % at 95 %)
        trial.need(abs(ratio - 1) < .05, f"the noise is {ratio:.4g} times what it should be",
                   "a step without examples still adds its noise, divided by the expected q*n, "
                   "not by the batch that came up", leaks=ratio < (.95*q if by_n else 1))
    with trial.holds("one more example moves a step by max_norm/(q n) at most"):
        sizes = torch.tensor([.1, .1, .1, 6., 6., 6.])
        for rows, max_norm in (normals(trial, 7, 4), .1), (normals(trial, 6, 4)*sizes[:, None], 5.):
            newcomers = [(size*normals(trial, 1, 4), torch.tensor([label]))
                         for size in (.1, 1., 10., 1e4, -1e4) for label in range(3)]

            def total(x, y):  # three steps, so short that each begins where the first did
                args = x, y, 3, 1., 0., 3, 1e-6, max_norm, trial.fresh_generator()
                return flat(lambda: trial(*args))()*len(x)/3e-6
            bounded(trial, total, (rows, torch.arange(len(rows)) % 3), newcomers, max_norm)
    with trial.holds("a step begins where the noise of the one before has led"):
        _judge_iterates(trial)
        _judge_luck(trial)
        _judge_one_look(trial)
    with trial.holds("without noise, everybody drawn: plain descent with clipped gradients"):
        x, y = normals(trial, 30, 4), torch.arange(30) % 3
        W, b = torch.zeros(3, 4), torch.zeros(3)
        for _ in range(5):
            g_W, g_b = sums(W, b, x, y, .5)
            W, b = W - g_W/30, b - g_b/30
        got = trial(x, y, 3, 1., 0., 5, 1., .5, trial.fresh_generator())
        found = gap(flat(lambda: got)(), torch.cat([W.flatten(), b]), RTOL)
        trial.need(not found, found, "start from zeros, step against the mean, clip each example")
    with trial.holds("digits, at about eps = 5: more than 80 % on images it has not seen"):
        x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
        x = x.float()/16
        W, b = trial(x[:1400], y[:1400], 10, .1, 1.3, 120, 2., 1., trial.fresh_generator())
        right = ((x[1400:].to(W.dtype)@W.T + b).argmax(1) == y[1400:]).double().mean().item()
        trial.need(right > .8, f"{right:.1%}", "it runs, and does not learn: check the sign")
    return trial.card()
