"Wrong answers to the exercises of 06_trainer: check -> words of the diagnosis -> code."
NOISE = '''def noise_for(seed, t, total):
    name = f"{seed}, step {t}: ".encode() + total.double().numpy().tobytes()
    key = int.from_bytes(hashlib.sha256(name).digest(), "little")
    return torch.from_numpy(np.random.default_rng(key).standard_normal(total.shape))
'''
RETURN = "    return torch.from_numpy(np.random.default_rng(key).standard_normal(total.shape))\n"
Z = RETURN.replace("return", "z =")
BYTES = "total.double().numpy().tobytes()"
PAY = '''def must_pay(events):
    return len({event for event in events if event[0] == "noised"})
'''
FILE = '''def must_pay(events):
    ledger, kept = set(), set()
    for event in events:
        if event[0] == "save":
            kept = set(ledger)
        elif event[0] == "load":
            ledger = set(kept)
        else:
            ledger.add(event)
    return len(ledger)
'''
LOOK = '''def private_accuracy(trainer, x, y, sigma):
    count = (trainer.model(x).argmax(1) == y).sum().item()
    rows = {"x": x, "y": y}
    noisy = trainer.noisy("private accuracy", count, sensitivity=1., sigma=sigma, asked=rows)
    return float(noisy)/len(y)
'''
STEP = '''def private_step(run, x, y):
    total, _ = loop_grad_sum(run.model, run.loss_fn, x, y, run.clip)
    noise = run.charge(total)
    mean = noisy_mean(total, run.clip.std(run.sigma), run.batch_size, noise)
    for name, p in run.model.named_parameters():
        p.grad = mean[name].to(p.dtype)
    run.optimizer.step()
    return mean
'''
CHARGE = "    noise = run.charge(total)\n"
MEAN = "    mean = noisy_mean(total, run.clip.std(run.sigma), run.batch_size, noise)\n"
KEPT = '''def checkpoint(run):
    import copy
    return copy.deepcopy({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(),
                          "t": run.t, "seed": run.seed})
'''


def edited(right, edits):
    "Diagnosis -> the right answer with one place changed."
    return {words: right.replace(*edit) for words, edit in edits.items()}


