"python -m experiments SWEEP PART [--minutes M] [--reverse] [--out FILE], from the repository."
from experiments import classes, clipping, harness, ladders, leaves, plain, scaling, tricks

RECIPES = clipping, scaling, tricks, classes, leaves, ladders, plain
harness.main({recipe.NAME: recipe for recipe in RECIPES})
