"Wrong answers to the exercises of 17_audit: check -> words of the diagnosis -> code."
SAID = ("lambda: {'fir': 'replay', 'juniper': 'noise', 'olive': 'noise', 'rowan': 'sampler',"
        " 'spruce': 'sampler'} | ")
SHARE = "lambda k, n, alpha: %s"
EPS = """def eps_at_least(found, accused, trials, delta, alpha):
    def lower(k, n, alpha):
        return float(stats.beta.ppf(alpha, k, n - k + 1)) if k else 0.
    tpr = %s
    fpr = %s
    return %s
"""
TPR, FPR = "lower(found, trials, alpha/2)", "1 - lower(trials - accused, trials, alpha/2)"
LOG = "max(0., math.log((tpr - delta)/fpr)) if tpr > delta else 0."
MOVED = """def moved_by(step, examples, newcomer, bound):
    x, y = (torch.cat([old, new]) for old, new in zip(examples, newcomer))
    one, two = %s
    before, after = step(*examples, one), step(%s, two)
    return %s
"""
SEEDS = "fresh(0), fresh(0)"
LENGTH = "(flat(after['gradient']) - flat(before['gradient'])).norm().item()/bound"
MUTANT = """def my_mutant():
    def bound(grads, max_norm):
        total, norms = clip_and_add(grads, max_norm)
        columns = grads["0.weight"]
        same = (columns == columns[..., :1]).flatten(1).all(1) & columns.flatten(1).any(1)
        return {name: total[name] + %s*g[%s].sum(0) for name, g in grads.items()}, norms
    return {"bound": bound}%s, (torch.ones(%s, 8), torch.zeros(%s).long())"""
WRONG = {
    "check_verdicts": {
        "replay comes before noise": SAID + "{'fir': 'noise'}",
        "replay cancels the noise": SAID + "{'juniper': 'replay'}",
        "enters the optimizer": SAID + "{'olive': 'one run'}",
        "which batches an epoch draws": SAID + "{'rowan': 'noise'}",
        "have in common": SAID + "{'spruce': 'noise'}"},
    "check_share_at_least": {
        "that is the estimate": SHARE % "k/n",
        "upper bound": SHARE % "float(stats.beta.ppf(1 - alpha, k + 1, n - k)) if k < n else 1.",
        "one-sided": SHARE % "float(stats.beta.ppf(alpha/2, k, n - k + 1)) if k else 0.",
        "not at 1 - alpha": SHARE % "float(stats.beta.ppf(1 - alpha, k, n - k + 1)) if k else 0.",
        "second parameter": SHARE % "float(stats.beta.ppf(alpha, k, n - k)) if k else 0.",
        "Hoeffding": SHARE % "k/n - math.sqrt(math.log(1/alpha)/(2*n))",
        "Jeffreys": SHARE % "float(stats.beta.ppf(alpha, k + .5, n - k + .5))",
        "shows nothing": SHARE % "float(stats.beta.ppf(alpha, k, n - k + 1))",
        "normal approximation":
            SHARE % "k/n + stats.norm.ppf(alpha)*math.sqrt(k/n*(1 - k/n)/n)"},
    "check_eps_at_least": {
        "those are the estimates": EPS % (
            "found/trials", "accused/trials", LOG.replace("/fpr)", "/max(fpr, 1e-300))")),
        "false-positive rate is an estimate": EPS % (
            TPR, "accused/trials", LOG.replace("/fpr)", "/max(fpr, 1e-300))")),
        "true-positive rate is an estimate": EPS % ("found/trials", FPR, LOG),
        "half for each": EPS % (
            TPR.replace("alpha/2", "alpha"), FPR.replace("alpha/2", "alpha"), LOG),
        "makes eps too large": EPS % (
            TPR, "lower(accused, trials, alpha/2)", LOG.replace("/fpr)", "/max(fpr, 1e-300))")),
        "delta is missing": EPS % (TPR, FPR, "max(0., math.log(tpr/fpr)) if tpr > 0 else 0."),
        "no eps is below 0": EPS % (TPR, FPR, "math.log((tpr - delta)/fpr) if tpr > delta else 0."),
        "logarithm of the ratio": EPS % (
            TPR, FPR, "max(1., (tpr - delta)/fpr) if tpr > delta else 1.")},
    "check_moved_by": {
        "divide by it": MOVED % (SEEDS, "x, y", LENGTH.replace("/bound", "")),
        "you multiplied": MOVED % (SEEDS, "x, y", LENGTH.replace("/bound", "*bound")),
        "must be the same in both": MOVED % ("fresh(0), fresh(1)", "x, y", LENGTH),
        "a new generator": MOVED % ("[fresh(0)]*2", "x, y", LENGTH),
        "joins the others": MOVED % (SEEDS, "*newcomer", LENGTH),
        "instead of another": MOVED % (
            SEEDS, "torch.cat([examples[0][:-1], newcomer[0]]), "
            "torch.cat([examples[1][:-1], newcomer[1]])", LENGTH),
        "subtract the two vectors": MOVED % (
            SEEDS, "x, y", "abs(flat(after['gradient']).norm().item() "
            "- flat(before['gradient']).norm().item())/bound"),
        "flat puts them": MOVED % (
            SEEDS, "x, y", "max((after['gradient'][n] - before['gradient'][n]).norm().item() "
            "for n in before['gradient'])/bound"),
        "sum of absolute values": MOVED % (SEEDS, "x, y", LENGTH.replace("norm()", "abs().sum()"))},
    "check_survivor": {
        "made-up newcomers": MUTANT % (100, "norms > 0", "", 1, 1),
        "harmless": MUTANT % (0, "same", "", 1, 1),
        "one example": MUTANT % (100, "same", "", 2, 2),
        "leave the noise alone": MUTANT % (100, "same", " | MUTANTS['hazel'].changes", 1, 1)},
}
SLOW = {"check_survivor"}
WRONG["check_moved_by"] |= {
    "on the newcomer alone": "lambda s, d, z, b: flat(s(*z, fresh(0))['gradient']).norm()/b"}
