"python -m experiments SWEEP PART [--minutes M] [--reverse] [--out FILE], from the repository."
from experiments import (
    adam,
    clipping,
    harness,
    ladders,
    leaves,
    normalization,
    plain,
    public_start,
    scaling,
    segmentation,
    shifted,
    shoe,
    tricks,
    tuning,
)

RECIPES = (clipping, scaling, tricks, leaves, ladders, normalization, plain, tuning,
           public_start, segmentation, shoe, adam, shifted)
harness.main({recipe.NAME: recipe for recipe in RECIPES})
