"Wrong answers to the exercises of 20_segmentation: check -> words of the diagnosis -> code."
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
AGREEMENT = '''def agreement(n, d, sigma, steps, generator):
    moved = torch.zeros(d)
    for _ in range(steps):
        moved += sigma/n*torch.randn(d, generator=generator)
        moved[0] += 1
    return (moved[0]/moved.norm()).item()
'''
WRONG = {
    "check_dice_scores": {
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
    "check_noise_over_signal": {
        "the root of d": "lambda n, d, eps, delta: gaussian_sigma(eps=eps, delta=delta)*d/n",
        "sqrt(d) times as long as in one":
            "lambda n, d, eps, delta: gaussian_sigma(eps=eps, delta=delta)/n",
        "not by its root":
            "lambda n, d, eps, delta: gaussian_sigma(eps=eps, delta=delta)*(d/n)**.5",
        "divide by n": "lambda n, d, eps, delta: gaussian_sigma(eps=eps, delta=delta)*d**.5",
        "sigma is missing": "lambda n, d, eps, delta: d**.5/n",
        "1/eps is no multiplier": "lambda n, d, eps, delta: d**.5/n/eps",
        "the textbook's":
            "lambda n, d, eps, delta: (2*torch.tensor(1.25/delta).log().item())**.5/eps*d**.5/n",
        "the other way round":
            "lambda n, d, eps, delta: n/d**.5/gaussian_sigma(eps=eps, delta=delta)"},
    "check_agreement": {
        "its noise with it: std sigma/n": AGREEMENT.replace("sigma/n", "sigma"),
        "not sigma/sqrt(n)": AGREEMENT.replace("sigma/n", "sigma/n**.5"),
        "not only one": AGREEMENT.replace("sigma/n*", "(_ == 0)*sigma/n*"),
        "new noise": AGREEMENT.replace("range(steps):", "range(steps):\n        generator"
                                       "=torch.Generator().manual_seed(generator.initial_seed())"),
        "not the length of the noise": AGREEMENT.replace("sigma/n", "sigma/n/d**.5"),
        "ignore `generator`": AGREEMENT.replace("d, generator=generator", "d"),
        "not along all d": AGREEMENT.replace("moved[0] += 1", "moved += 1"),
        "square of the cosine": AGREEMENT.replace("(moved[0]/moved.norm())",
                                                  "(moved[0]/moved.norm())**2").replace(
            "(moved[0]/moved.norm())**2.item()", "((moved[0]/moved.norm())**2).item()"),
        "turns the weights more": AGREEMENT.replace("sigma/n", "3*sigma/n"),
        "divide by the length": AGREEMENT.replace("moved.norm()", "steps")},
}
SLOW = set()
WRONG["check_own_share"] |= {
    "not the sum of the absolute": "lambda x, o: (o[torch.cdist(x.flatten(1), x.flatten(1), p=1)"
                                   ".fill_diagonal_(1e9).argmin(1)] == o).double().mean()"}
