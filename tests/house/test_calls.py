"""A call that does not fit is answered in the caller's words: name, value, what to write."""
import inspect
from functools import partial

import pytest
import torch
from torch import nn
from toys import loss

import dp_course
from dp_course.basics import refuse_unknown
from dp_course.data import dead_leaves, leaf_images, phantoms, views
from dp_course.features import private_channel_stats, train_only, with_adapters
from dp_course.models import TemperedSigmoid
from dp_course.privacy import (
    Budget,
    new_seed,
    search_epsilon,
    search_noise_multiplier,
    step_generator,
)
from dp_course.training import HeadFirst, sigma_table

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


def plan():
    return dp_course.PrivacyPlan(**PLAN)


def trainer(**options):
    return dp_course.Trainer(nn.Linear(6, 2), (X, Y), plan(), seed=0, **options)


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
        trainer().fit(epochs=3)
    with pytest.raises(ValueError, match="noisy lacks sigma: write sigma=..."):
        trainer().noisy("mean", 1., sensitivity=1.)
    with pytest.raises(ValueError, match="FlatClip got max_norm twice"):
        dp_course.FlatClip(1., max_norm=2.)


def test_a_mistake_inside_stays_what_it_is():
    @refuse_unknown
    def double(x):
        return 2*len(x)
    with pytest.raises(TypeError, match="has no len"):
        double(3)


# --- values of another kind, which were taken for something else or failed deep inside

def search():
    return dp_course.Search(**PLAN | {"n": 600}, runs=3)


def scores():
    return torch.rand(4, 1)


MISTYPED = {
    "bill": (lambda: Budget(eps=3, delta=1e-5, planned=5), "planned=5 is no bill"),
    "bill of words": (lambda: Budget(delta=1e-5, planned={(1., "a"): 2}), "sigma='a' is not"),
    "0 is no accountant": (lambda: Budget(delta=1e-5).epsilon(accountant=0), "accountant=0 is no"),
    "tries": (lambda: search_epsilon(5, **SUM), r"tries=5 .*pass RandomStopping\(5"),
    "tries beforehand": (lambda: search_noise_multiplier("5", eps=3, q=.1, steps=5, delta=1e-5),
                         r"tries='5' .*pass RandomStopping\("),
    "seed": (lambda: new_seed([3]), r"seed=\[3\] is no seed"),
    "seed of a search": (lambda: search().best(None, [1], seed=2.5), "seed=2.5 is no seed"),
    "quantile of a fixed clip": (lambda: dp_course.LayerClip([1., 1.], quantile=.9),
                                 "quantile=0.9.*pass batch_size="),
    "endless clip": (lambda: dp_course.LayerClip(10**400), "max_norms=10+.* are no bounds"),
    "no labels": (lambda: dp_course.Examples(X, []), "y has no rows"),
    "no test labels": (lambda: dp_course.Examples(X, Y, X, {}), "test_y has no rows"),
    "bytes": (lambda: dp_course.Examples(b"xy"), "x holds a bytes"),
    "mean": (lambda: dp_course.Examples(X, Y, mean="3"), "mean='3': pass a number"),
    "endless mean": (lambda: dp_course.Examples(X, Y, std=10**400), "std=10+.*: pass a positive"),
    "mean, one tensor": (lambda: dp_course.Examples(X, Y, mean=torch.tensor("a" == "b")),
                         r"mean=tensor\(False\): pass a number"),
    "name": (lambda: dp_course.Examples(X, Y, name=3), "name=3 is no name: pass text"),
    "device": (lambda: dp_course.load("digits", device="gpu"), "no such device: 'gpu'"),
    "folder": (lambda: dp_course.load("mnist", root=5), "root=5 is no folder"),
    "folder that is not needed": (lambda: dp_course.load("digits", root=5), "root=5 is no folder"),
    "parameters": (lambda: dp_course.DPAdam(5), "params=5 are no parameters.*pass"),
    "maker": (lambda: trainer(optimizer=float), "optimizer=<class 'float'>.*makes none.*pass"),
    "option of a maker": (lambda: trainer(optimizer=lambda params: torch.optim.SGD(params, lrr=1)),
                          "makes none.*lrr.*pass"),
    "peers": (lambda: dp_course.ProcessTrainer(nn.Linear(6, 2), (X, Y), plan(), peers=2),
              r"peers=2 .*pass join\(\)"),
    "timeout": (lambda: dp_course.join(timeout="5"), "timeout='5' is no"),
    "weights": (lambda: dp_course.load_release("a", 5), r"model=5 is no network"),
    "weights of": (lambda: dp_course.save_release("a", 5, "all"), r"model=5 is no network"),
    "fix": (lambda: dp_course.fix("resnet"), "model='resnet' is no network"),
    "head": (lambda: HeadFirst(nn.ReLU(), 3), "model=ReLU.* has no last layer"),
    "steps of a head": (lambda: HeadFirst(nn.Sequential(nn.Linear(2, 2)), "3"), "steps='3': pass"),
    "warm-up": (lambda: dp_course.Schedule(.1, "linear", 9, warmup="3"), "warmup='3'.*shape"),
    "option of a shape": (lambda: dp_course.Schedule(.1, "cosine", 9, factor=3), "factor=3.*shape"),
    "floor": (lambda: dp_course.Schedule(.1, "cosine", 9, floor=-3),
              "lr=-0.3.* is no learning rate, .* after 9 steps"),
    "labels": (lambda: dp_course.binary_accuracy(scores(), [1, 0, 1, 1]), "not .* for list"),
    "clip": (lambda: dp_course.fast_grad_sum(nn.Linear(6, 2), loss, X, Y, 1.),
             r"clip=1.0 .*pass FlatClip\(1.0\)"),
    "value": (lambda: trainer().noisy("a", 10**400, sensitivity=1, sigma=1), "value=10+.* no num"),
    "public number": (lambda: private_channel_stats(torch.rand(9, 2, 3, 3), 1., (1., 1.), n=-1),
                      "n=-1"),
    "noise of statistics": (lambda: private_channel_stats(torch.rand(9, 2, 3, 3), "1", (1., 1.)),
                            "sigma='1' is no noise multiplier"),
    "bounds of statistics": (lambda: private_channel_stats(torch.rand(9, 2, 3, 3), 1., 5),
                             "max_norms=5 are no bounds"),
    "length of a table": (lambda: sigma_table(
        60, [12], eps=3, delta=1e-5, epochs="3"), "epochs='3' is no length"),
    "images": (lambda: dead_leaves(2.5), "n=2.5: pass an integer"),
    "size": (lambda: leaf_images(1, "32"), "size='32': pass an integer"),
    "class of callbacks": (lambda: trainer(callbacks=[dp_course.EMA]),
                           r"the class EMA: .*callbacks=\[EMA\(\.\.\.\)\]"),
    "class of clips": (lambda: trainer(clip=dp_course.FlatClip), "clip=FlatClip is a class"),
    "rows of a copy": (lambda: dp_course.Examples(X, Y).replace(x=3),
                       "replace takes no x=3: it takes train_x$"),
    "candidates": (lambda: search().best(None, 5), "candidates=5 is no list"),
    "no pair": (lambda: search().best(lambda c, p: 3, [1], seed=0), r"train gave 3: .*\(model, s"),
    "no score": (lambda: search().best(lambda c, p: (3, "good"), [1], seed=0), "score=.good"),
    "a secret of everybody": (lambda: step_generator(None, "noise", 0), "seed=None is no secret"),
    "no step": (lambda: step_generator("a", "noise", -1), "t=-1: pass an integer"),
    "views": (lambda: views(torch.rand(2, 1, 8, 8), 2, 7), "generator=7 gives no random numbers"),
    "phantoms": (lambda: phantoms(1, 7), "generator=7 gives no random numbers"),
    "adapters": (lambda: with_adapters(5), "model=5 is no network"),
    "rank": (lambda: with_adapters(nn.Linear(2, 2), rank=2.5), "rank=2.5: pass an integer"),
    "head of nothing": (lambda: train_only(nn.ReLU(), "head"), "model=ReLU.* has no last layer"),
    "budget": (lambda: private_channel_stats(torch.rand(9, 2, 3, 3), 1., (1., 1.), budget=3.),
               r"budget=3\.0 is no Budget: pass plan\.budget\(\)"),
    "maps": (lambda: private_channel_stats(torch.rand(9, 2), 1., (1., 1.)), "pass a tensor .n,c,h"),
    "activation": (lambda: TemperedSigmoid("2"), "scale='2' is no number"),
}


