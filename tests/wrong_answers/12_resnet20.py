"Wrong answers to the exercises of 12_resnet20: check -> words of the diagnosis -> code."
EPS = ("lambda r: [epsilon(q=r[0]['plan']['batch_size']/r[0]['plan']['n'],"
       " sigma=r[0]['plan']['sigma'], delta=r[0]['plan']['delta'], steps={steps})"
       " for line in r if line['kind'] == 'epoch']")
JUDGE = '''def compare(old, new):
    before, after = ([method({seed}) for seed in range({runs})] for method in (old, new))
    gap = statistics.mean(after) - statistics.mean(before)
    if abs(gap) < {most}:
        return "cannot tell"
    return "better" if {right} else "worse"
'''


def judged(seed="seed", runs=12, most="stats.t.isf(.025, 22)*(statistics.variance(before)/12"
           " + statistics.variance(after)/12)**.5", right="gap > 0"):
    return JUDGE.format(seed=seed, runs=runs, most=most, right=right)


WRONG = {
    "check_eps_of_rows": {
        "what the rows claim": "lambda r: [row['eps'] for row in r if row['kind'] == 'epoch']",
        "straight line": "lambda r: [epsilon(q=r[0]['plan']['batch_size']/r[0]['plan']['n'],"
                         " sigma=r[0]['plan']['sigma'], delta=r[0]['plan']['delta'],"
                         " steps=r[0]['plan']['steps'])*row['step']/r[0]['plan']['steps']"
                         " for row in r if row['kind'] == 'epoch']",
        "not epochs": EPS.format(steps="int(line['epoch'])"),
        "eps of the whole plan": EPS.format(steps="r[0]['plan']['steps']")},
    "check_predict_seconds": {
        "slow only once": "lambda t, n, k, s: statistics.median(t)*n + k*s",
        "take the median": "lambda t, n, k, s: t[0] + statistics.mean(t[1:])*(n - 1) + k*s",
        "tests take time": "lambda t, n, k, s: t[0] + statistics.median(t[1:])*(n - 1)",
        "only steps - 1": "lambda t, n, k, s: t[0] + statistics.median(t[1:])*n + k*s",
        "count it as it was": "lambda t, n, k, s: statistics.median(t[1:])*n + k*s",
        "the mean of all": "lambda t, n, k, s: statistics.mean(t)*n + k*s"},
    "check_compare": {
        "one run has no spread": "lambda old, new: 'better' if new(0) > old(0) else 'worse'",
        "same seed again": judged(seed="0", most="1e-9"),
        "two means always differ": judged(most="1e-9"),
        "your threshold is too low": judged(most=".5*statistics.stdev(before)"),
        "chance alone passes it": '''def compare(old, new):
    a, b = [old(s) for s in range(3)], [new(s) for s in range(3)]
    return "better" if min(b) > max(a) else "worse" if max(b) < min(a) else "cannot tell"
''',
        "threshold is too high": judged(most="3*statistics.stdev(before + after)"),
        "24 runs in all": judged(runs=50),
        "so few runs": "lambda old, new: 'cannot tell'",
        "the wrong way round": judged(right="gap < 0")},
}
SLOW = {"check_compare"}  # hundreds of comparisons
