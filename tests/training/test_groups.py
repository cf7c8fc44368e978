"Units of privacy: a patient's examples are drawn, added up, clipped and accounted for as one."
import json
import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import every
from test_processes import in_threads
from torch import nn
from toys import Plan, close, jitter, linear, loss, two_views

from dp_course import gradients
from dp_course.audit import replay_sensitivity, sampler_audit, trainer_run, trainer_step
from dp_course.data import Examples, Views, as_examples, call_model, multiplicity, take, tree_map
from dp_course.features import private_channel_stats, release_mean
from dp_course.gradients import AdaptiveClip, FlatClip, LayerClip, Units, unit_grad_sum
from dp_course.models import WSConv2d
from dp_course.privacy import PrivacyPlan
from dp_course.training import (
    NoisyAccuracy,
    ProcessTrainer,
    Trainer,
    end_line,
    nonprivate_signal_noise,
    refuse_units,
    start_line,
)

IDS = [4, 7, 4, 1, 7, 7, 4, 4, 4, 9, 4, 1, 4, 4]  # units of 8, 3, 2 and 1 examples
SIZES = [8, 3, 2, 1]


@dataclass
class OfPatients(Plan):
    "A plan without a promise that counts patients."
    unit:str = "patient"


def visits(ids=IDS, shape=(5,), seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(len(ids), *shape, generator=g, dtype=torch.float64)
    y = torch.randint(3, (len(ids),), generator=g)
    return Examples(x, y, x, y, groups=ids)


def trainer(plan=None, data=None, model=None, **options):
    data = visits() if data is None else data
    plan = plan or OfPatients(data.units, data.units, 4)
    return Trainer(model or linear(), data, plan, **options)


# --- the oracle: one loss of everything that a unit has, differentiated by torch


def of_views(x, y):
    "Views of examples as rows, with labels, and how many views each example has."
    if not isinstance(x, Views):
        return x, y, 1
    def rows(v):
        return v.flatten(0, 1)
    labels = tree_map(rows, y.tree) if isinstance(y, Views) else y.repeat_interleave(x.k, 0)
    return tree_map(rows, x.tree), labels, x.k


def by_torch(model, loss_fn, x, y, members, clip):
    "Clipped sum and norms of units, given as lists of rows."
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in named.items()}
    norms = []
    for rows in members:
        inputs, labels, k = of_views(take(x, rows), take(y, rows))
        whole = loss_fn(call_model(model, inputs), labels).sum()/k
        found = torch.autograd.grad(whole, list(named.values()), materialize_grads=True)
        norms.append(torch.stack([g.norm() for g in found]))
        for name, f, g in zip(named, clip(norms[-1][:, None])[:, 0], found):
            total[name] += f*g
    return total, torch.stack(norms, 1)


class Words(nn.Module):
    "An embedding that is used twice, attention without a rule, LayerNorm."
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 3)

    def forward(self, ids):
        v = self.words(ids) + self.words(ids.flip(1))
        return self.out(self.norm(v + self.mix(v, v, v)[0]).mean(1))


def conv():
    return nn.Sequential(WSConv2d(2, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4), nn.Tanh(),
                         nn.Conv2d(4, 4, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))


def cases():
    "(name, model, x of 14 rows): a line, a network, words, views, a dict."
    g = torch.Generator().manual_seed(3)
    wide = partial(torch.randn, generator=g, dtype=torch.float64)
    torch.manual_seed(1)
    yield "linear", linear(), wide(14, 5)
    yield "conv", conv().double(), wide(14, 2, 6, 6)
    yield "words", Words().double(), torch.randint(7, (14, 5), generator=g)
    yield "views", conv().double(), Views(wide(14, 3, 2, 6, 6))
    yield "views with labels of their own", conv().double(), Views(wide(14, 3, 2, 6, 6))

    class Named(nn.Linear):
        def forward(self, age, place):
            return super().forward(age*place)

    yield "dict", Named(5, 3).double(), {"age": wide(14, 5), "place": wide(14, 5)}


CASES = {name: (model, x) for name, model, x in cases()}
LABELS = torch.arange(14) % 3
OWN_LABELS = Views(torch.arange(42).view(14, 3) % 3)
MEMBERS = [[i for i, one in enumerate(IDS) if one == unit] for unit in (4, 7, 1, 9)]


