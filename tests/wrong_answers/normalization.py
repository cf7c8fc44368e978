"Wrong answers to the exercises of the room normalization: check -> words of the diagnosis -> code."
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
        "each filter's own mean": RENORMALIZE.replace("m.centred()[0]", "(m.weight.flatten(1) - "
                                                      "m.weight.mean())"),
        "by its own length": RENORMALIZE.replace("F.normalize(m.centred()[0])", "m.centred()[0]"),
        "signs and directions": RENORMALIZE.replace("F.normalize(", "-F.normalize("),
        "change the model itself": RENORMALIZE.replace(
            "    for m in",
            "    from copy import deepcopy\n    model = deepcopy(model)\n    for m in"),
        "their means are still in them": RENORMALIZE.replace("m.centred()[0]",
                                                             "m.weight.flatten(1)"),
        "a length of sqrt(n)": RENORMALIZE.replace("F.normalize(m.centred()[0])",
                                                   "(lambda c: c/c.std(1, correction=0, "
                                                   "keepdim=True))(m.centred()[0])"),
        "that is standard deviation 1": RENORMALIZE.replace(
            "F.normalize(m.centred()[0])",
            "(lambda c: c/c.std(1, keepdim=True))(m.centred()[0])"),
        "the whole tensor has length 1": RENORMALIZE.replace(
            "F.normalize(m.centred()[0])", "(m.centred()[0]/m.centred()[0].norm())"),
        "not the sum of sizes": RENORMALIZE.replace("m.centred()[0])", "m.centred()[0], p=1)"),
        "lengths of columns": RENORMALIZE.replace("m.centred()[0])", "m.centred()[0], dim=0)")},
}
