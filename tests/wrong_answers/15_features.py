"Wrong answers to the exercises of 15_features: check -> words of the diagnosis -> code."
ERRORS = '''def output_errors(weight, a, y):
    errors = (a @ weight.T).softmax(1)
    errors[range(len(y)), y] -= 1
    return errors
'''
SUM = '''def head_sum(weight, a, y, max_norm):
    errors = (a @ weight.T).softmax(1)
    errors[range(len(y)), y] -= 1
    norms = errors.norm(dim=1)*a.norm(dim=1)
    factors = (max_norm/norms).clamp(max=1)
    return (factors[:, None]*errors).T @ a
'''


def edited(code, old, new):
    assert old in code
    return code.replace(old, new)


NORMS = "errors.norm(dim=1)*a.norm(dim=1)"
LAST = "    return (factors[:, None]*errors).T @ a\n"
WRONG = {
    "check_output_errors": {
        "the one is missing": "lambda w, a, y: (a @ w.T).softmax(1)",
        "not over the examples": edited(ERRORS, "softmax(1)", "softmax(0)"),
        "that is minus the gradient": edited(ERRORS, "return errors", "return -errors"),
        "take their softmax first": edited(ERRORS, ".softmax(1)", ""),
        "the logarithm of the softmax": edited(ERRORS, "softmax(1)", "log_softmax(1)"),
        "not that of the mean loss": edited(ERRORS, "return errors", "return errors/len(y)"),
        "changes whole columns": edited(ERRORS, "[range(len(y)), y]", "[:, y]")},
    "check_head_sum": {
        "a sum, not a mean": edited(SUM, ".T @ a", ".T @ a/max(1, len(a))"),
        "the factor is at most 1": edited(SUM, ".clamp(max=1)", ""),
        "the step subtracts it later": edited(SUM, "return (", "return -("),
        "nobody was clipped": edited(SUM, "factors[:, None]*errors", "errors"),
        "you clipped the sum": edited(SUM, LAST, "    total = errors.T @ a\n"
                                      "    return total*(max_norm/total.norm()).clamp(max=1)\n"),
        "the length of the errors alone": edited(SUM, NORMS, "errors.norm(dim=1)"),
        "the length of the features alone": edited(SUM, NORMS, "a.norm(dim=1)"),
        "a product, not a sum": edited(SUM, NORMS, NORMS.replace("*", " + ")),
        "the square of the length": edited(SUM, NORMS, "(" + NORMS + ")**2"),
        "every gradient written out": edited(SUM, NORMS,
                                             "(errors[:, :, None]*a[:, None]).norm(dim=(1, 2))")},
    "check_shift_of_first": {
        "the squared distance":
            "lambda x, z: (torch.cat([x, z[None]]).mean(0) - x.mean(0)).square().sum()",
        "how do the first one's move": "lambda x, z: (z - x.mean(0)).norm()",
        "divide by b + 1": "lambda x, z: (z/len(x)).norm()",
        "not the sum of absolute":
            "lambda x, z: (torch.cat([x, z[None]]).mean(0) - x.mean(0)).abs().sum()"},
}
WRONG["check_output_errors"] |= {
    "a large output overflows": "lambda w, a, y: (a @ w.T).exp()/(a @ w.T).exp().sum(1)[:, None]"
                                " - torch.eye(len(w))[y]",
    "rows and columns": "lambda w, a, y: ((a @ w.T).softmax(1) - torch.eye(len(w))[y]).T"}
