"""A call that does not fit is answered in the caller's words: name, value, what to write."""
import inspect

import pytest
import torch
from torch import nn

import dp_course
from dp_course.basics import refuse_unknown

SEEN_BY_MACHINES = {  # called by a trainer, with everything in its place
    "accuracy", "binary_accuracy", "squared_error", "fix", "MUTANTS",
    *(name for name in dp_course.__all__ if name.endswith("grad_sum"))}
CALLED = sorted({*dp_course.__all__} - SEEN_BY_MACHINES)


@pytest.mark.parametrize("name", CALLED)
def test_a_call_that_does_not_fit_is_answered_in_words(name):
    f = getattr(dp_course, name)
    with pytest.raises(ValueError, match=f"{name} takes no colour='red': it takes "):
        f(colour="red")
    needed = [p.name for p in inspect.signature(f).parameters.values()
              if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if needed:
        with pytest.raises(ValueError, match=f"{name} lacks {', '.join(needed)}: write "):
            f()


X, Y = torch.randn(60, 6), torch.zeros(60).long()
PLAN = dict(n=60, batch_size=12, steps=4, eps=3, delta=1e-3)


def run():
    return dp_course.Trainer(nn.Linear(6, 2), (X, Y), dp_course.PrivacyPlan(**PLAN), seed=0)


SUM = dict(q=.1, sigma=1., steps=10, delta=1e-5)
ELSEWHERE = [
    ("epsilon", SUM, "sigma", "noise_multiplier", "write sigma=7"),
    ("epsilon", SUM, "q", "sample_rate", "write q=7"),
    ("epsilon", SUM, "q", "batch_size", "write q=7/n"),
    ("epsilon", SUM, "steps", "epochs", r"write steps=round\(7/q\)"),
    ("epsilon", SUM, "delta", "target_delta", "write delta=7"),
    ("FlatClip", {}, "", "max_grad_norm", "write max_norm=7"),
    ("Examples", {"x": X}, "", "colour", "it takes x, y"),
    ("Examples", {"x": X}, "", "group", "write groups=7"),
    ("PrivacyPlan", PLAN, "", "max_grad_norm", r"write Trainer\(\.\.\., clip=FlatClip\(7\)\)"),
    ("PrivacyPlan", PLAN, "steps", "step", "write steps=7"),
    ("Schedule", dict(lr=.1, shape="cosine", steps=4), "lr", "learning_rate", "write lr=7"),
    ("Search", {**PLAN, "runs": 3}, "eps", "target_epsilon", "write eps=7")]


@pytest.mark.parametrize("name, good, right, wrong, words", ELSEWHERE)
def test_the_words_of_others_and_slips_of_the_pen(name, good, right, wrong, words):
    asked = {key: value for key, value in good.items() if key != right}
    with pytest.raises(ValueError, match=f"{name} takes no {wrong}=7: {words}"):
        getattr(dp_course, name)(**asked, **{wrong: 7})


@pytest.mark.parametrize("wrong, words", [
    ("max_grad_norm", r"write clip=FlatClip\(7\)"), ("criterion", "write loss_fn=7"),
    ("noise_multiplier", r"write PrivacyPlan\(\.\.\., sigma=7\)"),
    ("sample_rate", r"write PrivacyPlan\(\.\.\., batch_size=7\*n\)"),
    ("epochs", r"write PrivacyPlan\(\.\.\., epochs=7\)"), ("optimiser", "write optimizer=7"),
    ("lr", r"write optimizer=partial\(torch.optim.SGD, lr=7\)")])
def test_the_trainer_says_where_a_setting_goes(wrong, words):
    with pytest.raises(ValueError, match=f"Trainer takes no {wrong}=7: {words}"):
        dp_course.Trainer(nn.Linear(6, 2), (X, Y), None, **{wrong: 7})


@pytest.mark.parametrize("name, args, words", [
    ("epsilon", (.1, 1., 10), "epsilon takes nothing without a name, and got 3 values: write q="),
    ("Trainer", (1, 2, 3, "adam"), "takes only model, data, plan without a name, and got 4 values"),
    ("FlatClip", (1., 2.), "takes only max_norm without a name, and got 2 values: write no more")])
def test_numbers_in_a_row_want_their_names(name, args, words):
    with pytest.raises(ValueError, match=words):
        getattr(dp_course, name)(*args)


def test_methods_answer_too():
    with pytest.raises(ValueError, match=r"fit takes no epochs=3: write steps=round\(3/q\)"):
        run().fit(epochs=3)
    with pytest.raises(ValueError, match="noisy lacks sigma: write sigma=..."):
        run().noisy("mean", 1., sensitivity=1.)
    with pytest.raises(ValueError, match="FlatClip got max_norm twice"):
        dp_course.FlatClip(1., max_norm=2.)


def test_a_mistake_inside_stays_what_it_is():
    @refuse_unknown
    def double(x):
        return 2*len(x)
    with pytest.raises(TypeError, match="has no len"):
        double(3)
