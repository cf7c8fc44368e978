"Public networks, features and the sweep of lesson 19: shapes, exactness, files, what is run when."
import ast
import json
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from toys import code_of, digits_between, generator
from toys import loss as ce

from dp_course import features
from dp_course.basics import near
from dp_course.cli import (
    FEATURES,
    ONE_LABEL,
    PRESETS,
    Job,
    images_of,
    load_data,
    make_config,
    make_model,
    make_plan,
    make_trainer,
    open_release,
    releases,
    setup,
    summaries,
    train,
)
from dp_course.cli.main import main
from dp_course.data import Examples, load
from dp_course.data import datasets as data_module
from dp_course.features import cache, load_start, save_encoder
from dp_course.features import pretraining as N
from dp_course.features import transfer as P
from dp_course.gradients import fast_grad_sum, loop_grad_sum
from dp_course.models import resnet20
from dp_course.training import flat_row, read_record, sweep
from experiments import harness
from experiments import public_start as recipe

SMALL = replace(N.TRAININGS["min-rand-10"], name="small", epochs=8., lr=.02, crop=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A public network of the digits 0 to 4."
    out = tmp_path_factory.mktemp("public")
    data = digits_between(0, 5).replace(classes=tuple(map(str, range(10))))
    run = N.public_run(SMALL, data, out)
    run.work(say=lambda text: None, every=1e-6)
    return run, out


# -- training --------------------------------------------------------------------------------------

def test_a_public_training_learns_and_says_so(trained):
    run, out = trained
    lines = read_record(out/"small.jsonl")
    assert lines[0]["plan"] is None and lines[0]["preset"] == "pretrain-small"
    assert lines[-1]["finished"] and lines[-1]["public_accuracy"] > .6
    losses = [line["loss"] for line in lines if line["kind"] == "epoch"]
    assert losses[-1] < losses[0]


def test_a_public_encoder_offered_to_another_network_is_refused_by_name(trained):
    run, out = trained
    with pytest.raises(ValueError, match=f"{run.config.net}: it does not fit this network"):
        load_start(resnet20(), out/"small.pt")


def test_every_example_is_seen_once_an_epoch():
    config = replace(SMALL, batch_size=7)
    seen = torch.cat([N._chosen(config, 21, t) for t in range(6)])
    for epoch in seen.chunk(2):
        assert sorted(epoch.tolist()) == list(range(21))
    assert not torch.equal(*seen.chunk(2))


def test_tasks_are_disjoint_groups():
    y = torch.arange(100)
    half, few = (N.labels_of_task(task, y) for task in ("half-rand-50", "min-rand-10"))
    assert (half >= 0).sum() == 50 and (few >= 0).sum() == 10
    assert torch.equal(half.clamp(min=0)[few >= 0], few[few >= 0])  # the ten are among the fifty


def test_a_wide_layer_stands_on_frozen_convolutions(trained):
    run, out = trained
    wide = replace(SMALL, name="wide", width=96, start="small")
    data = digits_between(0, 5).replace(classes=tuple(map(str, range(10))))
    again = N.public_run(wide, data, out)
    before = {name: v.clone() for name, v in again.model.state_dict().items()}
    N.public_step(wide, again.model, again.optimizer, data, 0, 10)
    for name, v in again.model.state_dict().items():
        assert torch.equal(v, before[name]) == (before[name].dim() == 4 or name in (
            "0.bias", "2.bias", "5.bias", "7.bias", "10.bias", "12.bias")), name
    near(again.model[0].weight, run.model[0].weight, .01)


# -- layers that move ------------------------------------------------------------------------------

@pytest.mark.parametrize("what", features.MOVING)
def test_engines_are_exact_on_what_moves(what):
    g = generator()
    torch.manual_seed(0)
    net = features.public_net(20, widths=(32, 32, 32))
    model = features.new_head(net, torch.randn(50, 32, generator=g), 5)
    model = features.train_only(model, what, rank=2).double()
    for p in model.parameters():
        p.data += .1*torch.randn(p.shape, generator=g, dtype=torch.float64)
    x = torch.randn(5, 3, 16, 16, generator=g, dtype=torch.float64)
    y = torch.randint(5, (5,), generator=g)
    def clip(norms):
        return (.3/norms.square().sum(0).sqrt()).clamp(max=1).expand_as(norms)
    fast, norms = fast_grad_sum(model, ce, x, y, clip)
    slow, slow_norms = loop_grad_sum(model, ce, x, y, clip)
    near(norms, slow_norms, 1e-9)
    near(fast, slow, 1e-9)
    whole = torch.cat([v.flatten() for v in fast.values()]).norm()
    assert whole <= 5*.3*(1 + 1e-9)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert not set(frozen) & set(fast) and bool(frozen) == (what != "all")
    kinds = {"head": (), "norms": ("GroupNorm",), "adapters": ("Adapter",)}.get(what)
    if kinds is not None:
        expected = {f"{len(model) - 1}.{part}" for part in ("weight", "bias")}
        for name, m in model.named_modules():
            if type(m).__name__ in kinds:
                own = [n for n, _ in m.named_parameters() if not n.startswith("conv.")]
                expected |= {f"{name}.{n}" for n in own}
        assert set(fast) == expected


# -- features --------------------------------------------------------------------------------------

def test_features_of_an_image_depend_on_it_alone(trained):
    run, _ = trained
    data = digits_between(5, 10)
    all_of_them = P.describe(run.model.eval(), data, data.train_x[:9], k=4)
    alone = P.describe(run.model, data, data.train_x[4:5], k=4)
    near(all_of_them[4:5].float(), alone.float(), .05)


def test_the_metric_sees_public_images_only():
    g = generator()
    z = torch.randn(300, 6, generator=g) + 2
    metric = P.PublicMetric(z, power=.5, ridge=0.)
    near(metric(z).T.cov(correction=0), torch.eye(6), 1e-3)
    one = torch.randn(6, generator=g)
    near(metric(one), metric(torch.stack([one, 100*one]))[0], 1e-5)


def test_another_file_is_no_public_net(tmp_path):
    from dp_course.training import save_atomic
    path = tmp_path/"other.pt"
    save_atomic({"kind": "dp_course encoder 1", "about": json.dumps({"model": "resnet20"}),
                 "weights": {}}, path)
    with pytest.raises(ValueError, match="no encoder of public_nets"):
        P.load_public_net(path)


# -- presets ---------------------------------------------------------------------------------------

def photographs(n=60, size=32, seed=0):
    g = generator(seed)
    x = torch.randint(256, (n, 3, size, size), generator=g, dtype=torch.uint8)
    y = torch.arange(n) % 10
    return Examples(x, y, x[:20], y[:20], name="made up", classes=range(10))


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    "A machine where CIFAR-10 is, and the public network is not."
    monkeypatch.setenv("DP_COURSE_DATA", str(tmp_path))
    made_up = replace(ONE_LABEL, load=lambda *args, **kwargs: photographs())
    monkeypatch.setattr(setup, "task_of", lambda name: made_up)


@pytest.mark.parametrize("preset, net", [("public-linear-eps3", "public-net"),
                                         ("public-all-eps2", "public-net"),
                                         ("public-max100-eps2.12", "max-100")])
def test_without_the_public_network_one_line_names_its_command(preset, net, no_network, tmp_path,
                                                               capsys):
    words = [preset, "--batch-size", "20", "--out", str(tmp_path/"out"), "--device", "cpu"]
    assert main(words) == 2
    line, = capsys.readouterr().err.splitlines()
    assert f"dp-pretrain {net} " in line and str(tmp_path) in line
    assert not list((tmp_path/"out").glob("*")), "nothing was begun"


@pytest.mark.parametrize("preset, net, f", [("public-linear-eps3", "public-net", 2048),
                                            ("public-max100-eps2.12", "max-100", 1024)])
def test_what_it_would_cost_is_said_without_the_network(preset, net, f, no_network, capsys):
    assert main([preset, "--dry-run", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert f"{10*(f + 1):,} parameters" in said and f"dp-pretrain {net} " in said


def test_presets_say_how_many_runs_chose_them():
    for name, preset in PRESETS.items():
        if name.startswith("public-"):
            runs = {"max100": 26, "linear": 12, "all": 8}[name.split("-")[1]]
            assert preset["tuning_runs"] == runs


def read_by(features):
    "How a preset reads its features, in the words of a cell."
    return FEATURES[features].keywords | dict(net=features, name=features)


def is_cell(config, cell):
    "Whether a preset is a cell of the sweep."
    said = read_by(config.features) | dict(
        lr=config.lr, batch=config.batch_size, eps=config.eps, seed=cell["seed"],
        steps=make_plan(config, 50_000).steps, mean=True, kind_of_run="head", stage=cell["stage"])
    return said == cell | dict(name=cell["net"]) and (
        config.max_norm, config.momentum, config.schedule) == (recipe.CLIP, .9, "linear")


def test_the_preset_of_features_is_within_an_error_of_the_best_of_the_search():
    "An error is that of 5,000 held-out images."
    cell = recipe.head_cell("public-net", eps=2., lr=4., k=4)
    config = make_config("public-linear-eps2")
    assert is_cell(config, cell) and not is_cell(config, cell | dict(k=1))
    tried = {recipe.key(row): row["accuracy"] for row in harness.rows_of(recipe)
             if row["stage"] == "tune" and recipe.key(row)[1:3] == ("head", "tune")
             and row["net"] == "public-net"}
    ours, best = tried[recipe.key(cell)], max(tried.values())
    assert best - ours < (best*(1 - best)/5000)**.5
    assert config.tuning_runs == len(tried)


MAX_100 = recipe.head_cell("max-100", layers="last", power=.25, within=False)  # chosen


def test_papernots_presets_are_what_the_search_chose(monkeypatch):
    monkeypatch.setattr(recipe, "is_there", lambda net: True)
    rates = {2.12: 8., 1.48: 4., 1.04: 4., .73: 2., .32: 1.}
    expected = {eps: MAX_100 | dict(eps=eps, lr=lr) for eps, lr in rates.items()}
    for eps, cell in expected.items():
        assert is_cell(make_config(f"public-max100-eps{eps:g}"), cell)
        assert not is_cell(make_config(f"public-max100-eps{eps:g}", lr=3.), cell)
    cells, best = recipe.tuning_papernot(harness.rows_of(recipe))
    if best:  # where the record is
        tuning_runs = {make_config(f"public-max100-eps{eps:g}").tuning_runs for eps in rates}
        assert best == expected and tuning_runs == {len(set(map(recipe.key, cells)))}


def test_papernots_five_budgets_are_presets():
    assert {make_config(name).eps for name in PRESETS if name.startswith("public-max100")} == set(
        recipe.EPS)
    for net in recipe.THEIRS[:3]:
        assert read_by(net) == read_by("max-100") | dict(net=net, name=net)


def test_the_preset_of_layers_is_the_best_row_of_the_search():
    tried = [row for row in harness.rows_of(recipe)
             if row["kind_of_run"] == "layers" and row["stage"] == "tune"]
    best, ours = max(tried, key=lambda row: row["accuracy"]), make_config("public-all-eps2")
    assert ours.eps == recipe_layers()["eps"]
    assert (best["what"], ours.learns, ours.tuning_runs) == ("all", "", len(tried))
    assert (ours.lr, ours.batch_size) == (best["lr"], best["batch"])
    assert (make_plan(ours, 50_000).steps, ours.head_steps) == (best["steps"], best["head_steps"])
    public = data_module._SOURCES["cifar100"]
    assert (ours.pixel_mean, ours.pixel_std) == (public.mean, public.std)
    assert (ours.new_head, ours.start) == ("cifar100", best["net"])


def recipe_layers():
    "The first cell of the search over layers."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "is_there", lambda net: True)
        return recipe.layers([])[0]


LEARNS = {"all": "", "head": "head", "norms": "head+norms", "adapters": "head+adapters"}


@pytest.mark.parametrize("preset, given, least", [
    ("public-max100-eps2.12-fast", {}, .7),
    pytest.param("public-linear-eps3-fast", {}, .7, marks=pytest.mark.slow),
    *(pytest.param("public-all-eps2-fast", dict(head_steps=2, learns=learns), 0,
                   marks=pytest.mark.slow)
      for learns in LEARNS.values())])
def test_a_miniature_runs_and_resumes_offline(tmp_path, monkeypatch, preset, given, least):
    monkeypatch.setenv("DP_COURSE_DATA", str(tmp_path/"nowhere"))
    config = make_config(preset, **given)
    for job in (Job(config, out=tmp_path, device="cpu", seed=3, steps=1),
                Job(config, out=tmp_path, device="cpu", seed=3, resume=True)):
        end = train(job, say=lambda line: None, show=False)
    assert end["finished"] and end["test_accuracy"] >= least and end["eps_pld"] <= config.eps
    released = open_release(end["paths"]["weights"])
    assert released.accuracy() == (end["test_accuracy"], 360)
    assert len(released.outputs(released.prepared(load("digits").test_x[:3]))[0]) == 3
    if config.new_head:
        assert released.model[-2].scale != 1 and released.model[-2].mean.any()


def encoder_of_public_net(path, channels=3):
    torch.manual_seed(1)
    model = features.public_net(100, channels)
    save_encoder(model, N.TRAININGS["public-net"], 0, path, dict(model="public_net"))
    return model


@pytest.fixture
def as_if_there(monkeypatch, tmp_path):
    "A machine with made-up CIFAR-10, CIFAR-100 and two public networks."
    monkeypatch.setenv("DP_COURSE_DATA", str(tmp_path))
    (tmp_path/"starts").mkdir()
    encoder_of_public_net(tmp_path/"starts/public-net.pt")
    other = N.TRAININGS["max-100"]
    save_encoder(other.network(), other, 0, tmp_path/"starts/max-100.pt", dict(model=other.net))
    known = data_module._SOURCES["cifar100"]
    public = photographs(80, seed=1).replace(mean=known.mean, std=known.std)
    def found(name, *args, **kwargs):
        return public if name == "cifar100" else photographs()
    for module in (P, recipe):
        monkeypatch.setattr(module, "load", found)
    for module in (setup, releases):
        monkeypatch.setattr(module, "task_of", lambda name: replace(ONE_LABEL, load=found))
    return tmp_path


def trainer_of(cell, monkeypatch, **given):
    "What a cell of the sweep trains, and the lines that it leaves."
    kept = []
    for name in ("fine_tuner", "train_head"):
        make = getattr(recipe, name)
        monkeypatch.setattr(recipe, name, lambda *a, make=make: kept.append(make(*a)) or kept[-1])
    (start, end), = recipe.run(cell, **given)
    return kept[-1], end


@pytest.mark.slow
@pytest.mark.parametrize("what", features.MOVING)
def test_a_preset_is_a_row_of_the_sweep(what, as_if_there, monkeypatch):
    cell = recipe_layers() | dict(stage="final", what=what, steps=4, head_steps=2, lr=8., seed=7)
    theirs, row = trainer_of(cell, monkeypatch)
    config = make_config("public-all-eps2", learns=LEARNS[what], batch_size=6., epochs=.4,
                         head_steps=2)
    job = Job(config, out=as_if_there/"out", device="cpu", seed=7)
    end = train(job, say=lambda line: None, show=False)
    released = open_release(end["paths"]["weights"])
    state = theirs.model.state_dict()
    assert released.model.state_dict().keys() == state.keys() and end["step"] == 4
    for name, v in released.model.state_dict().items():
        assert torch.equal(v, state[name]), name
    assert end["test_accuracy"] == row["test_accuracy"] == released.accuracy()[0]
    assert end["eps_pld"] == row["eps_pld"] and released.model[-1].weight.any()


@pytest.mark.slow
def test_what_does_not_learn_stays_as_it_was(as_if_there):
    body = encoder_of_public_net(as_if_there/"again.pt")
    for learns, moved in (("head", 0), ("head+norms", 16), ("head+adapters", 0)):
        config = make_config("public-all-eps2", learns=learns, batch_size=20., epochs=1.,
                             head_steps=0)
        trainer = make_trainer(config, load_data(config), seed=0).fit()
        after = {name.replace(".conv.", "."): v for name, v in trainer.model.named_parameters()}
        before = {name: v for name, v in body.named_parameters() if name in after}
        assert len(before) == len(list(body.parameters())) - 2  # all but its last layer
        others = [name for name, v in before.items()
                  if not torch.equal(v.bfloat16().float(), after[name])]
        assert len(others) == moved, others


@pytest.mark.slow
def test_papernots_preset_is_a_row_of_the_sweep(as_if_there, monkeypatch):
    cell = MAX_100 | dict(stage="final", steps=5, batch=60., seed=3)
    theirs, row = trainer_of(cell, monkeypatch)
    config = make_config("public-max100-eps2.12", batch_size=30., epochs=2.5)
    job = Job(config, out=as_if_there/"out", device="cpu", seed=3)
    end = train(job, say=lambda line: None, show=False)
    released = open_release(end["paths"]["weights"])
    assert torch.equal(released.model[-1].weight, theirs.model[-1].weight)
    assert end["test_accuracy"] == row["test_accuracy"] == released.accuracy()[0]


@pytest.mark.slow
def test_each_network_and_each_reading_has_a_file(as_if_there):
    found = [FEATURES[name](photographs()).train_x for name in ("public-net", "max-100")]
    found += [FEATURES["max-100"](photographs(), **other).train_x
              for other in (dict(power=0.), dict(within=True), dict(k=2))]
    assert [x.shape[1] for x in found] == [2048] + 4*[1024]
    assert len(list((as_if_there/"features").glob("*.npy"))) == 5
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize("preset, given, words", [
    ("public-linear-eps3", dict(learns="head"), "for networks on pixels"),
    ("public-max100-eps2.12", dict(new_head="bars"), "for networks on pixels"),
    ("public-linear-eps3", dict(features="public"), "unknown features 'public'"),
    ("digits-eps3", dict(features="max-100"), "do not fit"),
    ("public-all-eps2", dict(learns="norms"), "pass one of , head, head.norms"),
    ("public-all-eps2", dict(new_head="cifar10"), "pass one of , cifar100, bars")])
def test_what_does_not_fit_is_refused(preset, given, words):
    with pytest.raises(ValueError, match=words):
        make_config(preset, **given)


def test_public_images_of_another_size_are_refused(as_if_there):
    config = make_config("public-all-eps2-fast", new_head="cifar100")
    with pytest.raises(ValueError, match="1x8x8.*pass bars"):
        make_model(config, load("digits"))


@pytest.mark.slow
def test_photographs_become_features_once(tmp_path, monkeypatch):
    monkeypatch.setenv("DP_COURSE_DATA", str(tmp_path))
    monkeypatch.setattr(P, "load", lambda name: photographs(90, seed=1))
    (tmp_path/"starts").mkdir()
    encoder_of_public_net(tmp_path/"starts/public-net.pt")
    first = P.public_featured(photographs())
    assert first.train_x.shape == (60, 2048) and first.train_x.dtype == torch.float16
    assert "public features" in first.name
    monkeypatch.setattr(cache, "_fill", None)  # nothing is computed again
    assert torch.equal(P.public_featured(photographs()).train_x, first.train_x)


@pytest.mark.slow
def test_the_head_of_a_public_start_learns_first(tmp_path):
    public = encoder_of_public_net(tmp_path/"a.pt", channels=1)
    config = make_config("public-all-eps2-fast", start=str(tmp_path/"a.pt"), head_steps=1)
    trainer = make_trainer(config, load("digits"), seed=0)
    near(trainer.model[0][0].weight, public[0][0].weight, .01)  # bfloat16
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for moved in (2, len(before)):
        trainer.step()
        now = dict(trainer.model.named_parameters())
        assert sum(not torch.equal(now[name], p) for name, p in before.items()) == moved


def test_a_public_start_is_called_public():
    for name in PRESETS:
        if name.startswith(("public-linear", "public-max100")):
            assert images_of(vars(make_config(name))) == "public (CIFAR-100)"
            assert images_of(vars(make_config(f"{name}-fast"))) == "synthetic"  # drawn bars
    assert images_of(vars(make_config("public-all-eps2"))) == "public (CIFAR-100)"
    assert images_of(vars(make_config("public-all-eps2-fast"))) == "synthetic"  # drawn bars
    other = make_config("resnet20-synthetic-eps3")
    assert images_of(vars(other)) == "synthetic"
    rows = {row.preset: row.images for row in summaries()}
    assert {name for name in rows if "CIFAR-100" in rows[name]} == {
        name for name in PRESETS if name.startswith("public-")}


# -- the sweep -------------------------------------------------------------------------------------

def made_up_parts(n=600, f=20, k=2):
    g = generator()
    centres = 2*torch.randn(10, f, generator=g)
    y = torch.arange(n) % 10
    x = centres[y][:, None] + torch.randn(n, k, f, generator=g)
    return dict(train=x[:500].half(), train_y=y[:500], test=x[500:].half(), test_y=y[500:])


@pytest.mark.parametrize("change", [{}, dict(k=2), dict(k=2, mean=False)])
def test_a_head_learns(change):
    cell = recipe.head_cell("public-net", lr=2., eps=50., steps=30, **change)
    (start, end), = recipe.run(cell | dict(stage="final"), parts=made_up_parts())
    assert end["test_accuracy"] > .6 and end["eps_pld"] <= 50
    assert start["config"]["net"] == "public-net" and start["plan"]["delta"] == 1e-5
    row = flat_row([start, end])
    assert recipe.key(row) == recipe.key(cell | dict(stage="final")), "it would never end"


def test_without_privacy_the_features_hold_more():
    cell = recipe.head_cell("public-net") | dict(kind_of_run="plain", eps=None, lr=.05)
    (start, end), = recipe.run(cell | dict(stage="final"), parts=made_up_parts())
    assert start["plan"] is None and end["test_accuracy"] > .8
    assert recipe.key(flat_row([start, end])) == recipe.key(cell | dict(stage="final"))


@pytest.mark.parametrize("what", ["head", "adapters"])
def test_layers_take_private_steps(trained, what):
    run, _ = trained
    data = digits_between(5, 10)
    cell = dict(kind_of_run="layers", stage="final", net="small", batch=640., steps=3,
                head_steps=1, lr=.5, eps=3., what=what, seed=0)
    z = P.describe(run.model.eval(), data, data.train_x[:50], "last")[:, 0]
    model = features.transfer_cnn(10, 1, 1024, 8)
    model.load_state_dict(run.model.state_dict())
    (start, end), = recipe.run(cell, model=model, z=z, data=data)
    assert end["step"] == 3 and 2.9 < end["eps_pld"] <= 3.
    assert start["config"]["what"] == what
    assert recipe.key(flat_row([start, end])) == recipe.key(cell)


def accuracies(cells, of=lambda cell: .5):
    return [cell | dict(accuracy=of(cell)) for cell in cells]


def finished(part, of=lambda cell: .5):
    "What a part asks for when everything that it asks for gets done."
    rows = []
    while True:
        done = set(map(recipe.key, rows))
        todo = [cell for cell in part(rows) if recipe.key(cell) not in done]
        if not todo:
            return rows
        rows += accuracies(todo[:1], of)


def test_parts_end_and_test_once(monkeypatch):
    monkeypatch.setattr(recipe, "is_there", lambda net: True)
    rows = finished(recipe.papernot)
    final = harness.chosen(rows, stage="final", net="max-100", power=.25)
    assert {(row["eps"], row["seed"]) for row in final} >= {
        (eps, seed) for eps in recipe.EPS for seed in range(3)}
    for net in ("half-rand-50", "min-rand-10"):
        assert {row["eps"] for row in rows if row["net"] == net} == set(recipe.EPS)
    assert all(row["stage"] == "tune" for row in rows[:8])
    rows = finished(recipe.heads, lambda cell: .5 + .1*(cell["k"] == 2) + .01*cell["power"])
    final = harness.chosen(rows, stage="final")
    assert {row["k"] for row in final if row["layers"] == "several"} == {2}
    assert len(harness.chosen(final, eps=2., layers="several")) == 3
    rows = finished(recipe.layers, lambda cell: .5 + .1*(cell["what"] == "norms"))
    assert [row["what"] for row in rows if row["stage"] == "final"] == ["norms"]
    rows = finished(recipe.plain)
    assert len(rows) == 0 or {row["kind_of_run"] for row in rows} == {"plain"}


def test_nothing_is_asked_for_without_a_network(monkeypatch):
    monkeypatch.setattr(recipe, "is_there", lambda net: False)
    assert not any(part([]) for part in recipe.PARTS.values())


# -- what the lesson says of a record that is not whole --------------------------------------------

def lesson(rows):
    "The cells that read the record, run on made-up rows; tables and figure in `shown`."
    path = Path(__file__).resolve().parents[2]/"nbs/19_public_start.ipynb"
    imports, cells = code_of(path)
    names, shown = {"faked": rows}, {}
    exec(imports, names)
    for start in ("THEIRS", "made_up", "near(sum(", "fig, ax = figure(\"More public",
                  "headline = ", "def of_preset", "CLAIMS = "):
        cell, = [cell for cell in cells if cell.startswith(start)]
        *body, last = ast.parse(cell.replace("rows = recorded()", "rows = faked")).body
        exec(compile(ast.Module(body, []), start, "exec"), names)
        if isinstance(last, ast.Expr):
            found = eval(compile(ast.Expression(last.value), start, "eval"), names)
            shown[start.strip()] = found if isinstance(found, list) else names["ax"]
        else:
            exec(compile(ast.Module([last], []), start, "exec"), names)
    plt.close("all")
    return names | {"shown": shown}


def row(net, eps=2.12, stage="final", accuracy=.7, **said):
    usual = dict(kind_of_run="head", layers="last", k=1, mean=True, power=.25, within=True, seed=0)
    return usual | dict(net=net, target_eps=eps, stage=stage, accuracy=accuracy) | said


def test_the_lesson_shows_what_the_search_chose():
    for power, other in (0., .25), (.25, 0.):
        rows = [row("max-100", stage="tune", power=other, accuracy=.6),
                row("max-100", stage="tune", power=power, accuracy=.8),
                row("max-100", power=power, accuracy=.7), row("max-100", power=None, accuracy=.1),
                row("max-100", power=other, accuracy=.2),
                row("half-rand-50", .32, power=power, accuracy=.5)]
        names = lesson(rows)
        assert names["beside"]("max-100", 2.12)[0] == 70.
        assert names["beside"]("half-rand-50", .32)[0] == 50.
        assert names["beside"]("max-100", .32) == "not run yet"
        said = {line["public data"]: line["ours (%)"] for line in names["shown"]["near(sum("]}
        assert said["max-100, raw"] == "10.0 (1 seed)"
    for k, layers in (1, "last"), (4, "several"):
        found = dict(k=k, layers=layers)
        rows = [row("public-net", 2., "tune", .9, **found), row("public-net", 2., "tune", .5, k=2),
                row("public-net", 2., accuracy=.8, **found), row("public-net", 2., k=2)]
        assert lesson(rows)["today"]["eps 2"][0] == 80.


def test_three_kinds_are_not_tested_by_design():
    tuned = [row("public-net", 2., "tune", kind_of_run="layers", what=what)
             for what in features.MOVING]
    assert {lesson(rows)["tested"]("norms") for rows in ([], tuned)} == {"not run yet"}
    names = lesson(tuned + [row("public-net", 2., kind_of_run="layers", what="norms")])
    said = [names["tested"](what) for what in features.MOVING]
    assert said.count("not tested, by design") == 3
    assert names["tested"]("norms") == "70.0 (1 seed)"


def whole_record(path, accuracy):
    "A file with every row of all four parts."
    rows, runs = [], []
    for part in (recipe.papernot, recipe.heads, recipe.plain, recipe.layers):
        while True:
            done = set(map(recipe.key, rows))
            todo = [cell for cell in part(rows) if recipe.key(cell) not in done]
            if not todo:
                break
            cell = todo[0]
            start = dict(kind="start", preset="sweep-public_start", config=cell, data="cifar10",
                         seed=cell["seed"], plan=cell["eps"] and dict(eps=cell["eps"]))
            end = dict(kind="end", test_accuracy=accuracy(cell), eps_pld=cell["eps"])
            runs.append([start, end])
            rows.append(flat_row(runs[-1]))
    harness.write(path, runs)
    return sweep(path)


@pytest.mark.parametrize("accuracy", [
    lambda cell: .7, lambda cell: .7 + .01*cell["seed"] - .001*cell["lr"],
    lambda cell: .1 + .2*(cell.get("power") == 0) + .1*(cell.get("layers") == "last"),
    lambda cell: .5 + .1*(cell.get("what") == "adapters") + .05*(not cell.get("mean", True))])
def test_a_whole_record_fills_every_table_and_the_figure(tmp_path, monkeypatch, accuracy):
    monkeypatch.setattr(recipe, "is_there", lambda net: True)
    rows = whole_record(tmp_path/"made-up.jsonl", accuracy)
    names = lesson(rows)
    for start, table in names["shown"].items():
        if start.startswith("fig"):
            labels = [text.get_text() for text in table.get_legend().get_texts()]
            assert len(labels) == 8 and sum("ours" in label for label in labels) == 4
            continue
        assert all(line.keys() == table[0].keys() for line in table), start
        ladder = start == "def of_preset"
        words = [str(v) for line in table for v in line.values() if not ladder or "net" in str(v)]
        assert not [word for word in words if "not run" in word or "nan" in word], start
    beside, = [line for line in names["shown"]["near(sum("]
               if (line["public data"], line["eps"]) == ("max-100", 2.12)]
    assert "(3 seeds)" in beside["ours (%)"]
    assert len(rows) == len(set(map(recipe.key, rows))) > 50


def test_of_no_record_every_table_says_so_and_nothing_else():
    names = lesson([])
    for start, table in names["shown"].items():
        if start.startswith("fig"):
            labels = [text.get_text() for text in table.get_legend().get_texts()]
            assert not [label for label in labels if "ours" in label]
        elif start != "def of_preset":
            assert "not run yet" in str(table) and "seed" not in str(table)
