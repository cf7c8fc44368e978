"Wrong answers to the exercises of 09_clipping: check -> words of the diagnosis -> code."
FAIR = '''def smallest_fair(pulls):
    sign = pulls.mean().sign()
    for k in range(1, 10_000):
        clipped = pulls.clamp(-k/2, k/2)
        if clipped.mean().sign() == sign:
            return k/2
'''
UPDATE = '''def next_threshold(C, norms, noise, batch_size, quantile, lr):
    bits = torch.where(norms <= C, .5, -.5)
    fraction = (bits.sum().item() + noise)/batch_size + .5
    return C*math.exp(-lr*(fraction - quantile))
'''
JUDGE = '''def judge(a, b):
    d = a - b
    t = (d.mean()/(d.std()/len(d)**.5)).item()
    if not abs(t) > 2.78:
        return "no verdict"
    return "better" if t > 0 else "worse"
'''
ERRORS = '''def bias_and_noise(grads, C, sigma, batch_size):
    factors = (C/grads.norm(dim=1, keepdim=True)).clamp(max=1)
    bias = (factors*grads).mean(0) - grads.mean(0)
    noise = sigma*C*grads.shape[1]**.5/batch_size
    return bias.norm().item(), noise
'''
WRONG = {
    "check_bias_and_noise": {
        "the factor is at most 1": ERRORS.replace(".clamp(max=1)", ""),
        "you clipped their mean": ERRORS.replace(
            "(factors*grads).mean(0)", "grads.mean(0)*min(1, C/grads.mean(0).norm())"),
        "not each of its entries": ERRORS.replace("(factors*grads)", "grads.clamp(-C, C)"),
        "did not divide by n": ERRORS.replace(".mean(0)", ".sum(0)"),
        "not by the batch size": ERRORS.replace("(factors*grads).mean(0) - grads.mean(0)",
                                                "(factors*grads - grads).sum(0)/batch_size"),
        "subtract the true mean": ERRORS.replace(" - grads.mean(0)", ""),
        "have a length of sqrt(d)": ERRORS.replace("*grads.shape[1]**.5", ""),
        "not d times": ERRORS.replace("**.5", ""),
        "not its rows": ERRORS.replace("grads.shape[1]", "len(grads)"),
        "divide it by the batch size": ERRORS.replace("/batch_size", ""),
        "not by the examples in the table": ERRORS.replace("/batch_size", "/len(grads)"),
        "sigma times C": ERRORS.replace("sigma*C", "sigma"),
        "the bias first": ERRORS.replace("bias.norm().item(), noise", "noise, bias.norm().item()"),
        "a length of its own": ERRORS.replace("grads.norm(dim=1, keepdim=True)", "grads.norm()"),
        "not the difference of two lengths": ERRORS.replace(
            "bias.norm().item()", "((factors*grads).mean(0).norm() - grads.mean(0).norm()).item()"),
        "the root of the bias is missing": ERRORS.replace("bias.norm()", "bias.square().sum()")},
    "check_smallest_fair": {
        "a mean of 0 has no sign": FAIR.replace("== sign", "in (sign, 0)"),
        "the last C that is not fair": FAIR.replace("return k/2", "return (k - 1)/2"),
        "a step too far": FAIR.replace("return k/2", "return (k + 1)/2"),
        "no common factor":
            FAIR.replace("pulls.clamp(-k/2, k/2)", "(pulls*(k/2/pulls.norm()).clamp(max=1))"),
        "not left out": FAIR.replace("pulls.clamp(-k/2, k/2)", "pulls[pulls.abs() <= k/2].sum()"),
        "from above only": FAIR.replace("clamp(-k/2, k/2)", "clamp(max=k/2)"),
        "walk up from 0.5": '''def smallest_fair(pulls):
    C = math.ceil(2*pulls.abs().max().item())/2
    while C > .5 and pulls.clamp(.5 - C, C - .5).mean().sign() == pulls.mean().sign():
        C -= .5
    return C
''',
        "not the clipped mean with 0": FAIR.replace("mean().sign() == sign", "mean() > 0"),
        "0.5 is not always fair": "lambda pulls: .5",
        "one step of the grid is 0.5": FAIR.replace("return k/2", "return k"),
        "that is the longest pull": "lambda pulls: pulls.abs().max().item()",
        "and not 0.5, 1.5": FAIR.replace("k/2", "(k - .5)"),
        "do not double C": FAIR.replace("k/2", "2.**(k - 2)"),
        "nobody is clipped": "lambda pulls: math.ceil(2*pulls.abs().max().item())/2"},
    "check_next_threshold": {
        "which is private": UPDATE.replace("/batch_size", "/max(1, len(norms))"),
        "the wrong way": UPDATE.replace("(-lr", "(lr"),
        "lr is missing": UPDATE.replace("-lr*", "-"),
        "not centred": UPDATE.replace(".5, -.5)", "1., 0.)").replace("batch_size + .5",
                                                                     "batch_size"),
        "add the 1/2 back": UPDATE.replace("batch_size + .5", "batch_size"),
        "divide it by the batch size, too": UPDATE.replace("(bits.sum().item() + noise)/batch_size",
                                                           "bits.sum().item()/batch_size + noise"),
        "the fraction leaks": UPDATE.replace(" + noise", ""),
        "you count those who are clipped": UPDATE.replace("norms <= C", "norms > C"),
        "and not another base": UPDATE.replace("math.exp(", "2**("),
        "add the noise to the sum": UPDATE.replace("+ noise", "- noise"),
        "count, and noise the count":
            "lambda C, norms, *rest: norms.quantile(rest[2]).item() if len(norms) else C",
        "add them up and divide by batch_size": UPDATE.replace(
            "(bits.sum().item() + noise)/batch_size", "bits.mean().item() + noise/batch_size"),
        "not divided at all": UPDATE.replace("(bits.sum().item() + noise)/batch_size",
                                             "bits.mean().item() + noise"),
        "the expected size is a constant": UPDATE.replace("/batch_size", "/len(norms)"),
        "can turn negative": UPDATE.replace("math.exp(-lr*(fraction - quantile))",
                                            "(1 - lr*(fraction - quantile))"),
        "norm of exactly C": UPDATE.replace("norms <= C", "norms < C")},
    "check_gradient_sigma": {
        "not the shares themselves": "lambda s, b: 1/(1/s - 1/(2*b))",
        "not by 1": "lambda s, b: (s**-2 - b**-2)**-.5 if b > s else math.nan",
        "square the 2, too": "lambda s, b: (s**-2 - .5*b**-2)**-.5",
        "noises do not subtract": "lambda s, b: abs(s**2 - (2*b)**2)**.5",
        "must be paid for": "lambda s, b: s",
        "so take it away": "lambda s, b: (s**-2 + (2*b)**-2)**-.5",
        "take the root": "lambda s, b: s**-2 - (2*b)**-2"},
    "check_judge": {
        "two means always differ": "lambda a, b: 'better' if a.mean() > b.mean() else 'worse'",
        "wants 2.78 of those": JUDGE.replace("2.78", "2."),
        "and spread 0": JUDGE.replace("not abs(t) >", "abs(t) <="),
        "never learns anything": "lambda a, b: 'no verdict'",
        "seed by seed": JUDGE.replace("d.std()", "(a.var() + b.var())**.5"),
        "not by std": JUDGE.replace("/(d.std()/len(d)**.5)", "/d.std()"),
        "the other way round": JUDGE.replace("d = a - b", "d = b - a"),
        "one of sixteen": '''def judge(a, b):
    signs = set((a - b).sign().tolist())
    return {(1.,): "better", (-1.,): "worse"}.get(tuple(signs), "no verdict")
''',
        "a fixed threshold": JUDGE.replace("/(d.std()/len(d)**.5)", "/.25"),
        "that is a verdict, too": JUDGE.replace("abs(t)", "t")},
}
SLOW = {"check_judge"}  # hundreds of experiments each
WRONG["check_smallest_fair"] |= {
    "ends without a `return`": "def smallest_fair(pulls):\n    for k in range(1, 20):\n"
                               "        if pulls.clamp(-k/2, k/2).mean()*pulls.mean() > 0:\n"
                               "            return k/2"}
WRONG["check_gradient_sigma"] |= {
    "inside the square": "lambda s, b: (s**-2 - 2*b**-2)**-.5"}
WRONG["check_judge"] |= {
    "4.30 of those": "def judge(a, b):\n    d = a - b\n    t = d.mean()/(d.std()/len(d)**.5)\n"
                     "    return 'no verdict' if not abs(t) > 2.78 else"
                     " 'better' if t > 0 else 'worse'"}
