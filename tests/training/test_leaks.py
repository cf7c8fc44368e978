"Leaks that nobody had tried before, and innocents of ordinary practice; the table is in leaks.py."
from copy import deepcopy

import leaks
import pytest
import torch

from dp_course.gradients import fast_grad_sum
from dp_course.training import prove_again

pytestmark = pytest.mark.filterwarnings("ignore")
ACCEPTED_ONCE = [
    "rows: pairs", "rows: all positive", "rows: all negative", "model: longest", "model: eval mode",
    "normalize: batches of ten", "items: columns", "items: reader", "other: mask, if all",
    "other: augment, ten rows", "other: bytes",
    "model: after a step", "model: batches of 59", "model: autograd.grad inside",
    "rows: all whole", "loss: hooked", "model: two hooks", "augment: shared out",
    "normalize: shared out", "model: bfloat16 only", "model: bfloat16, twenty rows",
    "model: back, float32 only", "augment: counts, draws", "augment: half",
    "augment: a shuffled half", "model: holds itself", "model: balance", "model: waits",
    "clip: later", "clip: 57 examples", "items: centred", "model: back, 20 to 50",
    "model: back, even ones", "augment: 17 to 60", "engine: in_float32", "engine: in_the_thirties",
    "model: filled up"]


def accepted(names):
    return [name for name in names if leaks.answer(leaks.LEAKS[name]) is None]


def test_what_was_accepted_once_is_refused():
    assert accepted(ACCEPTED_ONCE) == []


@pytest.mark.slow
def test_no_leak_gets_through():
    assert len(leaks.LEAKS) > 200
    assert accepted(leaks.LEAKS) == []


QUICK = ["one crop", "named columns", "reader of its own", "bytes", "masks", "padding", "views",
         "draws", "three ways", "routed rows, bf16", "keeps weights"]


@pytest.mark.parametrize("names", [QUICK, pytest.param(leaks.INNOCENTS, marks=pytest.mark.slow)],
                         ids=["quick", "all"])
def test_innocents_pass_and_their_sums_are_those_of_a_loop(names):
    for name in names:
        run = leaks.trained(**leaks.INNOCENTS[name])
        narrow = name in leaks.IN_FLOAT32
        off = leaks.off_the_loop(run, torch.float32 if narrow else torch.float64)
        assert off < (1e-5 if narrow else 1e-12), name


def test_the_named_limits_are_limits():
    "What is said not to be seen is not seen: so nobody believes in more."
    assert [name for name, options in leaks.NAMED.items() if leaks.answer(options)] == []


def test_weights_that_have_moved_far_are_looked_at_again():
    "What the first proof cannot see, the one in the middle of a run does."
    run = leaks.trained(leaks.Far())
    run.model.mixed(torch.zeros(2, 8))
    with torch.no_grad():
        run.model.inner.weight.add_(.3)
    with pytest.raises(ValueError, match="mixes examples"):
        prove_again(fast_grad_sum, run.model, leaks.loss, run.data, seed=1)


NEW_CHANGES = ["function", "optimizer", "loss, other weight"]  # test_attacks.py has the others


@pytest.mark.parametrize("names", [NEW_CHANGES, pytest.param(
    leaks.CHANGES, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_what_is_changed_after_the_proof_is_refused(names):
    said = {name: leaks.answer_after(leaks.CHANGES[name]) for name in names}
    assert [name for name, text in said.items() if text is None] == []


@pytest.mark.parametrize("name", ["counting", "keeps weights"])
def test_the_proof_puts_everything_back(name):
    options = dict(leaks.INNOCENTS[name])
    model = options.pop("model")().eval()
    before, attributes = deepcopy(model.state_dict()), vars(model).keys() | set()
    leaks.trained(model, **options)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert vars(model).keys() == attributes and not model.training
