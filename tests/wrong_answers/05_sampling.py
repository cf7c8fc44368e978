"Wrong answers to the exercises of 05_sampling: check -> words of the diagnosis -> code."
WRONG = {
    "check_size_stats": {
        "that is the variance": "lambda n, q: (n*q, n*q*(1 - q))",
        "vary a little less": "lambda n, q: (n*q, math.sqrt(n*q))",
        "the root of n, not n": "lambda n, q: (n*q, n*math.sqrt(q*(1 - q)))",
        "spread of one coin": "lambda n, q: (n*q, math.sqrt(q*(1 - q)))"},
    "check_fair_coins": {
        "refuses everybody": "lambda x, q: False",
        "how much the sizes vary": "lambda x, q: bool((x.double().mean() - q).abs() < .012)",
        "sixty chances": "lambda x, q: bool(((x.double().mean(0) - q).abs()"
                         " < 2*(q*(1 - q)/len(x))**.5).all())",
        "everybody's own": "lambda x, q: bool((x.double().mean() - q).abs() < .012"
                           " and x.double().sum(1).var() > 5)",
        "the last one too": "lambda x, q: bool((x.double().mean() - q).abs() < .012"
                            " and x.double().sum(1).var() > 5 and x[:, 0].any())"},
    "check_room_for": {
        "room for one batch": "lambda n, q, t, p: int(stats.binom.isf(p, n, q))",
        "one batch at a time": "lambda n, q, t, p: int(stats.binom.isf(p, n*t, q))",
        "one place too few": "lambda n, q, t, p: int(stats.binom.isf(p/t, n, q)) - 1",
        "one place too many": "lambda n, q, t, p: int(stats.binom.isf(p/t, n, q)) + 1",
        "the mean size": "lambda n, q, t, p: math.ceil(n*q)"},
    "check_safe_epsilon": {
        "not sigma/epochs": "lambda s, e, d: gaussian_epsilon(d, s/e)",
        "that is one epoch": "lambda s, e, d: gaussian_epsilon(d, s)",
        "one release too many": "lambda s, e, d: gaussian_epsilon(d, s/(e + 1)**.5)",
        "one release too few": "lambda s, e, d: gaussian_epsilon(d, s/max(1, e - 1)**.5)",
        "not twice": "lambda s, e, d: gaussian_epsilon(d, s/(2*e)**.5)",
        "there or its place is blank": "lambda s, e, d: gaussian_epsilon(d, s/(2*e**.5))",
        "here nobody tosses any": "lambda s, e, d: epsilon(q=1/25, sigma=s, steps=25*e, delta=d)",
        "not one over the epochs": "lambda s, e, d: epsilon(q=1/e, sigma=s, steps=e, delta=d)",
        "far more than needed": "lambda s, e, d: e*gaussian_epsilon(d, s)",
        "do not multiply": "lambda s, e, d: gaussian_epsilon(d, s*e**.5)"},
}
JUMPS = '''def poisson_by_jumps(n, q, generator):
    if q in (0, 1):
        return torch.arange(n if q else 0)
    at, drawn = -1, []
    while True:
        u = 1 - torch.rand((), dtype=torch.float64, generator=generator).item()
        at += max(1, math.ceil(math.log(u)/math.log1p(-q)))
        if at >= n:
            return torch.tensor(drawn, dtype=torch.int64)
        drawn.append(at)
'''
EDITS = {  # diagnosis -> (what the right sampler says, what the wrong one says)
    "start one place before": ("at, drawn = -1, []", "at, drawn = 0, []"),
    "every gap is at least 1": ("max(1, math.ceil(math.log(u)/math.log1p(-q)))",
                                "math.floor(math.log(u)/math.log1p(-q))"),
    "ignore `generator`": (", generator=generator)", ")"),
    "it repeats itself": ("    at, drawn =", "    generator = torch.Generator().manual_seed("
                          "generator.initial_seed())\n    at, drawn ="),
    "-q is near that for a tiny q only": ("math.log1p(-q)", "(-q)"),
    "an index of n or more": ("        if at >= n:\n            return torch.tensor(drawn, "
                              "dtype=torch.int64)\n        drawn.append(at)\n",
                              "        drawn.append(at)\n        if at >= n:\n"
                              "            return torch.tensor(drawn, dtype=torch.int64)\n"),
}
WRONG["check_poisson_by_jumps"] = {words: JUMPS.replace(*edit) for words, edit in EDITS.items()}
WRONG["check_poisson_by_jumps"] |= {
    "a coin for everybody": "lambda n, q, g: (torch.rand(n, generator=g) < q).nonzero().flatten()",
    "no size is fixed":
        "lambda n, q, g: torch.randperm(n, generator=g)[:round(n*q)].sort().values"}
SLOW = {"check_fair_coins", "check_poisson_by_jumps"}  # thousands of calls each
