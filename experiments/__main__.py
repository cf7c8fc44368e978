"python -m experiments SWEEP PART [--minutes M] [--reverse] [--out FILE], from the repository."
from experiments import classes, clipping, harness, leaves, scaling, tricks

harness.main({recipe.NAME: recipe for recipe in (clipping, scaling, tricks, classes, leaves)})
