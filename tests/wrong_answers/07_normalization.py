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
SQUARE = '''def raw_norms(conv, gg, g1, gc):
    c, f, h = conv.centred()
    n, cc = c.shape[1], c.square().sum(1, keepdim=True)
    square = f**2*(gg - g1**2/n) - (2*f*h - h**2*cc)*gc**2
    return square.clamp(min=0).sqrt()
'''
RENORMALIZE = '''def renormalize(model):
    for m in model.modules():
        if isinstance(m, WSConv2d):
            m.weight.data = F.normalize(m.centred()[0]).view_as(m.weight).detach()
    return model
'''
WRONG = {
    "check_mixes_rows": {
        "out of the comparison": MIXES.replace("!= row", ">= 0"),
        "only row 4 reaches the others": MIXES.replace("in range(len(x))", "in [0]"),
        "only row 0 reaches the others": MIXES.replace("in range(len(x))", "in [4]"),
        "answer True or False": "lambda model, x: 'no'",
        "run it and look": "lambda model, x: any(isinstance(m, nn.BatchNorm2d) and m.training"
                           " for m in model.modules())",
        "passed as harmless": MIXES.replace("    with", "    model.eval()\n    with")},
    "check_without_batchnorm": {
        "recurse into children": WITHOUT.replace("                replace(child)\n",
                                                 "                pass\n"),
        "four channels a group": WITHOUT.replace("four_a_group(child.num_features)",
                                                 "nn.GroupNorm(4, child.num_features)"),
        "the original has changed": WITHOUT.replace("deepcopy(model)", "model"),
        "it would train the original": WITHOUT.replace(
            "    return replace(deepcopy(model))",
            "    same = {id(p): p for p in model.parameters()}\n"
            "    return replace(deepcopy(model, same))")},
    "check_raw_norms": {
        "missing its root": SQUARE.replace(".sqrt()", ""),
        "the mean is still in it": SQUARE.replace("gg - g1**2/n", "gg"),
        "the cross term comes twice": SQUARE.replace("2*f*h", "f*h"),
        "the last term is missing": SQUARE.replace(" - h**2*cc", ""),
        "the cross term is missing": SQUARE.replace("2*f*h -", "-"),
        "has the other sign: it is a square": SQUARE.replace("- h**2*cc", "+ h**2*cc"),
        "h is squared in the last term": SQUARE.replace("h**2*cc", "h*cc"),
        "f is squared in the first term": SQUARE.replace("f**2*", "f*"),
        "|c| is squared, too": SQUARE.replace("h**2*cc", "h**2*cc.sqrt()"),
        "the length of c is missing": SQUARE.replace("h**2*cc", "h**2"),
        "gc is squared": SQUARE.replace("gc**2", "gc"),
        "n once, not twice": SQUARE.replace("g1**2/n", "g1**2/n**2"),
        "not of filters": SQUARE.replace("c.shape[1]", "c.shape[0]"),
        "its derivative is missing": SQUARE.replace("(2*f*h - h**2*cc)", "0")},
    "check_renormalize": {
        "only the weights of WSConv2d": RENORMALIZE.replace("WSConv2d", "nn.Conv2d").replace(
            "m.centred()[0]", "m.weight.flatten(1) - m.weight.flatten(1).mean(1, keepdim=True)"),
        "each filter's own mean": RENORMALIZE.replace("m.centred()[0]", "m.weight.flatten(1)"),
        "by its own norm": RENORMALIZE.replace("F.normalize(m.centred()[0])", "m.centred()[0]"),
        "signs and directions": RENORMALIZE.replace("F.normalize(", "-F.normalize("),
        "change the model itself": RENORMALIZE.replace(
            "    for m in",
            "    from copy import deepcopy\n    model = deepcopy(model)\n    for m in")},
}
