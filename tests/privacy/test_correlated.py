"Correlated noise: what one example may do, what that costs, the matrix; a run: test_banded.py."
import itertools
import math

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz
from toys import generator as gen

from dp_course.privacy import (
    BandedNoise,
    PLDAccountant,
    banded_coefficients,
    cyclic_groups,
    cyclic_indices,
    inverse_coefficients,
    momentum_workload,
    noise_of,
    participations,
    prefix_variances,
    square_root_coefficients,
)

SMALL = [(steps, bands) for steps in (4, 5, 6) for bands in range(1, steps + 1)]


def lower(column, steps):
    "Lower triangular Toeplitz matrix."
    return toeplitz(np.append(column, np.zeros(steps - len(column))), np.zeros(steps))


# --- what one example may do

def turns_apart(steps, least):
    "All sets of steps that are at least so far apart."
    for coins in itertools.product([0, 1], repeat=steps):
        when = np.flatnonzero(coins)
        if (np.diff(when) >= least).all():
            yield when


def longest_move(C, least, directions):
    "How far the worst pattern moves C x, over all patterns and some unit vectors for each turn."
    steps = len(C)
    found = 0.
    for when in turns_apart(steps, least):
        for u in directions(len(when)):
            found = max(found, np.linalg.norm(C[:, when] @ u))
    return found


def directions(turns):
    "The same vector at every turn, every choice of signs, and a few at random in 3-D."
    rng = np.random.default_rng(turns)
    yield from (np.array(signs).reshape(-1, 1) for signs in itertools.product([-1., 1.],
                                                                             repeat=turns))
    for _ in range(5):
        u = rng.standard_normal((turns, 3))
        yield u/np.linalg.norm(u, axis=1, keepdims=True)


@pytest.mark.parametrize("steps, bands", SMALL)
@pytest.mark.parametrize("make", [banded_coefficients, lambda t, b: square_root_coefficients(b)])
def test_turns_that_are_b_steps_apart_move_the_sum_by_sqrt_k(steps, bands, make):
    C = lower(make(steps, bands), steps)
    bound = math.sqrt(participations(steps, bands))
    assert longest_move(C, bands, directions) <= bound*(1 + 1e-9)
    if bands > 1:  # and the distance is needed
        assert longest_move(C, bands - 1, directions) > math.sqrt(participations(steps, bands))


def test_the_count_of_turns_is_that_of_the_busiest_group():
    for steps, bands in itertools.product(range(12), range(1, 8)):
        counts = [len(range(g, steps, bands)) for g in range(bands)]
        assert participations(steps, bands) == max(counts)


# --- what that costs, against the likelihood ratio of all that is released

def measured_delta(eps, q, sigma, steps, c, group, draws):
    "Delta of the released noisy steps for a newcomer of a known group, and its standard error."
    # she adds 1 whenever her coin says so
    rng, turns = np.random.default_rng(5), range(group, steps, len(c))
    C = lower(c, steps)
    coins = np.array(list(itertools.product([0., 1.], repeat=len(turns))))
    log_odds = coins @ np.full(len(turns), math.log(q/(1 - q))) + len(turns)*math.log(1 - q)
    moves = coins @ C[:, list(turns)].T  # of y = C x, for each outcome of her coins
    hers = rng.choice(len(coins), draws, p=np.exp(log_odds))
    z = rng.standard_normal((draws, steps))
    released = np.linalg.solve(C, (moves[hers] + sigma*z).T).T  # x + sigma C^-1 z
    y = released @ C.T
    log_ratio = (y @ moves.T - (moves**2).sum(1)/2)/sigma**2 + log_odds
    loss = np.logaddexp.reduce(log_ratio, axis=1)
    excess = np.maximum(0, 1 - np.exp(eps - loss))
    return excess.mean(), excess.std()/math.sqrt(draws)


