"The training command from outside: what a newcomer types, what crashes do, and what the files say."
import fcntl
import multiprocessing
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import dp_course.processes as processes
from dp_course.accounting import PLDAccountant, RDPAccountant
from dp_course.data import load
from dp_course.dpsgd import loop_grad_sum

from dp_course.console import foretell
from dp_course.presets import Config
from dp_course.records import Record, composed_epsilon, load_runs, mean_std, read_record
from dp_course.command import OPTIONS, parse
from dp_course.presets import PRESETS, lr_at, make_config, make_plan
from dp_course.train import load_data, main, make_trainer, run

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def dp_train(*args, **kw):
    "Run the command in a process of its own."
    return subprocess.run([sys.executable, "-m", "dp_course.train", *map(str, args)], capture_output=True, text=True, env=ENV, **kw)


def only(folder, pattern):
    found = sorted(Path(folder).glob(pattern))
    assert len(found) == 1, found
    return found[0]


def weights(folder):
    return torch.load(only(folder, "*.release.pt"), weights_only=True)["weights"]


def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "One uninterrupted miniature with a given seed, started as a user starts it."
    out = tmp_path_factory.mktemp("whole")
    done = dp_train("digits-eps3-fast", "--seed", 3, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.fixture(scope="module")
def no_data(tmp_path_factory):
    "A folder without data, in which the features of the digits are kept once they are made."
    return str(tmp_path_factory.mktemp("no_data"))


# ---- what a newcomer sees

def test_help_names_every_preset_and_every_option(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in PRESETS: assert name.removesuffix("-fast") in text
    for name in OPTIONS: assert "--" + name.replace("_", "-") in text
    for word in ("--data", "--seed", "--device", "--out", "--steps", "--time-limit", "--resume", "examples"): assert word in text


@pytest.mark.parametrize("args, words", [
    (["digits-eps"], ["unknown preset 'digits-eps'", "did you mean digits-eps3?", "resnet20-eps3", "report-4096"]),
    (["zzzz"], ["unknown preset 'zzzz'", "digits-eps3"]),
    (["--eps", "0"], ["eps", "above 0", "0.0"]),
    (["--eps", "-3"], ["eps", "-3"]),
    (["--eps", "nan"], ["eps", "nan"]),
    (["--eps", "three"], ["--eps", "'three'"]),
    (["--delta", "0"], ["delta", "0.0"]),
    (["--delta", "0.01"], ["delta", "1/n"]),
    (["--steps", "0"], ["--steps", "1 or more"]),
    (["--steps", "2.5"], ["--steps", "2.5"]),
    (["--time-limit", "0"], ["--time-limit"]),
    (["--seed", "-1"], ["--seed"]),
    (["--batch-size", "5000"], ["batch_size", "1,437"]),
    (["--lr", "-1"], ["lr", "-1"]),
    (["--n-val", "1437"], ["n_val"]),
    (["--device", "abacus"], ["no such device", "abacus", "cpu"]),
    (["--device", "cuda:99"], ["no such device", "cuda:99"]),
    (["--flux", "1"], ["--flux", "--help"]),
    (["--resume"], ["nothing to resume", "digits-eps3"]),
    (["resnet20-eps3", "--data", "nowhere"], ["nowhere", "data_batch_1", "download=True"]),
])
def test_a_mistake_gets_one_line_and_exit_code_2(args, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and err.startswith("dp-train: ") and not out
    for word in words: assert word in err
    assert not list(tmp_path.rglob("*.jsonl")), "a refused run must leave no record"


def test_a_mistake_has_no_traceback_in_a_real_process(tmp_path):
    done = dp_train("resnet20-eps33", "--out", tmp_path/"new")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1 and "did you mean resnet20-eps3" in done.stderr


def test_the_output_ends_with_guarantee_accuracy_and_paths(whole):
    out, text = whole
    assert "add" in text and "1,437 training examples" in text and "seed is not secret" in text
    assert re.search(r"test accuracy at the last step: \d+\.\d+% of 360 images", text)
    for suffix in (".jsonl", ".png", ".release.pt"): assert str(only(out, "*" + suffix)) in text
    assert only(out, "*.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    assert len(lines) == 2 and "\r" not in text  # one plain line per epoch, no bar in a pipe


def test_a_terminal_gets_a_live_bar(tmp_path):
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))  # or there is no room for a bar
    p = subprocess.Popen([sys.executable, "-m", "dp_course.train", "digits-eps3-fast", "--out", tmp_path], stdout=subprocess.DEVNULL,
                         stderr=writer, env=ENV)
    os.close(writer)
    seen = b""
    while True:
        try: chunk = os.read(reader, 4096)
        except OSError: break  # the other end is closed
        if not chunk: break
        seen += chunk
    assert p.wait() == 0
    for word in (b"digits-eps3-fast", b"epoch", b"eps", b"test accuracy", b"<"): assert word in seen  # tqdm: elapsed<left


# ---- settings

def test_every_setting_is_explained_and_every_preset_is_one():
    source = Path(sys.modules[Config.__module__].__file__).read_text()
    for f in fields(Config): assert re.search(rf"^    {f.name}:.*  # \S.{{4}}", source, re.M), f"{f.name} has no comment"
    for name in PRESETS: make_config(name)
    assert {"digits-eps3", "resnet20-eps3", *(f"resnet20-eps{e}" for e in (1, 2, 5, 8)), "report-v1", "report-2048",
            "report-4096", "report-wrn16-4"} <= PRESETS.keys()
    for name in list(PRESETS):
        if not name.endswith("-fast"): assert make_config(name + "-fast").data == "digits"


def test_the_plans_of_the_report_are_the_ones_that_really_ran():
    # FACTS: Opacus draws at q = 1/98, 1/25, 1/13; the PRV sigmas printed read about 0.010 too much eps
    for name, q, steps, printed in (("report-v1", 1/98, 1470, .8801), ("report-2048", 1/25, 625, 1.6138), ("report-4096", 1/13, 650, 2.8809)):
        plan = make_plan(make_config(name), 50_000)
        assert plan.q == pytest.approx(q, rel=1e-12) and plan.steps == steps
        assert .99*printed < plan.sigma < printed
        c = make_config(name)
        assert (c.views, c.ema, c.pixel_std) == (0, 0, (.2023, .1994, .2010)), "the report had no views and no average"


def test_the_recipes_of_our_own_runs():
    # FACTS: sigma by PLD at eps = 3 is 3.715 for (B 4096, T 1000) and 4.445 for (8192, 360)
    for name, size, steps, sigma in (("resnet20-eps3", 4096, 1000, 3.715), ("wrn16-4-eps3", 4096, 1000, 3.715), ("scatter-linear-eps3", 8192, 360, 4.445),
                                     ("scatter-cnn-eps3", 8192, 120, 2.701)):
        c = make_config(name)
        plan = make_plan(c, 50_000)
        assert (plan.batch_size, plan.steps, plan.eps, plan.delta) == (size, steps, 3., 1e-5) and abs(plan.sigma - sigma) < .002
        assert (c.views, c.ema, c.lr, c.momentum) == ((16, .999, 2., 0.) if size == 4096 else (0, 0, c.lr, .9))
    assert make_plan(make_config("wrn40-4-eps8"), 50_000).steps == 2000
    for family, budgets in (("resnet20", (1, 2, 3, 5, 8)), ("scatter-linear", (1, 2, 2.38, 3, 5, 8))):
        for eps in budgets: assert replace(make_config(f"{family}-eps{eps}"), preset="", about="", eps=3.) == replace(
            make_config(f"{family}-eps3"), preset="", about="")


def test_the_learning_rate_is_a_function_of_the_step():
    c = replace(make_config("digits-eps3"), lr=2., schedule="linear")
    assert [lr_at(c, t, 4) for t in range(4)] == [2., 1.5, 1., .5]
    assert lr_at(replace(c, schedule="constant"), 3, 4) == 2.


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("-fast")])
def test_every_miniature_takes_a_step(name, no_data, monkeypatch):
    monkeypatch.setenv("DP_COURSE_DATA", no_data)
    c = replace(make_config(name), batch_size=8)
    trainer = make_trainer(c, load_data(c), seed=0)
    assert len(trainer.callbacks) == bool(c.ema) and (trainer.augment is not None) == bool(c.views)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.step()
    moved = [k for k, v in trainer.model.named_parameters() if not torch.equal(before[k], v)]
    assert moved == [k for k, v in trainer.model.named_parameters() if v.requires_grad]


