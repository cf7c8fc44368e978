"What somebody else's models and data need: plain names, hints, tables, reports, logs."
import csv
import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d
from toys import linear, toy

from dp_course import (
    EMA,
    AdaptiveClip,
    Examples,
    LayerClip,
    Log,
    PrivacyPlan,
    Trainer,
    fast_grad_sum,
    fix,
    load_release,
    loop_grad_sum,
)
from dp_course.training import load_checked, save_atomic

N = 40


def a_plan(**options):
    return PrivacyPlan(**dict(n=N, batch_size=10, steps=3, delta=1e-3, eps=2.) | options)


def run(model, data=None, **options):
    data = toy(N, dtype=torch.float32) if data is None else data
    return Trainer(model, data, a_plan(), **options)


# --- compiled models

WRAPS = {"whole": torch.compile, "a part": lambda net: nn.Sequential(torch.compile(net))}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_files_of_compiled_models_have_plain_names(tmp_path, wrap):
    with pytest.warns(UserWarning, match="compiled"):
        trained = run(wrap(linear(torch.float32)), callbacks=[EMA(.5)]).fit()
        again = run(wrap(linear(torch.float32)), callbacks=[EMA(.5)])
    for path in (tmp_path/"model.pt", tmp_path/"run"):
        (trained.release if path.suffix else trained.save)(path)
        assert b"_orig_mod" not in path.read_bytes()
    again.load(tmp_path/"run").release(tmp_path/"again.pt")
    old = load_checked(tmp_path/"model.pt", "dp_course release 1")
    long = {name.replace("weight", "_orig_mod.weight"): v for name, v in old["weights"].items()}
    save_atomic({**old, "weights": long}, tmp_path/"old.pt")
    for name in ("model.pt", "old.pt", "again.pt"):
        fresh = wrap(linear(torch.float32, seed=1))
        load_release(tmp_path/name, fresh)
        assert torch.equal(next(fresh.parameters()), [*old["weights"].values()][0])


def test_safetensors_carries_the_statement(tmp_path):
    pytest.importorskip("safetensors")
    trained = run(linear(torch.float32)).fit()
    trained.release(tmp_path/"model.safetensors")
    fresh = linear(torch.float32, seed=1)
    assert load_release(tmp_path/"model.safetensors", fresh) == trained.statement()
    assert torch.equal(fresh.weight, trained.model.weight)
    with pytest.raises(ValueError, match="another network"):
        load_release(tmp_path/"model.safetensors", nn.Linear(2, 2))
    raw = (tmp_path/"model.safetensors").read_bytes()
    (tmp_path/"model.safetensors").write_bytes(raw[:40])
    with pytest.raises(ValueError, match="damaged or foreign"):
        load_release(tmp_path/"model.safetensors", fresh)


# --- models

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("engine", [None, loop_grad_sum])
def test_a_parameter_that_no_loss_reaches_is_named(engine, recwarn):
    options = {} if engine is None else {"engine": engine}
    run(Heads(), **options)
    run(linear(torch.float32), **options)
    said = [str(w.message) for w in recwarn if "will get noise only" in str(w.message)]
    assert len(said) == 1 and "spare.weight, spare.bias" in said[0]


@torch.jit.script
def multiplied(x, weight):
    return torch.matmul(x, weight.t())


class Scripted(nn.Linear):
    def forward(self, x):
        return multiplied(x, self.weight) + self.bias


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", [fast_grad_sum, loop_grad_sum])
def test_a_gradient_that_an_engine_loses_is_named(engine):
    with pytest.raises(ValueError, match="gradient of weight gets lost"):
        run(Scripted(5, 3), engine=engine)


def test_zero_gradients_are_no_reason_to_name_a_parameter(recwarn):
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    nn.init.zeros_(model[1].weight)  # as LoRA begins
    run(model)
    assert not [w for w in recwarn if "will get noise only" in str(w.message)]


def contrastive(output, y):
    z = nn.functional.normalize(output, dim=1)
    return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none")


def contrastive_mean(output, y):
    return contrastive(output, y).mean()


def dice(output, y):
    "One number for the whole batch, as libraries of segmentation compute it."
    p, y = output.sigmoid(), nn.functional.one_hot(y, 3)
    return 1 - 2*(p*y).sum()/(p + y).sum()


def weighted(output, y):
    return nn.functional.cross_entropy(output, y, torch.tensor([1., 5., 2.]))


def random_loss(output, y):
    return (output - torch.randn_like(output)).square().mean(1)


@pytest.mark.parametrize("loss, mixes", [
    (contrastive, 1), (contrastive_mean, 1), (dice, 1), (random_loss, 0), (weighted, 0), (None, 0)])
