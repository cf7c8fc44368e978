"Wrong answers to the assignments: check -> words of the diagnosis -> code; {name} is the function."


def rest(history="history", eps="eps"):
    "A bisection for the noise of the rest, of a history and a budget."
    return (f"def {{name}}(history, q, steps, eps, delta):\n    cost = a2.cost\n"
            f"    past, budget = {history}, {eps}\n"
            "    if cost(history, delta) > eps: raise ValueError\n    low, high = 1e-2, 1e5\n"
            "    while high/low > 1.0005:\n        m = math.sqrt(low*high)\n"
            "        over = cost([*past, (q, m, steps)], delta) > budget\n"
            "        low, high = (m, high) if over else (low, m)\n    return high")


def asks(*runs, below=".995"):
    "One that asks an accountant a few things."
    asked = ", ".join(f"({run})" for run in runs)
    return f"lambda a: any(a(*run) < {below}*a2.exact(*run) for run in [{asked}])"


WRONG = {
    "check_leak": {
        "logarithm of the ratio": "lambda p: p/(1 - p) if p < 1 else math.inf",
        "not with 1/2": "lambda p: math.log(2*p) if p < 1 else math.inf",
        "larger one": "lambda p: -math.log(p/(1 - p)) if p < 1 else math.inf",
        "math.inf": "lambda p: math.log(p/(1 - p)) if p < 1 else 1e9"},
    "check_debias": {
        "wrong on average": "lambda s, e: min(1, max(0, (s - 1/(1 + math.exp(e)))"
                            "/(2/(1 + math.exp(-e)) - 1)))",
        "p/(1 - p) = e^eps": "lambda s, e: (s - math.exp(-e))/(1 - 2*math.exp(-e))",
        "divide by 2p - 1": "lambda s, e: s - 1/(1 + math.exp(e))"},
    "check_noisy_sum": {
        "clamp first": "lambda v, h, e, g: v.sum().item() + h/e*(lambda u: u[0] - u[1])("
                       "-torch.log1p(-torch.rand(2, generator=g))).item()",
        "too little noise": "lambda v, h, e, g: v.clamp(0, h).sum().item() + .5*h/e*(lambda u: "
                            "u[0] - u[1])(-torch.log1p(-torch.rand(2, generator=g))).item()",
        "another shape": "lambda v, h, e, g: v.clamp(0, h).sum().item()"
                         " + h/e*1.2533*torch.randn((), generator=g).item()",
        "no noise at all": "lambda v, h, e, g: v.clamp(0, h).sum().item()",
        "seed must agree": "lambda v, h, e, g: v.clamp(0, h).sum().item() + h/e*(lambda u: "
                           "u[0] - u[1])(-torch.log1p(-torch.rand(2))).item()"},
    "check_exact_delta": {
        "both directions": "lambda p, q, e: sum(max(0, a - math.exp(e)*b) for a, b in zip(p, q))",
        "paid by eps": "lambda p, q, e: max(sum(a for a, b in zip(u, v) if a > math.exp(e)*b)"
                       " for u, v in ((p, q), (q, p)))",
        "clamp each output": "lambda p, q, e: max(0, sum(a - math.exp(e)*b"
                             " for a, b in zip(p, q)))"},
    "check_possible": {
        "far more": "lambda cs: a2.possible(cs, lambda q, *r: a2.exact(1., *r))",
        "every step counts": "lambda cs: a2.possible(cs, lambda q, s, n, d: a2.exact(q, s, 1, d))",
        "careful, not wrong": "lambda cs: [not ok for ok in a2.possible(cs)]",
        "claim below it may be right":
            "lambda cs: a2.possible(cs, lambda q, s, n, d: a2.cost([(q, s, n)], d))",
        "claims are rounded": "lambda cs: [eps >= a2.exact(*run) for *run, eps in cs]"},
    "check_rest_sigma": {
        "history costs, too": rest("[]"),
        "keeps the promise": rest().replace("return high", "return low"),
        "add up to too much": rest("[]", "eps - cost(history, delta)"),
        "whatever the noise": rest().replace("raise ValueError", "return 1e9")},
    "check_steps_left": {
        "history costs, too": "lambda h, *r: a2.steps_left([], *r)",
        "one step more": "lambda *a: a2.steps_left(*a) + 1",
        "one step less": "lambda *a: max(0, a2.steps_left(*a) - 1)",
        "in proportion": "lambda h, q, s, e, d: int(max(0, e - a2.cost(h, d))"
                         "/a2.cost([(q, s, 1)], d))"},
    "check_underpays": {
        "may claim more": "lambda a: True",
        "try rates": "lambda a: False",
        "ten thousand": asks(".2, 1., 100, 1e-5", ".9, 2., 10, 1e-5"),
        "with the exact eps": asks(".2, 4., 500, 1e-3", ".2, .5, 1, 1e-8", ".2, .5, 5000, 1e-8",
                                   below=".85")},
    "check_clipped_sum": {
        "not their sum": "lambda g, c: g.sum(0)*min(1., c/max(1e-30, g.sum(0).norm().item()))",
        "stay as they are": "lambda g, c: (c*g/g.norm(dim=1, keepdim=True)).sum(0)",
        "at most 1, not 2": "lambda g, c: ((c/g.norm(dim=1, keepdim=True)).clamp(max=2)*g).sum(0)",
        "a norm below 1": "lambda g, c: ((c/g.norm(dim=1, keepdim=True).clamp(min=1.)).clamp("
                          "max=1)*g).sum(0)",
        "not each coordinate": "lambda g, c: g.clamp(-c, c).sum(0)",
        "counts nothing":
            "lambda g, c: ((c/g.norm(dim=1, keepdim=True).clamp(min=1e-30)).clamp(max=1)*g)"
            ".sum(0)"},
    "check_loop_sum": {
        "not one each": "lambda *a: a3.sums(*a, joint=False)",
        "before adding up": "lambda *a: a3._batch_clip(*a)",
        "nothing is clipped": "lambda *a: a3.sums(*a, clip=False)"},
    "check_fast_sum": {
        "belongs to the gradient": "lambda *a: a3.sums(*a, bias=False)",
        "not a mean": "lambda W, b, x, y, c: tuple(p/len(x) for p in a3.sums(W, b, x, y, c))",
        "still a loop": "lambda W, b, x, y, c: tuple(p.detach() for p in a3._loop("
                        "W.clone(), b.clone(), x, y, c))"},
    "check_move": {
        "seed both generators": "lambda s, b, z: a4.moved(s, b, z, seeds=(0, 1))",
        "divide by suspect.bound": "lambda s, b, z: a4.moved(s, b, z, unit=False)",
        "not the longest": "lambda s, b, z: a4.moved(s, b, z, together=False)",
        "with her and without her": "lambda s, b, z: a4.moved(s, [part[:0] for part in b], z)"},
    "check_noise": {
        "not variances": "lambda s, b, t=300: {k: v**2 for k, v in NOISE(s, b, t).items()}",
        "an average hides": "lambda s, b, t=300: dict.fromkeys(NOISE(s, b, t),"
                            " NOISE(s, b, t)['0.weight'])",
        "compare runs": "lambda s, b, t=300: {k: v + .3 for k, v in NOISE(s, b, t).items()}",
        "one number per": "lambda s, b, t=300: 1."},
    "check_coins": {
        "accuses everybody": "lambda b, n, q: False",
        "look at how sizes vary":
            "lambda b, n, q: abs(sum(map(len, b))/len(b) - n*q) < 4*math.sqrt(n*q/len(b))",
        "compare batches": "lambda b, n, q: abs(sum(map(len, b))/len(b) - n*q)"
            " < 3.5*math.sqrt(n*q/len(b)) and .6 < torch.tensor([float(len(i)) for i in b]).var()"
            "/(n*q*(1 - q)) < 1.45",
        "two standard errors":
            "lambda b, n, q: abs(sum(map(len, b))/len(b) - n*q) < math.sqrt(n*q/len(b))"},
    "check_verdict": {
        "is accused": "lambda s: 'noise'",
        "try more newcomers": "lambda s: 'nothing'",
        "ask its batches": "lambda s: (lambda v: 'nothing' if v == 'sampling' else v)(VERDICT(s))",
        "another part": "lambda s: (lambda v: 'sampling' if v == 'noise' else v)(VERDICT(s))"},
    "check_mended_step": {
        "the mean is clipped": "lambda g, c, s, b, r: g.mean(0)*min(1., c/g.mean(0).norm().item())",
        "stay as they are": "lambda g, c, s, b, r: ((c/g.norm(dim=1, keepdim=True).clamp(min=1e-30)"
                            ")*g).sum(0)/b + s*c/b*torch.randn(g.shape[1], generator=r)",
        "at most 1, not 2": "lambda g, c, s, b, r: ((c/g.norm(dim=1, keepdim=True).clamp(min=1e-30)"
                            ").clamp(max=2)*g).sum(0)/b + s*c/b*torch.randn(g.shape[1], "
                            "generator=r)",
        "a norm below 1": "lambda g, c, s, b, r: ((c/g.norm(dim=1, keepdim=True).clamp(min=1.)"
                          ").clamp(max=1)*g).sum(0)/b + s*c/b*torch.randn(g.shape[1], "
                          "generator=r)",
        "is private": "lambda g, c, s, b, r: a3.clipped(g, c)/len(g)",
        "sigma*max_norm": "lambda g, c, s, b, r: (a3.clipped(g, c)"
                          " + s*torch.randn(g.shape[1], generator=r))/b",
        "0/0 is NaN": "lambda g, c, s, b, r: (g/g.norm(dim=1, keepdim=True)"
                      "*g.norm(dim=1, keepdim=True).clamp(max=c)).sum(0)/b"},
    "check_ledger_epsilon": {
        "another stream": "lambda es, d: a5.by(lambda e: (e[0], e[4]))(es, d)",
        "another digest": "lambda es, d: a5.by(lambda e: (e[0], e[3], e[4]))(es, d)",
        "is one look": "lambda es, d: a5.cost([tuple(e[1:3]) for e in es], d)",
        "steps alone": "lambda es, d: a5.by(lambda e: e)([e for e in es"
                       " if e[0] == 'training steps'], d)"},
    "check_honest_total": {
        "epsilons need not": "lambda q, s, n, d, k: (1 + k)*a5.cost([(q, s)]*n, d)",
        "that you hand in": "lambda q, s, n, d, k: a5.cost([(q, s)]*(n*k), d)",
        "tuning looked": "lambda q, s, n, d, k: a5.cost([(q, s)]*n, d)"},
}
SLOW = {"check_noisy_sum", "check_noise", "check_coins", "check_verdict"}  # seconds each