@pytest.mark.parametrize("steps, bands", [(4, 2), (5, 2), (6, 3), (3, 3), (4, 1)])
def test_the_accountant_says_what_the_busiest_group_can_tell(steps, bands):
    # off by six standard errors once in 10^8 runs; rounding up adds 1 % at most
    q, sigma, eps = .4, .8, 1.
    said = PLDAccountant().step(q, sigma, participations(steps, bands)).delta(eps)
    c = banded_coefficients(steps, bands)
    seen, error = measured_delta(eps, q, sigma, steps, c, 0, 100_000)
    assert seen <= said + 6*error
    if steps % bands == 0:  # else her last turn meets a column that is cut off, and counts in full
        assert seen >= .99*said - 6*error
    last, error = measured_delta(eps, q, sigma, steps, c, bands - 1, 100_000)
    assert last <= said + 6*error


# --- the matrix

def test_variances_are_those_of_the_written_matrix():
    c, steps = square_root_coefficients(4), 9
    for workload in (np.ones(steps), momentum_workload(steps, .9)):
        written = lower(workload, steps) @ np.linalg.inv(lower(c, steps))
        assert np.allclose(prefix_variances(c, steps, workload), (written**2).sum(1))


def test_momentum_is_what_an_optimizer_does_to_one_gradient():
    p = torch.zeros(1, requires_grad=True)
    optimizer, moved = torch.optim.SGD([p], lr=1., momentum=.8), []
    for t in range(6):
        p.grad = torch.tensor([float(t == 0)])
        optimizer.step()
        moved.append(-p.item())
    assert np.allclose(momentum_workload(6, .8), moved)


@pytest.mark.parametrize("steps, beta", [(3, 0.), (5, 0.), (6, 0.), (6, .9)])
def test_the_best_band_of_two_is_that_of_a_line_search(steps, beta):
    workload = momentum_workload(steps, beta)
    def error(angle): return prefix_variances([math.cos(angle), math.sin(angle)], steps,
                                              workload).mean()
    best = min(error(angle) for angle in np.linspace(-.78, .78, 20_001))
    assert best*(1 - 1e-6) < error(math.atan2(*banded_coefficients(steps, 2, beta)[::-1])) \
        <= best*(1 + 1e-9)


@pytest.mark.parametrize("steps, bands, error", [  # of jax_privacy 2.0.0, in float64
    (4, 2, 1.3951257109979858), (6, 3, 1.5036213409952184), (64, 8, 2.6639748341308613),
    (512, 16, 4.746777536153302)])
def test_another_program_finds_the_same_optimum(steps, bands, error):
    found = math.sqrt(prefix_variances(banded_coefficients(steps, bands), steps).mean())
    assert found == pytest.approx(error, rel=1e-8)


def test_more_bands_never_hurt_and_length_is_never_above_one():
    errors = []
    for bands in (1, 2, 4, 8, 16, 32):
        c = banded_coefficients(32, bands)
        assert 1 - 1e-9 < np.linalg.norm(c) <= 1
        errors.append(prefix_variances(c, 32).mean())
        root = prefix_variances(square_root_coefficients(bands), 32).mean()
        assert errors[-1] <= root*(1 + 1e-9)
    assert errors == sorted(errors, reverse=True)
    assert np.array_equal(inverse_coefficients([1.], 3), [1, 0, 0])


# --- what makes no sense

class Plan:
    steps, bands = 12, 4


@pytest.mark.parametrize("fails, says", [
    (lambda: noise_of(Plan).at(1, None, ""), "noise of step 0 is not known"),
    (lambda: BandedNoise([.8, .8]), "more than 1"),
    (lambda: BandedNoise([0., 1.]), "first one not 0"),
    (lambda: BandedNoise([1.]).load_state_dict(noise_of(Plan).state_dict()), "4 bands"),
    (lambda: noise_of(Plan).load_state_dict({"coefficients": [1.]}), "lacks the noise"),
    (lambda: banded_coefficients(3, 4), "bands=3 at most"),
    (lambda: banded_coefficients(3, 0), "bands=0"),
    (lambda: momentum_workload(3, 1.), "0 <= beta < 1"),
    (lambda: prefix_variances([1.], 3, [1.]), "one number per step"),
    (lambda: cyclic_indices(cyclic_groups(9, 3, gen()), 3, 1.5, 0, gen()), "batch_size/n")])
def test_what_makes_no_sense_is_refused(fails, says):
    with pytest.raises(ValueError, match=says):
        fails()
