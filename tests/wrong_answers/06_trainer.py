"Wrong answers to the exercises of 06_trainer: check -> words of the diagnosis -> code."
NOISE = '''def noise_for(seed, t, total):
    name = f"{seed}, step {t}: ".encode() + total.double().numpy().tobytes()
    key = int.from_bytes(hashlib.sha256(name).digest()[:8], "little")
    generator = torch.Generator().manual_seed(key)
    return torch.randn(total.shape, generator=generator, dtype=torch.float64)
'''
RETURN = "    return torch.randn(total.shape, generator=generator, dtype=torch.float64)\n"
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
PIECES = '''def micro_sum(model, loss_fn, x, y, clip, size):
    pieces = zip(x.split(size), y.split(size))
    parts = [loop_grad_sum(model, loss_fn, u, v, clip)[0] for u, v in pieces]
    return {name: sum(part[name] for part in parts) for name in parts[0]}
'''
SUM = "    return {name: sum(part[name] for part in parts) for name in parts[0]}\n"
WHOLES = '''    parts = [loop_grad_sum(model, loss_fn, u, v, FlatClip(1e30))[0]
             for u, v in zip(x.split(size), y.split(size))]
    lengths = [torch.stack([g.norm() for g in part.values()]).norm() for part in parts]
    factors = [(clip.max_norm/length).clamp(max=1) for length in lengths]
    return {name: sum(f*part[name] for f, part in zip(factors, parts)) for name in parts[0]}
'''


def edited(right, edits):
    "Diagnosis -> the right answer with one place changed."
    return {words: right.replace(*edit) for words, edit in edits.items()}


WRONG = {
    "check_noise_for": edited(NOISE, {
        "t belongs into the name": (", step {t}", ""),
        "whoever reads the code": ("{seed}, ", ""),
        "the whole t": ("step {t}", "step {t % 1000}"),
        "the bytes as they are": (BYTES, BYTES.replace("()", "().abs()", 1)),
        "whoever knows one knows": (RETURN, Z + "    return torch.cat([z[:len(z)//2]]*2)\n"),
        "the first and the last one": (RETURN, Z + "    z.view(-1)[0] = 0\n    return z\n"),
        "another shape": (RETURN, Z + "    return z.clamp(-3, 3)\n"),
        "put a separator": ("{seed}, step {t}: ", "{seed}{t}"),
        "the sum belongs into the name": (" + " + BYTES, ""),
        "hash every entry in its place": (BYTES, "str(round(total.sum().item(), 6)).encode()"),
        "sum with the same total": (BYTES, "str(total.sum().item()).encode()"),
        "rounded, two sums are one": (BYTES, "total.float().numpy().tobytes()"),
        "use hashlib": ("int.from_bytes(hashlib.sha256(name).digest()[:8], \"little\")",
                        "hash(name) % 2**63"),
        "a generator of your own": ("generator=generator, ", ""),
        "belongs in float64": (", dtype=torch.float64", "")}),
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
        "divide the noised count": ("/len(y)", ""),
        "nobody paid": ("trainer.noisy(\"private accuracy\", count, sensitivity=1., sigma=sigma, "
                        "asked=rows)", "count + sigma*torch.randn(()).item()")}),
    "check_micro_sum": edited(PIECES, {
        "the last rows are lost": ("in pieces]", "in pieces if len(u) == size]"),
        "the last piece alone": ("sum(part[name] for part in parts)", "parts[-1][name]"),
        "the mean over pieces": ("for part in parts)", "for part in parts)/len(parts)"),
        "a piece has `size` rows": ("x.split(size), y.split(size)", "[x], [y]"),
        "the pieces overlap": ("zip(x.split(size), y.split(size))",
                               "[(x[i:i + size + 1], y[i:i + size + 1])"
                               " for i in range(0, len(x), size)]"),
        "do not share C": ("v, clip)", "v, FlatClip(clip.max_norm/size))"),
        "not the piece": (SUM, WHOLES)}),
}
