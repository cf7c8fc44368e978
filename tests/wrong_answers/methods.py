"Wrong answers to the exercises of the room methods: check -> words of the diagnosis -> code."
PATCHES = "F.unfold(x, c.kernel_size, c.dilation, c.padding, c.stride)"
GHOST = f"""def conv_ghost(c, x, g):
    patches, back = {PATCHES}, g.flatten(2)
    return ((patches.mT @ patches)*(back.mT @ back)).sum((1, 2)).sqrt()
"""
MIXED = '''def mixed(layers):
    ghosts = waiting = 0
    for i, o, kernel, size in layers:
        t, fan_in = size**2, i*kernel**2
        ghost = 2*t**2 < fan_in*o
        ghosts += ghost
        waiting += t*(fan_in + o) if ghost else fan_in*o
    return ghosts, waiting
'''
WRONG = {
    "check_conv_ghost": {
        "holds for one position only":
            f"lambda c, x, g: {PATCHES}.flatten(1).norm(dim=1)*g.flatten(1).norm(dim=1)",
        "positions are not orthogonal":
            f"lambda c, x, g: ({PATCHES}.square().sum(1)*g.flatten(2).square().sum(1))"
            ".sum(1).sqrt()",
        "dilation before padding": GHOST.replace("c.dilation, c.padding", "c.padding, c.dilation"),
        "take no absolute values": GHOST.replace(".sum((1, 2))", ".abs().sum((1, 2))"),
        "leave out the bias": GHOST.replace(
            ".sum((1, 2)).sqrt()", ".sum((1, 2)).add(back.sum(2).square().sum(1)).sqrt()"),
        "mind dilation": GHOST.replace("c.dilation", "1"),
        "mind padding": GHOST.replace("c.padding", "0"),
        "mind stride": GHOST.replace("c.stride", "1"),
        "missing its root":
            f"lambda c, x, g: (({PATCHES}.mT @ {PATCHES})*(g.flatten(2).mT @ g.flatten(2)))"
            ".sum((1, 2))",
        "these are the gradients":
            f"lambda c, x, g: (g.flatten(2) @ {PATCHES}.mT).flatten(1).norm(dim=1)",
        "take inner products between positions":
            "lambda c, x, g: torch.stack([torch.autograd.grad(c(u[None]), c.weight, v[None])[0]"
            ".norm() for u, v in zip(x, g)])"},
    "check_mixed": {
        "g waits, too": MIXED.replace("t*(fan_in + o) if", "t*fan_in if"),
        "t is its square": MIXED.replace("t, fan_in = size**2", "t, fan_in = size"),
        "i*kernel² weights": MIXED.replace("i*kernel**2", "i"),
        "one table is not enough": MIXED.replace("2*t**2", "t**2"),
        "t < p is not the rule": MIXED.replace("2*t**2", "t"),
        "for each layer by itself": '''def mixed(layers):
    t = max(s*s for *_, s in layers)
    ghost = 2*t*t < sum(i*o*k*k for i, o, k, _ in layers)
    waiting = sum(s*s*(i*k*k + o) if ghost else i*o*k*k for i, o, k, s in layers)
    return ghost*len(layers), waiting
'''},
}
