"Rows that are not tame: what mixes only where a number is missing, endless or vast is refused too."
import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import generator as gen
from toys import loss

from dp_course.data import Examples
from dp_course.gradients import fast_grad_sum, loop_grad_sum, vmap_grad_sum
from dp_course.models import resnet20
from dp_course.privacy import PrivacyPlan, RDPAccountant
from dp_course.training import (
    PROOFS,
    Seal,
    Trainer,
    check_optimizer,
    prove_separate,
    refuse_mixed_items,
)

ENGINES = [fast_grad_sum, vmap_grad_sum, loop_grad_sum]


def floats(*shape, n=50, classes=3):
    "A data set of noise, all numbers known and small."
    return Examples(torch.randn(n, *shape, generator=gen()),
                    torch.randint(classes, (n,), generator=gen(1)))


def of_input(f, d=5, classes=3):
    "A network that does something to its rows before its only layer."
    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(f(x))
    torch.manual_seed(0)
    return Net(d, classes)


# --- attacks that the second version accepted


def imputed(x):
    "What is missing becomes the mean of its column."
    return torch.where(x.isnan(), x.nanmean(0).nan_to_num(), x)


def imputed_by_median(x):
    return torch.where(x.isnan(), x.nanmedian(0).values.nan_to_num(), x)


def skipped(x):
    "A batch with a number that is none counts nothing."
    return x if x.isfinite().all() else torch.zeros_like(x)


def rescaled(x):
    "A batch with a large number is made smaller."
    most = x.abs().amax()
    return x*1e5/most if most > 1e5 else x


def without_copies(x):
    "Equal rows share a weight."
    same = (x[:, None] == x).flatten(2).all(2).sum(1)
    return x/same.view(-1, *[1]*(x.dim() - 1))


def unless_zero(x):
    "An empty row tells the others."
    return x*(1 + (x == 0).flatten(1).all(1).any())


