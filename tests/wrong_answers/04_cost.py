"Wrong answers to the exercises of 04_cost: check -> words of the diagnosis -> code."
TOTAL = '''def total_rdp(history, orders):
    total = np.zeros(len(orders))
    for q, sigma, steps in history:
        total = total + steps*rdp_sampled_gaussian(q, sigma, orders)
    return total
'''
MARKOV = '''def markov_epsilon(rdp, orders, delta):
    eps = rdp + math.log(1/delta)/(orders - 1)
    return eps.min()
'''
LEAST = '''def least_sigma(spent, eps):
    low, high = 0., 1.
    while spent(high) > eps:
        low, high = high, 2*high
    while high - low > 5e-4*high:
        middle = (low + high)/2
        if spent(middle) > eps:
            low = middle
        else:
            high = middle
    return high
'''
SIGMA = '''def second_sigma(first, t, steps, q, eps, delta):
    def over(log_s):
        book = PLDAccountant().step(q, first, t).step(q, math.exp(log_s), steps - t)
        return book.epsilon(delta) - .9995*eps
    if over(7.) > 0:
        return math.inf
    return math.exp(brentq(over, -2., 7., xtol=1e-5))
'''


def edited(right, **edits):
    "Diagnosis -> the right answer with one place changed."
    assert all(edit[0] in right for edit in edits.values())
    return {words: right.replace(*edit) for words, edit in edits.items()}


