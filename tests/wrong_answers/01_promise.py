"Wrong answers to the exercises of 01_promise: check -> words of the diagnosis -> code."
WRONG = {
    "check_coin_answers": {
        "right half of the time": "lambda b, e, g: torch.where(torch.rand(b.shape, generator=g) <"
            " 1/(1 + math.exp(e)), torch.randint(0, 2, b.shape, generator=g), b)",
        "the lie is the rarer answer": "lambda b, e, g: torch.where("
            "torch.rand(b.shape, generator=g) < 1/(1 + math.exp(-e)), 1 - b, b)",
        "truth and lie add up to 1": "lambda b, e, g: torch.where("
            "torch.rand(b.shape, generator=g) < math.exp(-e), 1 - b, b)",
        "not eps times": "lambda b, e, g: torch.where("
            "torch.rand(b.shape, generator=g) < 1/(1 + e), 1 - b, b)",
        "nobody ever lies": "lambda b, e, g: b",
        "everybody lies": "lambda b, e, g: 1 - b",
        "whatever eps is": "lambda b, e, g: torch.randint(0, 2, b.shape, generator=g)",
        "every answer is a bit": "lambda b, e, g: b + (torch.rand(b.shape, generator=g)"
            " < 1/(1 + math.exp(e)))",
        "one random number for each bit": "lambda b, e, g: torch.where("
            "torch.rand((), generator=g) < 1/(1 + math.exp(e)), 1 - b, b)",
        "pass generator=generator": "lambda b, e, g: torch.where("
            "torch.rand(b.shape) < 1/(1 + math.exp(e)), 1 - b, b)"},
    "check_sum_moves": {
        "not always twice": "lambda a, b: (max(abs(a), abs(b)), 2*max(abs(a), abs(b)))",
        "her whole value": "lambda a, b: (b - a, b - a)",
        "lower end": "lambda a, b: (abs(b), b - a)",
        "in this order": "lambda a, b: (b - a, max(abs(a), abs(b)))",
        "a distance has no sign": "lambda a, b: (b, b - a)",
        "not by their sum": "lambda a, b: (max(abs(a), abs(b)), abs(a) + abs(b))",
        "start in the middle": "lambda a, b: ((b - a)/2, b - a)",
        "never negative": "lambda a, b: (max(abs(a), abs(b)), a - b)",
        "difference of their sizes": "lambda a, b: (max(abs(a), abs(b)), abs(abs(b) - abs(a)))",
        "farther than the larger end": "lambda a, b: (max(abs(a), abs(b)),)*2"},
    "check_laplace_noise": {
        "Gaussian noise of standard deviation": "lambda x, s, e, g: x + s/e*torch.randn("
            "x.shape, generator=g)",
        "upside down": "lambda x, s, e, g: x + e/s*(lambda n: n[0] - n[1])("
            "torch.empty(2, *x.shape).exponential_(generator=g))",
        "divide by eps": "lambda x, s, e, g: x + s*e*(lambda n: n[0] - n[1])("
            "torch.empty(2, *x.shape).exponential_(generator=g))",
        "eps is missing": "lambda x, s, e, g: x + s*(lambda n: n[0] - n[1])("
            "torch.empty(2, *x.shape).exponential_(generator=g))",
        "the sensitivity is missing": "lambda x, s, e, g: x + 1/e*(lambda n: n[0] - n[1])("
            "torch.empty(2, *x.shape).exponential_(generator=g))",
        "take the difference of two":
            "lambda x, s, e, g: x + s/e*torch.empty(x.shape).exponential_(generator=g)",
        "another shape": "lambda x, s, e, g: x + 1.2533*s/e*torch.randn(x.shape, generator=g)",
        "there is no noise": "lambda x, s, e, g: x",
        "noise of its own": "lambda x, s, e, g: x + s/e*(lambda n: n[0] - n[1])("
            "torch.empty(2).exponential_(generator=g))"},
    "check_allowed": {
        "swap the roles": "lambda f, e: math.exp(e)*f",
        "a rate is at most 1": "lambda f, e: (math.exp(e)*f).clamp(max=1)",
        "the first inequality is missing": "lambda f, e: 1 - math.exp(-e)*(1 - f)",
        "the smaller number": "lambda f, e: torch.maximum(math.exp(e)*f, 1 - math.exp(-e)*(1 - f))",
        "divide by e^eps": "lambda f, e: torch.minimum(math.exp(e)*f, 1 - math.exp(e)*(1 - f))",
        "a blind guess": "lambda f, e: f"}
}
WRONG["check_allowed"] |= {
    "take one truth": "lambda f, e: min(math.exp(e)*f, 1 - math.exp(-e)*(1 - f))"}
