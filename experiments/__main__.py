"python -m experiments SWEEP PART [--minutes M] [--reverse] [--out FILE], from the repository."
from experiments import (
    classes,
    clipping,
    harness,
    ladders,
    leaves,
    normalization,
    plain,
    scaling,
    segmentation,
    shoe,
    tricks,
    tuning,
)

RECIPES = (clipping, scaling, tricks, classes, leaves, ladders, normalization, plain, tuning,
           segmentation, shoe)
harness.main({recipe.NAME: recipe for recipe in RECIPES})