TRAIN = """def train(x, y, classes, q, sigma, steps, lr, max_norm, generator):
    n, i = x.shape
    W, b = torch.zeros(classes, i), torch.zeros(classes)
    for t in range(steps):
        chosen = torch.rand(n, generator=generator) < q
        g_W, g_b = a3.sums(W, b, x[chosen], y[chosen], max_norm)
        std, size = sigma*max_norm, q*n
        z_W = torch.randn(W.shape, generator=generator)
        z_b = torch.randn(b.shape, generator=generator)
        W = W - lr*(g_W + std*z_W)/size
        b = b - lr*(g_b + std*z_b)/size
    return W, b
"""
ZEROS, CHOSEN, SUMS = (line.strip() for line in TRAIN.splitlines() if any(
    part in line for part in ("W, b = torch", "chosen = ", "g_W, g_b = ")))


def trainer(*changes):
    "The right trainer with some parts of it replaced: (part, other part), ..."
    text = TRAIN
    for part, other in changes:
        assert part in text, part
        text = text.replace(part, other)
    return text


WRONG["check_train"] = {
    "short gradients stay as they are": trainer(("y[chosen], max_norm)", "y[chosen], max_norm, "
                                                 "most=1e30)"))}

LEAKS = {  # check -> what is wrong -> (words of the diagnosis, code): each breaks privacy
    "check_leak": {
        "half of it": ("", "lambda p: .5*math.log(p/(1 - p)) if p < 1 else math.inf")},
    "check_noisy_sum": {
        "no noise": ("no noise at all", "lambda v, h, e, g: v.clamp(0, h).sum().item()"),
        "half the noise": ("too little noise", "lambda v, h, e, g: v.clamp(0, h).sum().item()"
                           " + .5*h/e*(lambda u: u[0] - u[1])(-torch.log1p(-torch.rand(2, "
                           "generator=g))).item()"),
        "no clamp": ("clamp first", "lambda v, h, e, g: v.sum().item() + h/e*(lambda u: u[0]"
                     " - u[1])(-torch.log1p(-torch.rand(2, generator=g))).item()"),
        "clamped above only": ("clamp first", "lambda v, h, e, g: v.clamp(max=h).sum().item()"
                               " + h/e*(lambda u: u[0] - u[1])(-torch.log1p(-torch.rand(2, "
                               "generator=g))).item()")},
    "check_exact_delta": {
        "one direction": ("both directions", "lambda p, q, e: sum(max(0, a - math.exp(e)*b)"
                          " for a, b in zip(p, q))")},
    "check_possible": {
        "everything is believed": ("", "lambda cs: [True]*len(cs)")},
    "check_rest_sigma": {
        "the history is forgotten": ("history costs, too", rest("[]"))},
    "check_steps_left": {
        "the history is forgotten": ("history costs, too", "lambda h, *r: a2.steps_left([], *r)")},
    "check_underpays": {
        "one question": ("try rates", asks("1., 1., 10, 1e-5"))},
    "check_clipped_sum": {
        "the sum is clipped": ("not their sum", "lambda g, c: g.sum(0)*min(1., "
                               "c/max(1e-30, g.sum(0).norm().item()))"),
        "each coordinate is": ("not each coordinate", "lambda g, c: g.clamp(-c, c).sum(0)"),
        "an unbounded row": ("clip every example by itself", "lambda g, c: (g*torch.where("
                             "g.norm(dim=1) < 100, (c/g.norm(dim=1).clamp(min=1e-30)).clamp("
                             "max=1), 1.)[:, None]).sum(0)")},
    "check_loop_sum": {
        "W and b apart": ("not one each", "lambda *a: a3.sums(*a, joint=False)"),
        "clipped after adding up": ("before adding up", "lambda *a: a3._batch_clip(*a)"),
        "not clipped": ("nothing is clipped", "lambda *a: a3.sums(*a, clip=False)")},
    "check_fast_sum": {
        "W's norm alone": ("belongs to the gradient", "lambda *a: a3.sums(*a, bias=False)"),
        "not clipped": ("nothing is clipped", "lambda *a: a3.sums(*a, clip=False)")},
    "check_train": {
        "no noise": ("there is no noise on W", trainer(("sigma*max_norm", "0."))),
        "no noise on b": ("there is no noise on b", trainer(("std*z_b", "0*z_b"))),
        "no noise on W": ("there is no noise on W", trainer(("std*z_W", "0*z_W"))),
        "the same noise in every step": ("draw it anew", trainer(
            ("shape, generator=generator", "shape, generator=torch.Generator().manual_seed(1)"))),
        "one noise, in another order in every step": ("in another order", trainer(
            (ZEROS, ZEROS + "\n    once = torch.empty(W.shape).normal_(generator=generator)"),
            ("torch.randn(W.shape, generator=generator)",
             "once.flatten()[torch.randperm(W.numel(), generator=generator)].view_as(W)"))),
        "noise on W is cut": ("ends somewhere", trainer(
            ("torch.randn(W.shape, generator=generator)",
             "torch.randn(W.shape, generator=generator).clamp(-3.8, 3.8)"))),
        "a batch is read twice under one noise": ("read once", trainer(
            ("z_b = torch.randn(b.shape, generator=generator)", "z_b = torch.randn(b.shape, "
             "generator=generator)\n        W, b = W - lr*(g_W + std*z_W)/size/2, "
             "b - lr*(g_b + std*z_b)/size/2; " + SUMS),
            ("W = W - lr*(g_W + std*z_W)/size", "W = W - lr*(g_W + std*z_W)/size/2"),
            ("b = b - lr*(g_b + std*z_b)/size", "b = b - lr*(g_b + std*z_b)/size/2"))),
        "noise in the first step only": ("std sigma*max_norm/(q*n)", trainer(
            ("sigma*max_norm", "sigma*max_norm*(t == 0)"))),
        "one noise for all rows of W": ("std sigma*max_norm/(q*n)", trainer(
            ("randn(W.shape", "randn(W.shape[1:]"))),
        "one noise for all columns of W": ("noise of its own", trainer(
            ("randn(W.shape", "randn((classes, 1)"))),
        "sigma without max_norm": ("std sigma*max_norm/(q*n)", trainer(
            ("sigma*max_norm", "sigma"))),
        "noise on one micro-batch of four": ("std sigma*max_norm/(q*n)", trainer(
            ("sigma*max_norm", "sigma*max_norm/4"))),
        "noise before the clip": ("no noise on W", trainer(
            ("std*z_W)", "std*z_W)*min(1, max_norm/(g_W + std*z_W).norm())"))),
        "nothing in an empty step": ("still adds its noise", trainer(
            (SUMS, "if not chosen.any(): continue\n        " + SUMS))),
        "noise over the realised batch": ("still adds its noise", trainer(
            ("std*z_W)/size", "std*z_W*q*n/max(1, int(chosen.sum())))/size"),
            ("std*z_b)/size", "std*z_b*q*n/max(1, int(chosen.sum())))/size"))),
        "everything over the realised batch": ("not by the batch that came up", trainer(
            ("size = sigma*max_norm, q*n", "size = sigma*max_norm, max(1, int(chosen.sum()))"))),
        "over the realised batch, or q n": ("not by the batch that came up", trainer(
            ("size = sigma*max_norm, q*n", "size = sigma*max_norm, int(chosen.sum()) or q*n"))),
        "a fixed size": ("a shuffle or a fixed size", trainer(
            (CHOSEN, "chosen = torch.randperm(n, generator=generator)[:round(q*n)]"))),
        "shuffled epochs": ("a shuffle or a fixed size", trainer(
            (ZEROS, ZEROS + "\n    order = torch.randperm(n, generator=generator)"),
            (CHOSEN, "k = max(1, round(q*n)); chosen = order.roll(t*k)[:k]"))),
        "coins tossed once": ("coins anew", trainer(
            (ZEROS, ZEROS + "\n    once = torch.rand(n, generator=generator) < q"),
            (CHOSEN, "chosen = once"))),
        "everybody, always": ("a shuffle or a fixed size", trainer(
            (CHOSEN, "chosen = torch.ones(n, dtype=torch.bool)"))),
        "twice the rate": ("with probability q", trainer((CHOSEN, CHOSEN.replace("< q", "< 2*q")))),
        "no clip": ("clip every example by itself", trainer(
            ("y[chosen], max_norm)", "y[chosen], max_norm, clip=False)"))),
        "W and b apart": ("clip every example by itself", trainer(
            ("y[chosen], max_norm)", "y[chosen], max_norm, joint=False)"))),
        "clip after averaging": ("clip every example by itself", trainer(
            ("a3.sums(", "a3._batch_clip("))),
        "the norm of W alone": ("clip every example by itself", trainer(
            ("y[chosen], max_norm)", "y[chosen], max_norm, bias=False)"))),
        "a window of as many rows as coins say": ("a coin of her own", trainer(
            (CHOSEN, "k = int((torch.rand(n, generator=generator) < q).sum()); chosen = (torch."
             "arange(k) + int(torch.randint(n, (), generator=generator))) % n"))),
        "one coin for two": ("a coin of her own", trainer(
            (CHOSEN, "chosen = (torch.rand((n + 1)//2, generator=generator) < q)"
             ".repeat_interleave(2)[:n]"))),
        "dealt out of one shuffle, as many as coins say": ("as likely as anybody", trainer(
            (ZEROS, ZEROS + "\n    order, at = torch.randperm(n, generator=generator), 0"),
            (CHOSEN, "k = int((torch.rand(n, generator=generator) < q).sum()); "
             "chosen = order.roll(-at)[:k]; at += k"))),
        "every second one more often": ("the same q for everybody", trainer(
            (CHOSEN, "chosen = torch.rand(n, generator=generator) < (q*(.6 + .8*(torch.arange(n) "
             "% 2)) if q < 1 else q)"))),
        "drawn again when empty": ("nobody is drawn to fill it", trainer(
            (CHOSEN, "chosen = torch.zeros(n, dtype=torch.bool)\n        while not chosen.any(): "
             + CHOSEN))),
        "the first row when empty": ("nobody is drawn to fill it", trainer(
            (CHOSEN, CHOSEN + "; chosen = chosen if chosen.any() else torch.arange(n) == 0"))),
        "noise at the end, as much as all steps ask for": ("not the way", trainer(
            ("sigma*max_norm", "sigma*max_norm*(t == steps - 1)*steps**.5"))),
        "noise beside the weights, added at the end": ("not the way", trainer(
            (ZEROS, ZEROS + "\n    N, M = 0*W, 0*b"), ("return W, b", "return W + N, b + M"),
            ("W = W - lr*(g_W + std*z_W)/size", "W, N = W - lr*g_W/size, N - lr*std*z_W/size"),
            ("b = b - lr*(g_b + std*z_b)/size", "b, M = b - lr*g_b/size, M - lr*std*z_b/size"))),
        "b has the noise of a column of W": ("noise of its own", trainer(
            ("z_b = torch.randn(b.shape, generator=generator)", "z_b = z_W[:, 0]"))),
        "half of the rows have the noise of the others": ("noise of its own", trainer(
            ("torch.randn(W.shape, generator=generator)", "torch.randn((classes + 1)//2, i, "
             "generator=generator).repeat(2, 1)[:classes]"))),
        "noise of 1 or -1": ("another shape", trainer(
            ("torch.randn(W.shape, generator=generator)",
             "2.*torch.randint(2, W.shape, generator=generator) - 1"))),
        "noise where there are no features": ("there is no noise on W", trainer(
            ("sigma*max_norm", "sigma*max_norm*(not x.any())"))),
        "less noise where there is a gradient": ("std sigma*max_norm/(q*n)", trainer(
            ("std*z_W", "std*z_W*torch.where(g_W != 0, .1, 1.)"))),
        "clipped to the batch's median": ("clip every example by itself", trainer(
            ("y[chosen], max_norm)", "y[chosen], min(max_norm, float(x[chosen].norm(dim=1).median("
             ") if chosen.any() and x.any() else max_norm)))"))),
        "clipped in pairs": ("clip every example by itself", trainer(
            (SUMS, "pairs = [a3._batch_clip(W, b, x[k], y[k], max_norm) for k in "
             "chosen.nonzero().flatten().split(2)]\n        g_W, g_b = map(sum, zip(*pairs, "
             "(0*W, 0*b)))"))),
        "a start that has seen the data": ("has looked at the data", trainer(
            (ZEROS, ZEROS + "\n    W = torch.stack([x[y == c].sum(0) for c in range(classes)])"))),
    },
    "check_mended_step": {
        "the mean is clipped": ("the mean is clipped",
                                "lambda g, c, s, b, r: a3._clip_the_sum(g.mean(0)[None], c)"),
        "over the realised batch": ("is private", "lambda g, c, s, b, r: a3.clipped(g, c)/len(g)"),
        "noise where the mean is zero": ("", "lambda g, c, s, b, r: (lambda t: (t + s*c*(t == 0)*"
                                         "torch.randn(t.shape, generator=r))/b)(a3.clipped(g, c))"),
        "half of the noise repeats": ("noise of its own", "lambda g, c, s, b, r: (a3.clipped(g, c) "
                                      "+ s*c*torch.randn((g.shape[1] + 1)//2, generator=r).repeat("
                                      "2)[:g.shape[1]])/b"),
        "sigma without max_norm": ("sigma*max_norm", "lambda g, c, s, b, r: (a3.clipped(g, c)"
                                   " + s*torch.randn(g.shape[1], generator=r))/b")},
    "check_ledger_epsilon": {
        "streams are forgotten": ("another stream", "lambda es, d: a5.by(lambda e: (e[0], e[4]))"
                                  "(es, d)"),
        "training steps alone": ("steps alone", "lambda es, d: a5.by(lambda e: e)([e for e in es"
                                 " if e[0] == 'training steps'], d)")},
    "check_honest_total": {
        "the last run alone": ("tuning looked", "lambda q, s, n, d, k: a5.cost([(q, s)]*n, d)")},
}


def named(text, name):
    "The code of a wrong answer, under the student's name."
    return text.replace("{name}", name) if text.startswith("def ") else f"{name} = {text}"
