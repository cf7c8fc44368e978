"Hidden checks of the assignments: for graders, never handed out."
import os

from IPython.display import display

SEED = int(os.environ.get("DP_COURSE_GRADE_SEED", 2026))  # the same cases for everybody


def points(card, most):
    "Show a card to the student, and turn its score into points: a number, for nbgrader."
    display(card)
    passed, total = card.score
    return float(most*passed/max(1, total))
