"Wrong answers to the exercises of the room processes: check -> words of the diagnosis -> code."
APART = """def delta_apart(q, sigma, eps, world):
    x = torch.linspace(-12*sigma, world + 12*sigma, 20_001, dtype=torch.float64)
    r = q/world

    def bell(k):
        return torch.exp(-(x - k)**2/(2*sigma**2))/(sigma*math.sqrt(2*math.pi))
    drawn = sum(math.comb(world, k)*r**k*(1 - r)**(world - k)*bell(k) for k in range(world + 1))
    above = (drawn - math.exp(eps)*bell(0)).clamp(min=0)
    return (above.sum()*(x[1] - x[0])).item()
"""
DRAWN = "sum(math.comb(world, k)*r**k*(1 - r)**(world - k)*bell(k) for k in range(world + 1))"
WRONG = {
    "check_noises_in": {
        "standard deviations don't add up":
            "lambda moves, std: round((moves.std()/std).item())",
        "a whole one": "lambda moves, std: (moves.var()/std**2).item()",
        "the variance of one noise": "lambda moves, std: round((moves.var()/std).item())",
        "the mean of noise is 0": "lambda moves, std: round((moves.mean()/std).abs().item())"},
    "check_parts_of_noise": {
        "nobody's noise may be missing": "lambda s, w, c: (s/w**.5, s)",
        "divide by a root": "lambda s, w, c: (s/(w - c), s*w/(w - c))",
        "a whole noise from each": "lambda s, w, c: (s, s*w**.5)",
        "all the parts are in it": "lambda s, w, c: (s/(w - c)**.5, s)",
        "the other way round": "lambda s, w, c: (s/max(1, c)**.5, s*(w/max(1, c))**.5)"},
    "check_delta_apart": {
        "she may be drawn several times":
            APART.replace("r = q/world", "world = 1; r = q"),
        "counts `world` times": APART.replace(DRAWN, "(1 - q)*bell(0) + q*bell(world)"),
        "each process alone": APART.replace(DRAWN, "(1 - r)*bell(0) + r*bell(1)").replace(
            "return (", "return (world*"),
        "draws at rate q/world": APART.replace("r = q/world", "r = q")},
}
