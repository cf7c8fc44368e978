"Wrong answers to the exercises of 16_attacks: check -> words of the diagnosis -> code."
FOUND = """def found_at(members, others, fpr):
    k = min(int(fpr*len(others)), len(others) - 1)
    threshold = %s
    return %s
"""
SORTED = "others.sort(descending=True).values[k]"
ABOVE = "(members > threshold).double().mean().item()"
RATIO = """def log_ratio(c, mean_in, std_in, mean_out, std_out):
    z_in, z_out = (c - mean_in)/std_in, (c - mean_out)/std_out
    return %s
"""
EXPOSURE = """def exposure(losses, secret):
    rank = %s
    return %s
"""
RANK = "1 + (losses < losses[secret]).sum().item()"
BITS = "math.log2(len(losses)) - math.log2(rank)"
MISSING = "lambda W, others, decay: %s"
SHARE = "lambda tpr, fpr, prior: %s"
PIN = "lambda first, candidates, eps, delta: %s"
WRONG = {
    "check_found_at": {
        "above* the threshold": FOUND % (SORTED, ABOVE.replace(">", "<")),
        "comes from the others": FOUND % (SORTED.replace("others", "members"), ABOVE),
        "> and not >=": FOUND % (SORTED, ABOVE.replace(">", ">=")),
        "divide by how many": FOUND % (SORTED, "(members > threshold).sum().item()"),
        "one other less": FOUND % (SORTED.replace("[k]", "[max(0, k - 1)]"), ABOVE),
        "one other more": FOUND % (SORTED.replace("[k]", "[min(len(others) - 1, k + 1)]"), ABOVE),
        "from the highest score down": FOUND % ("others.sort().values[k]", ABOVE),
        "between two scores": FOUND % ("others.quantile(1 - fpr)", ABOVE),
        "the share of the accused who are": FOUND % (
            SORTED, "(members > threshold).sum().item()/max(1, ((members > threshold).sum() + "
            "(others > threshold).sum()).item())")},
    "check_log_ratio": {
        "wrong way round": RATIO % "(z_in**2 - z_out**2)/2 + torch.log(std_in/std_out)",
        "ln(std_out/std_in) is missing": RATIO % "(z_out**2 - z_in**2)/2",
        "two widths": RATIO % "(z_out**2 - z_in**2)/2 + torch.log(std_in/std_out)",
        "factor of one half": RATIO % "z_out**2 - z_in**2 + torch.log(std_out/std_in)",
        "its logarithm is asked for":
            RATIO % "((z_out**2 - z_in**2)/2 + torch.log(std_out/std_in)).exp()",
        "second density is missing": RATIO % "-z_in**2/2 - torch.log(std_in)",
        "distances are squared": RATIO % "z_in - z_out",
        "not of the variances": RATIO % "(z_out**2 - z_in**2)/2 + 2*torch.log(std_out/std_in)",
        "leave it so":
            RATIO % "((z_out**2 - z_in**2)/2 + torch.log(std_out/std_in)).clamp(min=0)",
        "you passed the variance": RATIO % (
            "torch.distributions.Normal(mean_in, std_in**2).log_prob(c) "
            "- torch.distributions.Normal(mean_out, std_out**2).log_prob(c)")},
    "check_exposure": {
        "ranked from the largest": EXPOSURE % (RANK.replace("<", ">"), BITS),
        "base 2": EXPOSURE % (RANK, BITS.replace("log2", "log")),
        "one too many": EXPOSURE % (RANK.replace("<", "<="), BITS),
        "an equal loss is not": EXPOSURE % ("(losses <= losses[secret]).sum().item()", BITS),
        "that is the ratio N/rank": EXPOSURE % (RANK, "len(losses)/rank"),
        "not always 10,000": EXPOSURE % (RANK, "math.log2(10_000/rank)"),
        "argsort says": EXPOSURE % ("1 + losses.argsort()[secret].item()", BITS),
        "that is the rank": EXPOSURE % (RANK, "rank"),
        "that is log2 of the rank": EXPOSURE % (RANK, "math.log2(rank)"),
        "the sign is the wrong way round":
            EXPOSURE % (RANK, "math.log2(rank) - math.log2(len(losses))")},
    "check_missing_gradient": {
        "n counts you, too": MISSING % "-others.sum(0) - len(others)*decay*W",
        "*minus* the rest": MISSING % "others.sum(0) + (len(others) + 1)*decay*W",
        "minus the decay, too": MISSING % "-others.sum(0) + (len(others) + 1)*decay*W",
        "the decay is missing": MISSING % "-others.sum(0)",
        "counts n times": MISSING % "-others.sum(0) - decay*W",
        "not of classes": MISSING % "-others.sum(0) - len(W)*decay*W",
        "no mean": MISSING % "-others.mean(0) - (len(others) + 1)*decay*W"},
    "check_share_right": {
        "the prior is missing": SHARE % "tpr/(tpr + fpr)",
        "the share 1 - prior": SHARE % "prior*tpr/(prior*tpr + fpr)",
        "divide by all the accused": SHARE % "prior*tpr",
        "accusations that are wrong":
            SHARE % "(1 - prior)*fpr/(prior*tpr + (1 - prior)*fpr)",
        "not of those who are not": SHARE % "prior*tpr/(prior*tpr + (1 - prior)*(1 - fpr))",
        "you swapped them": SHARE % "prior*fpr/(prior*fpr + (1 - prior)*tpr)"},
    "check_pin_chance": {
        "at most 1": PIN % "math.exp(eps)*first/candidates + delta",
        "the factor is e^eps": PIN % "min(1., max(1., eps)*first/candidates + delta)",
        "delta is added: with": PIN % "min(1., math.exp(eps)*first/candidates)",
        "not multiplied by e^eps": PIN % "min(1., math.exp(eps)*(first/candidates + delta))",
        "not one": PIN % "min(1., math.exp(eps)/candidates + delta)",
        "chance without the training": PIN % "first/candidates"},
}
WRONG["check_log_ratio"] |= {
    "densities are rounded to 0": "lambda c, a, s, b, t: torch.log((-((c - a)/s)**2/2).exp()/s)"
                                  " - torch.log((-((c - b)/t)**2/2).exp()/t)",
    "is natural, too": "lambda c, a, s, b, t: (((c - b)/t)**2 - ((c - a)/s)**2)/2"
                       " + torch.log2(t/s)"}
WRONG["check_missing_gradient"] |= {
    "not one number": "lambda W, o, decay: -o.sum() - (len(o) + 1)*decay*W"}
