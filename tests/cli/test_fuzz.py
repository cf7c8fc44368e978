"Whatever is passed to the public functions: a valid result, or a ValueError in the caller's words."
import math
import os
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from dp_course import Examples, FlatClip, PrivacyPlan, Trainer, load
from dp_course.data import as_examples, multiplicity
from dp_course.gradients import (
    AdaptiveClip,
    AutoClip,
    LayerClip,
    ScheduledClip,
    decay,
    falling_noise,
    noisy_mean,
    split_sigma,
)
from dp_course.models import papernot_cnn, resnet20, wide_resnet
from dp_course.privacy import (
    Budget,
    RandomStopping,
    RDPAccountant,
    epsilon,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mechanism,
    gaussian_sigma,
    gaussian_tpr,
    laplace_mechanism,
    max_tpr,
    noise_multiplier,
    poisson_indices,
    randomized_response_mean,
    rdp_gaussian,
    rdp_sampled_gaussian,
)
from dp_course.training import (
    EMA,
    DPAdam,
    NoisyAccuracy,
    Plateau,
    Schedule,
    TailAverage,
    constant,
    gradient_noise,
    matched_lr,
    scaled_lr,
    sigma_table,
    snr,
    snr_ceiling,
)

FAST = {"accountant": RDPAccountant}  # the other one is fuzzed by its own tests
ROWS = torch.zeros(6, 5)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def gen():
    return torch.Generator().manual_seed(0)


def trainer(**options):
    "A trainer, of which one argument is odd."
    return Trainer(nn.Linear(5, 3), Examples(ROWS, LABELS), SMALL, **options)


def positive(value):
    return value > 0 and not math.isnan(value)


def at_least_zero(value):
    return bool((torch.as_tensor(value) >= 0).all())


def rate(value):
    return bool(((torch.as_tensor(value) >= 0) & (torch.as_tensor(value) <= 1)).all())


def finite(value):
    return bool(torch.as_tensor(value).isfinite().all())


def kept_promise(plan):
    "The plan's numbers are what they claim."
    spent = epsilon(q=plan.q, sigma=plan.sigma, steps=plan.steps, delta=plan.delta, **FAST)
    return 0 < plan.q <= 1 and spent <= plan.eps*(1 + 1e-9) and plan.delta <= 1/plan.n


def made(value):
    return value is not None


def charged(accountant):
    "What a made accountant says is a bound."
    return accountant().step(.1, 1., 2).epsilon(1e-5) > 0


def adam(**options):
    "A weight after a step of which one setting is odd."
    weight = nn.Parameter(torch.ones(3))
    optimizer = DPAdam([weight], **options)
    weight.grad = torch.ones(3)
    optimizer.step()
    return weight.detach()


