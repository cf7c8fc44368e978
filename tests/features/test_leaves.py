"Leaves and patches, pre-training, the maps of an encoder, the head first, presets."
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from toys import first_digits, generator
from toys import loss as ce

from dp_course.basics import near
from dp_course.cli import (
    FEATURES,
    Job,
    Released,
    describe_network,
    make_config,
    make_plan,
    make_trainer,
    train,
)
from dp_course.data import drawings, load
from dp_course.features import cache, encoder_state, save_encoder
from dp_course.features import encoders as E
from dp_course.features import patches as L
from dp_course.features import pretraining as P
from dp_course.gradients import FlatClip, fast_grad_sum, loop_grad_sum
from dp_course.models import resnet20
from dp_course.privacy import PrivacyPlan
from dp_course.training import HeadFirst, Trainer, read_record, save_atomic
from experiments import pretraining as judged

by = pytest.mark.parametrize
# -- the images ------------------------------------------------------------------------------------


def test_shapes_have_the_areas_of_circle_square_and_triangle():
    kind = torch.tensor([0, 1, 2])
    edges = drawings._edges(kind, torch.zeros(3, 4), torch.tensor([[.3], [1.], [2.]]))
    at = (torch.arange(400) + .5)/200 - 1
    inside = drawings._inside(at.expand(3, -1), at.expand(3, -1), edges).float().mean((1, 2))*4
    near(inside.tolist(), [math.pi, 2., 3*3**.5/4], .02)


# -- the features ----------------------------------------------------------------------------------

FEW = L.LeafRecipe(patches=20, synthetic=70)


