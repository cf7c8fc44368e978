"Several processes share one private run: one sample, one sum, one noise, one ledger; and whoever is left alone says so."
import contextlib
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import dp_course.processes as processes
from dp_course.accounting import PLDAccountant, PrivacyPlan
from dp_course.data import Images
from dp_course.sampling import poisson_indices
from dp_course.dpsgd import FlatClip, loop_grad_sum
from dp_course.trainer import Trainer, step_generator
from dp_course.gradients import fast_grad_sum
from dp_course.gradients import fixed_shape
from dp_course.processes import Peers, ProcessTrainer, join, shard
from dp_course.records import class_counts, read_record
from dp_course.presets import make_config
from dp_course.train import main, run
from dp_course.tricks import EMA, views

if sys.platform == "linux": os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine without network may not know its own name
ROOT, QUIET = Path(__file__).resolve().parent.parent, dict(say=lambda text: None)


# ---- the machinery of the tests: real processes that talk through gloo, forked from one that has torch already

def _child(rank, world, port, timeout, work, out, args):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    peers = join("cpu", timeout)
    try: result = work(peers, *args)
    except Exception as e: result = e
    torch.save(result if not isinstance(result, Exception) else [type(result).__name__, str(result)], f"{out}/{rank}.pt")
    with contextlib.suppress(Exception): peers.leave()


def together(world, work, tmp_path, *args, timeout=60., wait=60):
    "What `work(peers, *args)` returned in each of `world` processes; None for one that died; [name, text] of an error."
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["dp_course.train", "torch.distributed", "test_processes"])
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    out = tmp_path/f"results{time.monotonic_ns()}"
    out.mkdir()
    children = [server.Process(target=_child, args=(r, world, port, timeout, work, str(out), args)) for r in range(world)]
    for c in children: c.start()
    end = time.monotonic() + wait
    for c in children: c.join(max(.1, end - time.monotonic()))
    hung = [r for r, c in enumerate(children) if c.is_alive()]
    for c in children: c.kill()
    assert not hung, f"processes {hung} of {world} were still waiting after {wait} s"
    return [torch.load(f, weights_only=False) if (f := out/f"{r}.pt").exists() else None for r in range(world)]


class Threads(Peers):
    "Peers that are threads: the same methods, without a network."
    def __init__(self, rank, world, hall): super().__init__(rank, world); self.hall = hall
    def _exchange(self, value):
        self.hall.setdefault("box", [None]*self.world)[self.rank] = value
        self.hall["barrier"].wait()
        said = list(self.hall["box"])
        self.hall["barrier"].wait()
        return said
    def add(self, x): said = self._exchange(x.clone()); return x.copy_(sum(said[1:], said[0]))
    def told(self, value): return self._exchange(value)[0]
    def agree(self, what, value):
        said = self._exchange(value)
        if any(v != said[0] for v in said): raise ValueError(f"the processes disagree about {what}: {said}")


def in_threads(world, work):
    hall, results = {"box": [None]*world, "barrier": threading.Barrier(world, timeout=30)}, [None]*world
    def go(rank): results[rank] = work(Threads(rank, world, hall))
    threads = [threading.Thread(target=go, args=(r,)) for r in range(world)]
    for t in threads: t.start()
    for t in threads: t.join()
    return results


# ---- a small problem in float64

def pictures(n=23, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.rand(n + 8, 1, 5, 5, generator=g, dtype=torch.float64), torch.randint(3, (n + 8,), generator=g)
    return Images(x[:n], y[:n], x[n:], y[n:], "made up", ("a", "b", "c"))


def network(width=4):
    g = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(25, width), nn.Tanh(), nn.Linear(width, 3)).double()
    with torch.no_grad():
        for p in model.parameters(): p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype))
    return model


class Silent(PrivacyPlan):
    "A plan without noise, to compare sums; `check_plan` is told to look away."
    sigma = 0.


@contextlib.contextmanager
def unchecked():
    import dp_course.dpsgd as dpsgd
    kept, dpsgd.check_plan = dpsgd.check_plan, lambda plan, data: None
    try: yield
    finally: dpsgd.check_plan = kept


