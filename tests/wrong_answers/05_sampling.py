"Wrong answers to the exercises of 05_sampling: check -> words of the diagnosis -> code."
RDP = '''def sampled_rdp(q, sigma, order):
    terms = [math.comb(order, k)*(1 - q)**(order - k)*q**k*math.exp(k*(k - 1)/(2*sigma**2))
             for k in range(order + 1)]
    return math.log(sum(terms))/(order - 1)
'''
WRONG = {
    "check_poisson_batch": {
        "torch.rand is float32": "lambda n, q, g: (torch.rand(n, generator=g) < q)"
            ".nonzero().flatten()",
        "no size is fixed": "lambda n, q, g: torch.randperm(n, generator=g)[:round(n*q)]"
            ".sort().values",
        "with replacement": "lambda n, q, g: torch.randint(n, (round(n*q),), generator=g)"
            ".sort().values",
        "those are marks": "lambda n, q, g: torch.rand(n, dtype=torch.float64, generator=g) < q",
        "indices in one row": "lambda n, q, g: (torch.rand(n, dtype=torch.float64, generator=g)"
            " < q).nonzero()",
        "with probability q": "lambda n, q, g: (torch.rand(n, dtype=torch.float64, generator=g)"
            " > q).nonzero().flatten()",
        "ignore `generator`": "lambda n, q, g: (torch.rand(n, dtype=torch.float64) < q)"
            ".nonzero().flatten()",
        "it repeats itself": "lambda n, q, g: (torch.rand(n, dtype=torch.float64, generator="
            "torch.Generator().manual_seed(g.initial_seed())) < q).nonzero().flatten()",
        "a batch may be empty": "lambda n, q, g: (lambda u: (u < q).nonzero().flatten() if "
            "(u < q).any() or not q else u.argmin()[None])(torch.rand(n, dtype=torch.float64, "
            "generator=g))",
        "example 0 never comes": "lambda n, q, g: 1 + (torch.rand(max(0, n - 1), "
            "dtype=torch.float64, generator=g) < q).nonzero().flatten()",
        "in the order of the data": "lambda n, q, g: (torch.rand(n, dtype=torch.float64, "
            "generator=g) < q).nonzero().flatten().flip(0)"},
    "check_sampled_rdp": {words: RDP.replace(*edit) for words, edit in {
        "divide the logarithm": ("/(order - 1)", ""),
        "those whose coin shows tails": ("*(1 - q)**(order - k)", ""),
        "a factor 1/2 is missing": ("/(2*sigma**2)", "/sigma**2"),
        "not k^2": ("k*(k - 1)/", "k**2/"),
        "the variance of the noise": ("sigma**2", "sigma"),
        "binomial coefficients are missing": ("math.comb(order, k)*", ""),
        "the last one, k = order": ("range(order + 1)", "range(order)"),
        "the sum starts at k = 0": ("range(order + 1)", "range(1, order + 1)"),
        "have them the other way round": ("(1 - q)**(order - k)*q**k", "(1 - q)**k*q**(order - k)"),
        "is not a factor q": (RDP, "lambda q, s, a: q*a/(2*s*s)"),
        "only nearly": (RDP, "lambda q, s, a: q*q*a/(2*s*s)"),
        "without a coin": (RDP, "lambda q, s, a: a/(2*s*s)")}.items()},
    "check_caught": {
        "no sum exceeds c": "lambda c, m, s, t: special.ndtr((c - m)/s)*special.ndtr(c/s)**(t - 1)",
        "have not": "lambda c, m, s, t: 1 - special.ndtr((c - m)/s)*special.ndtr(c/s)**t",
        "only one of the sums": "lambda c, m, s, t: 1 - special.ndtr((c - m)/s)**t",
        "one of the sums is shifted": "lambda c, m, s, t: 1 - special.ndtr(c/s)**t",
        "the shifted sum alone": "lambda c, m, s, t: 1 - special.ndtr((c - m)/s)",
        "multiply the probabilities": "lambda c, m, s, t: special.ndtr((m - c)/s)"
            " + (t - 1)*special.ndtr(-c/s)",
        "that of the standard normal": "lambda c, m, s, t: 1 - special.ndtr(c - m)"
            "*special.ndtr(c)**(t - 1)"},
    "check_fair_coins": {
        "accuse everybody": "lambda x, q: False",
        "in the next batch": "lambda x, q: bool((x.double().mean() - q).abs() < .012"
                         " and .7 < x.double().sum(1).var()/(x.shape[1]*q*(1 - q)) < 1.35 and ("
                         "x.double().sum(0) - len(x)*q).abs().max() < 5*(len(x)*q*(1 - q))**.5)",
        "how much the sizes vary": "lambda x, q: bool((x.double().mean() - q).abs() < .012)",
        "sixty chances": "lambda x, q: bool(((x.double().mean(0) - q).abs()"
                         " < 2*(q*(1 - q)/len(x))**.5).all())",
        "everybody's own": "lambda x, q: bool((x.double().mean() - q).abs() < .012"
                           " and x.double().sum(1).var() > 5)",
        "the last one too": "lambda x, q: bool((x.double().mean() - q).abs() < .012"
                            " and x.double().sum(1).var() > 5 and x[:, 0].any())"},
    "check_safe_epsilon": {
        "not sigma/epochs": "lambda s, e, d: gaussian_epsilon(d, s/e)",
        "1 % is allowed": "lambda s, e, d: 1.06*gaussian_epsilon(d, s/e**.5)",
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
    "u has 24 bits": (".rand((), dtype=torch.float64, ", ".rand((), "),
    "its log is 0": ("math.log1p(-q)", "math.log(1 - q)"),
    "an index of n or more": ("        if at >= n:\n            return torch.tensor(drawn, "
                              "dtype=torch.int64)\n        drawn.append(at)\n",
                              "        drawn.append(at)\n        if at >= n:\n"
                              "            return torch.tensor(drawn, dtype=torch.int64)\n"),
}
WRONG["check_poisson_by_jumps"] = {words: JUMPS.replace(*edit) for words, edit in EDITS.items()}
WRONG["check_poisson_by_jumps"]["most examples can never"] = JUMPS.replace(
    ".rand((), dtype=torch.float64, ", ".rand((), ").replace("log1p(-q)", "log(1 - q)")
WRONG["check_poisson_by_jumps"] |= {
    "a coin for everybody": "lambda n, q, g: (torch.rand(n, generator=g) < q).nonzero().flatten()",
    "no size is fixed":
        "lambda n, q, g: torch.randperm(n, generator=g)[:round(n*q)].sort().values"}
SLOW = {"check_fair_coins", "check_poisson_by_jumps"}  # thousands of calls each
