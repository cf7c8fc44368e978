"Several processes share one run: one sample, one sum, one noise, one ledger; nobody waits forever."
import contextlib
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import warm
from torch import nn
from toys import Plan, free_port

from dp_course.cli import Job, make_config, train
from dp_course.cli.main import main
from dp_course.data import Examples, multiplicity
from dp_course.gradients import ROUNDING, AdaptiveClip, FlatClip
from dp_course.privacy import PrivacyPlan, normal
from dp_course.training import (
    EMA,
    Peers,
    ProcessTrainer,
    Trainer,
    class_counts,
    join,
    load_release,
    read_record,
)

if sys.platform == "linux":  # a machine without network may not know its own name
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


# --- real processes that talk through gloo, forked from one that has torch already


def _child(rank, world, port, timeout, work, out, args):
    ranks = dict(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    peers = join("cpu", timeout)
    try:
        result = work(peers, *args)
    except Exception as e:
        result = [type(e).__name__, str(e)]
    torch.save(result, f"{out}/{rank}.pt")
    with contextlib.suppress(Exception):
        peers.leave()


def together(world, work, tmp_path, *args, timeout=180., wait=180):
    "What `work(peers, *args)` gave in each process: None if it died; [name, text] of an error."
    server = warm.server()
    out = tmp_path/f"results{time.monotonic_ns()}"
    out.mkdir()
    common = (world, free_port(), timeout, work, str(out), args)
    children = [server.Process(target=_child, args=(rank, *common)) for rank in range(world)]
    for child in children:
        child.start()
    end = time.monotonic() + wait
    for child in children:
        child.join(max(.1, end - time.monotonic()))
    hung = [rank for rank, child in enumerate(children) if child.is_alive()]
    for child in children:
        child.kill()
    assert not hung, f"processes {hung} of {world} were still waiting after {wait} s"
    paths = [out/f"{rank}.pt" for rank in range(world)]
    return [torch.load(p, weights_only=False) if p.exists() else None for p in paths]


# --- threads that take the place of processes


class Threads(Peers):
    "Peers that are threads: the same methods, without a network."
    def __init__(self, rank, world, hall):
        super().__init__(rank, world)
        self.hall = hall

    def all_gather(self, value):
        self.hall["box"][self.rank] = value
        self.hall["barrier"].wait()
        said = list(self.hall["box"])
        self.hall["barrier"].wait()
        return said

    def all_reduce(self, x):
        return x.copy_(sum(self.all_gather(x.clone())))

    def broadcast(self, value):
        return self.all_gather(value)[0]


def in_threads(world, work):
    "What `work(peers)` gave in each thread; the first error of a thread is raised here."
    hall = {"box": [None]*world, "barrier": threading.Barrier(world, timeout=30)}
    results, errors = [None]*world, []

    def go(rank):
        try:
            results[rank] = work(Threads(rank, world, hall))
        except Exception as error:
            errors.append(error)
            hall["barrier"].abort()

    threads = [threading.Thread(target=go, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


# --- a small problem in float64


def pictures(n=23, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n + 8, 1, 5, 5, generator=g, dtype=torch.float64)
    y = torch.randint(3, (n + 8,), generator=g)
    return Examples(x[:n], y[:n], x[n:], y[n:], name="made up", classes="abc")


def network(width=4):
    g = torch.Generator().manual_seed(1)
    layers = nn.Flatten(), nn.Linear(25, width), nn.Tanh(), nn.Linear(width, 3)
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype))
    return model


def a_plan(n=23, batch_size=6., steps=5, **more):
    return PrivacyPlan(n=n, batch_size=batch_size, steps=steps, eps=3., delta=1e-5, **more)


def make(peers, data, plan, seed=7, **options):
    kind = partial(ProcessTrainer, peers=peers) if peers.world > 1 else Trainer
    sgd = partial(torch.optim.SGD, lr=.5, momentum=.9)
    options = {"optimizer": sgd, "clip": FlatClip(.8), **options}
    return kind(network(), data, plan, seed=seed, **options)


def flat(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def plain():
    return {}


def with_views():
    return dict(augment=multiplicity(3, crop=1), micro_batch=2, callbacks=[EMA(.9)])


def steps_of(peers, n, batch_size, steps, seed, options):
    "Some steps without noise, and all that can be seen of them."
    plan = Plan(n, batch_size, steps)  # without noise
    trainer = make(peers, pictures(n), plan, seed, **options())
    sizes, engine = [], trainer.engine

    def counted(model, loss_fn, x, y, clip):
        sizes.append(len(x))
        return engine(model, loss_fn, x, y, clip)

    vars(trainer)["engine"] = counted
    norms, counted_fractions = [], trainer._counted

    def noted(rows, *more):
        norms.append(rows)
        return counted_fractions(rows, *more)

    trainer._counted = noted
    trainer.fit(steps)
    return dict(weights=flat(trainer), norms=norms, sizes=sizes, computed=trainer.computed,
                steps=trainer.t)


# --- two equal one


@pytest.mark.parametrize("n, world, options", [(23, 2, plain), (24, 3, plain), (23, 3, with_views)])
def test_several_equal_one_without_noise(n, world, options, tmp_path):
    # float64; without noise everything hangs on sample, views, sum, norms and constant batch size
    one = steps_of(Peers(), n, 6., 5, 7, options)
    all_ = together(world, steps_of, tmp_path, n, 6., 5, 7, options)
    assert all(isinstance(r, dict) for r in all_), all_
    for r in all_:
        assert torch.allclose(r["weights"], one["weights"], rtol=0, atol=1e-12)
        assert torch.equal(r["weights"], all_[0]["weights"])
        assert [v.shape for v in r["norms"]] == [v.shape for v in one["norms"]], "all norms, of all"
        for a, b in zip(r["norms"], one["norms"]):
            assert torch.allclose(a, b, atol=1e-12)
        assert r["computed"] == r["steps"] == 5
        assert sum(r["sizes"]) < sum(one["sizes"])
    assert sum(sum(r["sizes"]) for r in all_) == sum(one["sizes"])
    less = steps_of(Peers(), n, 6., 4, 7, options)
    assert not torch.allclose(one["weights"], less["weights"], atol=1e-3), "a step would be seen"


def test_views_of_a_large_batch_do_not_depend_on_the_number_of_processes():
    # over 128 examples: shards and micro-batches cut through the blocks that share a generator
    def work(peers):
        trainer = make(peers, pictures(400), Plan(400, 300., 2), **with_views(), seed=1)
        trainer.micro_batch = 50
        return flat(trainer.fit(2))
    one = work(Peers())
    for weights in in_threads(3, work):
        assert torch.allclose(weights, one, atol=1e-12)


def test_a_shard_may_come_away_empty(tmp_path):
    # n = 6, batch 1, 30 steps: some batches are empty, most leave one of three without work
    one = steps_of(Peers(), 6, 1., 30, 3, plain)
    all_ = together(3, steps_of, tmp_path, 6, 1., 30, 3, plain)
    for r in all_:
        assert torch.allclose(r["weights"], one["weights"], atol=1e-12)
        assert r["computed"] == 30
        assert 0 < len(r["sizes"]) < 30
    assert any(v.shape[1] == 0 for v in one["norms"])


# --- noise and ledger


def test_the_noise_is_the_ledgers_and_is_added_once():
    def work(peers):
        run = make(peers, pictures(), a_plan(), loss_fn=lambda output, y: 0*output.sum(1)).step()
        noise = run._secret.noise(run._ledger.entries()[-1])
        return [(p.grad, normal(p.shape, noise)) for p in run.params.values()]

    plan = a_plan()
    for drawn in in_threads(2, work):
        for grad, z in drawn:
            wanted = plan.sigma*.8*(1 + ROUNDING)*z/plan.batch_size  # without gradients
            torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=0)


def test_process_0_writes_what_all_of_them_save_and_release(tmp_path):
    "Programs for torchrun often call both everywhere: two writers of one file would tear it."
    def work(peers):
        trainer = make(peers, pictures(), a_plan(), clip=FlatClip(.8)).fit(2)
        trainer.save(tmp_path/f"{peers.rank}.checkpoint")
        trainer.release(tmp_path/f"{peers.rank}.pt")
        return trainer

    zero, _ = in_threads(2, work)
    assert {path.suffix for path in tmp_path.glob("0.*")} >= {".checkpoint", ".pt"}
    assert not list(tmp_path.glob("1.*"))
    assert load_release(tmp_path/"0.pt", network()) == zero.statement()
    again = make(Peers(), pictures(), a_plan(), clip=FlatClip(.8))
    assert again.load(tmp_path/"0.checkpoint").t == 2


def test_a_threshold_that_drifts_apart_is_bounded_and_noised_by_the_first_processs():
    "A GPU's coins are not a CPU's: one's threshold rose, and the other's noise fell."
    def work(peers):
        def drift(trainer):
            trainer.clip.max_norm *= 1 + peers.rank
        clip = AdaptiveClip(10., bit_sigma=5.)
        run = make(peers, pictures(), a_plan(), clip=clip, callbacks=[drift]).step()
        sensitivity = run._sensitivity()
        scale, std = sensitivity.scale, run._std(sensitivity)
        return run.clip.max_norm, scale, std, flat(run.step())

    (own, scale, std, weights), (other, *said, others) = in_threads(2, work)
    assert other > own == scale and said == [scale, std] and torch.equal(weights, others)


def test_a_secret_seed_is_shared_and_stays_secret():
    def work(peers):
        return make(peers, pictures(), a_plan(), seed=None)
    a, b = in_threads(2, work)
    assert a._seed == b._seed
    assert len(a._seed) == 64
    assert a.seed_policy == "secret"
    c, _ = in_threads(2, work)
    assert c._seed != a._seed


# --- refusals


def test_processes_with_other_data_are_refused():
    def work(peers):
        try:
            return make(peers, pictures(seed=peers.rank), a_plan())
        except ValueError as error:
            return str(error)

    for said in in_threads(2, work):
        assert "disagree about training data" in str(said)


def test_a_lone_process_needs_no_peers(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    alone = join("cpu")
    assert (alone.rank, alone.world, str(alone.device)) == (0, 1, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="no such device"):
        join("cuda:99")


# --- one of them dies


def dies(peers, how):
    trainer = make(peers, pictures(), a_plan(steps=50))
    trainer.fit(2)
    if peers.rank == 1:
        if how == "stuck":
            time.sleep(2.5)
        os._exit(1)
    trainer.fit(2)


@pytest.mark.parametrize("how, timeout", [("killed", 60.), ("stuck", 1.)])
def test_the_others_get_an_error_and_no_hang(how, timeout, tmp_path):
    alive, dead = together(2, dies, tmp_path, how, timeout=timeout, wait=30)
    assert dead is None
    assert alive[0] == "ConnectionError", alive
    assert "process 0 of 2 lost another one" in alive[1]
    assert "--resume" in alive[1]


# --- the whole command


def miniature():
    return make_config("digits-eps3-fast", ema=.5, views=2, crop=1)


def quiet(config, peers=Peers(), stop=lambda: False, **asked):
    return train(Job(config, **asked), stop=stop, say=lambda text: None, show=False, peers=peers)


def whole_run(peers, out, asked):
    end = quiet(miniature(), peers, out=out, seed=3, **asked)
    return None if end is None else {key: end[key] for key in ("step", "finished")}


def released(folder):
    path, = Path(folder).glob("*.release.pt")
    return torch.load(path, weights_only=True)["weights"]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    torch.set_num_threads(1)
    calm = quiet(miniature(), out=tmp_path/"calm", seed=3)
    out = tmp_path/"wild"
    two = together(2, whole_run, tmp_path, str(out), dict(steps=2))
    assert two == [dict(step=2, finished=False), None]
    three = together(3, whole_run, tmp_path, str(out), dict(steps=4, resume=True))
    assert three == [dict(step=4, finished=False), None, None]
    end = quiet(miniature(), out=out, seed=3, resume=True)
    assert end["finished"]
    assert len(list(out.glob("*.jsonl"))) == 1
    assert not list(out.glob("*.checkpoint*"))
    a, b = released(tmp_path/"calm"), released(out)
    # sums round differently, so their noise is another: no step is repeated, all are paid once
    assert a.keys() == b.keys() and any(not torch.equal(a[k], b[k]) for k in a)
    assert end["eps_pld"] == calm["eps_pld"] and end["computed"] == calm["computed"] == 6
    rows = read_record(end["paths"]["record"])
    begun = [row["processes"] for row in rows if row["kind"] in ("start", "resume")]
    assert begun == [2, 3, 1]
    assert [row["step"] for row in rows if row["kind"] == "epoch"] == [2, 3, 4, 6]


def stopped_run(peers, out):
    asked = []

    def stop():
        asked.append(1)
        return peers.rank == 1 and len(asked) > 2

    end = quiet(make_config("digits-eps3-fast"), peers, stop, out=out, seed=3)
    return end and {key: end[key] for key in ("step", "why", "finished")}


def test_when_one_must_go_all_stop_after_the_same_step(tmp_path):
    # one is asked to stop (Ctrl-C, SIGTERM) before its third step; nobody may wait for its sums
    found = together(2, stopped_run, tmp_path, str(tmp_path/"out"))
    assert found == [dict(step=2, why="interrupted", finished=False), None]


def test_a_mistake_is_told_once(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert main(["digits-eps"]) == 2
        assert capsys.readouterr().err.count("\n") == lines


def test_the_test_set_is_shared_too():
    def work(peers):
        return class_counts(make(peers, pictures(), a_plan()), peers)
    one = work(Peers())
    assert one[1].sum() == 8
    assert all(torch.equal(one, counts) for counts in in_threads(3, work))
