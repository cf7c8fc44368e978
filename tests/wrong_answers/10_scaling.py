"Wrong answers to the exercises of 10_scaling: check -> words of the diagnosis -> code."
NOISES = '''def step_noises(batch_size, n, mean_square, std, parameters):
    sampling = math.sqrt((1 - batch_size/n)*mean_square/batch_size)
    return sampling, std*math.sqrt(parameters)/batch_size
'''
BATCH = '''def smallest_batch(n, eps, delta, epochs, wanted):
    goal = wanted*snr_ceiling(n, eps=eps, delta=delta)
    b = 128
    while sigma_table(n, [b], eps=eps, delta=delta, epochs=epochs)[0]["snr"] < goal:
        b *= 2
    return b
'''
MATCHED = '''def matched_rate(lr, old, new):
    def moved(batch_size, steps, sigma):
        return math.sqrt(steps)*sigma/batch_size
    return lr*moved(*old)/moved(*new)
'''
POINTS = '''def points_lost(tried, lr):
    nearest = min(tried, key=lambda rate: abs(math.log(rate/lr)))
    return max(tried.values()) - tried[nearest]
'''
WRONG = {
    "check_step_noises": {
        "1 - q is missing": NOISES.replace("(1 - batch_size/n)*", ""),
        "the factor is 1 - q": NOISES.replace("(1 - batch_size/n)", "batch_size/n"),
        "what is left of it": NOISES.replace("(1 - batch_size/n)",
                                             "batch_size/n*(1 - batch_size/n)"),
        "the root of the first expression is missing": NOISES.replace("math.sqrt((", "((", 1),
        "is a square already": NOISES.replace("mean_square/", "mean_square**2/"),
        "like 1/sqrt(B), the noise": NOISES.replace("(parameters)/batch_size",
                                                    "(parameters/batch_size)"),
        "under the root, not outside": NOISES.replace("*mean_square/batch_size)",
                                                      "*mean_square)/batch_size"),
        "noise of one coordinate": NOISES.replace("*math.sqrt(parameters)", ""),
        "not d times": NOISES.replace("math.sqrt(parameters)", "parameters"),
        "that is the noise on the sum": NOISES.replace("(parameters)/batch_size", "(parameters)"),
        "has C in it already": NOISES.replace("math.sqrt(parameters)",
                                              "math.sqrt(mean_square*parameters)"),
        "and then the DP noise": NOISES.replace(
            "sampling, std*math.sqrt(parameters)/batch_size",
            "std*math.sqrt(parameters)/batch_size, sampling")},
    "check_crossover": {
        "square both sides": "lambda m, s, d: s*(d/m)**.5",
        "its square is d": "lambda m, s, d: s**2/m",
        "is a square already": "lambda m, s, d: s**2*d/m**2"},
    "check_run_snr": {
        "with the root": "lambda B, T, s: T*B/s",
        "T is missing": "lambda B, T, s: B/s",
        "more steps help": "lambda B, T, s: B/(s*math.sqrt(T))",
        "B as it is": "lambda B, T, s: math.sqrt(B*T)/s",
        "divide by sigma": "lambda B, T, s: math.sqrt(T)*B*s",
        "turn it over": "lambda B, T, s: s/B/math.sqrt(T)",
        "not squared": "lambda B, T, s: math.sqrt(T)*B/s**2",
        "the square of S": "lambda B, T, s: T*(B/s)**2"},
    "check_smallest_batch": {
        "one step too far": BATCH.replace("return b", "return 2*b"),
        "one step too early": BATCH.replace("return b", "return b//2"),
        "begin at 128": BATCH.replace("b = 128", "b = 64")},
    "check_matched_rate": {
        "interchanged": MATCHED.replace("moved(*old)/moved(*new)", "moved(*new)/moved(*old)"),
        "the rate must move": "lambda lr, old, new: lr",
        "that is the linear rule": "lambda lr, old, new: lr*new[0]/old[0]",
        "that is the root rule": "lambda lr, old, new: lr*(new[0]/old[0])**.5",
        "not like T": MATCHED.replace("math.sqrt(steps)", "steps"),
        "the steps are missing": MATCHED.replace("math.sqrt(steps)*", ""),
        "sigma is missing": MATCHED.replace("*sigma", ""),
        "the batch is missing": MATCHED.replace("/batch_size", ""),
        "makes the noise smaller": MATCHED.replace("/batch_size", "*batch_size"),
        "that keeps lr over S": MATCHED.replace("math.sqrt(steps)*sigma", "sigma/math.sqrt(steps)"),
        "not like its root": MATCHED.replace("/batch_size", "/math.sqrt(batch_size)")},
    "check_points_lost": {
        "compare logarithms": POINTS.replace("abs(math.log(rate/lr))", "abs(rate - lr)"),
        "how far is it below the best": POINTS.replace("max(tried.values()) - ", ""),
        "subtract that of the nearest": POINTS.replace(" - tried[nearest]", ""),
        "points lost are positive": POINTS.replace("max(tried.values()) - tried[nearest]",
                                                   "tried[nearest] - max(tried.values())"),
        "its largest key": POINTS.replace("max(tried.values())", "tried[max(tried)]"),
        "that is the nearest rate": POINTS.replace("max(tried.values()) - tried[nearest]",
                                                   "nearest"),
        "a distance has no sign": POINTS.replace("abs(math.log(rate/lr))", "math.log(rate/lr)"),
        "min, not max": POINTS.replace("nearest = min", "nearest = max"),
        "not the next smaller one": POINTS.replace(
            "min(tried, key=lambda rate: abs(math.log(rate/lr)))",
            "max((rate for rate in tried if rate <= lr), default=min(tried))"),
        "not the next larger one": POINTS.replace(
            "min(tried, key=lambda rate: abs(math.log(rate/lr)))",
            "min((rate for rate in tried if rate >= lr), default=max(tried))"),
        "not a mean": POINTS.replace("max(tried.values())", "sum(tried.values())/len(tried)")},
}
SLOW = {"check_smallest_batch"}  # an accountant's search for every answer
WRONG["check_crossover"] |= {"you rounded": "lambda m, s, p: round(s**2*p/m)"}
WRONG["check_matched_rate"] |= {
    "not variances": "lambda lr, o, n: lr*(o[1]*o[2]**2/o[0]**2)/(n[1]*n[2]**2/n[0]**2)",
    "does not depend on `old`": "lambda lr, old, new: lr/(new[1]**.5*new[2]/new[0])"}
WRONG["check_points_lost"] |= {
    "not a share of the best": "lambda tried, lr: 1 - tried[min(tried, key=lambda r:"
                               " abs(math.log(r/lr)))]/max(tried.values())"}
