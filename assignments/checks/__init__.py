"Hidden checks of the assignments: for graders, never handed out."
import os
from dataclasses import replace

from IPython.display import display

SEED = int(os.environ.get("DP_COURSE_GRADE_SEED", 2026))  # the same cases for everybody

CHEAP = {  # check -> what an answer has that looks at nothing: it earns nothing by itself
    "check_leak": [{"a fair coin tells nothing"}, {"always the truth: nothing is hidden"}],
    "check_debias": [{"half yes stays half", "an eps of 40: everybody tells the truth"}],
    "check_exact_delta": [{"an eps beyond every ratio: nothing is left",
                           "the same in both worlds"}],
    "check_clipped_sum": [{"one more example moves the sum by max_norm at most", "nobody"}],
    "check_loop_sum": [{"one more example moves the sum by max_norm at most", "nobody at all"}],
    "check_fast_sum": [{"one more example moves the sum by max_norm at most", "nobody at all"}],
    "check_train": [{"with a rate of zero it ends where it starts: at zero",
                     "one more example moves a step by max_norm/(q n) at most"}],
    "check_move": [{"an honest one, and a newcomer of ordinary size",
                    "an honest one, and a huge newcomer"}],
    "check_coins": [{"honest samplers are left alone"},
                    {"shuffled epochs", "a rate that is 10 % too high",
                     "batches that come again in every epoch",
                     "batches of one size, which no list names"}],
    "check_verdict": [{"an honest one"}, {"bounds that are broken"}, {"noise that is missing"},
                      {"batches that are no coins"}],
    "check_mended_step": [{"one more example moves the sum by max_norm at most",
                           "empty batches, and gradients of zero"}],
    "check_ledger_epsilon": [{"an empty ledger"}]}
NOTHING = "an answer that looks at nothing has these properties, too: they earn nothing alone"


def points(card, most):
    "Show a card to the student, and turn its score into points: a number, for nbgrader."
    held = {text for text, holds in card.properties if holds}
    cheap = held and any(held <= some for some in CHEAP.get(card.name, ()))
    display(replace(card, why=NOTHING) if cheap else card)
    passed, total = card.score
    return 0. if cheap else float(most*passed/max(1, total))