class Witness(FlatClip):
    "A clip that keeps the norms that it is shown, and the randomness that goes with them."
    def update(self, norms, generator=None): self.seen = getattr(self, "seen", []) + [norms]; self.coin = torch.rand(1, generator=generator)


def make(peers, data, plan, seed=7, **kw):
    kind = partial(ProcessTrainer, peers=peers) if peers.world > 1 else Trainer
    kw = dict(clip=Witness(.8), optimizer=partial(torch.optim.SGD, lr=.5, momentum=.9)) | kw
    return kind(network(), data, plan, seed=seed, **kw)


def flat(trainer): return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def steps_of(peers, n, batch, steps, seed, plan_type, options):
    with unchecked() if plan_type is Silent else contextlib.nullcontext():
        trainer = make(peers, pictures(n), plan_type(n, batch, steps, 3., 1e-5), seed, **options(peers) if options else {})
    sizes, engine = [], trainer.engine
    def counted(model, loss_fn, x, y, clip): sizes.append(len(x)); return engine(model, loss_fn, x, y, clip)
    trainer.engine = counted
    trainer.fit(steps)
    return dict(weights=flat(trainer), norms=trainer.clip.seen, coin=trainer.clip.coin, computed=trainer.computed, eps=trainer.epsilon(),
                steps=trainer.t, sizes=sizes, bad=trainer.nonprivate_nonfinite, seed=trainer._seed)


def with_views(peers): return dict(augment=lambda x, g: views(x, 3, g, pad=1), micro_batch=2, callbacks=[EMA(.9)])


# ---- shards

@pytest.mark.parametrize("n, world", [(10, 1), (10, 2), (10, 3), (23, 4), (2, 5), (0, 3), (50_000, 7)])
def test_shards_hold_every_example_once(n, world):
    pieces = [list(range(n))[shard(n, r, world)] for r in range(world)]
    assert sum(pieces, []) == list(range(n)) and max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_a_process_that_does_not_exist_has_no_shard():
    for rank, world in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="pass 0 <= rank < world"): shard(10, rank, world)


def test_each_shard_is_a_poisson_sample_and_they_know_nothing_of_each_other():
    # 4,000 batches. A mean is within 4.5 standard errors, a variance within 12 %, a correlation below 4.5/sqrt(4000):
    # false alarm below 1e-4 in all
    n, q, world = 101, .3, 3
    sizes = torch.zeros(4000, world, dtype=torch.float64)
    for t in range(len(sizes)):
        idx = poisson_indices(n, q, step_generator("secret", "sample", t))
        for r in range(world): sizes[t, r] = sum(shard(n, r, world).start <= i < shard(n, r, world).stop for i in idx.tolist())
    for r in range(world):
        m = len(range(n)[shard(n, r, world)])
        assert abs(sizes[:, r].mean() - m*q) < 4.5*math.sqrt(m*q*(1-q)/4000) and abs(sizes[:, r].var()/(m*q*(1-q)) - 1) < .12
    assert (torch.corrcoef(sizes.T) - torch.eye(world)).abs().max() < 4.5/math.sqrt(4000)


# ---- two equal one

@pytest.mark.parametrize("n, world, options", [(23, 2, None), (24, 3, None), (23, 3, with_views)])
def test_several_equal_one_without_noise(n, world, options, tmp_path):
    # float64; without noise everything hangs on the sample, the views, the sum, the norms and the constant batch size
    one = steps_of(Peers(), n, 6., 5, 7, Silent, options)
    all_ = together(world, steps_of, tmp_path, n, 6., 5, 7, Silent, options)
    assert all(isinstance(r, dict) for r in all_), all_
    for r in all_:
        assert torch.allclose(r["weights"], one["weights"], rtol=0, atol=1e-12) and torch.equal(r["weights"], all_[0]["weights"])
        assert [v.shape for v in r["norms"]] == [v.shape for v in one["norms"]], "clip.update gets all norms, of all processes"
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(r["norms"], one["norms"])) and torch.equal(r["coin"], one["coin"])
        assert r["computed"] == r["steps"] == 5
    assert sum(sum(r["sizes"]) for r in all_) == sum(one["sizes"]) and all(sum(r["sizes"]) < sum(one["sizes"]) for r in all_)
    assert not torch.allclose(one["weights"], steps_of(Peers(), n, 6., 4, 7, Silent, options)["weights"], atol=1e-3)  # 4 steps would be seen


