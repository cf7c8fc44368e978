"python -m experiments SWEEP PART [--minutes M] [--reverse] [--out FILE], from the repository."
from experiments import classes, clipping, harness, leaves, normalization, scaling, tricks

RECIPES = clipping, scaling, tricks, classes, leaves, normalization
harness.main({recipe.NAME: recipe for recipe in RECIPES})
