"Wrong answers to the exercise of the room thresholds: check -> words of the diagnosis -> code."
CHEAPEST = """def cheapest_noise(bounds, sizes, sigma):
    roots = np.sqrt(sizes)
    return sigma*np.sqrt((bounds*roots).sum()*bounds/roots)
"""
WRONG = {
    "check_cheapest_noise": {
        "all together are not": "lambda c, d, s: s*c",
        "more noise than the plan pays for": "lambda c, d, s: s*c.sum() + s*c",
        "the same for all tensors": "lambda c, d, s: s*np.linalg.norm(c) + 0*c",
        "in proportion to the bounds": "lambda c, d, s: s*len(c)**.5*c",
        "you left the sizes out": CHEAPEST.replace("np.sqrt(sizes)", "1."),
        "you took c_l/d_l": CHEAPEST.replace("np.sqrt(sizes)", "sizes")},
}
