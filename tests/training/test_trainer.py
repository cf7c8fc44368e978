"The private step, what it is made of, and what others get to see of it."
import gc
import math
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from toys import Plan, close, conv, jitter, linear, loss, toy, trainer, two_views

from dp_course.gradients import FlatClip, loop_grad_sum
from dp_course.privacy import PrivacyPlan, RDPAccountant, SecretSeed, step_generator
from dp_course.training import Trainer, accuracy, binary_accuracy, squared_error

# Randomness


def test_seed_keeps_its_history_and_its_secret():
    seed = SecretSeed("abc", secret=True)
    assert seed.continued(None, 3) == seed and "abc" not in repr(seed)
    assert not seed.continued("abc", 3).secret  # whoever gives it knows it
    turned = seed.continued("7", 3)
    assert turned.turns == (("7", 3),) and turned.key == "7 after abc, step 3"
    assert not turned.secret and turned.continued("7", 9) == turned
    assert turned.continued("8", 5).key == "8 after 7 after abc, step 3, step 5"


def test_every_purpose_has_its_own_randomness(monkeypatch):
    asked = []

    def noting(*name):
        asked.append(name[:3])
        return step_generator(*name)

    run = trainer(augment=lambda x, y, g: (x, y), seed=9)
    monkeypatch.setattr("dp_course.privacy.randomness.step_generator", noting)
    run.fit(3)
    assert len(asked) == len(set(asked)) == 9
    assert {stream.split()[0] for _, stream, _ in asked} == {"sample", "augment", "dropout"}
    assert {seed for seed, _, _ in asked} == {"9"} and {t for _, _, t in asked} == {0, 1, 2}


# The step


@pytest.mark.parametrize("make", [partial(torch.optim.SGD, lr=.3, momentum=.9),
                                  partial(torch.optim.Adam, lr=.01)])
def test_without_noise_and_clipping_it_is_plain_sgd(make):
    run = trainer(Plan(12, 12, 6), optimizer=make, clip=FlatClip(1e12))
    plain, data = linear(), run.data
    optimizer = make(plain.parameters())
    for _ in range(6):
        optimizer.zero_grad()
        F.cross_entropy(plain(data.train_x), data.train_y).backward()
        optimizer.step()
        run.step()
        for p, w in zip(run.model.parameters(), plain.parameters()):
            close(p, w)
    assert run.epsilon() == math.inf


def test_empty_batch_takes_a_noisy_step_and_is_charged():
    def never(*args):
        raise AssertionError("nobody was drawn")

    run = trainer(Plan(12, 1e-9, 3, 1.), engine=never)
    before = run.model.weight.clone()
    run.fit(2)
    assert not torch.equal(before, run.model.weight) and run.t == run.computed == 2
    assert run.accountant.history[0][2] == 2 and run.nonprivate_nonfinite == 0


def test_bad_example_in_training_is_counted_and_harmless():
    run = trainer(Plan(12, 12, 3, 1.))
    run.data.train_x[3, 1] = math.nan
    run.data.train_x[7, 1] = math.inf
    run.fit()
    assert run.model.weight.isfinite().all() and run.nonprivate_nonfinite == 6


@pytest.mark.quick(6)
@pytest.mark.parametrize("augment", [None, jitter, two_views])
@pytest.mark.parametrize("micro", [3, 128, 200] + [
    pytest.param(micro, marks=pytest.mark.slow) for micro in (1, 50, 1000)])
def test_micro_batches_change_nothing(micro, augment):
    n = 400 if micro > 3 else 12  # more than three blocks of 128
    make = partial(trainer, Plan(n, .9*n, 2), n, clip=FlatClip(.3), seed=1, augment=augment)
    whole = make().fit()
    parts = make(micro_batch=micro).fit()
    for p, w in zip(parts.model.parameters(), whole.model.parameters()):
        close(p, w)