ATTACKS = {f.__name__: f for f in (imputed, imputed_by_median, skipped, rescaled, without_copies,
                                   unless_zero)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_model_that_mixes_for_odd_rows_only_is_refused(name, engine):
    with pytest.raises(ValueError, match=r"\(Net\) mixes examples"):
        prove_separate(engine, of_input(ATTACKS[name]), loss, floats(5))


@pytest.mark.parametrize("name", ATTACKS)
def test_a_normalization_that_mixes_for_odd_rows_only_is_refused(name):
    data = floats(5).replace(normalize=ATTACKS[name])
    with pytest.raises(ValueError, match="normalize mixes examples"):
        prove_separate(fast_grad_sum, of_input(torch.Tensor.sin), loss, data)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_augmentation_that_mixes_for_odd_rows_only_is_refused(name):
    def augment(x, y, generator):
        return ATTACKS[name](x), y

    with pytest.raises(ValueError, match="augment mixes examples"):
        prove_separate(fast_grad_sum, of_input(torch.Tensor.sin), loss, floats(5), augment=augment)


def test_missing_numbers_among_the_data_change_nothing():
    x = torch.randn(50, 5, generator=gen())
    x[::3, 1] = torch.nan
    data = Examples(x, torch.arange(50) % 3)
    with pytest.raises(ValueError, match="mixes examples"):
        prove_separate(fast_grad_sum, of_input(imputed), loss, data)
    prove_separate(fast_grad_sum, of_input(torch.Tensor.nan_to_num), loss, data)


def all_or_nothing(output, y):
    each = loss(output, y)
    return each if each.isfinite().all() else 0*each.nan_to_num(0., 0., 0.)


def capped_by_the_batch(output, y):
    each = loss(output, y)
    return each if each.max() < 1e6 else each/each.detach().max()


def by_share(output, y):
    "Unknown labels count nothing, and the others for them."
    known = y != -100
    return loss(output, y)/known.float().mean().clamp(min=.01)


def by_share_of_targets(output, y):
    known = ~y.isnan()
    each = (output[:, 0] - y.nan_to_num()).square()*known
    return each/known.float().mean().clamp(min=.01)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss_fn", [all_or_nothing, capped_by_the_batch, by_share])
def test_a_loss_that_mixes_for_odd_rows_only_is_refused(loss_fn, engine):
    for body in (nn.Identity(), nn.Tanh()):  # whose outputs are finite whatever comes in
        model = nn.Sequential(nn.Linear(5, 8), body, nn.Linear(8, 3))
        with pytest.raises(ValueError, match="loss_fn mixes examples"):
            prove_separate(engine, model, loss_fn, floats(5))


def test_missing_targets_are_tried_too():
    data = Examples(torch.randn(50, 5), torch.randn(50))
    with pytest.raises(ValueError, match="loss_fn mixes examples"):
        prove_separate(fast_grad_sum, nn.Linear(5, 1), by_share_of_targets, data)


def test_an_own_number_for_missing_labels_is_found_out():
    "A loss says which label it ignores; the data hold it where they know it."
    def share(output, y, ignore_index=255):
        known = y != ignore_index
        each = F.cross_entropy(output, y, reduction="none", ignore_index=ignore_index)
        return each/known.float().mean().clamp(min=.01)

    with pytest.raises(ValueError, match="loss_fn mixes examples"):
        prove_separate(fast_grad_sum, nn.Linear(5, 3), partial(share, ignore_index=77), floats(5))


# --- Datasets


class Items(torch.utils.data.Dataset):
    "Items that `make` makes of a table."
    def __init__(self, make, n=30, table=torch.as_tensor):
        self.x = table(torch.randn(n, 5, generator=gen()).numpy())
        self.order = torch.randperm(n, generator=gen(2)).tolist()
        self.make, self.last, self.mean = make, 0., 0.

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return torch.as_tensor(self.make(self, i)), i % 3


def row(data, i):
    return data.x[i]


def permuted(data, i):
    return data.x[data.order[i]]


def of_the_same_shape(data, i):
    "Looks at the first row, and takes nothing of it but its shape."
    return data.x[i].reshape(data.x[0].shape)


def cropped(data, i):
    return data.x[i] + torch.rand(()).item()  # of torch's own generator


def minus_the_next(data, i):
    return data.x[i] - data.x[(i + 1) % len(data)]


def of_three(data, i):
    return sum(data.x[j] for j in (i, data.order[i], data.order[i - 1]))


def minus_the_last(data, i):
    last, data.last = data.last, data.x[i]
    return data.x[i] - last


def minus_running_mean(data, i):
    data.mean = .9*data.mean + .1*data.x[i]
    return data.x[i] - data.mean


class Together(Items):
    "Reads many items at once, and centres them."
    def __getitems__(self, idx):
        x = self.x[torch.tensor(idx)]
        return [(v, i % 3) for v, i in zip(x - x.mean(0), idx)]


@pytest.mark.parametrize("table", [torch.as_tensor, np.asarray, lambda v: list(torch.tensor(v))],
                         ids=["tensor", "array", "list"])
@pytest.mark.parametrize("make", [minus_the_next, of_three, minus_the_last, minus_running_mean])
def test_items_that_are_made_of_several_rows_are_refused(make, table):
    for data in (Items(make, table=table), torch.utils.data.Subset(Items(make, table=table),
                                                                   range(3, 20))):
        with pytest.raises(ValueError, match="of the Dataset (is made from the rows|changes)"):
            prove_separate(fast_grad_sum, nn.Linear(5, 3), loss, data)


def test_items_that_are_read_together_are_refused():
    with pytest.raises(ValueError, match="beside other items"):
        refuse_mixed_items(Examples(Together(row)))


def innocent(data):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    refuse_mixed_items(Examples(data))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    prove_separate(fast_grad_sum, nn.Linear(5, 3), loss, data)


@pytest.mark.quick(4)
@pytest.mark.parametrize("table", [torch.as_tensor, np.asarray])
@pytest.mark.parametrize("make", [row, permuted, of_the_same_shape, cropped])
def test_items_of_one_row_are_innocent(make, table):
    made = Items(make, table=table)
    innocent(made)
    refuse_mixed_items(Examples(torch.utils.data.Subset(made, range(3, 20))))
    refuse_mixed_items(Examples(torch.utils.data.ConcatDataset([made, made])))


def test_rows_of_tensors_are_innocent():
    innocent(torch.utils.data.TensorDataset(torch.randn(9, 5), torch.arange(9) % 3))


def test_what_a_dataset_computed_before_is_not_seen():
    "The stated limit, so that nobody believes in more."
    class Centred(Items):
        def __init__(self):
            super().__init__(row)
            self.x = self.x - self.x.mean(0)

    refuse_mixed_items(Examples(Centred()))


# --- innocent


class Mixture(nn.Module):
    "Each row goes to one expert of four."
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(5, 4)
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(4))

    def forward(self, x):
        scores = self.gate(x).softmax(1)
        best = scores.argmax(1)
        out = x.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            rows = (best == i).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows])*scores[rows, i, None])
        return out


class AllExperts(Mixture):
    "The same, each expert sees every row."
    def forward(self, x):
        scores = self.gate(x).softmax(1)
        top = scores*(scores == scores.amax(1, keepdim=True))
        out = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("be,beo->bo", top, out)


class Teacher(nn.Module):
    "A frozen copy follows the weights, in every forward."
    def __init__(self):
        super().__init__()
        self.pupil = nn.Linear(5, 3)
        self.teacher = copy.deepcopy(self.pupil).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for t, p in zip(self.teacher.parameters(), self.pupil.parameters()):
                t.lerp_(p, .01)
        return self.pupil(x), self.teacher(x)


def agree(output, y):
    return loss(output[0], y) + (output[0] - output[1]).square().mean(1)


def test_a_sparse_mixture_of_experts_is_innocent():
    prove_separate(loop_grad_sum, Mixture(), loss, floats(5))
    for engine in ENGINES:
        prove_separate(engine, AllExperts(), loss, floats(5))
    with pytest.raises(ValueError, match="count the examples.*rows: pass loop_grad_sum"):
        prove_separate(fast_grad_sum, Mixture(), loss, floats(5))  # has no rows per example there


