"python -m experiments SWEEP PART [--minutes M] [--reverse] [--out FILE], from the repository."
from experiments import (
    clipping,
    harness,
    ladders,
    leaves,
    normalization,
    plain,
    public_start,
    scaling,
    segmentation,
    shoe,
    tricks,
    tuning,
)

RECIPES = (clipping, scaling, tricks, leaves, ladders, normalization, plain, tuning,
           public_start, segmentation, shoe)
harness.main({recipe.NAME: recipe for recipe in RECIPES})