def test_blocks_of_a_batch_are_augmented_as_wholes():
    "Rows low..high of a batch, which one of several processes asks for, are the batch's own."
    run = trainer(Plan(400, 400, 2), 400, augment=jitter, seed=1)
    idx = torch.arange(400)
    (x, y), = run._micro_batches(idx, 0)
    run.micro_batch = 70
    parts = list(run._micro_batches(idx, 0, 100, 333))
    assert [len(y) for _, y in parts] == [70, 70, 70, 23]
    assert torch.equal(torch.cat([u for u, _ in parts]), x[100:333])
    first = x[:128] - run.data.train_x[:128]
    second = x[128:256] - run.data.train_x[128:256]
    assert not torch.allclose(first, second)


def test_frozen_parameters_stay_and_cost_nothing():
    net = conv().double()
    run = Trainer(net, toy(8, shape=(2, 6, 6)), Plan(8, 4, 3, 1.),
                  optimizer=torch.optim.SGD(net.parameters(), lr=1., weight_decay=.1))
    before = {n: p.clone() for n, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.ones_like(p)  # left over from something else
    run.fit()
    for n, p in net.named_parameters():
        assert torch.equal(p, before[n]) != p.requires_grad
        assert (p.grad is None) != p.requires_grad


def test_a_step_that_fails_before_its_noise_costs_nothing():
    fail = [True]

    def engine(*args):
        if fail and fail.pop():
            raise RuntimeError("out of memory")
        return loop_grad_sum(*args)

    run = trainer(Plan(12, 12, 3, 1.), engine=engine, seed=3)
    before = run.model.weight.detach().clone()
    with pytest.raises(RuntimeError):
        run.step()
    assert run.t == run.computed == 0 and torch.equal(run.model.weight, before)
    other = trainer(Plan(12, 12, 3, 1.), engine=loop_grad_sum, seed=3).step()
    assert run.step().t == run.computed == 1
    assert torch.equal(run.model.weight, other.model.weight)  # nothing of it had been seen


def test_a_step_that_fails_after_its_noise_is_charged():
    run, fail = trainer(Plan(12, 12, 3, 1.), seed=3), [True]
    step = run.optimizer.step

    def failing():
        if fail and fail.pop():
            raise RuntimeError("out of memory")
        return step()

    run.optimizer.step = failing
    with pytest.raises(RuntimeError):
        run.step()
    assert (run.t, run.computed) == (0, 1)
    first = run.model.weight.grad.clone()
    run.step()
    assert torch.equal(run.model.weight.grad, first) and run.t == run.computed == 1


def test_a_run_goes_on_after_a_step_that_was_stopped_while_it_wrote(tmp_path):
    run = trainer(Plan(12, 12, 3, 1.), seed=3)
    step = run.optimizer.step

    def stopped():
        run.optimizer.step = step
        step()
        raise KeyboardInterrupt

    run.optimizer.step = stopped
    with pytest.raises(KeyboardInterrupt):
        run.step()
    assert (run.t, run.computed) == (0, 1)
    run.step()  # another sum, and another look: the weights have moved
    assert (run.t, run.computed) == (1, 2)
    run.release(tmp_path/"model.pt")


def test_a_clip_need_not_learn():
    class Fixed:
        sensitivity = 2.

        def __call__(self, norms):
            return FlatClip(2.)(norms)

    assert trainer(Plan(12, 12, 3, 1.), clip=Fixed()).fit().t == 3


# Metrics


def test_metrics():
    y = torch.tensor([1, 0])
    assert accuracy(torch.tensor([[.1, .9], [.2, .8]]), y).tolist() == [1, 0]
    assert binary_accuracy(torch.tensor([[3.], [3.]]), y).tolist() == [1, 0]
    assert binary_accuracy(torch.tensor([[3., -1.], [3., 1.]]), torch.tensor([[1, 1], [0, 1]])
                           ).tolist() == [.5, .5]
    assert squared_error(torch.tensor([[3.], [0.]]), torch.tensor([1., 1.])).tolist() == [4, 1]


@pytest.mark.parametrize("output, y", [
    (torch.zeros(4, 1), torch.zeros(4, dtype=torch.long)), (torch.zeros(4, 3), torch.zeros(4)),
    (torch.zeros(4, 3), torch.zeros(4, 3)), ({"a": torch.zeros(4, 3)}, torch.zeros(4)),
    (torch.zeros(4), torch.zeros(4, dtype=torch.long)),
])
def test_accuracy_refuses_what_is_no_classification(output, y):
    with pytest.raises(ValueError, match="metric="):
        accuracy(output, y)


def test_evaluate_is_the_mean_over_all_test_rows():
    run = trainer()
    guess = run.model(run.data.test_x).argmax(1)
    right = (guess == run.data.test_y).double().mean().item()
    assert run.evaluate() == run.evaluate(chunk=5) == right


# What the trainer refuses


def test_step_after_the_last_is_refused():
    plan = PrivacyPlan(n=12, batch_size=4, steps=5, eps=3., delta=1e-3)
    run = trainer(plan).fit()
    before = run.model.weight.clone()
    with pytest.raises(ValueError, match="step 6 .*eps=3.0 buys 5 steps"):
        run.step()
    assert torch.equal(before, run.model.weight) and run.t == 5 and run.epsilon() <= 3
    with pytest.raises(ValueError, match="not paid"):
        trainer(plan).fit(6)
    for name in ("t", "computed"):
        with pytest.raises(AttributeError):
            setattr(run, name, 0)
    for name in ("plan", "engine"):  # the statement is about these
        with pytest.raises(ValueError, match=f"trainer.{name} cannot be replaced"):
            setattr(run, name, None)


def test_plan_that_lies_is_refused():
    class Fast(Plan):
        q = .01

    class Quiet(PrivacyPlan):
        def __post_init__(self, *epochs):
            super().__post_init__(*epochs)
            object.__setattr__(self, "sigma", .1)

    with pytest.raises(ValueError, match="batch_size/n"):
        trainer(Fast(12, 4, 2, 1.))
    with pytest.raises(ValueError, match="costs eps=inf"):
        trainer(Plan(12, 4, 2, 0., eps=3.))
    with pytest.raises(ValueError, match="costs eps="):
        trainer(Plan(12, 4, 200, 1., eps=3.))
    with pytest.raises(ValueError, match="costs eps="):
        trainer(Quiet(n=12, batch_size=4, steps=5, eps=3., delta=1e-5, accountant=RDPAccountant))


# What others get to see


def reachable(root):
    "Every tensor that can be reached from an object, modules, classes and globals left out."
    seen, todo, found = set(), [root], []
    while todo:
        o = todo.pop()
        is_globals = isinstance(o, dict) and "__builtins__" in o
        if id(o) in seen or is_globals or isinstance(o, (types.ModuleType, type)):
            continue
        seen.add(id(o))
        if isinstance(o, torch.Tensor):
            found.append(o)
            if o.is_leaf and o.grad is not None:
                found.append(o.grad)
        todo += gc.get_referents(o)
    return found


def as_bytes(t):
    return t.detach().contiguous().numpy().tobytes()


def test_callbacks_see_nothing_that_was_not_noised():
    secrets = set()  # bytes, not tensors: the test's own copies must not be found

    def engine(*args):
        grads, norms = loop_grad_sum(*args)
        flat = torch.cat([g.flatten() for g in grads.values()])
        whole = norms.square().sum(0).sqrt()
        means = [g/4 for g in grads.values()]
        secrets.update(map(as_bytes, (norms, whole, flat, *grads.values(), *means)))
        return grads, norms

    def look(run):
        visible = set(map(as_bytes, reachable(run)))
        assert not visible & secrets
        assert all(p.grad is not None for p in run.model.parameters())

    run = trainer(Plan(12, 4, 4, 1.), engine=engine, callbacks=[look]).fit()
    assert secrets  # empty only if four batches were: less than once in 1e8
    data = run.data
    run.leak = loop_grad_sum(run.model, loss, data.train_x, data.train_y, run.clip)[1]
    assert any(t is run.leak for t in reachable(run))  # the search can find what is there
