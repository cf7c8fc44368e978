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
    "check_best_of": {
        "root of 2 log k": "lambda k, std: std*math.sqrt(2*math.log(k))",
        "the median of the largest": "lambda k, std: std*stats.norm.ppf(.5**(1/k))",
        "proportional to the spread":
            "lambda k, std: stats.norm.expect(lambda x: x*k*stats.norm.cdf(x)**(k - 1))",
        "no density": "lambda k, std: std*stats.norm.expect("
                      "lambda x: x*stats.norm.cdf(x)**(k - 1))"},
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
