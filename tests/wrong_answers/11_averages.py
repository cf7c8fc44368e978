"Wrong answers to the exercises of 11_averages: check -> words of the diagnosis -> code."
EMA = '''def warm_ema(iterates, decay):
    average = iterates[0]
    for t, w in enumerate(iterates[1:], 1):
        d = min(decay, (1 + t)/(10 + t))
        average = d*average + (1 - d)*w
    return average
'''
EDITS = {
    "no warm-up": ("min(decay, (1 + t)/(10 + t))", "decay"),
    "min, not max": ("min(", "max("),
    "the share of the old average": ("d*average + (1 - d)*w", "(1 - d)*average + d*w"),
    "t counts the iterates": ("iterates[1:], 1)", "iterates[1:])"),
    "t = 1, not 2": ("iterates[1:], 1)", "iterates[1:], 2)"),
}
SHORT = "(%s*(c/%s.norm(dim=-1, keepdim=True)).clamp(max=1))"
EACH, MEAN = SHORT % ("g", "g"), SHORT % ("g.mean(1)", "g.mean(1)")
WRONG = {
    "check_warm_ema": {words: EMA.replace(*edit) for words, edit in EDITS.items()},
    "check_clipped_views": {
        "by k C": f"lambda g, c: {EACH}.sum((0, 1))",
        "sound, but": f"lambda g, c: {EACH}.mean(1).sum(0)",
        "averaged, not added": f"lambda g, c: {SHORT % ('g.sum(1)', 'g.sum(1)')}.sum(0)",
        "the mean over people": f"lambda g, c: {MEAN}.mean(0)",
        "nobody was clipped": "lambda g, c: g.mean(1).sum(0)"},
    "check_naive_epsilon": {
        "no further steps": "lambda q, s, t, d, k: epsilon(q=q, sigma=s, steps=t, delta=d)",
        "in proportion": "lambda q, s, t, d, k: k*epsilon(q=q, sigma=s, steps=t, delta=d)",
        "not independently":
            "lambda q, s, t, d, k: epsilon(q=q, sigma=s/k**.5, steps=t, delta=d)"},
    "check_clearly_better": {
        "always finds a winner": "lambda a, b: bool(a.mean() > b.mean())",
        "subtract seed by seed":
            "lambda a, b: bool(a.mean() - b.mean() > 2*((a.var() + b.var())/len(a))**.5)",
        "the spread of one difference":
            "lambda a, b: bool((a - b).mean() > 2*(a - b).std())",
        "one time in six": "lambda a, b: bool((a - b).mean() > (a - b).std()/len(a)**.5)",
        "learns nothing": "lambda a, b: False",
        "a fixed number of points": "lambda a, b: bool((a - b).mean() > 1)",
        "keep the sign":
            "lambda a, b: bool((a - b).mean().abs() > 2.4*(a - b).std()/len(a)**.5)"},
}
WRONG["check_clipped_views"]["by sqrt(k) C"] = (
    "lambda g, c: (g*(c/g.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None]).sum((0, 1))")
WRONG["check_warm_ema"]["the plain mean"] = "lambda iterates, decay: iterates.mean(0)"
SLOW = {"check_naive_epsilon", "check_clearly_better"}
