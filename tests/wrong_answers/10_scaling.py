"Wrong answers to the exercises of 10_scaling: check -> words of the diagnosis -> code."
BATCH = '''def smallest_batch(n, eps, delta, epochs, wanted):
    goal = wanted*snr_ceiling(n, eps=eps, delta=delta)
    b = 128
    while sigma_table(n, [b], eps=eps, delta=delta, epochs=epochs)[0]["snr"] < goal:
        b *= 2
    return b
'''
ADVISE = '''def advise(n, eps, delta, lr, batch_size, steps, factor):
    def row(b, t):
        return sigma_table(n, [b], eps=eps, delta=delta, steps=t)[0]
    def run(r):
        return r["batch_size"], r["steps"], r["sigma"]
    powers = [2**i for i in range(factor.bit_length()) if batch_size*2**i <= n]
    tries = [row(batch_size*k, steps*factor//k) for k in powers]
    most = max(r["snr"] for r in tries)
    best = next(r for r in tries if r["snr"] >= .97*most)
    old = run(row(batch_size, steps))
    return best["batch_size"], best["steps"], matched_lr(lr, old, run(best))
'''
ENOUGH = '''def enough_steps(found):
    best = max(found, key=lambda t: found[t].mean())
    def error(t):
        return (found[t].var()/len(found[t]) + found[best].var()/len(found[best]))**.5
    return min(t for t in found if found[best].mean() - found[t].mean() <= 2*error(t))
'''
WRONG = {
    "check_crossover": {
        "square both sides": "lambda m, s, d: s*(d/m)**.5",
        "its square is d": "lambda m, s, d: s**2/m",
        "is a square already": "lambda m, s, d: s**2*d/m**2"},
    "check_smallest_batch": {
        "one step too far": BATCH.replace("return b", "return 2*b"),
        "one step too early": BATCH.replace("return b", "return b//2"),
        "begin at 128": BATCH.replace("b = 128", "b = 64")},
    "check_advise": {
        "the rate must move": ADVISE.replace("matched_lr(lr, old, run(best))", "lr"),
        "interchanged": ADVISE.replace("old, run(best)", "run(best), old"),
        "all into the batch": ADVISE.replace("next(r for r in tries if r[\"snr\"] >= .97*most)",
                                             "tries[-1]"),
        "all into the steps": ADVISE.replace("next(r for r in tries if r[\"snr\"] >= .97*most)",
                                             "tries[0]"),
        "made for mini-batch noise": ADVISE.replace(
            "matched_lr(lr, old, run(best))", 'lr*best["batch_size"]/batch_size')},
    "check_enough_steps": {
        "not medians": ENOUGH.replace(".mean()", ".median()"),
        "that is the best mean": "lambda found: max(found, key=lambda t: found[t].mean())",
        "spreads by std/sqrt(n)": ENOUGH.replace("/len(found[t])", "").replace("/len(found[best])",
                                                                               ""),
        "add the variances of both": ENOUGH.replace(" + found[best].var()/len(found[best])", ""),
        "a number of runs of its own": ENOUGH.replace(
            "found[t].var()/len(found[t]) + found[best].var()/len(found[best])",
            "2*found[best].var()/3"),
        "use len": ENOUGH.replace("len(found[t])", "3").replace("len(found[best])", "3"),
        "look at all": '''def enough_steps(found):
    best = first = max(found, key=lambda t: found[t].mean())
    for t in sorted((t for t in found if t < best), reverse=True):
        error = (found[t].var()/len(found[t]) + found[best].var()/len(found[best]))**.5
        if found[best].mean() - found[t].mean() > 2*error:
            return first
        first = t
    return first
''',
        "not one": ENOUGH.replace("2*error", "error"),
        "not with the last T": ENOUGH.replace("max(found, key=lambda t: found[t].mean())",
                                              "max(found)")},
}
SLOW = {"check_advise", "check_smallest_batch"}  # an accountant's search for every answer