@by("side", [2, 4, 8])
def test_only_the_averages_over_quarters_count_more(side):
    m = torch.randn(2, 3, side, side, generator=generator()).double()
    got = L.emphasized(m, .5)
    quarters = F.adaptive_avg_pool2d(m, 2)
    near(F.adaptive_avg_pool2d(got, 2), 1.5*quarters, 1e-12)
    detail = got - 1.5*quarters.repeat_interleave(side//2, 2).repeat_interleave(side//2, 3)
    near(detail + F.interpolate(quarters, (side, side)), m, 1e-12)
    assert (got.flatten(1).norm(dim=1) <= 1.5*m.flatten(1).norm(dim=1) + 1e-12).all()


def test_the_network_beside_sees_the_centred_scattering():
    shapes = {"patches": (4, 2, 2), "scatter": (3, 4, 4)}
    seen = []

    def spy(x):
        seen.append(x)
        return 0.

    model = L.LeafNet(shapes, 5, spy)
    x = {name: torch.randn(2, *shape, generator=generator()) for name, shape in shapes.items()}
    model.mean.copy_(torch.arange(64.))
    model(**x)
    want = x["scatter"] - torch.arange(16., 64.).view(3, 4, 4)
    near(seen[0], want, 1e-6)


# -- pre-training ----------------------------------------------------------------------------------

TOY = P.Pretraining(images=40, batch_size=16, views=32*6, size=16, precision="float32", outputs=8)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return P.leaf_stock(TOY, tmp_path_factory.mktemp("stock"))


def test_views_stay_inside_the_image_and_change_only_place_and_light():
    theta = P._crops(2000, generator())
    corners = torch.tensor([[-1., -1, 1], [1, 1, 1], [-1, 1, 1], [1, -1, 1]]).T
    assert (theta @ corners).abs().max() <= 1 + 1e-5
    area = (theta[:, 0, 0]*theta[:, 1, 1]).abs()
    assert area.min() > .07 and area.max() <= 1
    # mirrored: half of 2,000; 5 standard errors are .056
    assert abs((theta[:, 0, 0] < 0).double().mean() - .5) < .056
    tints = P._tints(2000, generator())
    grey = (tints @ torch.ones(3)).std(1)
    assert grey.max() < 2e-3  # grey stays grey
    lost = (tints[:, 0] - tints[:, 1]).abs().amax(1) < 1e-3
    assert abs(lost.double().mean() - .2) < .045  # 5 standard errors


def test_a_feature_that_leaves_never_move_stays_small(monkeypatch):
    "A photograph may wake it: divided by a std of nothing it would drown all others."
    leaves = torch.stack([torch.linspace(0, 1, 500), torch.zeros(500)], 1)
    photographs = torch.tensor([[.5, 0.], [.5, .01]])  # in the second it stirs
    told = iter([leaves, photographs])
    monkeypatch.setattr(judged, "encoder_features", lambda model, x: next(told))
    found, = judged.normalized_features(None, torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    assert found[0, 1] == 0 and 0 < found[1, 1] < 1000, "a millionth as std made it 884,000"


@pytest.mark.slow
def test_a_verdict_goes_into_the_record(stock, tmp_path):
    P.drawn_run(TOY, stock, tmp_path).work(say=lambda text: None)
    run = judged.run_of(tmp_path/"pretrain-resnet20-0")
    assert run.t == TOY.steps
    d = first_digits(1000, 200)
    d = d.replace(train_x=d.train_x.repeat(1, 3, 2, 2), test_x=d.test_x.repeat(1, 3, 2, 2))
    line = judged.judge(run, d, steps=15, say=lambda text: None)
    assert line["probe"]["random"] > .4  # .1 is guessing
    assert read_record(run.file(".jsonl"))[-1]["probe"] == line["probe"]


# -- an encoder's maps -----------------------------------------------------------------------------

def large_digits(n=12, held=4):
    d = first_digits(n, held)
    return d.replace(train_x=d.train_x.repeat(1, 3, 4, 4), test_x=d.test_x.repeat(1, 3, 4, 4))


def written(folder, seed):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    path = folder/f"{seed}.pt"
    save_encoder(resnet20(), TOY, 1000*seed, path)
    return str(path)


def test_the_maps_of_an_encoder_stand_beside_the_others(tmp_path, monkeypatch):
    one, two = (written(tmp_path, seed) for seed in (1, 2))
    given = large_digits()
    data = E.encoded(given, one, FEW, tmp_path)
    assert {name: v.shape for name, v in data.train_x.items()} == {
        "scatter": (12, 243, 8, 8), "patches": (12, 40, 4, 4),
        "encoder2": (12, 32, 4, 4), "encoder3": (12, 64, 4, 4)}
    assert re.search("synthetic leaves, encoder [0-9a-f]{8} of 1,000 views", data.name)
    other = E.encoded(given, two, FEW, tmp_path)  # other weights have other files
    assert not np.array_equal(data.train_x["encoder3"], other.train_x["encoder3"])
    assert np.array_equal(data.train_x["patches"], other.train_x["patches"])
    monkeypatch.setattr(cache, "_described", None)  # nothing is computed again
    again = E.encoded(given, one, FEW, tmp_path)
    for part in ("train_x", "test_x"):
        for name, v in getattr(data, part).items():
            assert np.array_equal(getattr(again, part)[name], v)


# -- the head first ------------------------------------------------------------------------------

def begun(steps=4, head=2, engine=fast_grad_sum):
    torch.manual_seed(0)
    model = resnet20(in_channels=1)
    first = HeadFirst(model, head)
    d = first_digits(200)
    plan = PrivacyPlan(n=200, batch_size=20, steps=steps, eps=3, delta=1e-5)
    trainer = Trainer(model, d, plan, engine=first.engine(engine), callbacks=[first], seed=0,
                      optimizer=partial(torch.optim.SGD, lr=.1, momentum=.9))
    first.begin()
    return trainer, first


def test_only_the_head_is_clipped_while_it_learns_alone():
    trainer, first = begun()
    x, y = first_digits(6).normalize(first_digits(6).train_x), first_digits(6).train_y
    total, norms = trainer.engine(trainer.model, ce, x, y, FlatClip(.1))
    assert list(total) == list(trainer.params) and len(norms) == len(total)
    head = [name.startswith("13.") for name in total]
    assert sum(head) == 2 and norms[[not h for h in head]].abs().max() == 0
    head_of = {name: v for name, v in total.items() if name.startswith("13.")}
    rest = {name: v for name, v in total.items() if name not in head_of}
    assert max(v.abs().max() for v in rest.values()) == 0
    for name, p in trainer.model.named_parameters():
        p.requires_grad_(name in head_of)
    want, _ = loop_grad_sum(trainer.model, ce, x, y, FlatClip(.1))
    near(head_of, want, 1e-5)


def test_the_body_stands_still_then_moves_without_old_momentum():
    trainer, first = begun()
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for moved in (2, 2, len(start), len(start)):
        trainer.step()
        now = dict(trainer.model.named_parameters())
        assert sum(not torch.equal(now[name], p) for name, p in start.items()) == moved
        remembered = sum(p in trainer.optimizer.state for p in trainer.params.values())
        assert remembered == moved  # no momentum from mere noise
    with pytest.raises(ValueError, match="not paid"):
        trainer.step()  # the first phase is charged like any other


# -- presets, recipes --------------------------------------------------------------------------

def test_the_plan_pays_for_the_mean():
    "2.7237 with the release, 2.7010 without."
    config = make_config("leaves-linear-eps3")
    plan = make_plan(config, 50_000)
    assert plan.steps == 120 and plan.releases == (10.,)
    assert abs(plan.sigma - 2.7237) < 2e-4
    assert plan.epsilon_after(120) <= 3


def test_the_encoder_that_comes_with_the_course():
    "It is found by its name, and it says how it was made."
    model, about = E.load_encoder("resnet20-synthetic")
    assert about["model"] == "resnet20" and about["data"] == "synthetic leaves, textured"
    assert about["views_seen"] == 2*about["batch_size"]*(about["views"]//512)
    assert sum(p.numel() for p in encoder_state(model).values()) == 272_474 - 650


@pytest.mark.slow
def test_a_release_is_not_tested_on_features_of_another_encoder(tmp_path, monkeypatch):
    "Same shapes, same number of views, other weights."
    one, two = (written(tmp_path/name, 1) for name in "ab")
    weights = torch.load(two, weights_only=True)
    weights["weights"]["0.weight"] *= 2
    save_atomic(weights, two)
    given = large_digits()

    def made_by(encoder):
        return partial(E.encoded, name=encoder, recipe=FEW)

    config = make_config("leaves-encoder-eps3", data="cifar10")
    about = describe_network(config, made_by(one)(given, cache=False))
    released = Released(None, about, "")
    monkeypatch.setitem(FEATURES, "leaves-encoder", made_by(one))
    assert len(released.prepared(given.test_x).test_x["encoder3"]) == 4
    monkeypatch.setitem(FEATURES, "leaves-encoder", made_by(two))
    with pytest.raises(ValueError, match="trained on features from 'synthetic leaves, encoder"):
        released.prepared(given.test_x)
    del about["origin"]  # a file of an older version does not say
    assert len(released.prepared(given.test_x).test_x["encoder3"]) == 4


@by("preset, least", [("leaves-linear-eps3-fast", .7),
                      *(pytest.param(f"leaves-{kind}-eps3-fast", .6, marks=pytest.mark.slow)
                        for kind in ("encoder", "cnn"))])
def test_a_miniature_buys_its_mean_and_leaves_a_record(tmp_path, monkeypatch, preset, least):
    small = partial(L.leafed, recipe=FEW, cache=tmp_path)
    monkeypatch.setitem(FEATURES, "leaves", small)
    monkeypatch.setitem(FEATURES, "leaves-encoder", partial(E.encoded, recipe=FEW, cache=tmp_path))
    config = make_config(preset)
    for job in (Job(config, out=tmp_path, device="cpu", seed=3, steps=4),
                Job(config, out=tmp_path, device="cpu", seed=3, resume=True)):
        end = train(job, say=lambda line: None, show=False)  # picked up, nothing is bought twice
    start, *_, last = read_record(end["paths"]["record"])
    assert "synthetic leaves" in start["data"] and start["config"]["centre"] == 10
    assert end["test_accuracy"] > least and last["finished"]
    assert 2.99 < last["eps_pld"] <= 3  # the mean is in it: the steps alone spend 2.971
    assert "mean of the features" in last["statement"]


def test_a_start_is_loaded_by_the_command(tmp_path):
    model = resnet20(classes=8, in_channels=1)
    save_encoder(model, TOY, 10, tmp_path/"start.pt")
    config = make_config("resnet20-cpu-eps3-fast", start=str(tmp_path/"start.pt"))
    made = make_trainer(config, load("digits"), seed=0).model
    near(encoder_state(made), encoder_state(model), 1e-2)


def test_an_interrupted_command_says_how_to_go_on(monkeypatch, capsys):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(P, "leaf_stock", interrupted)
    assert P.main(["resnet20"]) == 130
    assert "--resume goes on" in capsys.readouterr().err
