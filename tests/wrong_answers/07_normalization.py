"Wrong answers to the exercises of 07_normalization: check -> words of the diagnosis -> code."
MIXES = '''def mixes_rows(model, x):
    with torch.no_grad():
        before = model(x)
        for row in range(len(x)):
            changed = x.clone()
            changed[row] = 3*changed[row] + 1
            others = torch.arange(len(x)) != row
            if not torch.allclose(model(changed)[others], before[others], rtol=1e-4, atol=1e-6):
                return True
    return False
'''
WITHOUT = '''def without_batchnorm(model):
    from copy import deepcopy
    def replace(m):
        for name, child in m.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(m, name, four_a_group(child.num_features))
            else:
                replace(child)
        return m
    return replace(deepcopy(model))
'''
STANDARD = '''def standardized(weight, gain=1., eps=1e-5):
    rows = weight.flatten(1)
    c = rows - rows.mean(1, keepdim=True)
    variance = c.square().mean(1, keepdim=True)
    return (gain*c/(variance + eps).sqrt()).view_as(weight)
'''
WRONG = {
    "check_mixes_rows": {
        "out of the comparison": MIXES.replace("!= row", ">= 0"),
        "only row 4 reaches the others": MIXES.replace("in range(len(x))", "in [0]"),
        "only row 0 reaches the others": MIXES.replace("in range(len(x))", "in [4]"),
        "answer True or False": "lambda model, x: 'no'",
        "in the mode in which it comes": MIXES.replace("    with", "    model.train()\n    with"),
        "run it and look": "lambda model, x: any(isinstance(m, nn.BatchNorm2d) and m.training"
                           " for m in model.modules())",
        "passed as harmless": MIXES.replace("    with", "    model.eval()\n    with")},
    "check_without_batchnorm": {
        "recurse into children": WITHOUT.replace("                replace(child)\n",
                                                 "                pass\n"),
        "four channels a group": WITHOUT.replace("four_a_group(child.num_features)",
                                                 "nn.GroupNorm(4, child.num_features)"),
        "a scale and a shift": WITHOUT.replace(
            "four_a_group(child.num_features)",
            "nn.GroupNorm(child.num_features//4, child.num_features, affine=False)"),
        "the original has changed": WITHOUT.replace("deepcopy(model)", "model"),
        "it would train the original": WITHOUT.replace(
            "    return replace(deepcopy(model))",
            "    same = {id(p): p for p in model.parameters()}\n"
            "    return replace(deepcopy(model, same))")},
    "check_standardized": {
        "one mean and one variance for all filters": STANDARD.replace(
            "rows.mean(1, keepdim=True)", "rows.mean()").replace(
            ".mean(1, keepdim=True)\n    return", ".mean()\n    return"),
        "correction=0": STANDARD.replace("c.square().mean(1, keepdim=True)",
                                         "rows.var(1, keepdim=True)"),
        "subtract it before you divide": STANDARD.replace("gain*c/", "gain*rows/"),
        "divide by the standard deviation": STANDARD.replace(".sqrt()", ""),
        "under the root": STANDARD.replace("(variance + eps).sqrt()", "(variance.sqrt() + eps)"),
        "the variance divides by n": STANDARD.replace(
            "(variance + eps).sqrt()", "(rows.std(1, keepdim=True) + eps)"),
        "for each position": "lambda weight, gain=1., eps=1e-5: gain*(weight - weight.mean(1, "
                             "keepdim=True))/(weight.var(1, correction=0, keepdim=True) + eps)"
                             ".sqrt()",
        "for each channel": "lambda weight, gain=1., eps=1e-5: gain*(weight - weight.mean((2, 3), "
                            "keepdim=True))/(weight.var((2, 3), correction=0, keepdim=True) + eps)"
                            ".sqrt()",
        "across the filters": "lambda weight, gain=1., eps=1e-5: gain*(weight - weight.mean(0))/("
                              "weight.var(0, correction=0) + eps).sqrt()",
        "a length of sqrt(n)": STANDARD.replace("c.square().mean", "c.square().sum"),
        "the gain is missing": STANDARD.replace("gain*", ""),
        "do not divide": STANDARD.replace("gain*c", "c/gain"),
        "eps is missing": STANDARD.replace("variance + eps", "variance"),
        "not a number of your own": STANDARD.replace("variance + eps", "variance + 1e-5"),
        "the mean square is another number": STANDARD.replace("c.square().mean",
                                                              "rows.square().mean"),
        "leave the weights as they are": STANDARD.replace(
            "    return", "    weight.data.zero_()\n    return"),
        "multiply by the gain, and divide": STANDARD.replace("c/(", "c*("),
        "a mean of squares": STANDARD.replace("c.square()", "c.abs()"),
        "those are the raw filters:": "lambda weight, gain=1., eps=1e-5: weight",
        "times the gain:": "lambda weight, gain=1., eps=1e-5: gain*weight",
        "not yet divided": STANDARD.replace("/(variance + eps).sqrt()", ""),
        "the filters have length 1": "lambda weight, gain=1., eps=1e-5: gain*F.normalize("
                                     "weight.flatten(1)).view_as(weight)",
        "do not detach them": STANDARD.replace("(variance + eps)", "(variance.detach() + eps)"),
        "no detach()": STANDARD.replace("weight.flatten(1)", "weight.detach().flatten(1)")},
}
WRONG["check_without_batchnorm"] |= {
    "a four_a_group of as many": "lambda model: nn.Sequential(nn.Identity())",
    "must not change in the loop": "def without_batchnorm(model):\n    import copy\n"
        "    new = copy.deepcopy(model)\n    for name, m in new.named_modules():\n"
        "        if isinstance(m, nn.BatchNorm2d):\n"
        "            setattr(new, name, four_a_group(m.num_features))\n    return new"}