def test_the_engines_of_a_preset_agree():
    c = make_config("digits-eps3-fast")
    data = load_data(c)
    x, y = data.normalize(data.train_x[:12]).double(), data.train_y[:12]
    trainer = make_trainer(c, data, seed=0)
    model = trainer.model.double()
    a, na = trainer.engine(model, trainer.loss_fn, x, y, trainer.clip)
    b, nb = loop_grad_sum(model, trainer.loss_fn, x, y, trainer.clip)
    assert torch.allclose(na.double(), nb.double(), atol=1e-10) and all(torch.allclose(a[k], b[k], atol=1e-10) for k in b)


# ---- truth

def test_the_record_holds_everything(whole):
    start, *rows, end = read_record(only(whole[0], "*.jsonl"))
    assert start["kind"] == "start" and start["preset"] == "digits-eps3-fast"
    assert set(start["config"]) == {f.name for f in fields(Config)}
    assert start["seed"] == 3 and start["seed_policy"].startswith("reproducible")
    assert start["device"] == "cpu" and start["machine"]["torch"] == torch.__version__ or start["machine"]["torch"]
    assert [r["step"] for r in rows] == [3, 6] and all(r["kind"] == "epoch" for r in rows)
    for r in rows: assert r.keys() == {"kind", "epoch", "step", "eps", "test_accuracy", "seconds", "lr", "clip"}
    assert end["kind"] == "end" and end["finished"] and end["step"] == 6 and end["delta"] == 1e-5
    assert end["test_accuracy"] == rows[-1]["test_accuracy"]  # of the last step, not the best
    for k in ("seconds", "seconds_per_step", "images_per_second", "peak_memory_mb"): assert end[k] > 0
    assert end["tuning_runs"] == start["config"]["tuning_runs"] and start["processes"] == 1
    assert end["classes"] == list("0123456789") and sum(end["class_accuracy"])/10 == pytest.approx(end["test_accuracy"], abs=1e-6)  # 36 of each
    plan = start["plan"]
    pld = PLDAccountant().step(plan["q"], plan["sigma"], 6).epsilon(1e-5)
    rdp = RDPAccountant().step(plan["q"], plan["sigma"], 6).epsilon(1e-5)
    assert end["eps_pld"] == pytest.approx(pld) and end["eps_rdp"] == pytest.approx(rdp) and pld <= 3 < 1.2*rdp


