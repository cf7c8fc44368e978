"Wrong answers to the exercises of 17_segmentation: check -> words of the diagnosis -> code."
DICE = '''def dice_scores(predicted, y, classes):
    scores = []
    for c in range(classes):
        said, true = predicted == c, y == c
        both = (said & true).sum().item()
        below = said.sum().item() + true.sum().item()
        scores.append(2*both/below if below else 1.)
    return torch.tensor(scores)
'''
OWN = '''def own_share(x, owners):
    flat = x.double().flatten(1)
    far = torch.cdist(flat, flat).fill_diagonal_(float("inf"))
    return (owners[far.argmin(1)] == owners).double().mean().item()
'''
NEEDED = "lambda d, eps, delta, ratio: __import__('math').ceil(gaussian_sigma(eps=eps, delta=delta)"
WRONG = {
    "check_dice": {
        "intersection over the union": DICE.replace("2*both/below if", "both/(below - both) if"),
        "twice the common pixels": DICE.replace("2*both", "both"),
        "true pixels that were found": DICE.replace("said.sum().item() + true", "true").replace(
            "2*both", "both"),
        "predicted pixels that are right": DICE.replace(" + true.sum().item()", "").replace(
            "2*both", "both"),
        "all scans together": DICE.replace("def dice_scores", "def alone") + '''
def dice_scores(predicted, y, classes):
    found = [alone(p[None], t[None], classes) for p, t in zip(predicted, y)]
    return torch.stack(found).mean(0)
'''},
    "check_own_share": {
        "most like itself": OWN.replace('.fill_diagonal_(float("inf"))', ""),
        "not a count": OWN.replace(".mean()", ".sum()"),
        "share of the others": OWN.replace("== owners", "!= owners")},
    "check_patients_needed": {
        "the root of d": NEEDED + "*d/ratio)",
        "one alone is not its length": NEEDED + "/ratio)",
        "round up": (NEEDED + "*d**.5/ratio)").replace("ceil", "floor"),
        "not sigma/sqrt(n)": NEEDED + "**2*d/ratio**2)"},
}
SLOW = set()
