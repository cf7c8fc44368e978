"Wrong answers to the exercises of 12_views: check -> words of the diagnosis -> code."
SHORT = "(%s*(c/%s.norm(dim=-1, keepdim=True)).clamp(max=1))"
EACH, MEAN = SHORT % ("g", "g"), SHORT % ("g.mean(1)", "g.mean(1)")
NOISES = '''def mean_noises(n, batch_size, steps, eps, delta, k):
    def sigma(b, t):
        return PrivacyPlan(n=n, batch_size=b, steps=t, eps=eps, delta=delta).sigma
    return {"views": sigma(batch_size, steps)/batch_size,
            "batch": sigma(k*batch_size, steps)/(k*batch_size),
            "steps": sigma(batch_size, k*steps)/batch_size}
'''
EDITS = {
    "sigma stays what it was": ('"views": sigma(batch_size, steps)',
                                '"views": sigma(batch_size, k*steps)'),
    "averaged inside one person": ('"views": sigma(batch_size, steps)',
                                   '"views": 1/k*sigma(batch_size, steps)'),
    "a larger batch draws everybody": ("sigma(k*batch_size, steps)", "sigma(batch_size, steps)"),
    "the sum of the larger batch": ("/(k*batch_size)", "/batch_size"),
    "so sigma must grow": ("sigma(batch_size, k*steps)", "sigma(batch_size, steps)"),
    "nothing is divided by k": ("k*steps)/batch_size", "k*steps)/(k*batch_size)"),
    "the noise on the sum": ("/batch_size", ""),
}
WRONG = {
    "check_clipped_views": {
        "by k C": f"lambda g, c: {EACH}.sum((0, 1))",
        "private, but": f"lambda g, c: {EACH}.mean(1).sum(0)",
        "averaged, not added": f"lambda g, c: {SHORT % ('g.sum(1)', 'g.sum(1)')}.sum(0)",
        "the mean over people": f"lambda g, c: {MEAN}.mean(0)",
        "by sqrt(k) C": "lambda g, c: (g*(c/g.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None])"
                        ".sum((0, 1))",
        "nobody was clipped": "lambda g, c: g.mean(1).sum(0)"},
    "check_naive_epsilon": {
        "no further steps": "lambda q, s, t, d, k: epsilon(q=q, sigma=s, steps=t*k, delta=d)",
        "in proportion": "lambda q, s, t, d, k: k*epsilon(q=q, sigma=s, steps=t, delta=d)",
        "that was promised": "lambda q, s, t, d, k: epsilon(q=q, sigma=s, steps=t, delta=d)",
        "not independently":
            "lambda q, s, t, d, k: epsilon(q=q, sigma=s/k**.5, steps=t, delta=d)"},
    "check_mean_noises": {words: NOISES.replace(*edit) for words, edit in EDITS.items()},
}
WRONG["check_mean_noises"]["the noise on the sum"] = NOISES.replace("/batch_size", "").replace(
    "/(k*batch_size)", "")
SLOW = {"check_naive_epsilon", "check_mean_noises"}
WRONG["check_naive_epsilon"] |= {
    "not sigma*k": "lambda q, sigma, steps, delta, k: epsilon(q=q, sigma=sigma*k, steps=steps,"
                   " delta=delta)"}
WRONG["check_clipped_views"] |= {
    "averaged over the people": "lambda g, c: (g.mean(0)*(c/g.mean(0).norm(dim=1, keepdim=True))"
                                ".clamp(max=1)).sum(0)",
    "add them up": "lambda g, c: g.mean(1)*(c/g.mean(1).norm(dim=1, keepdim=True)).clamp(max=1)"}
PART = '''def common_part(grads, directions, max_norm):
    def shorter(g, bound):
        return g*(bound/g.norm(dim=-1, keepdim=True)).clamp(max=1)
    k = grads.shape[1]
    ways = {"each": shorter(grads, max_norm/k).sum(1), "mean": shorter(grads.mean(1), max_norm)}
    return {way: (g*directions).sum(1).mean()/max_norm for way, g in ways.items()}
'''
WRONG["check_common_part"] = {words: PART.replace(*edit) for words, edit in {
    "clip to C/k": ("max_norm/k", "max_norm"),
    "added up, not averaged": ("max_norm/k).sum(1)", "max_norm/k).mean(1)"),
    "not their sum": ("sum(1).mean()", "sum(1).sum()"),
    "the mean was not clipped": ("shorter(grads.mean(1), max_norm)", "grads.mean(1)"),
    "the factor is at most 1": (".clamp(max=1)", ""),
    "the inner product": ("(g*directions).sum(1)", "g.norm(dim=1)"),
    "a share of C": (".mean()/max_norm", ".mean()")}.items()}