def test_nothing_un_noised_about_the_training_set_is_recorded(whole):
    keys = {key for row in read_record(only(whole[0], "*.jsonl")) for key in row}
    for word in ("loss", "train", "norm", "nonfinite", "nonprivate", "realised", "indices"): assert word not in " ".join(keys)


def test_a_run_cut_short_charges_what_it_spent(tmp_path, capsys):
    assert main(["digits-eps3-fast", "--steps", "2", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    start, *_, end = read_record(only(tmp_path, "*.jsonl"))
    spent = PLDAccountant().step(start["plan"]["q"], start["plan"]["sigma"], 2).epsilon(1e-5)
    assert not end["finished"] and end["step"] == 2 and end["eps_pld"] == pytest.approx(spent) and 0 < spent < 2
    assert start["plan"]["steps"] == 6, "sigma must be that of the whole plan, or --resume could not go on"
    assert f"eps = {spent:.4g} is spent, not 3" in text and "after step 2 of 6" in text


def test_a_time_limit_stops_at_a_step_boundary_and_resume_goes_on(tmp_path, capsys):
    slice_ = ["digits-eps3-fast", "--time-limit", "1e-6", "--out", str(tmp_path)]
    assert main([*slice_, "--seed", "3"]) == 0 and "time limit" in capsys.readouterr().out
    end = read_record(only(tmp_path, "*.jsonl"))[-1]
    assert end["step"] == 1 and not end["finished"]  # one step always, so that slices get somewhere
    assert [main([*slice_, "--resume"]) for _ in range(6)] == [0]*5 + [2]
    assert "nothing to resume" in capsys.readouterr().err
    calm = run(make_config("digits-eps3-fast"), out=tmp_path/"calm", seed=3, say=lambda s: None)  # as many threads as here
    assert same(weights(tmp_path), torch.load(calm["paths"]["weights"], weights_only=True)["weights"])
    lines = read_record(only(tmp_path, "*.jsonl"))
    assert lines[-1]["finished"] and [r["step"] for r in lines if r["kind"] == "end"] == [1, 2, 3, 4, 5, 6]


def test_a_secret_seed_stays_in_the_checkpoint(tmp_path):
    assert main(["digits-eps3-fast", "--steps", "3", "--out", str(tmp_path)]) == 0
    private = only(tmp_path, "*.checkpoint").read_bytes()
    seed = re.search(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", private)[0].decode()  # 256 bits, in hex
    public = [p for p in tmp_path.iterdir() if ".checkpoint" not in p.name]
    assert len(public) == 3 and "secret" in only(tmp_path, "*.jsonl").name
    for p in public:
        content = p.read_bytes()
        for form in (seed.encode(), bytes.fromhex(seed), str(int(seed, 16)).encode()): assert form not in content, p.name
    assert main(["digits-eps3-fast", "--resume", "--out", str(tmp_path)]) == 0
    assert not list(tmp_path.glob("*.checkpoint*")), "the secret of a finished run is destroyed"


def test_two_secret_runs_differ_and_keep_their_own_records(tmp_path):
    for _ in range(2): run(make_config("digits-eps3-fast", epochs=.5), out=tmp_path, say=lambda s: None)
    a, b = sorted(tmp_path.glob("*.jsonl"))
    assert b.name.endswith("secret.jsonl") != a.name.endswith("secret.jsonl")  # the other one has a number
    w = [torch.load(p, weights_only=True)["weights"] for p in sorted(tmp_path.glob("*.release.pt"))]
    assert len(w) == 2 and not same(*w)


def test_validation_comes_out_of_the_training_set():
    data, c = load("digits"), make_config("digits-eps3", n_val=200)
    held = load_data(c)
    rows = {bytes(x.flatten().tolist()) for x in data.train_x}
    assert len(held.train_x) == 1237 and all(bytes(x.flatten().tolist()) in rows for x in held.test_x)
    assert "validation" in held.name


# ---- views and averages

def test_a_view_is_one_example_and_micro_batches_shrink():
    c = make_config("digits-eps3-fast", micro_batch=32, views=4, crop=1, batch_size=32)
    trainer = make_trainer(c, load_data(c), seed=0)
    seen, engine = [], trainer.engine
    trainer.engine = lambda model, loss_fn, x, y, clip: seen.append(x.shape) or engine(model, loss_fn, x, y, clip)
    trainer.step()
    assert all(s[1:] == (4, 1, 8, 8) and s[0] <= 8 for s in seen) and trainer.plan.batch_size == 32
    assert 10 < sum(s[0] for s in seen) < 60  # examples, as the plan counts them; 32 +- 5 are expected: 5 standard deviations
    for more, micro_batch in (({}, 64), ({"micro_batch": 2}, 1), ({"views": 0}, 1024)):
        more = {"views": 16, "micro_batch": 1024, **more}
        assert make_trainer(replace(c, **more), load_data(c), seed=0).micro_batch == micro_batch


def test_the_average_is_tested_and_released(tmp_path):
    c = make_config("digits-eps3-fast", ema=.9, epochs=4, lr=9., schedule="constant", eps=.5)  # so wild that the last iterate is worse
    end = run(c, out=tmp_path, seed=0, say=lambda s: None)
    data = load_data(c)
    trainer = make_trainer(c, data, seed=0)
    mean = None
    for t in range(trainer.plan.steps):  # by hand: the mean of all iterates with De et al.'s warm-up
        for group in trainer.optimizer.param_groups: group["lr"] = lr_at(c, t, trainer.plan.steps)
        trainer.step()
        w, decay = trainer.params["5.weight"].detach().double(), min(.9, (1 + t)/(10 + t))
        mean = w.clone() if mean is None else decay*mean + (1 - decay)*w
    assert end["accuracy_unaveraged"] == trainer.evaluate()
    with torch.no_grad(): trainer.params["5.weight"].copy_(mean)
    released = torch.load(end["paths"]["weights"], weights_only=True)["weights"]
    assert torch.allclose(released["5.weight"].double(), mean, atol=1e-5)
    assert not torch.allclose(released["5.weight"].double(), w, atol=1e-3), "the average is not the last iterate"
    trainer.model.load_state_dict(released)
    assert end["test_accuracy"] == trainer.evaluate() > end["accuracy_unaveraged"]
    rows = [r for r in read_record(end["paths"]["record"]) if r["kind"] == "epoch"]
    assert rows[-1]["accuracy_unaveraged"] == end["accuracy_unaveraged"] and rows[-1]["test_accuracy"] == end["test_accuracy"]


def test_views_average_and_momentum_survive_a_stop(tmp_path):
    c, quiet = make_config("digits-eps3-fast", views=3, ema=.9), dict(seed=0, say=lambda s: None)
    assert c.momentum == .9
    calm = run(c, out=tmp_path/"calm", **quiet)
    for steps in (1, 2, None): wild = run(c, out=tmp_path/"wild", steps=steps, resume=steps != 1, **quiet)
    assert wild["finished"] and wild["accuracy_unaveraged"] == calm["accuracy_unaveraged"]
    a, b = (torch.load(e["paths"]["weights"], weights_only=True)["weights"] for e in (calm, wild))
    assert same(a, b)


def test_per_class_accuracy_by_hand(whole):
    end = read_record(only(whole[0], "*.jsonl"))[-1]
    c = make_config("digits-eps3-fast")
    trainer = make_trainer(c, load_data(c), seed=3, init_seed=3)
    trainer.model.load_state_dict(weights(whole[0]))
    right = (trainer.model(trainer._input(trainer.data.test_x)).argmax(1) == trainer.data.test_y).double()
    assert end["class_accuracy"] == [round(right[trainer.data.test_y == k].mean().item(), 6) for k in range(10)]


def test_features_and_pixels_cannot_be_mixed_up():
    with pytest.raises(ValueError, match="take features"): make_config("digits-eps3", features="scatter")
    with pytest.raises(ValueError, match="take features"): make_config("scatter-linear-eps3", features="")
    assert "dp_course.scattering" not in subprocess.run(
        [sys.executable, "-c", "import sys, dp_course.train; print(*sys.modules)"], capture_output=True, text=True, env=ENV).stdout


def test_a_slow_run_says_how_long_it_will_take():
    said = []
    foretell([.01]*3, 100, said.append); foretell([4.]*2, 100, said.append); foretell([40.]*2, 100, said.append); assert not said
    foretell([9., 4., 5.], 100, said.append); foretell([40.], 1000, said.append)
    assert "about 4 s" in said[0] and "7 minutes" in said[0] and "11 hours" in said[1] and len(said) == 2


# ---- checkpoints that travel

def small(ema=.9):
    "A trainer with momentum and an average, whose checkpoint is cut into several parts at 20,000 bytes."
    c = make_config("digits-eps3-fast", ema=ema)
    return make_trainer(c, load_data(c), seed=0)


SIZE = 20_000


def test_checkpoints_are_as_small_as_promised(tmp_path):
    for name, most, parts in (("resnet20-eps3-fast", 8e6, 0), ("wrn16-4-eps3-fast", 40e6, 3)):
        c = replace(make_config(name), batch_size=2, views=1, momentum=.9)
        trainer = make_trainer(c, load_data(c), seed=0)
        for _ in range(2): trainer.step(); save_checkpoint(trainer, tmp_path/"c.checkpoint")
        assert trainer.optimizer.state and trainer.callbacks[0].weights
        files = [p for p in tmp_path.iterdir() if p.name != "c.checkpoint.prev"]
        named = torch.load(tmp_path/"c.checkpoint", weights_only=True).get("parts", {})
        now = [p for p in files if p.name in (*named, "c.checkpoint")]
        assert len(now) == parts + 1 and len(files) == 2*parts + 1, "this one and the one before, no leftovers"
        assert sum(p.stat().st_size for p in now) <= most and all(p.stat().st_size < 15e6 for p in files)
        for p in tmp_path.iterdir(): p.unlink()


def test_a_checkpoint_in_parts_loads_or_says_what_is_wrong(tmp_path):
    trainer, path = small(), tmp_path/"c.checkpoint"
    for t in range(3):
        trainer.step()
        save_checkpoint(trainer, path, SIZE)
    names = list(torch.load(path, weights_only=True)["parts"])
    assert len(names) > 2 and len(list(tmp_path.iterdir())) == 2*len(names) + 2
    for p in tmp_path.iterdir(): assert p.stat().st_size <= SIZE and p.stat().st_mode & 0o77 == 0, "private: it holds the secret seed"
    other = load_checkpoint(small(), path)
    assert other.t == 3 and same(other.model.state_dict(), trainer.model.state_dict()) and same(other.callbacks[0].weights, trainer.callbacks[0].weights)
    assert load_checkpoint(small(), Path(f"{path}.prev")).t == 2
    for i, (damage, word) in enumerate(((lambda p: p.unlink(), "missing"), (lambda p: p.write_bytes(p.read_bytes()[:-1]), "altered or cut short"),
                                        (lambda p: p.write_bytes(p.read_bytes()[::-1]), "altered or cut short"))):
        victim = tmp_path/names[i]
        content = victim.read_bytes()
        damage(victim)
        with pytest.raises(ValueError, match=rf"c.checkpoint is not whole: {re.escape(victim.name)} is {word}; the one before it is .*c.checkpoint.prev"):
            load_checkpoint(small(), path)
        assert load_checkpoint(small(), Path(f"{path}.prev")).t == 2
        victim.write_bytes(content)
    assert load_checkpoint(small(), path).t == 3
    with pytest.raises(ValueError, match="c.checkpoint is a checkpoint of another run"): load_checkpoint(small(ema=0), path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="truncated or foreign"): load_checkpoint(small(), path)
    assert not list(tmp_path.glob("*joined*"))


def test_a_set_that_was_never_finished_changes_nothing(tmp_path, monkeypatch):
    trainer, path = small().step(), tmp_path/"c.checkpoint"
    save_checkpoint(trainer, path, SIZE)
    parts = len(torch.load(path, weights_only=True)["parts"])
    trainer.step()
    def stop(*args): raise KeyboardInterrupt
    for stage in range(parts + 1):  # the crash comes before the first part, the second, ..., the index
        written = []
        def crash(name, content, real=processes._write_private):
            if len(written) == stage: stop()
            written.append(name); real(name, content)
        monkeypatch.setattr(processes, "_write_private", crash)
        if stage >= parts: monkeypatch.setattr(processes, "save_atomic", stop)
        with pytest.raises(KeyboardInterrupt): save_checkpoint(trainer, path, SIZE)
        monkeypatch.undo()
        assert load_checkpoint(small(), path).t == 1
    save_checkpoint(trainer, path, SIZE)
    assert parts > 2 and load_checkpoint(small(), path).t == 2 and len(list(tmp_path.iterdir())) == 2*parts + 2, "no leftovers"


def test_a_run_with_parts_is_stopped_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(save_checkpoint, "__defaults__", (SIZE,))
    c, quiet = make_config("digits-eps3-fast"), dict(seed=0, say=lambda s: None)
    calm = run(c, out=tmp_path/"calm", **quiet)
    run(c, out=tmp_path/"wild", steps=1, **quiet)
    assert len(list((tmp_path/"wild").glob("*.checkpoint.*.[0-9]"))) > 1
    end = run(c, out=tmp_path/"wild", resume=True, **quiet)
    assert same(weights(tmp_path/"calm"), weights(tmp_path/"wild")) and end["finished"] and calm["finished"]
    assert not list(tmp_path.rglob("*.checkpoint*")), "every part held a piece of the secret"


# ---- crashes

def survive(tmp_path, kills, monkeypatch):
    "Kill a run again and again at random moments, finish it, and compare with a run that nobody touched."
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums in another order differ in the last bit
    server = multiprocessing.get_context("forkserver")  # imports torch once; every child is a fresh fork of it
    server.set_forkserver_preload(["dp_course.train"])
    calm, wild = tmp_path/"calm", tmp_path/"wild"
    records = lambda: [read_record(f) for f in wild.glob("*.jsonl")]
    over = lambda: [r for r in records() if r and r[-1].get("finished")]

    def start(out):
        more = ["--resume"] if list(out.glob("*.checkpoint")) else ["--seed", "5"]
        p = server.Process(target=main, args=(["digits-eps3", "--batch-size", "60", "--epochs", "8", "--ema", ".9", "--views", "2", *more, "--out", str(out)],))
        p.start()
        return p

    start(calm).join()
    alive = 0
    for _ in range(kills):
        if over(): break
        before, give_up = sum(map(len, records())), time.monotonic() + 60
        p = start(wild)
        while p.is_alive() and sum(map(len, records())) == before and time.monotonic() < give_up: time.sleep(.002)
        time.sleep(random.uniform(0, .2))
        alive += p.is_alive()
        p.kill()
        p.join()
    if not over(): start(wild).join()
    assert len(over()) == 1 and alive, f"{alive} of {kills} kills hit a running process"
    weights = [torch.load(only(out, name), weights_only=True)["weights"] for out, name in (
        (calm, "*.release.pt"), (wild, Path(name_of_finished(wild)).name.replace(".jsonl", ".release.pt")))]
    assert same(*weights), "bit for bit"
    got, reference = over()[0], read_record(only(calm, "*.jsonl"))
    epochs = lambda rows: [(r["step"], r["eps"], r["test_accuracy"], r["accuracy_unaveraged"], r["lr"]) for r in rows if r["kind"] == "epoch"]
    assert epochs(got) == epochs(reference), "every epoch once, with the same numbers"
    assert got[-1]["eps_pld"] == reference[-1]["eps_pld"]


def name_of_finished(folder):
    return next(f for f in Path(folder).glob("*.jsonl") if (read_record(f) or [{}])[-1].get("finished"))


def test_kill_9_ten_times_changes_nothing(tmp_path, monkeypatch): survive(tmp_path, 10, monkeypatch)


def test_an_epoch_whose_checkpoint_was_lost_is_written_once(tmp_path):
    c, quiet = make_config("digits-eps3-fast"), dict(out=tmp_path/"a", say=lambda s: None)
    calm = run(c, out=tmp_path/"b", seed=0, say=lambda s: None)
    checkpoint = run(c, seed=0, steps=1, **quiet)["paths"]["checkpoint"]
    old = checkpoint.read_bytes()
    run(c, resume=True, steps=3, **quiet)
    checkpoint.write_bytes(old)  # as if the crash came between the row of step 3 and its checkpoint
    end = run(c, resume=True, **quiet)
    rows = [r["step"] for r in read_record(end["paths"]["record"]) if r["kind"] == "epoch"]
    assert rows == [1, 3, 6] and end["test_accuracy"] == calm["test_accuracy"]


def test_half_a_line_is_dropped_and_the_record_goes_on(tmp_path):
    r = Record(tmp_path/"a.jsonl")
    r.write("start", preset="x"); r.write("epoch", step=1)
    r.file.write('{"kind": "epoch", "st'); r.file.close()
    assert [row["kind"] for row in read_record(r.path)] == ["start", "epoch"]
    again = Record(r.path, resume=True)
    again.write("epoch", step=2)
    assert [row.get("step") for row in read_record(r.path)] == [None, 1, 2]
    with pytest.raises(FileExistsError): Record(r.path)


def test_resume_refuses_other_settings(tmp_path, capsys):
    run(make_config("digits-eps3-fast"), out=tmp_path, seed=0, steps=1, say=lambda s: None)
    assert main(["digits-eps3-fast", "--resume", "--eps", "8", "--out", str(tmp_path)]) == 2
    assert "eps is 3.0, not 8.0" in capsys.readouterr().err
    assert main(["digits-eps3-fast", "--resume", "--seed", "1", "--out", str(tmp_path)]) == 2
    assert "with seed 1" in capsys.readouterr().err
    only(tmp_path, "*.checkpoint").write_bytes(b"no checkpoint at all")
    assert main(["digits-eps3-fast", "--resume", "--out", str(tmp_path)]) == 2
    assert ".checkpoint" in capsys.readouterr().err


# ---- several runs

def test_three_seeds_are_summed_up_and_composed(tmp_path, capsys):
    assert main(["digits-eps3-fast", "--seed", "0", "--seeds", "3", "--epochs", "1", "--out", str(tmp_path)]) == 0
    text, runs = capsys.readouterr().out, load_runs("digits-eps3-fast", tmp_path)
    assert [r[0]["seed"] for r in runs] == [0, 1, 2]
    mean, std = mean_std(100*r[-1]["test_accuracy"] for r in runs)
    assert f"3 runs: test accuracy {mean:.2f} +- {std:.2f} %" in text
    plan = make_plan(make_config("digits-eps3-fast", epochs=1), 1437)
    together = composed_epsilon([r[-1] for r in runs], plan)
    assert together > 3.5 and f"eps = {together:.3g} together" in text
    assert parse(["--seeds", "2", "--seed", "7"])[1]["seed"] == 8 and parse(["--seeds", "2"])[1]["seed"] is None


def test_the_committed_records_reach_what_is_promised():
    runs = load_runs("digits-eps3", Path(__file__).parent.parent/"runs")
    assert len(runs) >= 3 and len({r[0]["seed"] for r in runs}) == len(runs)
    for r in runs:
        config, end = r[0]["config"], r[-1]
        now = make_config("digits-eps3")
        assert {k: config[k] for k in ("eps", "delta", "batch_size", "epochs", "lr", "model")} == {
            k: getattr(now, k) for k in ("eps", "delta", "batch_size", "epochs", "lr", "model")}
        assert end["eps_pld"] <= 3 and end["tuning_runs"] == now.tuning_runs > 0
    assert mean_std(r[-1]["test_accuracy"] for r in runs)[0] >= .90


# ---- the real network on real images

def test_resnet20_takes_three_steps_on_real_cifar10(real, tmp_path):
    cifar = real("cifar10")
    c = replace(make_config("resnet20-eps3"), batch_size=8, micro_batch=16, views=2, epochs=3*8/2000, momentum=.9)
    data = replace(cifar, train_x=cifar.train_x[:2000], train_y=cifar.train_y[:2000], test_x=cifar.test_x[:64], test_y=cifar.test_y[:64])
    trainer = make_trainer(c, data, seed=0)
    for _ in range(3): trainer.step()
    assert len(cifar.train_x) == 50_000 and trainer.t == trainer.plan.steps == 3 and 0 < trainer.epsilon() <= 3
    assert all(p.isfinite().all() for p in trainer.model.parameters()) and 0 <= trainer.evaluate() <= 1
    save_checkpoint(trainer, tmp_path/"c")
    assert (tmp_path/"c").stat().st_size < 8e6 and len(list(tmp_path.iterdir())) == 1