def clips(model):
    many = sum(p.requires_grad for p in model.parameters())
    return FlatClip(.7), LayerClip(torch.linspace(.1, .5, many).tolist(), groups=range(many))


@pytest.mark.quick(38)
@every
@pytest.mark.parametrize("most", [None, 1, 4] + [
    pytest.param(most, marks=pytest.mark.slow) for most in (2, 8)])
@pytest.mark.parametrize("case", CASES)
def test_engines_are_exact_for_units(engine, case, most):
    # float64; units of 8, 3, 2 and 1 examples, which share calls, or are added up over several
    model, x = CASES[case]
    y = OWN_LABELS if "own" in case else LABELS
    rows = [i for members in MEMBERS for i in members]
    for clip in clips(model):
        truth, lengths = by_torch(model, loss, x, y, MEMBERS, clip)
        got, norms = unit_grad_sum(model, loss, Units(take(x, rows), SIZES), take(y, rows), clip,
                                   engine=engine, most=most)
        close(norms, lengths, rtol=1e-9, atol=1e-12)
        for name in truth:
            close(got[name], truth[name], rtol=1e-9, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
       most=st.one_of(st.none(), st.integers(1, 12)), seed=st.integers(0, 9))
def test_any_sizes_are_exact(sizes, most, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 5, generator=g, dtype=torch.float64)
    y = torch.randint(3, (sum(sizes),), generator=g)
    members = [list(range(sum(sizes[:u]), sum(sizes[:u + 1]))) for u in range(len(sizes))]
    truth, lengths = by_torch(linear(), loss, x, y, members, FlatClip(1.))
    got, norms = unit_grad_sum(linear(), loss, Units(x, sizes), y, FlatClip(1.), most=most)
    close(norms, lengths, rtol=1e-10, atol=1e-12)
    close(got["weight"], truth["weight"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_row_costs_its_unit_and_nobody_else(value, most):
    x = torch.randn(14, 5, dtype=torch.float64)
    good, _ = unit_grad_sum(linear(), loss, Units(x[8:], [3, 2, 1]), LABELS[8:], FlatClip(1.))
    x[5, 2] = value
    got, norms = unit_grad_sum(linear(), loss, Units(x, SIZES), LABELS, FlatClip(1.), most=most)
    assert (~norms.isfinite()).any(0).tolist() == [True, False, False, False]
    close(got["weight"], good["weight"])


def test_memory_of_a_large_unit_is_bounded():
    "The engine never gets more rows than it may, however many one unit has."
    asked = []

    def watched(model, loss_fn, x, y, clip):
        asked.append(len(x)*x.k)
        return gradients.fast_grad_sum(model, loss_fn, x, y, clip)

    x = torch.randn(1000, 5, dtype=torch.float64)
    unit_grad_sum(linear(), loss, Units(x, [900, 90, 10]), torch.zeros(1000).long(), FlatClip(1.),
                  engine=watched, most=64)
    assert max(asked) <= 64 and sum(asked) == 1000
    asked.clear()
    unit_grad_sum(linear(), loss, Units(x, [1]*90 + [910]), torch.zeros(1000).long(),
                  FlatClip(1.), engine=watched)
    assert sum(asked) == 1000  # one large unit does not fill up ninety small ones


# --- who is drawn, and what is divided by what


def test_units_are_drawn_whole_by_one_coin_each(monkeypatch):
    # 300 steps of 40 units at q = 1/4; the audit's six questions have false alarms below 1e-3
    ids = [i for j in range(4) for i in range(40) if j <= i % 4]  # no unit lies in one piece
    run = trainer(OfPatients(40, 10, 300, sigma=1.), visits(ids), seed=5)
    seen = []
    rows_of = run.data.rows
    monkeypatch.setattr(Examples, "rows", lambda self, idx: seen.append(idx) or rows_of(idx))
    drawn = [idx for idx, _, _ in trainer_run(run)]
    found = sampler_audit(drawn, n=40, q=1/4)
    assert found, str(found)
    assert max(int(idx.max()) for idx in drawn if len(idx)) == 39
    owners = torch.tensor(ids)
    for units, rows in zip((idx for idx in drawn if len(idx)), seen):
        everything = torch.isin(owners, units).nonzero().flatten()
        assert rows.sort().values.equal(everything)


def test_the_update_is_divided_by_the_expected_units():
    "q = 1, no noise, no clipping: gradient descent on the sum of all losses over units."
    data, net = visits(), linear()
    run = trainer(OfPatients(4, 4, 3), data, linear(), clip=FlatClip(1e9),
                  optimizer=partial(torch.optim.SGD, lr=.3)).fit()
    sgd = torch.optim.SGD(net.parameters(), lr=.3)
    for _ in range(3):
        sgd.zero_grad()
        (loss(net(data.train_x), data.train_y).sum()/4).backward()
        sgd.step()
    close(run.model.weight, net.weight)


@pytest.mark.quick(6)
@pytest.mark.parametrize("micro, augment", [
    pytest.param(micro, augment, marks=[pytest.mark.slow]*(augment != two_views and micro != 5))
    for micro in (None, 1, 2, 3, 5, 11, 100) for augment in (None, jitter, two_views)])
def test_micro_batches_never_split_a_unit(micro, augment):
    # what a training step clips is the oracle's, whatever the micro-batch
    ids = [i//3 if i < 90 else 30 + i//60 for i in range(300)]  # more than two blocks of 128
    data = visits(ids)
    plan = OfPatients(data.units, data.units, 1)
    run = trainer(plan, data, clip=FlatClip(2.), seed=1, augment=augment, micro_batch=micro)
    idx = torch.arange(data.units)
    total, norms = run._clipped_sum(idx, 0, 2.)
    rows, sizes = data.rows_of(idx)
    (x, y), = run._reader(0).micro_batches(idx)
    x = x.tree
    ends = sizes.cumsum(0).tolist()
    members = [list(range(end - size, end)) for end, size in zip(ends, sizes.tolist())]
    truth, lengths = by_torch(run.model, loss, x, y, members, FlatClip(2.))
    close(norms, lengths, rtol=1e-9, atol=1e-12)
    close(total["weight"], truth["weight"], rtol=1e-9, atol=1e-12)


def test_clips_learn_from_units():
    "The adaptive clip counts the units below its threshold, not their examples."
    seen = []

    class Watched(AdaptiveClip):
        def short(self, norms):
            seen.append(norms.shape)
            return super().short(norms)

    run = trainer(OfPatients(4, 4, 2, sigma=1.), clip=Watched(batch_size=4, bit_sigma=2.))
    before = run.clip.max_norm
    run.fit()
    assert seen == [(2, 1)]*2 and run.clip.max_norm != before  # a call for all units, one by one


# --- units among the data


def test_ids_may_be_anything_that_has_a_name():
    rows = torch.zeros(4, 1)
    kinds = ([7, 7, 2, 7], torch.tensor([7, 7, 2, 7]), np.array([7, 7, 2, 7]), ["a", "a", "b", "a"],
             np.array(["a", "a", "b", "a"]), [(1, 2), (1, 2), (3, 4), (1, 2)], (7, 7, 2, 7),
             ["a", "a", "A", "a"], [b"a", b"a", b"a ", b"a"])
    for ids in kinds:
        data = Examples(rows, rows, groups=ids)
        assert data.groups.tolist() == [0, 0, 1, 0] and data.units == 2 and len(data) == 4


@pytest.mark.parametrize("ids, why", [
    ([1, 2, 3], "3 ids for 4 rows"),
    ([1, None, 2, 3], r"groups\[1\] is None"),
    ([1., 2., 3., 4.], r"groups\[0\] is 1.0"),
    (["a", "b", math.nan, "c"], r"groups\[2\] is nan"),
    ([[1], [2], [3], [4]], r"groups\[0\] is \[1\]"),
    (torch.ones(4, 2), r"groups\[0\] is \[1.0, 1.0\]"),
    ([1, "1", 2, 3], "7 and '7' would be two units"),
    (["P1", "P2", "P1 ", "P2"], "'P1' and 'P1 ', which look alike"),
    (["Ana", "Jos\u00e9", "Jose\u0301", "Ana"], "which look alike"),
])
def test_ids_that_cut_a_person_in_two_are_refused(ids, why):
    with pytest.raises(ValueError, match=why):
        Examples(torch.zeros(4, 1), torch.zeros(4), groups=ids)


def test_groups_stay_with_their_rows():
    data = visits()
    moved = as_examples(data.to("cpu").replace(name="other"))
    assert moved.groups.equal(data.groups) and "14, 5) float64 of 4 units" in repr(moved)
    with pytest.raises(ValueError, match="14 ids for 3 rows"):
        data.replace(train_x=data.train_x[:3], train_y=data.train_y[:3])

    class Table:
        train_x, train_y, groups = data.train_x, data.train_y, IDS

    assert as_examples(Table).units == 4


def test_a_validation_split_holds_out_whole_units():
    data = visits([i//3 for i in range(30)])
    cut = data.split(4, seed=2)
    assert cut.units == 6 and len(cut) == 18 and len(cut.test_y) == 12
    def firsts(x):
        return {round(v, 9) for v in x[:, 0].tolist()}
    apart = [firsts(data.train_x[3*u:3*u + 3]) for u in range(10)]
    here, there = firsts(cut.train_x), firsts(cut.test_x)
    assert all(own <= here or own <= there for own in apart)
    with pytest.raises(ValueError, match="pass 1 to 9"):
        data.split(10)


# --- what is refused


def a_plan(**numbers):
    usual = dict(n=4, batch_size=2, steps=4, eps=3., delta=.01, unit="patient")
    return PrivacyPlan(**usual | numbers)


@pytest.mark.parametrize("plan, data, why", [
    (a_plan(unit="example", n=14), visits(), r"PrivacyPlan\(n=4, unit='patient'"),
    (a_plan(unit="example"), visits(), "protects single examples, and these have owners"),
    (Plan(14, 4, 4, 1.), visits(), "protects single examples"),
    (a_plan(n=14), visits(), r"has 4 units \(groups=\): make a PrivacyPlan\(n=4"),
    (a_plan(n=14), visits().replace(groups=None), r"one patient's id per row"),
    (a_plan(unit="example", n=5), visits().replace(groups=None), "has 14 examples"),
])
def test_plan_and_units_must_agree(plan, data, why):
    with pytest.raises(ValueError, match=why):
        Trainer(linear(), data, plan)


def test_what_counts_examples_is_refused():
    run = trainer(a_plan(eps=30.))
    look = NoisyAccuracy(run.data.train_x, run.data.train_y, sigma=30., measurements=1)
    with pytest.raises(ValueError, match="one patient may have many"):
        look(run)
    with pytest.raises(ValueError, match="one patient may have many"):
        look.epsilon(run.plan)
    with pytest.raises(ValueError, match="one patient may have many"):
        release_mean(run, 30.)
    for book in (run.budget, run.plan.budget()):
        with pytest.raises(ValueError, match="one patient may have many"):
            private_channel_stats(torch.rand(9, 2, 3, 3), 30., (1., 1.), budget=book)
    refuse_units(Plan(4, 2, 4), "a count")
    with pytest.raises(ValueError, match="measured by example"):
        nonprivate_signal_noise(linear(), visits(), [4])
    assert run.computed == 0 and not run.budget.posts


# --- several processes, files, words


def three_ways():
    "A fresh network, the same each time: threads share torch's stream, so its weights don't."
    net = nn.Sequential(nn.Flatten(), nn.Linear(25, 3)).double()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(.2*torch.randn(p.shape, generator=g, dtype=p.dtype))
    return net


def train_with(peers, micro, augment):
    data = visits([i//3 if i < 60 else 20 + i//10 for i in range(120)], (1, 5, 5))
    plan = OfPatients(data.units, 8., 4)
    net = three_ways()
    made = ProcessTrainer(net, data, plan, peers=peers, seed=7, clip=FlatClip(1.),
                          micro_batch=micro, augment=augment)
    norms = []
    vars(made)["clip"] = FlatClip(.7)
    keep = made._over_all
    made._over_all = lambda *args: norms.append(keep(*args)) or norms[-1]
    made.fit()
    return made.model[1].weight.detach(), [n for _, n in norms]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("micro, augment", [(None, None), (4, multiplicity(2, crop=1))])
def test_several_processes_equal_one(world, micro, augment):
    (one, norms), = in_threads(1, lambda peers: train_with(peers, None, augment))
    for weights, found in in_threads(world, lambda peers: train_with(peers, micro, augment)):
        close(weights, one, rtol=1e-9, atol=1e-12)
        for a, b in zip(found, norms, strict=True):
            close(a, b, rtol=1e-9, atol=1e-12)


def test_a_checkpoint_belongs_to_its_units(tmp_path):
    path = tmp_path/"checkpoint"
    make = partial(trainer, a_plan(), seed=3)
    run = make().fit(2)
    run.save(path)
    run.fit()
    again = make().load(path).fit()
    assert again.t == 4 and again.computed == 4 and again.model.weight.equal(run.model.weight)
    with pytest.raises(ValueError, match="groups: .* there, .* here"):
        trainer(a_plan(), visits(IDS[::-1])).load(path)
    with pytest.raises(ValueError, match="plan.unit: patient there, family here"):
        trainer(a_plan(unit="family")).load(path)
    single = visits().replace(train_x=torch.zeros(4, 5).double(), train_y=torch.arange(4) % 3,
                              groups=None)
    with pytest.raises(ValueError, match="plan.unit: patient there, None here"):
        Trainer(linear(), single, a_plan(unit="example")).load(path)
    first = (tmp_path/"checkpoint.ledger").read_text().splitlines()[1]
    assert "one patient a unit" in json.loads(first[first.index("["):])[1]


def test_statement_and_record_name_the_unit():
    run = trainer(a_plan(), seed=3).fit()
    for words in ("adding or removing one of 4 units", "the unit is one patient",
                  "Each patient is drawn whole"):
        assert words in run.statement()
    fewer = trainer(a_plan(), visits(IDS[1:]), seed=3).fit()
    assert fewer.statement() == run.statement()  # how many rows there are is nobody's business
    start = start_line({"preset": "mine"}, run, 3, 0)
    assert start["plan"]["unit"] == "patient" and start["plan"]["examples"] == 14
    end = end_line({"preset": "mine"}, run, 2., .5, "steps")
    assert end["images_per_second"] == 4*2/4*14/2 and "one patient" in end["statement"]
    plain = Trainer(linear(), visits().replace(groups=None), a_plan(unit="example", n=14)).fit(1)
    assert "(the unit is one example)" in plain.statement() and "drawn" not in plain.statement()
    assert "unit" not in start_line({"preset": "mine"}, plain, 3, 0)["plan"]


# --- audits


def newcomers(seed=0):
    "Units that nobody has seen: large, small, with rows that agree or disagree."
    g = torch.Generator().manual_seed(seed)
    for i, size in enumerate((1, 2, 7, 20, 20)):
        x = 10.**(i - 2)*torch.randn(size, 5, generator=g, dtype=torch.float64)
        x = x[:1].expand(size, 5) if i == 4 else x
        yield (x, torch.full((size,), 99)), torch.ones(size, dtype=torch.int64)


def test_a_whole_unit_moves_a_step_by_no_more_than_one_clipped_gradient():
    data = visits()
    run = trainer(OfPatients(4, 2, 4, sigma=1.), data, clip=FlatClip(.5), seed=1)
    everybody = (data.train_x, torch.tensor(IDS)), data.train_y
    found = replay_sensitivity(trainer_step(run), everybody, [*newcomers()], bound=.5/2, tries=0)
    assert found and found.numbers["ratio"] > .99, str(found)


def test_the_replay_sees_a_trainer_that_clips_examples(monkeypatch):
    "Units drawn whole, and their examples clipped one by one: a unit of twenty moves it by more."
    monkeypatch.setattr("dp_course.training.trainer.unit_engine", per_example)
    data = visits()
    run = trainer(OfPatients(4, 2, 4, sigma=1.), data, clip=FlatClip(.5), seed=1)
    everybody = (data.train_x, torch.tensor(IDS)), data.train_y
    found = replay_sensitivity(trainer_step(run), everybody, [*newcomers()], bound=.5/2, tries=0)
    assert not found and found.numbers["ratio"] > 5


def per_example(engine, data, most=None):
    def wrong(model, loss_fn, x, y, clip):
        return engine(model, loss_fn, x.tree, y, clip)
    return wrong
