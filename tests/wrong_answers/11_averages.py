"Wrong answers to the exercises of 11_averages: check -> words of the diagnosis -> code."
EMA = '''def warm_ema(iterates, decay):
    average = iterates[0]
    for t, w in enumerate(iterates[1:], 1):
        d = min(decay, (1 + t)/(10 + t))
        average = d*average + (1 - d)*w
    return average
'''
EDITS = {
    "no warm-up": ("min(decay, (1 + t)/(10 + t))", "decay"),
    "min, not max": ("min(", "max("),
    "the share of the old average": ("d*average + (1 - d)*w", "(1 - d)*average + d*w"),
    "t counts the iterates": ("iterates[1:], 1)", "iterates[1:])"),
    "t = 1, not 2": ("iterates[1:], 1)", "iterates[1:], 2)"),
    "that is the last iterate": ("return average", "return w if len(iterates) > 1 else average"),
}
SHARES = '''def shares(decays):
    out = [1.]
    for decay in decays:
        out = [decay*share for share in out] + [1 - decay]
    return out
'''
MOMENT = '''def second_moment(grads, noise_std, floor, beta=.999):
    v = 0*grads[0]
    for g in grads:
        v = beta*v + (1 - beta)*g**2
    v = v/(1 - beta**len(grads))
    return (v - noise_std**2).clamp(min=floor)
'''
MOMENTS = {
    "the mean began with zeros": ("    v = v/(1 - beta**len(grads))\n", ""),
    "the noise adds its variance": ("noise_std**2", "noise_std"),
    "the noise is still in it": (" - noise_std**2", ""),
    "do not add it": (" - noise_std**2", " + noise_std**2"),
    "the floor is missing": (".clamp(min=floor)", ""),
    "not something that is added": (".clamp(min=floor)", ".clamp(min=0) + floor"),
    "not its root": (".clamp(min=floor)", ".clamp(min=floor)**.5"),
    "not max": ("clamp(min=floor)", "clamp(max=floor)"),
    "the share of the old mean": ("beta*v + (1 - beta)*g**2\n    v = v/(1 - beta**len(grads))",
                                  "(1 - beta)*v + beta*g**2\n"
                                  "    v = v/(1 - (1 - beta)**len(grads))"),
    "square each gradient": ("g**2", "g"),
    "the square of the mean": ("g**2\n    v = v/(1 - beta**len(grads))",
                               "g\n    v = (v/(1 - beta**len(grads)))**2"),
    "subtract after the division": (
        "    v = v/(1 - beta**len(grads))\n    return (v - noise_std**2)",
        "    return ((v - noise_std**2)/(1 - beta**len(grads)))"),
}
WRONG = {
    "check_warm_ema": {words: EMA.replace(*edit) for words, edit in EDITS.items()},
    "check_shares": {
        "what the older iterates keep": SHARES.replace(
            "decay*share", "(1 - decay)*share").replace("[1 - decay]", "[decay]"),
        "multiply them by every later decay": "lambda decays: [1.] + [1 - d for d in decays]",
        "T shares for T - 1 decays": SHARES.replace("return out", "return out[1:]"),
        "the oldest iterate comes first": SHARES.replace("return out", "return out[::-1]"),
        "not by its own": SHARES.replace("[1 - decay]", "[decay*(1 - decay)]"),
        "the share of the first iterate": SHARES.replace("return out", "return out[0]"),
        "equal shares": "lambda decays: [1/(len(decays) + 1)]*(len(decays) + 1)"},
    "check_second_moment": {words: MOMENT.replace(*edit) for words, edit in MOMENTS.items()},
}
WRONG["check_warm_ema"]["the plain mean"] = "lambda iterates, decay: iterates.mean(0)"
WRONG["check_second_moment"]["the plain mean of the squares"] = (
    "lambda g, s, f, b: ((g**2).mean(0) - s**2).clamp(min=f)")
SLOW = set()
WRONG["check_warm_ema"] |= {
    "the last iterate counts": EMA.replace("enumerate(iterates[1:], 1)",
                                           "enumerate(iterates[1:-1], 1)"),
    "only the last of what you return": EMA.replace("average = iterates[0]", "every = average ="
        " iterates[:1]").replace("d)*w", "d)*w\n        every = torch.cat([every, average])"
                                 ).replace("return average", "return every")}
WRONG["check_shares"] |= {
    "the shares after the first": "lambda decays: torch.tensor([torch.tensor(decays).prod()]"
                                  " + [1 - d for d in decays])"}