def test_the_sum_is_that_of_the_union_of_what_the_processes_drew():
    # one step by hand: who was drawn comes from the engines of the processes, the update from the plain loop
    data, plan = pictures(23), None
    with unchecked():
        def work(peers):
            trainer, mine = make(peers, data, Silent(23, 6., 5, 3., 1e-5), optimizer=partial(torch.optim.SGD, lr=1.)), []
            engine = trainer.engine
            trainer.engine = lambda m, f, x, y, c: mine.extend(x) or engine(m, f, x, y, c)
            return flat(trainer), flat(trainer.step()), mine
        found = in_threads(3, work)
    rows = [[int((data.train_x == x).flatten(1).all(1).nonzero()) for x in mine] for _, _, mine in found]
    for r, mine in enumerate(rows): assert set(mine) <= set(range(23)[shard(23, r, 3)]) and len(set(mine)) == len(mine)
    union = sorted(sum(rows, []))
    model = network()
    total, _ = loop_grad_sum(model, partial(nn.functional.cross_entropy, reduction="none"), data.train_x[union], data.train_y[union], FlatClip(.8))
    update = torch.cat([g.flatten() for g in total.values()])/6.  # the constant batch size, not the size of this batch
    for before, after, _ in found: assert torch.allclose(before - after, update, atol=1e-12)


def test_a_shard_may_come_away_empty(tmp_path):
    # at n = 6, batch 1, over 30 steps: some batches are empty altogether and most leave one of three processes without work
    one = steps_of(Peers(), 6, 1., 30, 3, Silent, None)
    all_ = together(3, steps_of, tmp_path, 6, 1., 30, 3, Silent, None)
    assert all(torch.allclose(r["weights"], one["weights"], atol=1e-12) for r in all_) and all(r["computed"] == 30 for r in all_)
    assert any(v.shape[1] == 0 for v in one["norms"]) and all(0 < len(r["sizes"]) < 30 for r in all_)


# ---- noise and ledger

def test_noise_is_added_once_and_the_ledger_charged_once(tmp_path):
    # Features are all zero, labels irrelevant: only the biases have gradients; the 4,000 weights of one layer get noise alone.
    steps = 8
    found = together(2, noise_only, tmp_path, steps)
    plan = PrivacyPlan(40, 10., steps, 3., 1e-5)
    wanted = plan.sigma*.5/plan.batch_size  # sigma C / expected batch
    z = found[0]["moves"]
    assert torch.equal(z, found[1]["moves"]), "the same noise everywhere"
    # 32,000 independent draws: the standard error of the std is 0.4 %, of the mean 0.6 % of the std; limits at 5 of them: false
    # alarm 1e-6. Noise once per process would be sqrt(2) = 41 % too much, the batch divided by 2 as well 100 %
    assert abs(z.std().item()/wanted - 1) < .02 and abs(z.mean().item()) < .028*wanted
    flat_ = (z - z.mean())/z.std()
    assert abs((flat_[0]*flat_[1]).mean()) < 5/math.sqrt(z.shape[1]), "a fresh draw in each step"
    for r in found:
        assert r["computed"] == steps and r["left"] == 0
        assert r["eps"] == pytest.approx(PLDAccountant().step(plan.q, plan.sigma, steps).epsilon(1e-5)) and r["eps"] <= 3


