"Wrong answers to the exercises of the appendix: check -> words of the diagnosis -> code."
CURVE = '''def delta_curve(first, masses, h, steps, eps):
    p = np.ones(1)
    for _ in range(steps):
        p = np.convolve(p, masses)
    loss = h*(steps*first + np.arange(len(p)))
    share = np.maximum(0, 1 - np.exp(np.minimum(0, eps[:, None] - loss)))
    return share@p + 1 - masses.sum()**steps
'''


WRONG = {
    "check_group_delta": {
        "delta grows": "lambda e, d, k: k*d",
        "counted from 1": "lambda e, d, k: d*sum(math.exp(i*e) for i in range(1, k + 1))",
        "k times the last term": "lambda e, d, k: k*d*math.exp((k - 1)*e)",
        "k times more than the bound": "lambda e, d, k: k*d*math.exp(k*e)",
        "last term only": "lambda e, d, k: d*math.exp((k - 1)*e)",
        "no term is like another": "lambda e, d, k: d*(1 + (k - 1)*math.exp(e))",
        "the eps of the whole group": "lambda e, d, k: d*math.exp(k*e)",
        "one term too many": "lambda e, d, k: d*sum(math.exp(i*e) for i in range(k + 1))",
        "e^eps - 1 cancels":
            "lambda e, d, k: d*(math.exp(k*e) - 1)/(math.exp(e) - 1) if e else d*k",
        "range(k)": "lambda e, d, k: d*sum(math.exp(i*e) for i in range(1, k))"},
    "check_delta_curve": {words: CURVE.replace(*edit) for words, edit in {
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
        "times their place": ("h*(steps", "(steps")}.items()}
}
