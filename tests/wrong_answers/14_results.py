"Wrong answers to the exercises of 14_results: check -> words of the diagnosis -> code."
ROW = '''def row(records):
    kept = {{}}
    for i, run in enumerate(records):
        if {counts}:
            kept.setdefault({key}, {pick})
    values = list(kept.values())
    mean, std = mean_std(values)
    return mean, {std}, len(values)
'''


def made(counts="run['finished'] and run['split'] == 'test'", key="run['seed']",
         pick="run['accuracies'][-1]", std="std"):
    return ROW.format(counts=counts, key=key, pick=pick, std=std)


NU = "(v_a + v_b)**2/(v_a**2/(len(a) - 1) + v_b**2/(len(b) - 1))"
WELCH = f'''def welch(a, b):
    v_a, v_b = np.var(a, ddof=1)/len(a), np.var(b, ddof=1)/len(b)
    nu = {NU}
    reach = stats.t.ppf(.975, nu)*(v_a + v_b)**.5
    gap = np.mean(b) - np.mean(a)
    return gap - reach, gap + reach
'''


def edited(old, new):
    assert old in WELCH
    return WELCH.replace(old, new)


COST = "epsilon(q=plan.q, sigma=plan.sigma, delta=plan.delta, steps={})"
WRONG = {
    "check_row": {
        "that is the best epoch": made(pick="max(run['accuracies'])"),
        "the same seed twice": made(key="i"),
        "cut short is no result": made(counts="run['split'] == 'test'"),
        "validation split is not": made(counts="run['finished']"),
        "divides by n: the sample": made(std="np.std(values) if len(values) > 1 else math.nan"),
        "the error of the mean": made(std="std/len(values)**.5"),
        "one run has no spread": made(std="std if len(values) > 1 else 0.")},
    "check_welch": {
        "that is a minus b": edited("np.mean(b) - np.mean(a)", "np.mean(a) - np.mean(b)"),
        "divides by n - 1": edited("ddof=1", "ddof=0"),
        "keeps the two variances apart":
            "lambda a, b: tuple(stats.ttest_ind(b, a).confidence_interval(.95))",
        "not n + m - 2": edited(NU, "len(a) + len(b) - 2"),
        "of a normal distribution": edited("stats.t.ppf(.975, nu)", "stats.norm.ppf(.975)"),
        "the quantile at .975": edited(".975", ".95"),
        "the root of v_a + v_b": edited("(v_a + v_b)**.5", "(v_a + v_b)"),
        "divided by its number of runs": edited("/len(a), ", ", ").replace(
            "np.var(b, ddof=1)/len(b)", "np.var(b, ddof=1)"),
        "two standard errors": edited("stats.t.ppf(.975, nu)", "2")},
    "check_search_cost": {
        "the final run is published too":
            f"lambda plan, tried: {COST.format('tried*plan.steps')} if tried else 0.",
        "add up run by run": f"lambda plan, tried: (tried + 1)*{COST.format('plan.steps')}",
        "root of the number of runs":
            f"lambda plan, tried: (tried + 1)**.5*{COST.format('plan.steps')}",
        "that is one run": f"lambda plan, tried: {COST.format('plan.steps')}",
        "that is RDP": "lambda plan, tried: epsilon(q=plan.q, sigma=plan.sigma, delta=plan.delta,"
                       " steps=(tried + 1)*plan.steps, accountant=RDPAccountant)"},
}