WRONG = {
    "check_gaussian_rdp": {
        "sigma squared": "lambda s, a: np.asarray(a)/(2*s)",
        "a factor 1/2 is missing": "lambda s, a: np.asarray(a)/s**2",
        "divide the logarithm by a - 1": "lambda s, a: np.asarray(a)*(np.asarray(a) - 1)/(2*s**2)",
        "not by a": "lambda s, a: (np.asarray(a) - 1)/(2*s**2)",
        "that is the mean itself":
            "lambda s, a: np.exp(np.minimum(700, np.asarray(a)*(np.asarray(a) - 1)/(2*s**2)))",
        "for the mean under P": "lambda s, a: (np.asarray(a) - 2)/(2*s**2)",
        "P/Q has -1 in it": "lambda s, a: np.asarray(a)**2/(2*s**2)/(np.asarray(a) - 1)",
        "not +1": "lambda s, a: np.asarray(a)*(np.asarray(a) + 1)/(2*s**2)/(np.asarray(a) - 1)",
        "grows with the order": "lambda s, a: [1/(2*s**2)]*len(a)"},
    "check_total_rdp": edited(TOTAL, **{
        "counts `steps` times": ("steps*rdp", "rdp"),
        "without a root": ("steps*rdp", "math.sqrt(steps)*rdp"),
        "the last group alone": ("total + steps", "steps"),
        "the first group alone": ("in history:", "in history[:1]:"),
        "do not take the largest": ("total = total + steps*rdp_sampled_gaussian(q, sigma, orders)",
            "total = np.maximum(total, steps*rdp_sampled_gaussian(q, sigma, orders))"),
        "without the coin": ("rdp_sampled_gaussian(q, ", "rdp_sampled_gaussian(1., "),
        "is not a factor q": ("rdp_sampled_gaussian(q, ", "q*rdp_sampled_gaussian(1., "),
        "no further factor q": ("steps*rdp", "q*steps*rdp"),
        "do not add up the orders": ("return total", "return total.sum()"),
        "no mean over the groups": ("return total", "return total/max(1, len(history))"),
        "no average rate": ("    for q", "    if history:\n        q, s, n = map(np.array, "
            "zip(*history))\n        history = [(np.average(q, weights=n), np.average(s, "
            "weights=n), n.sum())]\n    for q")}),
    "check_markov_epsilon": edited(MARKOV, **{
        "not by a": ("(orders - 1)", "orders"),
        "not the largest": ("min()", "max()"),
        "not at the first": ("eps.min()", "eps[0]"),
        "not at the last": ("eps.min()", "eps[-1]"),
        "Markov's inequality was asked": (
            "math.log(1/delta)/(orders - 1)", "math.log(1/delta)/(orders - 1) "
            "+ np.log1p(-1/orders) - np.log(orders)/(orders - 1)"),
        "not its order": ("eps.min()", "orders[eps.argmin()]"),
        "not that of base 10": ("math.log(1/delta)", "math.log10(1/delta)"),
        "not that of base 2": ("math.log(1/delta)", "math.log2(1/delta)"),
        "don't multiply": ("/(orders - 1)", "*(orders - 1)"),
        "once more": ("rdp +", "rdp/(orders - 1) +"),
        "do not multiply it again": ("rdp +", "rdp*(orders - 1) +"),
        "stands under a logarithm": ("math.log(1/delta)", "delta"),
        "price of the conversion is missing": ("math.log(1/delta)", "0"),
        "the sign": ("math.log(1/delta)", "math.log(delta)")}),
    "check_least_sigma": edited(LEAST, **{
        "the end with too little noise": ("return high", "return low"),
        "or rounded to it": ("return high", "return math.floor(1e3*high)/1e3"),
        "that is the budget": ("return high", "return eps"),
        "halve the interval": ("    while high - low > 5e-4*high:", "    while False:"),
        "0.1 % of sigma": ("5e-4*high:", ".02*high:"),
        "becomes the lower end": ("spent(middle) > eps", "spent(middle) < eps"),
        "double the upper end": ("    while spent(high) > eps:\n        low, high = high, 2*high\n",
                                 "")}),
    "check_second_sigma": edited(SIGMA, **{
        "the wrong side": (".9995*eps", "1.0005*eps"),
        "without a first part": (".step(q, first, t)", ""),
        "if *all* steps": ("PLDAccountant().step(q, first, t)",
                           "PLDAccountant().step(q, math.exp(log_s), t)"),
        "not subtracted": ("    return math.exp", "    left = eps - epsilon(q=q, sigma=first, "
                           "steps=t, delta=delta)\n    return noise_multiplier(eps=left, q=q, "
                           "steps=steps - t, delta=delta)\n    return math.exp"),
        "squares of eps": ("    return math.exp", "    left = (eps**2 - epsilon(q=q, sigma=first, "
                           "steps=t, delta=delta)**2)**.5\n    return noise_multiplier(eps=left, "
                           "q=q, steps=steps - t, delta=delta)\n    return math.exp"),
        "nothing is left": ("return math.inf", "return 1e3"),
        "has steps - t steps": ("steps - t)", "steps)"),
        "you have them the other way round": ("first, t).step(q, math.exp(log_s), steps - t)",
                                              "first, steps - t).step(q, math.exp(log_s), t)"),
        "that is the first part's noise": ("    return math.exp(brentq(over, -2., 7., xtol=1e-5))",
                                           "    return first"),
        # no typical plan: one sentence in every case, not the plan that fits a case by chance
        "both parts together spend": ("    return math.exp", "    return 1.07*math.exp")}),
}
SLOW = {"check_second_sigma"}  # hundreds of compositions each
WRONG["check_gaussian_rdp"] |= {
    "times `orders`": "lambda s, a: np.asarray(a)**2/(2*s**2)",
    "the last number is missing": "lambda s, a: [a[i]/(2*s**2) for i in range(len(a) - 1)]"}
WRONG["check_total_rdp"] |= edited(TOTAL, **{
    "no power": ("steps*rdp_sampled_gaussian(q, sigma, orders)",
                 "rdp_sampled_gaussian(q, sigma, orders)**steps"),
    "a bare `sum`": ("np.zeros(len(orders))", "0")})
WRONG["check_markov_epsilon"] |= edited(MARKOV, **{
    "the smallest, no mean": ("eps.min()", "eps.mean()")})
WRONG["check_least_sigma"] |= {  # stops on either side
    "return the end that": "lambda spent, eps: brentq(lambda s: spent(s) - eps, 1e-2, 1e3)"}
