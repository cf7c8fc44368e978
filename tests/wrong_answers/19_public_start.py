"Wrong answers to the exercises of 19_public_start: check -> words of the diagnosis -> code."
OWN = '''def own_rate(held, tests):
    rate = max(held, key=lambda r: held[r].mean())
    found = tests[rate]
    return rate, found.mean(), found.std()/len(found)**.5
'''
WRONG = {
    "check_noise_length": {
        "not as they are": "lambda d, s, c, b: s*c*d/b",
        "there are d of them": "lambda d, s, c, b: s*c/b",
        "not by its root": "lambda d, s, c, b: s*c*math.sqrt(d/b)",
        "sigma times the bound": "lambda d, s, c, b: s*math.sqrt(d)/b",
        "divide by the batch": "lambda d, s, c, b: s*c*math.sqrt(d)"},
    "check_centred": {
        "that is the private mean":
            "lambda x, z: (x - x.mean(0))*(x.shape[1]/(x - x.mean(0)).square().sum(1).mean())**.5",
        "the scale is private":
            "lambda x, z: (x - z.mean(0))*(x.shape[1]/(x - z.mean(0)).square().sum(1).mean())**.5",
        "a length of its own":
            "lambda x, z: (x - z.mean(0))*x.shape[1]**.5/(x - z.mean(0)).norm(dim=1)[:, None]",
        "is not f yet": "lambda x, z: x - z.mean(0)"},
    "check_own_rate": {
        "the test set chose": OWN.replace("held[r]", "tests[r]"),
        "the images that chose": OWN.replace("tests[rate]", "held[rate]"),
        "one lucky seed": OWN.replace("held[r].mean()", "held[r].max()"),
        "not medians": OWN.replace("held[r].mean()", "held[r].median()"),
        "not the worst": OWN.replace("max(held", "min(held"),
        "spread of one run": OWN.replace("/len(found)**.5", ""),
        "divides by k - 1": OWN.replace(".std()", ".std(correction=0)")},
}
WRONG["check_centred"] |= {
    "its root is the unit": "lambda x, z: (x - z.mean(0))*z.shape[1]"
                            "/(z - z.mean(0)).square().sum(1).mean()",
    "of the centred public": "lambda x, z: (x - z.mean(0))"
                             "*(z.shape[1]/z.square().sum(1).mean()).sqrt()"}
