"Wrong answers to the exercises of 08_fast_gradients: check -> words of the diagnosis -> code."
HOOKS = '''def hook_gradients(model, loss_fn, x, y):
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    inputs, outputs = {}, {}
    def note(name, m, args, out):
        inputs[name], outputs[name] = args[0].detach(), out
    hooks = [m.register_forward_hook(partial(note, n)) for n, m in layers.items()]
    losses = loss_fn(model(x), y)
    for hook in hooks:
        hook.remove()
    found = torch.autograd.grad(losses.sum(), [outputs[n] for n in layers])
    each = {}
    for (name, m), g in zip(layers.items(), found):
        x = inputs[name].reshape(len(g), -1, m.in_features)
        g = g.reshape(len(g), -1, m.out_features)
        each[f"{name}.weight"] = torch.einsum("bto,bti->boi", g, x)
        if m.bias is not None:
            each[f"{name}.bias"] = g.sum(1)
    return each
'''
EDITS = {  # diagnosis -> (what the right engine says, what the wrong one says)
    "gradient of the whole batch": (
        '"bto,bti->boi", g, x)\n', '"bto,bti->oi", g, x).expand(len(g), -1, -1)\n'),
    "differentiate the sum of the losses": ("losses.sum()", "losses.mean()"),
    "the biases are missing": ("m.bias is not None", "False"),
    "look at `m.bias`": ("m.bias is not None", "True"),
    "in `finally`": ("        hook.remove()\n", "        pass\n"),
    "at each position, then add up": ('torch.einsum("bto,bti->boi", g, x)',
                                      'torch.einsum("bo,bi->boi", g.sum(1), x.sum(1))'),
    "use torch.autograd.grad": (
        "    each = {}\n", "    each = {}\n    loss_fn(model(x), y).sum().backward()\n"),
}
HOOKED = {words: HOOKS.replace(*edit) for words, edit in EDITS.items()}
HOOKED["gradient of the whole batch"] = HOOKED["gradient of the whole batch"].replace(
    "= g.sum(1)", "= g.sum((0, 1)).expand(len(g), -1)")
HOOKED["one forward pass for all rows"] = '''def hook_gradients(model, loss_fn, x, y):
    params = dict(model.named_parameters())
    rows = [torch.autograd.grad(loss_fn(model(x[i:i+1]), y[i:i+1]).sum(), list(params.values()))
            for i in range(len(x))]
    return {name: torch.stack(each) for name, each in zip(params, zip(*rows))}
'''
SAFE = "torch.where((f > 0)[:, None, None], {}, 0.)"
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
    "check_hook_gradients": HOOKED,
    "check_late_sum": {
        "don't multiply it away":
            "lambda x, g, f: (f[:, None, None]*g).flatten(0, 1).T @ x.flatten(0, 1)",
        "forms all gradients":
            f"lambda x, g, f: torch.einsum('b,boi->oi', f, {SAFE.format('g')}.mT"
            f" @ {SAFE.format('x')})",
        "the factors are missing": "lambda x, g, f: torch.einsum('bto,bti->oi', g, x)",
        "it counts twice":
            "lambda x, g, f: (f[:, None, None]*g).flatten(0, 1).T"
            " @ (f[:, None, None]*x).flatten(0, 1)",
        "divide nowhere":
            "lambda x, g, f: (f[:, None, None]*g).flatten(0, 1).T @ x.flatten(0, 1)/len(x)"},
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
