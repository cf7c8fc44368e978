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
HOOKED["one copy of the weights for each row"] = '''def hook_gradients(model, loss_fn, x, y):
    from torch.func import functional_call, grad, vmap
    params = {name: p.detach() for name, p in model.named_parameters()}
    def one(params, u, v):
        return loss_fn(functional_call(model, params, (u[None],)), v[None]).sum()
    return vmap(grad(one), (None, 0, 0))(params, x, y)
'''
HOOKED["goes back once for each row"] = '''def hook_gradients(model, loss_fn, x, y):
    losses, params = loss_fn(model(x), y), dict(model.named_parameters())
    each = torch.autograd.grad(losses, list(params.values()), torch.eye(len(x)).to(losses),
                               is_grads_batched=True)
    return dict(zip(params, each))
'''
HOOKED["leave b in the einsum's output"] = HOOKS.replace(
    'torch.einsum("bto,bti->boi", g, x)', 'torch.einsum("bto,bti->oi", g, x)')
HOOKED["that goes back once for each row"] = '''def hook_gradients(model, loss_fn, x, y):
    losses, params = loss_fn(model(x), y), dict(model.named_parameters())
    rows = [torch.autograd.grad(loss, list(params.values()), retain_graph=True) for loss in losses]
    return {name: torch.stack(each) for name, each in zip(params, zip(*rows))}
'''
SAFE = "torch.where((f > 0)[:, None, None], {}, 0.)"
LATE = f"lambda x, g, f: (f[:, None, None]*{SAFE.format('g')}).flatten(0, 1).T" \
       f" @ {SAFE.format('x')}.flatten(0, 1)"
NORMS = "lambda x, g: ((x @ x.mT)*(g @ g.mT)).sum((1, 2)).clamp(min=0).sqrt()"
WRONG = {
    "check_ghost_norms": {
        "missing its root": NORMS.replace(".sqrt()", ""),
        "clamp(min=0)": NORMS.replace(".clamp(min=0)", ""),
        "one sum for each example": NORMS.replace("sum((1, 2))", "sum()").replace(
            ".sqrt()", ".sqrt().expand(len(x))"),
        "with *, not as matrices": NORMS.replace(")*(", ") @ ("),
        "a product of sums": "lambda x, g: ((x @ x.mT).sum((1, 2))*(g @ g.mT).sum((1, 2)))"
                             ".clamp(min=0).sqrt()",
        "holds for one position only": "lambda x, g: x.flatten(1).norm(dim=1)*g.flatten(1)"
                                       ".norm(dim=1)",
        "positions are not orthogonal": "lambda x, g: (x.square().sum(2)*g.square().sum(2)).sum(1)"
                                        ".sqrt()",
        "adds up the lengths": "lambda x, g: (x.norm(dim=2)*g.norm(dim=2)).sum(1)",
        "no absolute values": NORMS.replace(".sum", ".abs().sum"),
        "more than their inner product": "lambda x, g: ((x @ x.mT).norm(dim=(1, 2))*(g @ g.mT)"
                                         ".norm(dim=(1, 2))).sqrt()",
        "keep the precision": NORMS.replace("x @ x.mT", "x.float() @ x.float().mT").replace(
            "g @ g.mT", "g.float() @ g.float().mT"),
        "that is a mean": NORMS + "/x.shape[1]",
        "the root of a mean": NORMS.replace(".sum(", ".mean(").replace(
            ".sqrt()", ".mul(x.shape[1]).sqrt()"),
        "of the batch's gradient": "lambda x, g: torch.einsum('bto,bti->oi', g, x).norm()"
                                   ".expand(len(x))",
        "as large as a gradient": "lambda x, g: torch.einsum('bto,bti->boi', g, x).flatten(1)"
                                  ".norm(dim=1)"},
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
        "also those that were clipped": LATE.replace("f[:,", "(f*(f >= 1))[:,"),
        "a weighted mean": LATE + "/f.sum()",
        "not its root": LATE.replace("f[:,", "f.sqrt()[:,"),
        "divide nowhere":
            "lambda x, g, f: (f[:, None, None]*g).flatten(0, 1).T @ x.flatten(0, 1)/len(x)"},
}
WRONG["check_late_sum"] |= {
    "not only the first": "lambda x, g, f: torch.einsum('b,bo,bi->oi', f[f > 0], g[f > 0][:, 0],"
                          " x[f > 0][:, 0])"}