def test_a_teacher_that_follows_its_pupil_is_innocent_where_a_step_is_one_call():
    prove_separate(fast_grad_sum, Teacher(), agree, floats(5))
    with pytest.raises(ValueError, match="keeps count of its calls: at call 2, teacher"):
        prove_separate(loop_grad_sum, Teacher(), agree, floats(5))  # it would follow each row


@pytest.mark.quick(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("f", [torch.log1p, torch.sqrt, lambda x: (x + 1).log()])
def test_logarithms_of_counts_are_innocent(f, engine):
    counts = Examples(torch.randint(99, (50, 5), generator=gen()).float(), torch.arange(50) % 3)
    prove_separate(engine, nn.Linear(5, 3), loss, counts.replace(normalize=f))
    prove_separate(engine, of_input(f), loss, counts)


def test_logits_of_fractions_are_innocent():
    some = Examples(torch.rand(50, 5, generator=gen())*.98 + .01, torch.arange(50) % 3)
    prove_separate(fast_grad_sum, of_input(torch.logit), loss, some)


def test_what_cannot_bear_odd_rows_is_innocent():
    class Strict(nn.Module):
        "Counts its calls, and refuses what is not finite."
        def __init__(self):
            super().__init__()
            self.out, self.calls = nn.Linear(5, 3), 0

        def forward(self, x):
            self.calls += 1
            if not x.isfinite().all() or x.abs().max() > 1e5:
                raise RuntimeError("no number")
            return self.out(x)

    prove_separate(fast_grad_sum, Strict(), loss, floats(5))
    ids = Examples(torch.randint(9, (50, 4)).float(), torch.arange(50) % 3)
    words = of_input(lambda x: F.one_hot(x.long().abs() % 9, 9).float().mean(1), 9)
    prove_separate(fast_grad_sum, words, loss, ids)


def test_ignored_labels_are_innocent():
    y = torch.arange(50) % 3
    y[::5] = -100
    prove_separate(fast_grad_sum, nn.Linear(5, 3), loss, Examples(torch.randn(50, 5), y))


# --- the same work on every machine


def test_what_is_proved_depends_on_shapes_alone(monkeypatch):
    "No proof looks at a clock."
    def no_clock():
        raise AssertionError("a proof asked for the time")

    for name in ("time", "perf_counter", "process_time", "thread_time", "monotonic"):
        monkeypatch.setattr(f"time.{name}", no_clock)
    data = Examples(torch.randint(256, (9, 3, 32, 32), dtype=torch.uint8), torch.arange(9))
    assert prove_separate(fast_grad_sum, resnet20(10), loss, data, largest=256) == (3, 4, 7)
    assert prove_separate(fast_grad_sum, nn.Linear(5, 3), loss, floats(5), largest=256) == (
        3, 4, 5, 7, 8, 256)


def test_a_proof_is_a_list_of_named_proofs():
    assert len(PROOFS) == 8 and all(map(callable, PROOFS.values()))


# --- optimizers, and what is done to a model later


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_cannot_step_are_refused(make):
    model = nn.Linear(5, 3)
    with pytest.raises(ValueError, match=f"{make.__name__} takes no step.*closure"):
        check_optimizer(make(model.parameters()))
    assert model.weight.grad is None


@pytest.mark.parametrize("make", [
    partial(torch.optim.SGD, lr=.1, momentum=.9, nesterov=True), torch.optim.Adam,
    torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
def test_optimizers_that_step_are_left_as_they_are(make):
    model = nn.Linear(5, 3)
    before = model.weight.clone()
    optimizer = make(model.parameters())
    state = copy.deepcopy(optimizer.state_dict())
    check_optimizer(optimizer)
    assert torch.equal(model.weight, before) and model.weight.grad is None
    assert str(optimizer.state_dict()) == str(state)


def freeze(model):
    model[0].requires_grad_(False)


def thaw(model):
    model[2].requires_grad_()


def exchange(model):
    model[0] = nn.Linear(5, 4)


def hook(model):
    model[1].register_forward_hook(lambda m, args, out: out - out.mean(0))


def backward_hook(model):
    model[0].register_full_backward_hook(lambda *args: None)


def add(model):
    model.append(nn.BatchNorm1d(3))


@pytest.mark.parametrize("change, words", [
    (freeze, r"parameter 0\.weight, parameter 0\.bias: not what was proved"),
    (thaw, r"parameter 2\.weight"), (exchange, r"parameter 0\.weight, parameter 0\.bias"),
    (hook, "layer 1: not what"), (backward_hook, "layer 0: not what"), (add, r"layer 3")])
def test_a_model_that_is_changed_after_the_proof_is_refused(change, words):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3).requires_grad_(False))
    seal = Seal(model)
    model.eval()
    with torch.no_grad():
        model[0].weight.add_(1.)
    seal.check()
    change(model)
    with pytest.raises(ValueError, match=words):
        seal.check()


def test_the_trainer_refuses_what_the_proof_refuses():
    plan = PrivacyPlan(n=50, batch_size=10, steps=2, eps=3., delta=1e-3, accountant=RDPAccountant)
    with pytest.raises(ValueError, match="mixes examples"):
        Trainer(of_input(skipped), floats(5), plan)