def test_a_loss_that_compares_examples_is_named(recwarn, loss, mixes):
    run(linear(torch.float32), **({} if loss is None else {"loss_fn": loss}))
    said = [w for w in recwarn if "depends on the others" in str(w.message)]
    assert len(said) == mixes


class Pairs(nn.Module):
    "Compares all examples of a batch, as CLIP does."
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.left(x) @ self.right(x).T


class Graph(nn.Module):
    "Keeps the features of all examples."
    def __init__(self):
        super().__init__()
        self.register_buffer("features", torch.randn(N, 5))
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(x + self.features.mean(0))


@pytest.mark.parametrize("why, model, loss", [
    ("mixes examples", Pairs, lambda output, y: output.exp().mean()),
    ("features has a row for each of the 40 examples", Graph, None)])
def test_a_model_that_looks_at_other_examples_is_named(why, model, loss):
    with pytest.warns(UserWarning, match=why):
        run(model(), **({} if loss is None else {"loss_fn": loss}))


class Named(nn.Linear):
    def forward(self, x):
        return {"out": super().forward(x), "aux": x}


class Penalized(nn.Linear):
    "Takes a gradient in its forward, as a gradient penalty does."
    def forward(self, x):
        x = x.detach().requires_grad_()
        y = super().forward(x)
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0].square().sum()


WHOLE = Examples(torch.arange(5*N).view(N, 5), torch.arange(N) % 3)
YES = Examples(torch.randn(N, 5), torch.rand(N))


@pytest.mark.parametrize("why, model, data, options", [
    (r"dict of out, aux.*output\['out'\]", lambda: Named(5, 3), None, {}),
    (r"torch.func.grad.*engine=loop_grad_sum", lambda: Penalized(5, 3), None, {}),
    (r"normalize=lambda x: x.float", lambda: nn.Linear(5, 3), WHOLE, {}),
    (r"x\[:, None\] has one channel", lambda: nn.Conv1d(1, 3, 5), None, {}),
    (r"y\[:, None\]", lambda: nn.Linear(5, 1), YES, {"loss_fn": nn.BCEWithLogitsLoss()}),
    (r"remove_spectral_norm", lambda: nn.utils.spectral_norm(nn.Linear(5, 3)), None, {}),
    (r"pass model.module", lambda: nn.DataParallel(nn.Linear(5, 3)), None, {}),
], ids=["dict", "inner gradient", "whole numbers", "no channel", "one output", "spectral norm",
        "DataParallel"])
def test_what_does_not_fit_is_refused_with_the_line_to_write(why, model, data, options):
    with pytest.raises(ValueError, match=why):
        run(model(), data, **options)


def test_frozen_norms_keep_what_was_learnt_under_its_names():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(6, 2, 5, 5)
    net(x + 2)
    state, before = net.eval().state_dict(), net(x)
    assert "public" in fix(net, frozen=True)[0] and isinstance(net[1], FrozenBatchNorm2d)
    assert torch.allclose(net(x), before, atol=1e-5) and set(net.state_dict()) <= set(state)


def packed(net, batch):
    rows = nn.utils.rnn.pack_padded_sequence(batch["x"], batch["length"].cpu(), batch_first=True,
                                             enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(net.lstm(rows)[0], batch_first=True)[0]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, batch):
        return self.out(packed(self, batch)[:, 0])


def test_packed_sequences_are_refused_in_fitting_words_and_run_in_the_loop():
    rows = {"x": torch.randn(N, 7, 4), "length": torch.arange(N) % 5 + 2}
    data = Examples(rows, torch.arange(N) % 3)
    with pytest.raises(ValueError, match="packed sequence.*DPLSTM.*loop_grad_sum"):
        run(Reader(), data)
    assert run(Reader(), data, engine=loop_grad_sum).fit(1).t == 1


