"Wrong answers to the exercises of 02_gaussian: check -> words of the diagnosis -> code."
WRONG = {
    "check_excess": {
        "clamp before the sum": "lambda p, q, e: (p - math.exp(e)*q).sum()",
        "not their sum": "lambda p, q, e: (p - math.exp(e)*q).sum().clamp(min=0)",
        "add the excesses up": "lambda p, q, e: (p - math.exp(e)*q).clamp(min=0).max()",
        "not by eps": "lambda p, q, e: (p - e*q).clamp(min=0).sum()",
        "the delta at eps = 0": "lambda p, q, e: (p - q).clamp(min=0).sum()",
        "wrong way round": "lambda p, q, e: (q - math.exp(e)*p).clamp(min=0).sum()",
        "not all of P": "lambda p, q, e: p[p > math.exp(e)*q].sum()",
        "no absolute values": "lambda p, q, e: (p - math.exp(e)*q).abs().sum()"},
    "check_laplace_delta": {
        "forgot to subtract": "lambda e, l: 1 - math.exp((e - l)/2)/2 if e < l else 0.",
        "half of eps": "lambda e, l: 1 - math.exp(e - l)",
        "not a negative number": "lambda e, l: 1 - math.exp((e - l)/2)",
        "is half of eps - level": "lambda e, l: max(0., 1 - math.exp(e - l))",
        "so eps - level is halved": "lambda e, l: max(0., (1 - math.exp(e - l))/2)",
        "the delta of a coin":
            "lambda e, l: max(0., (math.exp(l) - math.exp(e))/(1 + math.exp(l)))",
        "that is e^eps Q alone": "lambda e, l: math.exp((e - l)/2)*(e < l)",
        "the sign of the exponent": "lambda e, l: max(0., 1 - math.exp((l - e)/2))",
        "that is P[loss > eps]": "lambda e, l: max(0., 1 - math.exp((e - l)/2)/2)*(e < l)"},
    "check_sampled_delta": {
        "from Q": "lambda e, s, z: (1 - (e - (2*s*z - 1)/(2*s**2)).exp()).clamp(min=0).mean()",
        "not 2 sigma": "lambda e, s, z: (1 - (e - (1 + 2*s*z)/(2*s)).exp()).clamp(min=0).mean()",
        "clamp each": "lambda e, s, z: (1 - (e - (1 + 2*s*z)/(2*s**2)).exp()).mean()",
        "not 1 + z": "lambda e, s, z: (1 - (e - (1 + 2*z)/(2*s**2)).exp()).clamp(min=0).mean()",
        "not sigma^2": "lambda e, s, z: (1 - (e - (1 + 2*s*z)/s**2).exp()).clamp(min=0).mean()",
        "not the other way round":
            "lambda e, s, z: (1 - (e + (1 + 2*s*z)/(2*s**2)).exp()).clamp(min=0).mean()",
        "share, not the mean":
            "lambda e, s, z: (1 - (e - (1 + 2*s*z)/(2*s**2)).exp()).mean().clamp(min=0)",
        "not 2y + 1":
            "lambda e, s, z: (1 - (e - (3 + 2*s*z)/(2*s**2)).exp()).clamp(min=0).mean()",
        "not 2y": "lambda e, s, z: (1 - (e - (1 + s*z)/s**2).exp()).clamp(min=0).mean()",
        "not 1 + sigma^2*z":
            "lambda e, s, z: (1 - (e - (1 + 2*s**2*z)/(2*s**2)).exp()).clamp(min=0).mean()",
        "not loss - eps": "lambda e, s, z: ((1 + 2*s*z)/(2*s**2) - e).clamp(min=0).mean()",
        "over all outputs": "lambda e, s, z: (lambda v: v[v > 0].mean() if (v > 0).any() else 0.)"
                            "(1 - (e - (1 + 2*s*z)/(2*s**2)).exp())",
        "P[loss > eps]": "lambda e, s, z: ((1 + 2*s*z)/(2*s**2) > e).double().mean()",
        "not divided": "lambda e, s, z: (1 - (e - (1 + 2*z/s)/(2*s**2)).exp()).clamp(min=0).mean()",
        "it is not the mean": "lambda e, s, z: (1 - (e - (2*(s + z) - 1)/(2*s**2)).exp())"
                              ".clamp(min=0).mean()",
        "the loss of the *output*":
            "lambda e, s, z: (1 - (e - (2*z - 1)/(2*s**2)).exp()).clamp(min=0).mean()"},
    "check_guilty": {
        "convicts everybody": "lambda f, h, n, s: True",
        "acquits everybody": "lambda f, h, n, s: False",
        "half of the honest": "lambda f, h, n, s: bool(h/n > gaussian_tpr(f/n, s))",
        "more than three":
            "lambda f, h, n, s: bool(h/n - (h/n*(1-h/n)/n)**.5 > gaussian_tpr(f/n, s))",
        "two standard errors": "lambda f, h, n, s: bool(h/n - 2*(h/n*(1-h/n)/n)**.5"
                               " > gaussian_tpr(f/n + 2*(f/n*(1-f/n)/n)**.5, s))",
        "sigma is none": "lambda f, h, n, s: bool(h/n > max_tpr(f/n, s))",
        "more than one kind of noise": "lambda f, h, n, s: bool(h/n > max_tpr(f/n, 3., 1e-5))",
        "in the wrong direction": "lambda f, h, n, s: bool((stats.beta.ppf(1 - 5e-4, h + 1, n - h)"
            " if h < n else 1.)"
            " > gaussian_tpr(stats.beta.ppf(5e-4, f, n - f + 1) if f else 0., s))",
        "use `trials`": "lambda f, h, n, s: bool(h/n - .03*(h/n*(1-h/n))**.5"
                        " > gaussian_tpr(min(1, f/n + .03*(f/n*(1-f/n))**.5), s))",
        "no number at the ends":
            "lambda f, h, n, s: bool(stats.beta.ppf(5e-4, h, n - h + 1)"
            " > gaussian_tpr(stats.beta.ppf(1 - 5e-4, f + 1, n - f) if f < n else 0., s))"}
}
SLOW = {"check_guilty"}  # thousands of calls each
WRONG["check_excess"] |= {
    "the larger of both ways": "lambda p, q, e: max((p - math.exp(e)*q).clamp(min=0).sum(),"
                               " (q - math.exp(e)*p).clamp(min=0).sum())",
    "clamp each output at 0": "lambda p, q, e: (p - math.exp(e)*q).abs().sum()/2",
    "a sum over the outputs": "lambda p, q, e: (p - math.exp(e)*q).clamp(min=0).mean()",
    "multiplies Q, not P": "lambda p, q, e: (math.exp(e)*p - q).clamp(min=0).sum()"}
WRONG["check_sampled_delta"] |= {
    "draws numbers of its own": "lambda e, s, z: (1 - (e - (1 + 2*s*torch.randn(9999))/(2*s**2))"
                                ".exp()).clamp(min=0).mean()",
    "does not depend on `z`": "lambda e, s, z: gaussian_delta(e, s)"}
WRONG["check_guilty"] |= {
    "no fixed margin": "lambda f, h, n, s: bool(h/n > gaussian_tpr(f/n, s) + .05)"}