def noise_only(peers, steps):
    data = pictures(40)
    data = replace(data, train_x=torch.zeros(40, 1, 20, 20))
    model = nn.Sequential(nn.Flatten(), nn.Linear(400, 10))
    with torch.no_grad(): model[1].weight.zero_(); model[1].bias.zero_()
    trainer = ProcessTrainer(model, replace(data, classes=tuple("0123456789")), PrivacyPlan(40, 10., steps, 3., 1e-5), peers=peers,
                             clip=FlatClip(.5), optimizer=partial(torch.optim.SGD, lr=1.), seed=None)
    moves = []
    for _ in range(steps):
        before = model[1].weight.detach().clone()
        trainer.step()
        moves.append((model[1].weight.detach() - before).flatten().double())
    return dict(moves=torch.stack(moves), computed=trainer.computed, left=trainer.left(), eps=trainer.epsilon())


def test_a_secret_seed_is_shared_and_stays_secret():
    plan = PrivacyPlan(23, 6., 5, 3., 1e-5)
    a, b = in_threads(2, lambda peers: make(peers, pictures(), plan, seed=None))
    assert a._seed == b._seed and len(a._seed) == 64 and a.seed_policy == "secret"
    c, _ = in_threads(2, lambda peers: make(peers, pictures(), plan, seed=None))
    assert c._seed != a._seed


# ---- refusals

def test_processes_that_differ_are_refused():
    plan = PrivacyPlan(23, 6., 5, 3., 1e-5)
    def work(change, peers):
        try: return change(peers)
        except ValueError as e: return str(e)
    def other_plan(peers): return make(peers, pictures(), replace(plan, eps=3. + peers.rank))
    def other_data(peers): return make(peers, pictures(seed=peers.rank), plan)
    def other_weights(peers):
        trainer = make(peers, pictures(), plan)
        with torch.no_grad(): next(iter(trainer.params.values()))[0] += peers.rank*1e-7
        return trainer.agree()
    for change, word in ((other_plan, "plan"), (other_data, "labels"), (other_weights, "weights")):
        for said in in_threads(2, partial(work, change)): assert f"disagree about {word}" in said or f"disagree about training {word}" in said


def test_a_lone_process_needs_no_peers(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"): monkeypatch.delenv(name, raising=False)
    alone = join("cpu")
    assert (alone.rank, alone.world, str(alone.device)) == (0, 1, "cpu") and not alone.any(False) and alone.any(True)
    assert alone.told("x") == "x" and alone.agree("anything", 1) is None and torch.equal(alone.add(torch.ones(2)), torch.ones(2))
    monkeypatch.setenv("WORLD_SIZE", "2"); monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="no such device"): join("cuda:99")


# ---- one of them dies

def dies(peers, how):
    trainer = make(peers, pictures(), PrivacyPlan(23, 6., 50, 3., 1e-5))
    trainer.fit(2)
    if peers.rank == 1 and how == "killed": os._exit(1)
    if peers.rank == 1 and how == "stuck": time.sleep(5); os._exit(1)
    trainer.fit(2)


@pytest.mark.parametrize("how", ["killed", "stuck"])
def test_the_others_get_an_error_and_no_hang(how, tmp_path):
    alive, dead = together(2, dies, tmp_path, how, timeout=2. if how == "stuck" else 60., wait=30)
    assert dead is None and alive[0] == "ConnectionError", alive
    assert "process 0 of 2 lost another one" in alive[1] and "--resume" in alive[1]


# ---- the whole command

def whole_run(peers, out, kw, cut):
    c = make_config("digits-eps3-fast", ema=.5, views=2, crop=1)
    first = run(c, out=out, peers=peers, seed=3, **kw, **QUIET)
    return None if first is None else {k: first[k] for k in ("step", "finished", "test_accuracy", "class_accuracy", "eps_pld")}


