"Wrong answers to the exercises of 18_architecture: check -> words of the diagnosis -> code."
CHOICE = '''def fair_choice(rows, act):
    tried = {}
    for row in rows:
        if row["stage"] == "tune" and row["act"] == act:
            tried.setdefault((row["lr"], row["max_norm"]), []).append(row["accuracy"])
    return max(tried, key=lambda p: (sum(tried[p])/len(tried[p]), -p[0]))
'''
BILL = '''def whole_bill(q, steps, sigma, first_steps, first_sigma):
    account = PLDAccountant()
    account.step(q, sigma, steps)
    if first_steps:
        account.step(q, first_sigma, first_steps)
    return account.epsilon(1e-5)
'''
HOLM = '''def holm(p_values):
    m, highest, corrected = len(p_values), 0., list(p_values)
    for rank, i in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        highest = max(highest, (m - rank)*p_values[i])
        corrected[i] = min(1., highest)
    return corrected
'''
SHARES = '''def layer_shares(model, x, y):
    shares = []
    for one, label in zip(x.split(1), y.split(1)):
        loss = F.cross_entropy(model(one), label)
        parts = torch.autograd.grad(loss, list(model.parameters()))
        layers = torch.stack([g.square().sum() for g in parts]).view(-1, 2).sum(1)
        shares.append(layers/layers.sum())
    return torch.stack(shares).mean(0)
'''
WRONG = {
    "check_layer_shares": {
        "bias belongs to its layer": SHARES.replace(".sum(1)", "[:, 0]"),
        "squared lengths do": SHARES.replace("g.square().sum()", "g.norm()"),
        "every example counts the same": SHARES.replace("layers/layers.sum()", "layers").replace(
            "return torch.stack(shares).mean(0)",
            "total = torch.stack(shares).sum(0)\n    return total/total.sum()")},
    "check_tempered": {
        "not multiplied along": "lambda x, s, T, o: s*(torch.sigmoid(T*x) - o)",
        "not what comes out": "lambda x, s, T, o: s*T*torch.sigmoid(x) - o",
        "makes it steeper": "lambda x, s, T, o: s*torch.sigmoid(x/T) - o",
        "it moves the curve down": "lambda x, s, T, o: s*torch.sigmoid(T*x) + o",
        "that is tanh": "lambda x, s, T, o: torch.tanh(x)"},
    "check_fair_choice": {
        "on the test set": CHOICE.replace('"tune"', '"final"'),
        "what suits the others": CHOICE.replace(' and row["act"] == act', ""),
        "one lucky seed": CHOICE.replace("sum(tried[p])/len(tried[p])", "max(tried[p])"),
        "threshold first": CHOICE.replace("-p[0]))", "-p[0]))[::-1]")},
    "check_whole_bill": {
        "paid for, too": BILL.replace("    if first_steps:\n    "
                                      "    account.step(q, first_sigma, first_steps)\n", ""),
        "the dearer of two runs": '''def whole_bill(q, steps, sigma, first_steps, first_sigma):
    runs = [(sigma, steps)] + [(first_sigma, first_steps)]*(first_steps > 0)
    return max(epsilon(q=q, sigma=s, steps=n, delta=1e-5) for s, n in runs)
''',
        "that is RDP": BILL.replace(
            "    account = PLD", "    from dp_course.privacy import RDPAccountant\n"
            "    account = RDP"),
        "the two are exchanged": BILL.replace("q, sigma, steps", "q, first_sigma, steps", 1)
        .replace("q, first_sigma, first_steps", "q, sigma, first_steps"),
        "that is another delta": BILL.replace("1e-5", "5e-6"),
        "each run has its own": BILL.replace("q, first_sigma", "q, sigma")},
    "check_holm": {
        "Bonferroni": HOLM.replace("(m - rank)", "m"),
        "not by m - 1": HOLM.replace("(m - rank)", "(m - rank - 1)"),
        "largest product so far": HOLM.replace("max(highest, (m - rank)*p_values[i])",
                                               "(m - rank)*p_values[i]"),
        "at most 1": HOLM.replace("min(1., highest)", "highest"),
        "not sorted": HOLM.replace("return corrected", "return sorted(corrected)"),
        "not its place in the list":
            "lambda p: [min(1., (len(p) - i)*v) for i, v in enumerate(p)]",
        "Benjamini": HOLM.replace("(m - rank)*", "m/(rank + 1)*")},
}
SLOW = set()
WRONG["check_tempered"] |= {
    "the offset is missing": "lambda x, s, T, o: s*torch.sigmoid(T*x)"}
WRONG["check_holm"] |= {
    "not by m + 1": "lambda p: [min(1., max((len(p) - sum(w < v for w in p) + 1)*v for v in p"
                    " if v <= u)) for u in p]"}
