"Public networks, features and presets of lesson 19: shapes, exactness, files."
from dataclasses import replace

import pytest
import torch
from toys import digits_between, generator

from dp_course import features
from dp_course.basics import near
from dp_course.cli import (
    FEATURES,
    ONE_LABEL,
    PRESETS,
    Job,
    images_of,
    make_config,
    make_model,
    make_plan,
    open_release,
    releases,
    setup,
    summaries,
    train,
)
from dp_course.cli.main import main
from dp_course.data import Examples, load
from dp_course.data import datasets as data_module
from dp_course.features import cache, save_encoder
from dp_course.features import pretraining as N
from dp_course.features import transfer as P
from experiments import harness
from experiments import public_start as recipe

SMALL = replace(N.TRAININGS["min-rand-10"], name="small", epochs=8., lr=.02, crop=1)


# -- training --------------------------------------------------------------------------------------

def test_every_example_is_seen_once_an_epoch():
    config = replace(SMALL, batch_size=7)
    seen = torch.cat([N._chosen(config, 21, t) for t in range(6)])
    for epoch in seen.chunk(2):
        assert sorted(epoch.tolist()) == list(range(21))
    assert not torch.equal(*seen.chunk(2))


def test_a_wide_layer_stands_on_frozen_convolutions(tmp_path):
    data = digits_between(0, 5).replace(classes=tuple(map(str, range(10))))
    run = N.public_run(replace(SMALL, seed=1), data, tmp_path)
    run.save()
    wide = replace(SMALL, name="wide", width=96, start="small")
    again = N.public_run(wide, data, tmp_path)
    before = {name: v.clone() for name, v in again.model.state_dict().items()}
    N.public_step(wide, again.model, again.optimizer, data, 0, 10)
    for name, v in again.model.state_dict().items():
        assert torch.equal(v, before[name]) == (before[name].dim() == 4 or name in (
            "0.bias", "2.bias", "5.bias", "7.bias", "10.bias", "12.bias")), name
    near(again.model[0].weight, run.model[0].weight, .01)


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


@pytest.mark.slow
def test_each_network_and_each_reading_has_a_file(as_if_there, monkeypatch):
    found = [FEATURES[name](photographs()).train_x for name in ("public-net", "max-100")]
    found += [FEATURES["max-100"](photographs(), **other).train_x
              for other in (dict(power=0.), dict(within=True), dict(k=2))]
    assert [x.shape[1] for x in found] == [2048] + 4*[1024]
    assert len(list((as_if_there/"features").glob("*.npy"))) == 5
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    monkeypatch.setattr(cache, "_described", None)  # nothing is computed again
    assert torch.equal(FEATURES["public-net"](photographs()).train_x, found[0])


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


def test_a_public_start_is_called_public():
    for name in PRESETS:
        if name.startswith("public-"):
            assert images_of(vars(make_config(name))) == "public (CIFAR-100)"
            assert images_of(vars(make_config(f"{name}-fast"))) == "synthetic"  # drawn bars
    rows = {row.preset: row.images for row in summaries()}
    assert {name for name in rows if "CIFAR-100" in rows[name]} == {
        name for name in PRESETS if name.startswith("public-")}