def released(folder):
    path, = Path(folder).glob("*.release.pt")
    return torch.load(path, weights_only=True)["weights"]


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    torch.set_num_threads(1)
    c = make_config("digits-eps3-fast", ema=.5, views=2, crop=1)
    calm = run(c, out=tmp_path/"calm", seed=3, **QUIET)
    out = str(tmp_path/"wild")
    two = together(2, whole_run, tmp_path, out, dict(steps=2), None)
    assert two[1] is None and two[0]["step"] == 2 and not two[0]["finished"]
    three = together(3, whole_run, tmp_path, out, dict(steps=4, resume=True), None)
    assert three[0]["step"] == 4 and three[1:] == [None, None]
    end = run(c, out=out, seed=3, resume=True, **QUIET)
    assert end["finished"] and len(list(Path(out).glob("*.jsonl"))) == 1 and not list(Path(out).glob("*.checkpoint*"))
    a, b = released(tmp_path/"calm"), released(out)
    assert all(torch.allclose(a[k], b[k], atol=1e-5) for k in a), "the same batches, views and noise; sums round differently"
    assert end["eps_pld"] == calm["eps_pld"] and abs(end["test_accuracy"] - calm["test_accuracy"]) <= .006  # two digits of 360
    rows = read_record(end["paths"]["record"])
    assert [r.get("processes") for r in rows if r["kind"] in ("start", "resume")] == [2, 3, 1]
    assert [r["step"] for r in rows if r["kind"] == "epoch"] == [2, 3, 4, 6]


def test_torchrun_trains_once_prints_once_and_leaves_one_record(tmp_path):
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone",
                           "-m", "dp_course.train", "digits-eps3-fast", "--seed", "3", "--out", str(tmp_path), "--device", "cpu"],
                          capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy at the last step") == 1 and done.stdout.count("step     6/6") == 1
    start, *_, end = read_record(*tmp_path.glob("*.jsonl"))
    assert start["processes"] == 2 and end["finished"] and end["eps_pld"] <= 3 and len(list(tmp_path.iterdir())) == 3


def stopped_run(peers, out):
    asked = []
    def stop(): asked.append(1); return peers.rank == 1 and len(asked) > 2
    end = run(make_config("digits-eps3-fast"), out=out, peers=peers, seed=3, stop=stop, **QUIET)
    return end and {k: end[k] for k in ("step", "why", "finished")}


def test_when_one_must_go_all_stop_after_the_same_step(tmp_path):
    # one process is asked to stop (Ctrl-C, SIGTERM) before its third step; nobody may wait for its sums
    assert together(2, stopped_run, tmp_path, str(tmp_path/"out")) == [dict(step=2, why="interrupted", finished=False), None]


@pytest.mark.parametrize("b", [1, 5, 8])
def test_filling_up_a_micro_batch_changes_nothing(b):
    data, shapes = pictures(), []
    def engine(model, loss_fn, x, y, clip): shapes.append(len(x)); return fast_grad_sum(model, loss_fn, x, y, clip)
    loss = partial(nn.functional.cross_entropy, reduction="none")
    for x in (data.train_x[:b], data.train_x[:b, None].repeat(1, 3, 1, 1, 1)*torch.linspace(.5, 1.5, 3).view(1, 3, 1, 1, 1)):
        a, na = fast_grad_sum(network(), loss, x, data.train_y[:b], FlatClip(.3))
        f, nf = fixed_shape(engine, 8)(network(), loss, x, data.train_y[:b], FlatClip(.3))
        assert torch.allclose(na, nf, atol=1e-12) and all(torch.allclose(a[k], f[k], atol=1e-12) for k in a)
    assert shapes == [8, 8]
    seen = []
    fixed_shape(engine, 8)(network(), loss, x, data.train_y[:b], lambda norms: seen.append(norms.shape) or FlatClip(.3)(norms))
    assert seen == [(4, b)], "the clip sees real examples only"


def test_a_mistake_is_told_once(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert main(["digits-eps"]) == 2 and capsys.readouterr().err.count("\n") == lines


def test_the_test_set_is_shared_too():
    def work(peers):
        trainer = make(peers, pictures(), PrivacyPlan(23, 6., 5, 3., 1e-5))
        return class_counts(trainer, peers)
    one = work(Peers())
    assert one[1].sum() == 8 and all(torch.equal(one, v) for v in in_threads(3, work))
