"Wrong answers to the exercises of 21_correlated: check -> words of the diagnosis -> code."
NODES = '''def tree_nodes(t):
    nodes, start = [], 0
    while start < t:
        size = 2**((t - start).bit_length() - 1)
        nodes.append((start, start + size))
        start += size
    return nodes
'''
NOISE = '''def next_noise(c, past, z):
    w = z.clone()
    for weight, old in zip(c[1:], past):
        w = w - weight*old
    return w/c[0]
'''
EPS = '''def banded_eps(n, batch_size, steps, bands, sigma, delta):
    return epsilon(q=bands*batch_size/n, sigma=sigma, steps=math.ceil(steps/bands), delta=delta)
'''
ERROR = '''def weights_error(c, sigma, steps, batch_size):
    return sigma/batch_size*float(prefix_variances(c, steps).mean())**.5
'''
MOVE = '''def longest_move(c, steps, apart):
    import itertools
    longest = 0.
    for turns in itertools.product([0, 1], repeat=steps):
        when = [t for t in range(steps) if turns[t]]
        if any(b - a < apart for a, b in itertools.pairwise(when)):
            continue
        moved = torch.zeros(steps + len(c), dtype=torch.float64)
        for t in when:
            moved[t:t + len(c)] += torch.tensor(c, dtype=torch.float64)
        longest = max(longest, moved[:steps].norm().item())
    return longest
'''
WRONG = {
    "check_tree_nodes": {
        "intervals end at t": NODES.replace("nodes, start = [], 0",
                                            "nodes, start, t = [], 0, t + 1"),
        "the largest node that fits": NODES.replace("2**((t - start).bit_length() - 1)", "1"),
        "not (start, length)": NODES.replace("(start, start + size)", "(start, size)"),
        "the one before it ends": NODES.replace("(start, start + size)", "(0, size)"),
        "as in range(start, stop)": NODES.replace("start + size)", "start + size - 1)")},
    "check_next_noise": {
        "subtracted, not added": NOISE.replace("w - weight", "w + weight"),
        "divide by it": NOISE.replace("w/c[0]", "w"),
        "meets c[1]": NOISE.replace("c[1:]", "c"),
        "c[1] meets past[0]": NOISE.replace("past):", "past[::-1]):"),
        "the past is, too": NOISE.replace("z.clone()", "z/c[0]").replace("w/c[0]", "w"),
        "take back a part of the past": NOISE.replace("w - weight*old", "w")},
    "check_banded_eps": {
        "the rate is bands*batch_size/n": EPS.replace("q=bands*", "q="),
        "and not all steps": EPS.replace("math.ceil(steps/bands)", "steps"),
        "that is DP-SGD": EPS.replace("q=bands*", "q=").replace("math.ceil(steps/bands)", "steps"),
        "round up": EPS.replace("math.ceil(steps/bands)", "steps//bands"),
        "and not one more": EPS.replace("math.ceil(steps/bands)", "steps//bands + 1"),
        "drawn more often": EPS.replace("bands*batch_size/n", "batch_size/n/bands")},
    "check_weights_error": {
        "and its noise with it": ERROR.replace("sigma/batch_size", "sigma"),
        "not by its root": ERROR.replace("sigma/batch_size", "sigma/batch_size**.5"),
        "sigma is missing": ERROR.replace("sigma/batch", "1/batch"),
        "take its root at the end": ERROR.replace("sigma/batch_size*", "(sigma/batch_size)**2*")
        .replace("**.5", ""),
        "the mean of the roots": ERROR.replace(".mean())**.5", "**.5).mean()").replace(
            "float(prefix_variances(c, steps)", "float((prefix_variances(c, steps)").replace(
            ".mean()", ".mean())"),
        "error of the last sum": ERROR.replace(".mean()", "[-1]")},
    "check_longest_move": {
        "the root of the sum of squares": MOVE.replace(".norm()", ".square().sum()"),
        "sum of the entries": MOVE.replace(".norm()", ".sum()"),
        "are allowed": MOVE.replace("b - a < apart", "b - a <= apart"),
        "where no columns overlap":
            "lambda c, steps, apart: math.hypot(*c)*math.ceil(steps/apart)**.5",
        "more than one turn": MOVE.replace("b - a < apart", "b > a")},
}
SLOW = set()
