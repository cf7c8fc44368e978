"Wrong answers to the exercises of 13_resnet20: check -> words of the diagnosis -> code."
EPS = ("lambda r: [epsilon(q=r[0]['plan']['batch_size']/r[0]['plan']['n'],"
       " sigma=r[0]['plan']['sigma'], delta=r[0]['plan']['delta'], steps={steps})"
       " for line in r if line['kind'] == 'epoch']")
LOOP = '''def private_loop(run, steps):
    plan = run.plan
    for _ in range(steps):
        rows, labels = run.data.rows(poisson_indices(plan.n, plan.q, run.coins))
        total, _ = run.engine(run.model, run.loss_fn, run.data.normalize(rows), labels, run.clip)
        mean = noisy_mean(total, run.clip.std(plan.sigma), plan.batch_size, run.noise)
        for name, p in run.model.named_parameters():
            p.grad = mean[name].to(p.dtype)
        run.optimizer.step()
    return epsilon(q=plan.q, sigma=plan.sigma, steps=steps, delta=plan.delta)
'''
DRAW = "        rows, labels = run.data.rows(poisson_indices(plan.n, plan.q, run.coins))\n"
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
    "check_private_loop": {words: LOOP.replace(*edit) for words, edit in {
        "the weights have not moved": ("        run.optimizer.step()\n", ""),
        "the pixels are as they came": ("run.data.normalize(rows)", "rows"),
        "number that came": ("plan.batch_size", "max(1, len(rows))"),
        "that is the sum": ("plan.batch_size", "1"),
        "nobody was clipped": ("labels, run.clip)", "labels, FlatClip(1e30))"),
        "draw inside of the loop": (
            "    for _ in range(steps):\n" + DRAW,
            DRAW[4:] + "    for _ in range(steps):\n"),
        "replace them, don't add": ("p.grad = mean[name].to(p.dtype)",
                                    "p.grad = mean[name] + (0 if p.grad is None else p.grad)"),
        "not in it": ("    return eps", "        return eps"),
        "a generator each": ("run.coins", "run.noise"),
        "draw with poisson_indices": ("poisson_indices(plan.n, plan.q, run.coins)",
                                      "torch.randperm(plan.n, generator=run.coins)[:18]"),
        "that is the whole plan": ("steps=steps", "steps=plan.steps"),
        "that is one step": ("steps=steps", "steps=1"),
        "step by step": ("return epsilon(q=plan.q, sigma=plan.sigma, steps=steps",
                         "return steps*epsilon(q=plan.q, sigma=plan.sigma, steps=1"),
        "not sigma": ("run.clip.std(plan.sigma)", "plan.sigma"),
        "draws noise of its own": (
            "    for _ in range(steps):\n",
            "    state = run.noise.get_state()\n    for _ in range(steps):\n"
            "        run.noise.set_state(state)\n"),
        "nobody came": ("        total, _", "        if not len(rows):\n            continue\n"
                        "        total, _")}.items()},
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
WRONG["check_private_loop"] |= {
    "noise is drawn from run.noise": LOOP.replace("run.noise", "run.coins")}