WRONG = {
    "check_noise_for": edited(NOISE, {
        "t belongs in the name": (", step {t}", ""),
        "reads the code": ("{seed}, ", ""),
        "try all of them": ("digest()", "digest()[:4]"),
        "keeps 32 bits": (
            RETURN, "    generator = torch.Generator().manual_seed(key % 2**64)\n"
            "    return torch.randn(total.shape, generator=generator, dtype=torch.float64)\n"),
        "the whole t": ("step {t}", "step {t % 1000}"),
        "the bytes as they are": (BYTES, BYTES.replace("()", "().abs()", 1)),
        "gives the other away": (RETURN, Z + "    return torch.cat([z[:len(z)//2]]*2)\n"),
        "the first and the last one": (RETURN, Z + "    z.view(-1)[0] = 0\n    return z\n"),
        "another shape": (RETURN, Z + "    return z.clamp(-3, 3)\n"),
        "put a separator": ("{seed}, step {t}: ", "{seed}{t}"),
        "the sum belongs in the name": (" + " + BYTES, ""),
        "hash every entry in its place": (BYTES, "str(round(total.sum().item(), 6)).encode()"),
        "sum with the same total": (BYTES, "str(total.sum().item()).encode()"),
        "rounded, two sums are one": (BYTES, "total.float().numpy().tobytes()"),
        "use hashlib": ("int.from_bytes(hashlib.sha256(name).digest(), \"little\")",
                        "hash(name) % 2**63"),
        "a generator of your own": ("default_rng(key)", "default_rng()"),
        "belongs in float64": ("(total.shape)", "(total.shape, dtype=np.float32)")}),
    "check_must_pay": edited(PAY, {
        "repeated exactly": ("len({event for event in events if event[0] == \"noised\"})",
                             "sum(event[0] == \"noised\" for event in events)"),
        "the same step with another sum": ("{event for", "{event[1:3] for"),
        "another seed, another noise": ("{event for", "{event[2:] for"),
        "at another step": ("{event for", "{(event[1], event[3]) for")})
    | {"does not take back": FILE,
       "the number of the last step":
           "lambda events: max((e[2] for e in events if e[0] == 'noised'), default=0)"},
    "check_private_accuracy": edited(LOOK, {
        "too little noise": ("sensitivity=1.", "sensitivity=1/len(y)"),
        "too much noise": ("sensitivity=1.", "sensitivity=2."),
        "leaves the house": ("float(noisy)", "count"),
        "above 1 or below 0": ("float(noisy)/len(y)",
                               "(float(noisy) if 0 <= noisy <= len(y) else count)/len(y)"),
        "a sum or a mean": ('{"x": x, "y": y}', '{"x": x.sum(), "y": y.sum()}'),
        "divide the noised count": ("/len(y)", ""),
        "nobody paid": ("trainer.noisy(\"private accuracy\", count, sensitivity=1., sigma=sigma, "
                        "asked=rows)", "count + sigma*torch.randn(()).item()")}),
    "check_private_step": edited(STEP, {
        "the weights have not moved": ("    run.optimizer.step()\n", ""),
        "number that came": ("run.batch_size", "max(1, len(x))"),
        "that is the sum": ("run.batch_size", "1"),
        "nobody was clipped": ("y, run.clip)", "y, FlatClip(1e30))"),
        "you clipped the mean": (
            STEP[STEP.index("    total"):STEP.index("    for")],
            "    total, _ = loop_grad_sum(run.model, run.loss_fn, x, y, FlatClip(1e30))\n" + CHARGE
            + MEAN + "    length = torch.cat([v.flatten() for v in mean.values()]).norm().item()\n"
            "    mean = {n: v*min(1., run.clip.max_norm/length) for n, v in mean.items()}\n"),
        "replace them, don't add": ("p.grad = mean[name].to(p.dtype)",
                                    "p.grad = mean[name] + (0 if p.grad is None else p.grad)"),
        "with its momentum": (
            STEP[STEP.index("    for"):],
            "    with torch.no_grad():\n        for name, p in run.model.named_parameters():\n"
            "            p -= run.optimizer.param_groups[0]['lr']*mean[name]\n    return mean\n"),
        "goes against the gradient": ("p.grad = mean", "p.grad = -mean"),
        "nobody paid": (CHARGE, "    noise = run.generator\n"),
        "call it once": (CHARGE, CHARGE + CHARGE),
        "before it is divided": (
            CHARGE, "    noise = run.charge({n: v/run.batch_size for n, v in total.items()})\n"),
        "charge first, and then": (
            STEP[STEP.index(CHARGE):],
            "    mean = noisy_mean(total, run.clip.std(run.sigma), run.batch_size, run.generator)\n"
            + STEP[STEP.index("    for"):].replace("    return", CHARGE + "    return")),
        "nobody came": ("    total, _", "    if not len(x):\n        return {}\n    total, _"),
        "not sigma": ("run.clip.std(run.sigma)", "run.sigma"),
        "don't catch it": (
            CHARGE, "    try:\n        noise = run.charge(total)\n    except ValueError:\n"
            "        return {n: 0*v for n, v in total.items()}\n"),
        "return the noised mean": ("return mean", "return total"),
        "ends without a `return`": ("    return mean\n", "")}),
    "check_checkpoint": edited(KEPT, {
        "the momentum is lost": ('"optimizer": run.optimizer.state_dict(),', ""),
        "begins again at its first step": ('"t": run.t, ', ""),
        "draws a seed of its own": (', "seed": run.seed', ""),
        "the weights are missing": ('"model": run.model.state_dict(), ', ""),
        "copy them": ("copy.deepcopy(", "("),
        "went back in time": ('"seed": run.seed', '"seed": run.seed, "ledger": run.ledger'),
        "those of the run's": ('"t": run.t', '"step": run.t'),
        "the private rows": ('"seed": run.seed', '"seed": run.seed, "x": run.x, "y": run.y'),
        "has a state_dict()": ("run.model.state_dict()", "list(run.model.parameters())")}),
}
WRONG["check_private_accuracy"] |= {
    ".argmax(1) of its outputs": LOOK.replace("argmax(1) == y", "argmax(0) == y[:3]")}
