"Wrong answers to the exercises of 04_cost: check -> words of the diagnosis -> code."
ORDER = '''def best_order(rdp, orders, steps, delta):
    eps = steps*rdp + math.log(1/delta)/(orders - 1)
    i = eps.argmin()
    return eps[i], orders[i]
'''
CURVE = '''def delta_curve(first, masses, h, steps, eps):
    p = np.ones(1)
    for _ in range(steps):
        p = np.convolve(p, masses)
    loss = h*(steps*first + np.arange(len(p)))
    share = np.maximum(0, 1 - np.exp(np.minimum(0, eps[:, None] - loss)))
    return share@p + 1 - masses.sum()**steps
'''
STEPS = '''def affordable(q, sigma, delta, eps):
    low, high = 0, 2**16
    while high - low > 1:
        mid = (low + high)//2
        fits = epsilon(q=q, sigma=sigma, steps=mid, delta=delta) <= eps
        low, high = (mid, high) if fits else (low, mid)
    return low
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
    return {words: right.replace(*edit) for words, edit in edits.items()}


WRONG = {
    "check_best_order": edited(ORDER, **{
        "that is one step": ("steps*rdp", "rdp"),
        "add the divergences first": ("steps*rdp + math.log(1/delta)/(orders - 1)",
                                      "steps*(rdp + math.log(1/delta)/(orders - 1))"),
        "divided by a - 1": ("(orders - 1)", "orders"),
        "not the largest": ("argmin", "argmax"),
        "not at the first": ("eps.argmin()", "0"),
        "Markov's inequality was asked": (
            "math.log(1/delta)/(orders - 1)", "math.log(1/delta)/(orders - 1) "
            "+ np.log1p(-1/orders) - np.log(orders)/(orders - 1)"),
        "the index of the order": ("orders[i]", "i"),
        "in this order": ("eps[i], orders[i]", "orders[i], eps[i]"),
        "natural logarithm": ("math.log(1/delta)", "math.log10(1/delta)"),
        "don't multiply": ("/(orders - 1)", "*(orders - 1)"),
        "once more": ("steps*rdp +", "steps*rdp/(orders - 1) +"),
        "the sign": ("math.log(1/delta)", "math.log(delta)")}),
    "check_delta_curve": edited(CURVE, **{
        "only the share": ("np.maximum(0, 1 - np.exp(np.minimum(0, eps[:, None] - loss)))",
                           "loss > eps[:, None]"),
        "add its probability": (" + 1 - masses.sum()**steps", ""),
        "one infinite loss among the steps": ("1 - masses.sum()**steps",
                                              "(1 - masses.sum())*(steps > 0)"),
        "so convolve": ("    p = np.ones(1)\n    for _ in range(steps):\n"
                        "        p = np.convolve(p, masses)\n",
                        "    p, h, steps = masses, steps*h, 1\n"),
        "starts at steps*first": ("steps*first", "first*(steps > 0)"),
        "not steps*(1 - sum)": ("1 - masses.sum()**steps", "steps*(1 - masses.sum())"),
        "not one fewer": ("masses.sum()**steps", "masses.sum()**max(0, steps - 1)"),
        "1 minus that": ("1 - masses.sum()**steps", "masses.sum()**steps"),
        "the exponent's sign": ("eps[:, None] - loss", "loss - eps[:, None]"),
        "no share is negative": ("np.maximum(0, 1 - np.exp(np.minimum(0, eps[:, None] - loss)))",
                                 "1 - np.exp(eps[:, None] - loss)"),
        "a single step": ("    p = np.ones(1)", "    p, steps = np.ones(1), min(steps, 1)"),
        "times their place": ("h*(steps", "(steps")}),
    "check_affordable": edited(STEPS, **{
        "one fewer": ("return low", "return high"),
        "one step short": ("return low", "return max(0, low - 1)"),
        "in proportion": ("    low, high = 0, 2**16\n", "    return int(eps/epsilon(q=q, "
                          "sigma=sigma, steps=1, delta=delta))\n    low, high = 0, 2**16\n"),
        "RDP's answer": ("delta=delta)", "delta=delta, accountant=RDPAccountant)")}),
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
                                           "    return first")}),
}
SLOW = {"check_affordable", "check_second_sigma"}  # hundreds of compositions each
