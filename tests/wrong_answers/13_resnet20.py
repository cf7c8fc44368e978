"Wrong answers to the exercises of 13_resnet20: check -> words of the diagnosis -> code."
EPS = ("lambda r: [epsilon(q=r[0]['plan']['batch_size']/r[0]['plan']['n'],"
       " sigma=r[0]['plan']['sigma'], delta=r[0]['plan']['delta'], steps={steps})"
       " for line in r if line['kind'] == 'epoch']")
RIGHT = "min(max(1, 1 + int((s - t[0])//statistics.median(t[1:]))), p.steps)"
CUT = "lambda p, t, s: epsilon(q=p.q, sigma=p.sigma, delta=p.delta, steps={steps})"
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
        "not always 1e-6": EPS.format(steps="line['step']").replace(
            "r[0]['plan']['delta']", "1e-6"),
        "take it from there": EPS.format(steps="line['step']").replace(
            "r[0]['plan']['delta']", "1e-5"),
        "from the first to the last": EPS.format(steps="line['step']") + "[::-1]",
        "not epochs": EPS.format(steps="int(line['epoch'])"),
        "eps of the whole plan": EPS.format(steps="r[0]['plan']['steps']")},
    "check_eps_when_cut": {
        "no more are taken": CUT.format(steps=RIGHT.replace(", p.steps", ", 10**6")),
        "always taken": "lambda p, t, s: " + CUT[16:].format(steps=RIGHT) + " if s > t[0] else 0.",
        "grows like the root": "lambda p, t, s: p.eps*" + RIGHT + "/p.steps",
        "only the steps that were taken": CUT.format(steps="p.steps"),
        "take the median": CUT.format(steps=RIGHT.replace("median", "mean")),
        "slow only once": CUT.format(steps=RIGHT.replace("t[1:]", "t")),
        "it happens": CUT.format(steps=RIGHT.replace("t[0]", "statistics.median(t[1:])")),
        "one of the steps, too": CUT.format(steps=RIGHT.replace("1 + int", "int")),
        "round down": CUT.format(steps=RIGHT.replace("1 + int", "2 + int"))},
    "check_compare": {
        "one run has no spread": "lambda old, new: 'better' if new(0) > old(0) else 'worse'",
        "without a single run": "lambda old, new: 'better'",
        "only one of the two": "lambda old, new: 'better' if new(0) > 70 else 'worse'",
        "a fixed number of points": judged(most=".7"),
        "same seed again": judged(seed="0", most="1e-9"),
        "two numbers always differ": judged(most="1e-9"),
        "your threshold is too low": judged(most=".5*statistics.stdev(before)"),
        "chance alone passes it": '''def compare(old, new):
    a, b = [old(s) for s in range(3)], [new(s) for s in range(3)]
    return "better" if min(b) > max(a) else "worse" if max(b) < min(a) else "cannot tell"
''',
        "threshold is too high": judged(most="3*statistics.stdev(before + after)"),
        "24 runs in all": judged(runs=50),
        "so few runs": judged(runs=2, most="12*statistics.stdev(before + after)"),
        "a change may also do harm": judged().replace('"worse"', '"cannot tell"'),
        "the wrong way round": judged(right="gap < 0")},
}
SLOW = {"check_compare"}  # hundreds of comparisons
