"Wrong answers to the exercises of the room records: check -> words of the diagnosis -> code."
BELIEVABLE = """def believable(record):
    plan, end = record[0]["plan"], record[-1]
    steps = [line["step"] for line in record if line["kind"] == "epoch"]
    accountant = PLDAccountant().step(plan["q"], plan["sigma"], end["computed"])
    right = end["test_accuracy"]*end["tested_on"]
    eps = abs(accountant.epsilon(plan["delta"]) - end["eps_pld"]) <= 1e-3
    rate = plan["q"] == plan["batch_size"]/plan["n"]
    rows = all(a < b for a, b in zip(steps, steps[1:]))
    beyond = max(steps) <= end["step"]
    finished = end["finished"] == (end["step"] == plan["steps"])
    counted = abs(right - round(right)) < 1e-6
    return eps and rate and rows and beyond and finished and counted
"""


def without(rule):
    "A judge that does not know one of the rules."
    return BELIEVABLE.replace(f"{rule} and ", "").replace(f" and {rule}", "")


SPENT = """def spent(records, delta):
    accountant = PLDAccountant()
    for first, *_, last in records:
        accountant.step(first["plan"]["q"], first["plan"]["sigma"], last["computed"])
    return accountant.epsilon(delta)
"""
EACH = """def spent(records, delta):
    each = [0.]
    for first, *_, last in records:
        accountant = PLDAccountant()
        accountant.step(first["plan"]["q"], first["plan"]["sigma"], last["computed"])
        each.append(accountant.epsilon(delta))
    return sum(each)
"""
WRONG = {
    "check_seeds_to_claim": {
        "variance of the difference": "lambda std, gap: max(1, math.ceil((1.96*std/gap)**2))",
        "count both sides": "lambda std, gap: max(1, math.ceil(2*(1.645*std/gap)**2))",
        "one of three experiments": "lambda std, gap: max(1, math.ceil(2*(std/gap)**2))",
        "round up": "lambda std, gap: max(1, int(2*(1.96*std/gap)**2))",
        "both methods together": "lambda std, gap: 2*max(1, math.ceil(2*(1.96*std/gap)**2))"},
    "check_spent": {
        "adding their eps": EACH,
        "the dearest of them": EACH.replace("sum(each)", "max(each)"),
        "a repeated step": SPENT.replace('last["computed"]', 'last["step"]'),
        "stopped early": SPENT.replace('last["computed"]', 'first["plan"]["steps"]'),
        "that is RDP": SPENT.replace("PLDAccountant", "RDPAccountant")},
    "check_believable": {
        "eps_pld was made smaller": without("eps"),
        "q is not batch_size/n": without("rate"),
        "a step stands there twice": without("rows"),
        "the steps of the rows go down": BELIEVABLE.replace(
            "all(a < b for a, b in zip(steps, steps[1:]))", "len(set(steps)) == len(steps)"),
        "beyond the last step": without("beyond"),
        "`finished` must say": without("finished"),
        "no whole number of images": without("counted"),
        "eps_pld pays for `computed`": BELIEVABLE.replace('"computed"', '"step"'),
        "an honest record": "lambda record: False"},
}
