"Wrong answers to the exercises of the appendix: check -> words of the diagnosis -> code."
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
        "range(k)": "lambda e, d, k: d*sum(math.exp(i*e) for i in range(1, k))"}
}
