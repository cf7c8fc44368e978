"Wrong answers to the exercise of the room pld: check -> words of the diagnosis -> code."
ON_GRID = """def on_grid(p, q, grid):
    seen = (p > 0) & (q > 0)
    p, q = p[seen], q[seen]
    loss = np.log(p/q)
    cell = np.minimum(np.searchsorted(grid, loss, "right") - 1, len(grid) - 2)
    low, high = grid[cell], grid[cell + 1]
    right = RIGHT
    masses = np.zeros(len(grid))
    np.add.at(masses, cell, p - right)
    np.add.at(masses, cell + 1, right)
    return masses
"""
SPLIT = "(p - q*np.exp(low))/-np.expm1(low - high)"


def rounded(right):
    return ON_GRID.replace("RIGHT", right)


WRONG = {
    "check_on_grid": {
        "rounded down": rounded("p*(loss >= high)"),
        "rounded up": rounded("p*(loss > low + 1e-12)"),
        "rounded to the nearest": rounded("p*(loss > (low + high)/2)"),
        "split by the distance": rounded("p*(loss - low)/(high - low)"),
        "the last point of the grid": rounded(SPLIT).replace(
            "(q > 0)", "(q > 0) & (p < .999*q*np.exp(grid[-1]))"),
        "the wrong way round": rounded(SPLIT).replace("seen =", "p, q = q, p; seen ="),
        "the loss is infinite": rounded(SPLIT).replace("(q > 0)", "(q > -1)").replace(
            "np.log(p/q)", "np.log(p/np.maximum(q, p/9))")},
}