@pytest.mark.parametrize("what", MISTYPED)
def test_a_value_of_another_kind_is_refused_by_its_name(what):
    call, words = MISTYPED[what]
    with pytest.raises(ValueError, match=words):
        call()


def test_a_bill_that_does_not_fit_is_no_way_around_the_budget():
    "What was said to fit was believed, and eps reported as the budget: 1 instead of 2,000."
    with pytest.raises(ValueError, match="spends eps = .* more than eps=1"):
        Budget(eps=1, delta=1e-5, planned={(1., .5): 1000})
    assert Budget(eps=1, delta=1e-5, planned={(1., 50.): 2}).post("x", sigma=50.).epsilon() <= 1


def squares(output, y):
    return (output - y).flatten(1).square().mean(1)


@pytest.mark.parametrize("outputs, test_part, metric, refused", [
    (1, True, {}, True), (1, False, {}, False), (3, True, {}, False),
    (1, True, {"metric": dp_course.squared_error}, False)])
def test_no_classes_are_looked_for_in_one_output(outputs, test_part, metric, refused):
    "It was found out by `evaluate`, after the budget was spent."
    y = torch.rand(60, outputs)
    data = dp_course.Examples(X, y, *((X[:9], y[:9]) if test_part else ()))
    def make():
        net = nn.Linear(6, outputs)
        return dp_course.Trainer(net, data, plan(), loss_fn=squares, seed=0, **metric)
    if refused:
        with pytest.raises(ValueError, match="accuracy needs .*pass metric=binary_accuracy"):
            make()
    else:
        assert make().t == 0


ENGINES = sorted(name for name in dp_course.__all__ if name.endswith("grad_sum"))


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_names_what_it_cannot_call(name):
    "Once an AttributeError of None, and a TypeError of text."
    def call(**other):
        told = dict(model=nn.Linear(6, 2), loss_fn=loss, x=X, y=Y, clip=dp_course.FlatClip(1.))
        return getattr(dp_course, name)(**told | other)
    for other, words in ((dict(model=None), "model=None is no network"),
                         (dict(loss_fn="mse"), "loss_fn='mse' is no function"),
                         (dict(clip="flat"), "clip='flat' is no clip")):
        with pytest.raises(ValueError, match=words):
            call(**other)


def test_an_audit_names_what_it_cannot_call():
    for audit in (dp_course.replay_sensitivity, partial(dp_course.noise_audit, canaries=(X, Y),
                                                        sigma=1.)):
        with pytest.raises(ValueError, match="step=3 is no function"):
            audit(step=3, examples=(X, Y), bound=1.)
    released = partial(dp_course.replay_release, canaries=(X, Y), q=.1, sigma=1., steps=2)
    with pytest.raises(ValueError, match="train=3 is no function"):
        released(3, (X, Y))
    with pytest.raises(ValueError, match="silent=3 is no batch"):
        released(print, 3)
