"Wrong answers to the exercises of 15_features: check -> words of the diagnosis -> code."
WRONG = {
    "check_channels": {
        "only pairs of scales": "lambda J, L: 1 + J*L + (J*L)**2",
        "an equal scale": "lambda J, L: 1 + J*L + J*(J + 1)//2*L**2",
        "is a channel, too": "lambda J, L: J*L + J*(J - 1)//2*L**2",
        "a direction of their own": "lambda J, L: 1 + J*L + J*(J - 1)//2*L",
        "that is order 1": "lambda J, L: 1 + J*L"},
    "check_shift_of_first": {
        "the squared distance":
            "lambda x, z: (torch.cat([x, z[None]]).mean(0) - x.mean(0)).square().sum()",
        "how do the first one's move": "lambda x, z: (z - x.mean(0)).norm()",
        "divide by b + 1": "lambda x, z: (z/len(x)).norm()",
        "not the sum of absolute":
            "lambda x, z: (torch.cat([x, z[None]]).mean(0) - x.mean(0)).abs().sum()"},
    "check_view_norms": {
        "the mean of the views' norms": "lambda g, a: (g.norm(dim=2)*a.norm(dim=2)).mean(1)",
        "not its diagonal":
            "lambda g, a: (g.norm(dim=2)*a.norm(dim=2)).square().sum(1).sqrt()/g.shape[1]",
        "divide by k": "lambda g, a: ((g @ g.mT)*(a @ a.mT)).sum((1, 2)).sqrt()",
        "take its root":
            "lambda g, a: ((g @ g.mT)*(a @ a.mT)).sum((1, 2))/g.shape[1]**2",
        "not before":
            "lambda g, a: (((g @ g.mT)*(a @ a.mT)).sum((1, 2))/g.shape[1]).sqrt()"},
}
