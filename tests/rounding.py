"Rows of numbers whose sum, in float32, moves by more than any of them when one goes."
import math

import torch

C = 1.
BOUND = C*(1 + 1e-6)


def dot(output, y):
    "A loss whose gradient at the output is the label: rows of gradients are chosen at will."
    return (output.flatten(1)*y.flatten(1)).sum(1)


def staircase(n, lost=.6):
    "Ones up to a power of two; below it rows of `lost` units vanish, above it they round up."
    k = int(math.log2(n*2/3))
    unit = 2.**(k - 24)
    v = torch.full((n,), -lost*unit)
    v[:2**k] = 1.
    v[2**k] = .5
    return v


def blocks(n, length=64):
    "The same within every block of 64: taking away a row shifts all of them."
    ones = length//2
    one = torch.full((length,), -.6*2.**-19)
    one[:ones] = 1.
    return one.repeat(-(-n//length))[:n]


def alternating(n):
    "Large terms that cancel, between small ones that a float32 sum forgets."
    v = torch.tensor([1., 2.**-25, -1., 2.**-25]).repeat(-(-n//4))[:n]
    v[0] = .75
    return v


def at_random(n):
    g = torch.Generator().manual_seed(n)
    return torch.randn(n, generator=g)*10**(-8*torch.rand(n, generator=g))
