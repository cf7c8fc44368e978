"Wrong answers to the exercises of 03_by_hand: check -> words of the diagnosis -> code."
STEAL = "lambda W, bias: {'image': W[bias.argmin()]%s, 'label': bias.argmin()}"
MOVE = '''def worst_move(release, d):
    worst = 0.
    for b in CROWDS:
        crowd = torch.randn(1, d, dtype=torch.float64).expand(b, d)
        directions = DIRECTIONS
        for stranger in [s*z for s in SCALES for z in directions]:
            joined = torch.cat([crowd, stranger[None]])
            worst = max(worst, MOVED)
    return worst
'''


def attack(crowds="(1, 8, 32)", scales="(1e-3, 1., 1e3, 1e6)",
           directions="[torch.randn(d, dtype=torch.float64), -crowd[0]]",
           moved="(release(joined) - release(crowd)).norm().item()"):
    "An attack with something left out."
    code = MOVE.replace("CROWDS", crowds).replace("SCALES", scales)
    return code.replace("DIRECTIONS", directions).replace("MOVED", moved)


MEAN = '''def private_mean(grads, max_norm, sigma, batch_size, generator):
    norms = grads.norm(dim=1, keepdim=True)
    clipped = torch.where(norms.isfinite(), grads*(max_norm/norms).clamp(max=1), 0.)
    noise = torch.randn(grads.shape[1], dtype=grads.dtype, generator=generator)
    return (clipped.sum(0) + sigma*max_norm*noise)/batch_size
'''
LAST = "    return (clipped.sum(0) + sigma*max_norm*noise)/batch_size\n"
NOISE = "torch.randn(grads.shape[1], dtype=grads.dtype, generator=generator)"
EDITS = {
    "you clipped the mean": (
        "    norms =", "    grads, batch_size = grads.mean(0, keepdim=True), 1\n    norms ="),
    "divided by the realised": ("/batch_size\n", "/len(grads)\n"),
    "that is the sum": ("/batch_size\n", "\n"),
    "the factor is at most 1": (".clamp(max=1)", ""),
    "clamped every coordinate": ("grads*(max_norm/norms).clamp(max=1)",
                                 "grads.clamp(-max_norm, max_norm)"),
    "you divided before": (LAST, "    return clipped.sum(0)/batch_size + sigma*max_norm*noise\n"),
    "divided by the batch twice": ("sigma*max_norm*noise", "sigma*max_norm*noise/batch_size"),
    "clip first, then add noise": (
        "    norms =", "    grads = grads + sigma*max_norm*torch.randn(grads.shape, "
        "generator=generator, dtype=grads.dtype)\n    sigma = 0.\n    norms ="),
    "not one for each example": (
        NOISE, NOISE.replace("grads.shape[1]", "grads.shape").replace("randn(", "randn(*")
        + ".sum(0)"),
    "sigma times max_norm": ("sigma*max_norm*noise", "sigma*noise"),
    "nobody came": (
        "    norms =", "    if not len(grads):\n        return grads.sum(0)\n    norms ="),
    "not a number": ("torch.where(norms.isfinite(), grads*(max_norm/norms).clamp(max=1), 0.)",
                     "grads*(max_norm/norms).clamp(max=1)"),
    "the entry of nan alone": ("    norms =", "    grads = grads.nan_to_num()\n    norms ="),
    "the root is missing": ("grads.norm(dim=1, keepdim=True)",
                            "grads.square().sum(1, keepdim=True)"),
    "pass generator=generator": (", generator=generator", ""),
    "it repeats itself": ("generator=generator", "generator=torch.Generator().manual_seed("
                          "generator.initial_seed())"),
    "every coordinate has noise of its own": (NOISE, NOISE.replace("[1]", "[1]//2") + ".repeat(2)"),
    "one gives the other away": (
        LAST, "    half = noise[:len(noise)//2]\n    noise = torch.cat([half, -half])\n" + LAST),
    "the first and the last one": (LAST, "    noise[0] = 0.\n" + LAST),
    "the right size and another shape": (
        NOISE, NOISE.replace("randn", "rand").join(["12**.5*(", " - .5)"])),
    "the accountant counts on": (NOISE, NOISE + ".sign()"),
    "Gaussian noise, torch.randn": (NOISE, NOISE + ".clamp(-3, 3)"),
    "noise has mean 0": ("sigma*max_norm*noise", "sigma*max_norm*(noise + 5)"),
}
STEPS = '''def dp_sgd(w, gradient, batches, lr, C, sigma, batch_size, generator):
    def one_mean(grads):
        kept = [g*min(1., C/g.norm()) for g in grads]
        noise = torch.randn(len(w), dtype=w.dtype, generator=generator)
        return (sum(kept, torch.zeros_like(w)) + sigma*C*noise)/batch_size
    for batch in batches:
        w = w - lr*one_mean([gradient(w, i) for i in batch])
    return w
'''


def steps(old, new):
    "The steps with something else in a place."
    assert old in STEPS
    return STEPS.replace(old, new)


