"Attacks on trained models: what is solved for is right, and a guess is worth what it should be."
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from experiments import memorization  # noqa: E402


def test_the_missing_image_is_what_the_others_leave_over():
    g = torch.Generator().manual_seed(0)
    x = memorization.unit_rows(torch.randn(30, 5, generator=g, dtype=torch.float64))
    y = torch.randint(10, (30,), generator=g)
    w = memorization.optimum(x, y)
    true = x[0]/x[0, -1]
    found = memorization.missing_image(w, x[1:], y[1:], 30)
    assert torch.allclose(found, true, atol=1e-4)
    miscounted = memorization.missing_image(w, x[1:], y[1:], 29)  # a slip must not pass
    assert not torch.allclose(miscounted, true, atol=1e-2)


class Knows(nn.Module):
    "Finds one PIN likelier than all the others, or none."
    def __init__(self, pin=None):
        super().__init__()
        self.pin = pin

    def forward(self, x):
        y = torch.zeros(*x.shape, len(memorization.LETTERS))
        if self.pin is not None:
            known = memorization.encoded(memorization.with_pin([self.pin]))[0]
            y[:, range(len(known)), known] = 1.
        return y


def test_exposure_is_thirteen_bits_for_the_first_of_ten_thousand():
    assert memorization.exposure(Knows(4711), 4711) == pytest.approx(math.log2(10_000))
    closer = 10**4 - 9**4  # PINs with a digit of 4711 at its place; 8888 has none
    bits = memorization.exposure(Knows(4711), 8888)
    assert bits == pytest.approx(math.log2(10_000/(1 + closer)))


def test_no_character_is_guessed_from_itself_or_a_later_one():
    torch.manual_seed(0)
    model, x = memorization.NextCharacter(), memorization.encoded(["anna calls ben in 4711."])
    changed = x.clone()
    changed[0, 10] += 1
    same = torch.isclose(model(x), model(changed)).all(-1)[0]
    assert same[:11].all() and not same[11]
