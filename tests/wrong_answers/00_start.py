"Wrong answers to the exercises of 00_start: check -> words of the diagnosis -> code."
WRONG = {
    "check_rms": {
        "forgot the root": "lambda x: x.square().mean()",
        "the norm": "lambda x: x.norm()",
        "last dimension only": "lambda x: x.square().mean(-1).sqrt()",
        "averaged |x|": "lambda x: x.abs().mean()"},
    "check_is_right": {
        "believes everybody": "lambda rms: True",
        "believes nobody": "lambda rms: False",
        "too strict": "lambda rms: torch.as_tensor(rms(torch.arange(6.).view(2, 3)))"
                      ".double().sum().item() == (55/6)**.5",
        "a NaN passed": "lambda rms: not any((torch.as_tensor(rms(x)) - w).abs().max() > 1e-4"
                        " for x, w in ((torch.tensor([3., 4.]), 12.5**.5),"
                        " (torch.arange(6.).view(2, 3), (55/6)**.5)))",
        "vectors only": "lambda rms: bool(abs(rms(torch.tensor([3., 4.])) - 12.5**.5) <= 1e-4)",
        "so wide": "lambda rms: rms(torch.ones(2, 3)).numel() == 1 and bool("
                   "abs(rms(torch.tensor([3., 4.])) - 12.5**.5) <= .01)"
                   " if isinstance(rms(torch.ones(2, 3)), torch.Tensor) else True"},
    "check_mean_error": {
        "the spread of one repetition":
            "lambda n, r, g: (lambda m: (m.square().mean().sqrt(), m.std()))"
            "(torch.randn(r, n, generator=g).mean(1))",
        "the root halves relative errors":
            "lambda n, r, g: (lambda e: (e, e/r**.5))"
            "(torch.randn(r, n, generator=g).mean(1).square().mean().sqrt())",
        "not more numbers in each":
            "lambda n, r, g: (lambda e: (e, e/(2*n)**.5))"
            "(torch.randn(r, n, generator=g).mean(1).square().mean().sqrt())",
        "the mean of |m|":
            "lambda n, r, g: (lambda m: (m.abs().mean(), m.abs().std()/r**.5))"
            "(torch.randn(r, n, generator=g).mean(1))",
        "an experiment measures it": "lambda n, r, g: (n**-.5, n**-.5/(2*r)**.5)",
        "do not come from `generator`":
            "lambda n, r, g: (lambda e: (e, e/(2*r)**.5))"
            "(torch.randn(r, n).mean(1).square().mean().sqrt())",
        "that is the error of one number":
            "lambda n, r, g: (lambda e: (e, e/(2*r)**.5))"
            "(torch.randn(r, n, generator=g).square().mean().sqrt())"},
    "check_secrets": {
        "differences of the means": "lambda m: [b - a for a, b in zip([0.] + m, m)]",
        "the first secret comes first": "lambda m: (lambda s: [b - a for a, b in zip([0.] + s, s)]"
                                        "[::-1])([i*x for i, x in enumerate(m, 1)])",
        "over 2 values, not over 3": "lambda m: [m[0]] + [(i + 1)*b - i*a"
                                     " for i, (a, b) in enumerate(zip(m, m[1:]), 2)]",
        "round nothing": "lambda m: (lambda s: [round(b - a) for a, b in zip([0.] + s, s)])"
                              "([i*x for i, x in enumerate(m, 1)])",
        "these are the sums": "lambda m: [i*x for i, x in enumerate(m, 1)]",
        "two different counts": "lambda m: [m[0]] + [i*(b - a)"
                                " for i, (a, b) in enumerate(zip(m, m[1:]), 1)]",
        "right for the last one": "lambda m: [m[0]] + [len(m)*b - (len(m) - 1)*a"
                                  " for a, b in zip(m, m[1:])]",
        "counted from 0": "lambda m: (lambda s: [b - a for a, b in zip([0.] + s, s)])"
                          "([i*x for i, x in enumerate(m)])"},
}
WRONG["check_secrets"] |= {
    "changes `means` itself": "def secrets(means):\n    for i in range(1, len(means)):\n"
                              "        means[i] = (i + 1)*means[i] - i*means[i-1]\n"
                              "    return means"}
WRONG["check_is_right"] |= {
    "several numbers came": "lambda rms: abs(float(rms(torch.ones(2, 3))) - 1) < 1e-4"}