WRONG = {
    "check_clipped": {
        "the factor is at most 1": "lambda g, C: g*C/g.norm()",
        "every entry was clamped": "lambda g, C: g.clamp(-C, C)",
        "the root is missing": "lambda g, C: g*(C/g.square().sum()).clamp(max=1)",
        "not at least": "lambda g, C: g*(C/g.norm()).clamp(min=1)",
        "nobody was clipped": "lambda g, C: g",
        "not the sum of the entries": "lambda g, C: g*(C/g.abs().sum()).clamp(max=1)",
        "the largest entry is not": "lambda g, C: g*(C/g.abs().max()).clamp(max=1)",
        "0/0 is not a number": "lambda g, C: g/g.norm()*min(g.norm().item(), C)"},
    "check_clipped_sum": {
        "you clipped the sum": "lambda g, C: g.sum(0)*(C/g.sum(0).norm()).clamp(max=1)",
        "nobody was clipped": "lambda g, C: g.sum(0)",
        "one length for the whole table": "lambda g, C: (g*(C/g.norm()).clamp(max=1)).sum(0)",
        "lengths of columns": "lambda g, C: (g*(C/g.norm(dim=0)).clamp(max=1)).sum(0)",
        "you clamped every entry": "lambda g, C: g.clamp(-C, C).sum(0)",
        "0 times infinity":
            "lambda g, C: (g*(C/g.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)",
        "not the broken entry alone": "lambda g, C: (lambda g: (g*(C/g.norm(dim=1, keepdim=True))"
            ".clamp(max=1)).sum(0))(torch.where(g.isfinite(), g, 0.))",
        "a sum, not a mean": "lambda g, C: (lambda g: (g*(C/g.norm(dim=1, keepdim=True))"
            ".clamp(max=1)).sum(0)/max(1, len(g)))(g[g.isfinite().all(1)])"},
    "check_dp_sgd": {
        "not at the first ones": steps("    for batch", "    first = w\n    for batch").replace(
            "gradient(w, i)", "gradient(first, i)"),
        "*against* the gradient": steps("w - lr*", "w + lr*"),
        "the learning rate is missing": steps("w - lr*", "w - "),
        "divided by the number that came": steps("/batch_size", "/max(1, len(grads))"),
        "nobody came": steps("        w = w - ", "        if len(batch):\n            w = w - "),
        "pass generator=generator": steps(", generator=generator", ""),
        "noise of its own": steps("    def one_mean", "    given = generator.get_state()\n"
            "    def one_mean").replace("        noise =", "        generator.set_state(given)\n"
                                        "        noise =")},
    "check_steal": {
        "where the bias gradient is negative":
            "lambda W, bias: {'image': W[bias.argmax()]/bias.max(), 'label': bias.argmax()}",
        "the image times a number": STEAL % "",
        "the smallest entry says nothing":
            "lambda W, b: {'image': W[0]/b[0], 'label': b.abs().argmin()}",
        "the row is the image *times* it": STEAL % "*bias.min()",
        "divide by that": "lambda W, bias: {'image': W.T@bias, 'label': bias.argmin()}",
        "not its length": "lambda W, bias: {'image': W.T@bias/bias.norm(), 'label': bias.argmin()}",
        "divide by the row's own": STEAL % "/bias.sum()",
        "not by the length": STEAL % "/bias.norm()",
        "the minus one in it already": STEAL % "/(bias.min() - 1)",
        "no picture of 8 times 8": STEAL % "[:64].view(8, 8)/bias.min()",
        "minus the image": STEAL % "/bias.min().abs()",
        "not the sum": "lambda W, bias: {'image': W.sum(0)/bias.sum(), 'label': bias.argmin()}",
        "not the image's own": STEAL % "/W[bias.argmin()].norm()"},
    "check_update_std": {
        "multiplies it by lr": "lambda s, c, b, lr: s*c/b",
        "the noise on the sum": "lambda s, c, b, lr: lr*s*c",
        "sigma has no unit": "lambda s, c, b, lr: lr*s/b",
        "that is the variance": "lambda s, c, b, lr: (lr*s*c/b)**2",
        "no square root": "lambda s, c, b, lr: lr*s*c/b**.5"},
    "check_worst_move": {
        "make some strangers long": attack(scales="(1e-3,)"),
        "up to 1e6": attack(scales="(1e-3, 2.)",
                            directions="[torch.nn.functional.normalize(z, dim=0) for z in "
                                       "(torch.randn(d, dtype=torch.float64)*3, -crowd[0])]"),
        "use all coordinates": attack(directions="[torch.eye(d).double()[0]]"),
        "the same people": attack(moved="release(joined).norm().item()", crowds="(1,)"),
        "the crowd matters": attack(crowds="(32,)")},
    "check_private_mean": {words: MEAN.replace(*edit) for words, edit in EDITS.items()},
}
WRONG["check_steal"] |= {
    "not the column": "lambda W, b: {'image': W[:, b.argmin()]/b.min(), 'label': b.argmin()}",
    "don't subtract": "lambda W, b: {'image': W[b.argmin()] - b.min(), 'label': b.argmin()}"}
WRONG["check_clipped"] |= {"norm times C": "lambda g, C: g/(g.norm()*C).clamp(min=1)"}
WRONG["check_clipped_sum"] |= {
    "the last row is missing": "lambda g, C: (lambda g: (g*(C/g.norm(dim=1, keepdim=True))"
        ".clamp(max=1)).sum(0))(g[:-1][g[:-1].isfinite().all(1)])"}
WRONG["check_private_mean"] |= {
    "C is not divided by the batch": MEAN.replace("(max_norm/", "(max_norm/batch_size/").replace(
        "(clipped.sum(0) + sigma*max_norm*noise)/batch_size",
        "clipped.sum(0) + sigma*max_norm*noise/batch_size")}
WRONG["check_dp_sgd"] |= {
    "stands after the loop": steps("\n    return w", "\n        return w"),
    "you clipped the sum of the batch": steps("for g in grads]", "for g in [sum(grads, 0*w)]]"),
    "holds the numbers of its examples": steps("i in batch", "i in range(len(batch))"),
    "were handed over": steps("w = w - lr", "w -= lr"),
    "an answer is due all the same": steps("kept = [g*min(1., C/g.norm()) for g in grads]",
                                           "kept = [*torch.stack(grads)]")}
WRONG["check_worst_move"] |= {
    "not a sum of moves": attack().replace("worst = max(worst, ", "worst += (")}
