"Wrong answers to the exercises of 17_audit: check -> words of the diagnosis -> code."
SAID = ("lambda: {'fir': 'replay', 'juniper': 'noise', 'olive': 'noise', 'rowan': 'sampler',"
        " 'spruce': 'sampler'} | ")
COINS = """def coins_needed(share):
    accuracy, coins = %s, 100
    while least_mu(round(accuracy*coins), coins, %s) <= 1/1.6138:
        coins += 100
    return coins"""
RIGHT = "stats.norm.cdf(1/(2*share*1.6138))"
MUTANT = """def my_mutant():
    def bound(grads, max_norm):
        total, norms = clip_and_add(grads, max_norm)
        columns = grads["0.weight"]
        same = (columns == columns[..., :1]).flatten(1).all(1) & columns.flatten(1).any(1)
        return {name: total[name] + %s*g[%s].sum(0) for name, g in grads.items()}, norms
    return {"bound": bound}%s, (torch.ones(%s, 8), torch.zeros(%s).long())"""
WRONG = {
    "check_verdicts": {
        "replay stands before noise": SAID + "{'fir': 'noise'}",
        "replay cancels the noise": SAID + "{'juniper': 'replay'}",
        "enters the optimizer": SAID + "{'olive': 'one run'}",
        "which batches an epoch draws": SAID + "{'rowan': 'noise'}",
        "have in common": SAID + "{'spruce': 'noise'}"},
    "check_coins_needed": {
        "you forgot the 2": COINS % ("stats.norm.cdf(1/(share*1.6138))", "5e-4"),
        "not of its variance": COINS % ("stats.norm.cdf(1/(2*share**.5*1.6138))", "5e-4"),
        "half of alpha": COINS % (RIGHT, "1e-3"),
        "do not convict yet": (COINS % (RIGHT, "5e-4")).replace("return coins",
                                                                "return coins - 100"),
        "tossed in hundreds": (COINS % (RIGHT, "5e-4")).replace("return coins",
                                                                "return coins - 1"),
        "how many are tossed":
            (COINS % (RIGHT, "5e-4")).replace("return coins", "return round(accuracy*coins)")},
    "check_survivor": {
        "made-up newcomers": MUTANT % (100, "norms > 0", "", 1, 1),
        "harmless": MUTANT % (0, "same", "", 1, 1),
        "one example": MUTANT % (100, "same", "", 2, 2),
        "leave the noise alone": MUTANT % (100, "same", " | MUTANTS['hazel'].changes", 1, 1)},
}
SLOW = {"check_survivor"}