SMALL = PrivacyPlan(n=6, batch_size=3, steps=2, eps=8., delta=1e-3, **FAST)
MECHANISM = {"x": torch.ones(3), "sensitivity": 1., "generator": gen()}
RUN = {"q": .01, "sigma": 1., "steps": 10, "delta": 1e-5}
CALLS = {  # name: function, arguments that are right, what must hold of a result
    "gaussian_delta": (gaussian_delta, {"eps": 1., "sigma": 1.}, rate),
    "gaussian_epsilon": (gaussian_epsilon, {"delta": 1e-5, "sigma": 1.}, at_least_zero),
    "gaussian_sigma": (gaussian_sigma, {"eps": 1., "delta": 1e-5}, at_least_zero),
    "gaussian_tpr": (gaussian_tpr, {"fpr": .1, "sigma": 1.}, rate),
    "max_tpr": (max_tpr, {"fpr": .1, "eps": 1., "delta": 0.}, rate),
    "response_mean": (randomized_response_mean, {"y": torch.ones(3), "eps": 1.}, finite),
    "laplace": (laplace_mechanism, {**MECHANISM, "eps": 1.}, finite),
    "gaussian": (gaussian_mechanism, {**MECHANISM, "sigma": 1.}, finite),
    "rdp_gaussian": (rdp_gaussian, {"sigma": 1., "orders": [2., 3.]}, at_least_zero),
    "rdp_sampled": (rdp_sampled_gaussian, {"q": .1, "sigma": 1., "orders": [2., 3.]},
                    at_least_zero),
    "epsilon": (epsilon, {**RUN, **FAST}, at_least_zero),
    "noise_multiplier": (noise_multiplier,
                         {"eps": 1., "delta": 1e-5, "q": .01, "steps": 10, **FAST}, at_least_zero),
    "plan": (PrivacyPlan, {"n": 1000, "batch_size": 100, "steps": 10, "eps": 1., "delta": 1e-5,
                           **FAST}, kept_promise),
    "budget": (Budget, {"eps": 1., "delta": 1e-5, **FAST}, made),
    "poisson": (poisson_indices, {"n": 10, "q": .5, "generator": gen()},
                lambda index: len(index.unique()) == len(index)),
    "noisy_mean": (noisy_mean, {"grads": {"w": torch.ones(3)}, "std": 1., "batch_size": 4.,
                                "generator": gen()}, lambda means: finite(means["w"])),
    "flat": (FlatClip, {"max_norm": 1.}, lambda clip: positive(clip.sensitivity)),
    "auto": (AutoClip, {"max_norm": 1., "gamma": .01}, lambda clip: positive(clip.sensitivity)),
    "adaptive": (AdaptiveClip, {"batch_size": 60., "max_norm": 1., "quantile": .5, "lr": .2,
                                "bit_sigma": 3.}, lambda clip: positive(clip.sensitivity)),
    "layers": (LayerClip, {"max_norms": [1., 2.], "groups": [0, 1], "own_noise": False,
                           "batch_size": 60., "quantile": .5, "lr": .2, "bit_sigma": 3.},
               lambda clip: positive(clip.sensitivity)),
    "split_sigma": (split_sigma, {"sigma": 1., "bit_sigma": 3.}, at_least_zero),
    "decay": (decay, {"first": 1., "last": .5, "steps": 5, "levels": 2}, finite),
    "snr": (snr, {"batch_size": 100, "steps": 10, "sigma": 1.}, at_least_zero),
    "snr_ceiling": (snr_ceiling, {"n": 1000, "eps": 1., "delta": 1e-5}, at_least_zero),
    "scaled_lr": (scaled_lr, {"lr": 1., "batch_size": 10, "new_batch_size": 20,
                              "rule": "linear"}, at_least_zero),
    "gradient_noise": (gradient_noise, {"batch_size": 10, "n": 100, "mean_square": 1., "std": 1.,
                                        "parameters": 5}, at_least_zero),
    "matched_lr": (matched_lr, {"lr": 1., "old": (10, 20, 1.), "new": (20, 10, 1.)}, positive),
    "sigma_table": (sigma_table, {"n": 1000, "batch_sizes": [100, 200], "eps": 1., "delta": 1e-5,
                                  "steps": 10, **FAST},
                    lambda rows: all(row["sigma"] > 0 for row in rows)),
    "sigma_table by epochs": (sigma_table, {"n": 1000, "batch_sizes": [100, 200], "eps": 1.,
                                            "delta": 1e-5, "epochs": 2, **FAST},
                              lambda rows: all(row["steps"] >= 1 for row in rows)),
    "random_stopping": (RandomStopping, {"mean": 5., "eta": 1.}, made),
    "falling_noise": (falling_noise, {"ratios": [1., .9, .5], "by": RDPAccountant}, charged),
    "scheduled": (ScheduledClip, {"max_norms": [1., .5], "plan": SMALL},
                  lambda clip: positive(clip.sensitivity)),
    "plateau": (Plateau, {"metric": Trainer.evaluate, "every": 5, "patience": 2, "factor": .5,
                          "threshold": 0.}, made),
    "adam": (adam, {"lr": .1, "betas": (.9, .99), "eps": 1e-8, "noise_std": .1, "floor": 1e-8},
             lambda weight: bool(weight.isfinite().all())),
    "ema": (EMA, {"decay": .9, "warmup": True}, made),
    "tail": (TailAverage, {"start": 1}, made),
    "schedule": (Schedule, {"lr": 1., "shape": constant, "steps": 10}, made),
    "multiplicity": (multiplicity, {"k": 2, "crop": 1, "flip": True}, made),
    "noisy_accuracy": (NoisyAccuracy, {"x": ROWS, "y": LABELS, "sigma": 1., "measurements": 3},
                       made),
    "examples": (Examples, {"x": ROWS, "y": LABELS, "test_x": ROWS, "test_y": LABELS},
                 lambda data: len(data) > 0),
    "as_examples": (as_examples, {"data": (ROWS, LABELS)}, lambda data: len(data) > 0),
    "load": (load, {"name": "digits"}, lambda data: len(data) > 0),
    "resnet20": (resnet20, {"classes": 10, "in_channels": 3, "order": "norm-relu"}, made),
    "wide_resnet": (wide_resnet, {"depth": 10, "width": 1, "classes": 10}, made),
    "papernot": (papernot_cnn, {"k": 4, "act": "tanh", "classes": 10, "image_size": 28}, made),
    "trainer": (trainer, {"clip": FlatClip(1.), "augment": None, "micro_batch": 2, "seed": 1,
                          "loss_fn": nn.CrossEntropyLoss(reduction="none")}, made),
}
ODD = [None, "a", "", [], {}, (), math.nan, math.inf, -math.inf, -1, -1e-9, 0, 0., .5, 1, 1., 2.5,
       True, False, 1e-300, 1e-18, 1e18, 1e300, 10**30, 1j, object(), torch.tensor([1., 2.]),
       torch.tensor(math.nan), torch.zeros(0), [1, "b"], range(3), lambda x: x, b"x"]


def fault(name, changes):
    "What is wrong with a call in which some arguments are odd, or None."
    function, right, holds = CALLS[name]
    try:
        result = function(**{**right, **changes})
    except ValueError as error:
        words = str(error)
        return None if re.search("[a-z]{3}", words) else f"says nothing: {words!r}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:90]}"
    try:
        good = holds(result)
    except (KeyError, TypeError, RuntimeError):
        good = False
    return None if good else f"returned {result!r:.60}"


def test_what_is_right_is_taken():
    assert {name: fault(name, {}) for name in CALLS} == dict.fromkeys(CALLS)


QUICK = sorted(set(CALLS) - {"resnet20", "wide_resnet", "trainer"})


@pytest.mark.quick(12)
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow]*(name == "trainer")) for name in CALLS])
def test_one_odd_argument(name):
    "Every odd value at every place."
    found = {}
    for argument in CALLS[name][1]:
        for value in ODD:
            words = fault(name, {argument: value})
            if words:
                found[argument, repr(value)] = words
    assert not found


numbers = st.floats() | st.integers(-10, 10**6) | st.sampled_from(ODD)
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 300))


@settings(max_examples=EXAMPLES, derandomize="FUZZ_EXAMPLES" not in os.environ, deadline=None,
          suppress_health_check=list(HealthCheck), database=None)
@given(st.data())
def test_several_odd_arguments(data):
    "FUZZ_EXAMPLES=100000 looks further, with another seed each time."
    name = data.draw(st.sampled_from(QUICK))
    places = sorted(CALLS[name][1])
    changed = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3, unique=True))
    changes = {place: data.draw(numbers) for place in changed}
    words = fault(name, changes)
    assert words is None, (name, changes, words)