def test_an_augmentation_may_change_the_form_of_the_input():
    class Timed(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(6, 3)

        def forward(self, v, time):
            return self.out(torch.cat([v, time], 1))

    def timed(x, y, generator):
        return {"v": x, "time": torch.rand(len(x), 1, generator=generator)}, y

    trained = run(Timed(), augment=timed).fit()
    with pytest.raises(ValueError, match="trainer.outputs"):
        trained.evaluate()
    pair = timed(*trained.data.rows(torch.arange(3)), None)
    assert next(trained.outputs([pair]))[0].shape == (3, 3)


# --- data

ROWS = [{"a": 1., "b": 2, "label": i % 2} for i in range(N)]


class Rows:
    def __len__(self):
        return N

    def __getitem__(self, i):
        return {"ids": [i, 1, 2], "label": i % 2}


class Frame(dict):
    "What we use of a DataFrame."
    columns = property(list)

    def to_numpy(self):
        return np.stack(list(self.values()), 1)

    def __getitem__(self, names):
        if isinstance(names, list):
            return Frame({name: super(Frame, self).__getitem__(name) for name in names})
        return super().__getitem__(names)


FRAME = Frame({name: np.array([row[name] for row in ROWS]) for name in ROWS[0]})


@pytest.mark.parametrize("x, y, shape", [
    (FRAME, "label", (3, 2)), (ROWS, "label", (3,)), (dict(FRAME), "label", (3,)),
    (Rows(), "label", (3, 3)), ([[1., 2.]]*N, [0]*N, (3, 2)), (FRAME, FRAME["label"], (3, 3)),
], ids=["table", "list of dicts", "dict", "dataset", "lists", "table and column"])
def test_data_as_people_have_them(x, y, shape):
    rows, labels = Examples(x, y).rows(torch.arange(3))
    first = next(iter(rows.values())) if isinstance(rows, dict) else rows
    assert first.shape == shape and labels.dtype == torch.int64


@pytest.mark.parametrize("why, make", {
    "holds text": lambda: Examples([{"a": "x", "label": 1}]*N, "label"),
    "pad them to one": lambda: Examples([[1, 2], [3]], [0, 1]),
    "y='sick' names none": lambda: Examples(ROWS, "sick"),
    "has no columns": lambda: Examples(np.ones((N, 2)), "label"),
    "different keys": lambda: Examples([{"a": 1, "b": 1}, {"a": 1}], [0, 1]),
    "holds dates": lambda: Examples(Frame(a=np.zeros(N, "datetime64[D]")), [0]*N),
    "is a path.*ImageFolder": lambda: Examples("photos"),
    r"x is complex.*view_as_real": lambda: Examples(torch.ones(N, 2).cfloat(), [0]*N),
    r"y is complex": lambda: Examples(np.ones((N, 2)), np.ones(N, complex)),
    r"x.to_dense\(\)": lambda: Examples(torch.ones(N, 2).to_sparse(), [0]*N),
    r"x, y = zip": lambda: Examples([(torch.ones(2), 1), (torch.ones(2), 0)]),
    r"a dict of Datasets.*Examples\(data\['train'\]": lambda: Examples({"train": Rows()}, [0]*N),
    r"Examples\(dataset, y='label'\)": lambda: Examples(Rows()).rows(torch.arange(2)),
}.items())
def test_data_are_refused_with_the_line_to_write(why, make):
    with pytest.raises(ValueError, match=why):
        make()


@pytest.mark.parametrize("why, x", {
    "2 of 40 rows": torch.randn(N, 5).index_fill(0, torch.tensor([3, 9]), torch.nan),
    "differ 1e.03 times": torch.ones(N, 5)*torch.tensor([1., 1., 1., 1e3, 1.]),
}.items())
def test_rows_that_will_not_learn_are_named(why, x):
    with pytest.warns(UserWarning, match=why):
        run(linear(torch.float32), Examples(x, torch.arange(N) % 3))


# --- what is said

@pytest.mark.parametrize("clip", [None, AdaptiveClip(100), LayerClip([1., 2.])],
                         ids=["flat", "adaptive", "layers"])
def test_the_report_says_what_the_statement_says(tmp_path, clip):
    trained = run(linear(torch.float32), clip=clip).fit(2)
    report = trained.report()
    report.save(tmp_path/"run.json")
    report.save(tmp_path/"README.md")
    again = json.loads((tmp_path/"run.json").read_text())
    assert again == report and again["spent"]["eps"] == trained.epsilon()
    assert again["spent"]["steps"] == 2 and again["statement"] == trained.statement()
    card = (tmp_path/"README.md").read_text()
    assert card.startswith("---\n") and trained.statement() in card


def test_one_callback_writes_everywhere(tmp_path):
    rows, curves = [], []
    board = nn.Module()
    board.add_scalar = lambda *curve: curves.append(curve)
    log = partial(Log, every=2)
    callbacks = [log(rows.append, score=True), log(board), log(tmp_path/"run.csv")]
    trained = run(linear(torch.float32), callbacks=callbacks).fit()
    assert [row["step"] for row in rows] == [2, 3] and rows[-1]["eps"] == trained.epsilon()
    written = list(csv.DictReader(open(tmp_path/"run.csv")))
    assert [float(row["eps"]) for row in written] == [row["eps"] for row in rows]
    assert ("lr", 1., 3) in curves and rows[-1]["score"] == trained.evaluate()


def test_a_score_on_held_out_private_rows_is_not_logged():
    data = toy(2*N, dtype=torch.float32).split(N)
    with pytest.raises(ValueError, match="NoisyAccuracy"):
        run(linear(torch.float32), data, callbacks=[Log(print, score=True)]).fit()
