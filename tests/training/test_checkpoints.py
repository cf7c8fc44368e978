"A run that is killed goes on to the bit, and a file is all there or not there."
import errno
import os
import pickle
import resource
import select
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from toys import Bomb, Plan, equal, same, trainer

from dp_course.gradients import AdaptiveClip
from dp_course.training import EMA, Journal, load_checked, save_atomic


def run(seed=7, lr=.5):
    return trainer(Plan(12, 4, 8, .7), seed=seed, clip=AdaptiveClip(4., bit_sigma=5.),
                   optimizer=partial(torch.optim.SGD, lr=lr, momentum=.9),
                   callbacks=[EMA(.7), lambda run: None])


def weights_of(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def test_resumed_run_is_bit_identical(tmp_path):
    whole = run().fit()
    first = run().fit(3)
    first.save(tmp_path/"c")
    rest = run(lr=99.)
    torch.manual_seed(123)
    rest.load(tmp_path/"c")
    assert rest.t == rest.computed == 3
    rest.fit()
    assert same(rest.model, whole.model) and rest.clip == whole.clip
    assert rest.t == rest.computed == 8
    for k, v in whole.callbacks[0].weights.items():
        assert torch.equal(rest.callbacks[0].weights[k], v)
    assert first.fit().load(tmp_path/"c").computed == 8 and first.t == 3
    again = first.fit()  # back in time in one process: the same steps, not charged twice
    assert same(again.model, whole.model) and again.computed == 8


def test_ledger_holds_steps_with_other_randomness(tmp_path):
    run(seed=7).fit(5).save(tmp_path/"c")
    other = run(seed=8).load(tmp_path/"c")
    assert other.t == other.computed == 5
    with pytest.raises(ValueError, match="not paid"):
        other.fit(4)
    assert other.computed == 8 and not same(other.model, run(seed=7).fit().model)
    run(seed=7).fit(5).save(tmp_path/"c")  # anew
    mine = run(seed=8).fit(2).load(tmp_path/"c")  # two steps of its own before
    assert mine.computed == 7 and mine.left() == 1
    assert mine.accountant.history[0][2] == 7
    mine.step()
    with pytest.raises(ValueError, match="step 9"):
        mine.step()
    assert run(seed=7).load(tmp_path/"c").computed == 8  # it stands in the file beside
    mine.save(tmp_path/"d")
    assert run(seed=8).load(tmp_path/"d").computed == 8
    assert run(seed=None).load(tmp_path/"d").seed_policy.startswith("reproducible")


def test_a_new_seed_never_repeats_noise_that_it_has_used(tmp_path):
    run(seed=7).fit(1).save(tmp_path/"c")
    a = run(seed=8).fit(2)  # its step 1 had other weights before it
    used = a.model.weight.grad.clone()
    a.load(tmp_path/"c").step()
    fresh = run(seed=8).load(tmp_path/"c").step()
    assert torch.equal(a.model.weight, fresh.model.weight)  # repeatable
    assert not torch.equal(used, a.model.weight.grad)


def test_a_secret_seed_is_in_the_checkpoint_alone_and_goes_on(tmp_path):
    a = run(seed=None).fit(3)
    a.save(tmp_path/"c")
    a.release(tmp_path/"r")
    b = run(seed=None).load(tmp_path/"c")
    assert same(a.fit().model, b.fit().model) and b.seed_policy == "secret"
    assert (tmp_path/"c").stat().st_mode & 0o077 == 0
    found = {p.name for p in tmp_path.iterdir() if a._seed.encode() in p.read_bytes()}
    assert found == {"c"}


def with_a_wrong_bit(raw):
    middle = len(raw)//2
    return raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1:]


@pytest.mark.parametrize("kind", ["cut", "bit", "text", "empty", "pickle", "other"])
def test_bad_checkpoint_is_named_and_the_one_before_loads(tmp_path, kind):
    path, first = tmp_path/"run.checkpoint", run().fit(2)
    first.save(path)
    first.step().save(path)
    raw = path.read_bytes()
    broken = {"cut": raw[:len(raw)*2//3], "bit": with_a_wrong_bit(raw), "text": b"hello",
              "empty": b"", "pickle": pickle.dumps(Bomb(), 2)}
    if kind == "other":
        torch.save({"weights": torch.zeros(2)}, path)
    else:
        path.write_bytes(broken[kind])
    fresh = run()
    before = weights_of(fresh.model)
    message = "run.checkpoint .*the one before it is .*run.checkpoint.prev"
    with pytest.raises(ValueError, match=message):
        fresh.load(path)
    assert fresh.t == 0 and equal(fresh.model.state_dict(), before)
    assert fresh.load(f"{path}.prev").t == 2 and not Bomb.went_off
    with pytest.raises(FileNotFoundError, match="there is no"):
        fresh.load(tmp_path/"nothing")


@pytest.mark.parametrize("where", ["fsync", "replace", "link"])
def test_crash_while_saving_leaves_the_old_checkpoint(tmp_path, monkeypatch, where):
    path, first = tmp_path/"c", run().fit(2)
    first.save(path)
    first.step()

    def crash(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, where, crash)
    with pytest.raises(KeyboardInterrupt):
        first.save(path)
    monkeypatch.undo()
    assert run().load(path).t == 2
    first.save(path)
    assert run().load(path).t == 3


def test_state_that_would_not_load_is_not_written(tmp_path):
    save_atomic({"kind": "x", "v": 1}, tmp_path/"c")
    with pytest.raises(ValueError, match="not written"):
        save_atomic({"kind": "x", "v": Bomb()}, tmp_path/"c")
    assert load_checked(tmp_path/"c", "x")["v"] == 1 and not Bomb.went_off
    with pytest.raises(ValueError, match="not a y"):
        load_checked(tmp_path/"c", "y")


# --- wrong bits, full disks


def in_child(work, *args):
    "Run `work` in a forked process; returns it, and the file to which it may say something."
    out, into = os.pipe()
    child = os.fork()
    if child:
        os.close(into)
        return child, open(out)
    try:
        os.close(out)
        with open(into, "w") as say:
            work(say, *args)
    finally:
        os._exit(0)


def on_a_full_disk(size, work, *args):
    "What a process says that may write no file longer than `size` bytes."
    def limited(say):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        try:
            work(*args)
        except OSError as error:
            say.write(str(error))

    child, said = in_child(limited)
    text = said.read()
    os.waitpid(child, 0)
    return text


def test_full_disk_is_one_error_and_the_last_checkpoint_is_good(tmp_path):
    path = tmp_path/"run.checkpoint"
    save_atomic({"kind": "x", "v": 1}, path)
    said = on_a_full_disk(20_000, save_atomic, {"kind": "x", "v": torch.zeros(10_000)}, path)
    assert "run.checkpoint" in said and len(said.splitlines()) == 1
    assert load_checked(path, "x")["v"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run.checkpoint"]  # no half file, no .prev


def test_disk_that_gives_back_other_bytes_is_noticed(tmp_path, monkeypatch):
    save_atomic({"kind": "x", "v": 1}, tmp_path/"c")
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: real(path)[:-1] + b"?")
    with pytest.raises(OSError, match="gives back something else"):
        save_atomic({"kind": "x", "v": 2}, tmp_path/"c")
    monkeypatch.undo()
    assert load_checked(tmp_path/"c", "x")["v"] == 1


# --- a copy of the process


def spend(say, run):
    "Try everything that spends or writes down what is spent."
    looks = dict(sensitivity=1., sigma=1.)
    for act in (run.step, partial(run.noisy, "mean", 1., **looks), partial(run.save, "c"),
                partial(run.budget.post, "elsewhere", sigma=1.)):
        try:
            act()
            print("spent", file=say)
        except ValueError as error:
            print(error, file=say)


@pytest.mark.parametrize("saved", [False, True])
def test_a_fork_cannot_spend_what_the_first_process_spends(tmp_path, monkeypatch, saved):
    monkeypatch.chdir(tmp_path)
    first = run(seed=None).fit(2)
    if saved:
        first.save("c")
    child, said = in_child(spend, first)
    lines = said.read().splitlines()
    os.waitpid(child, 0)
    refusal = f"this run belongs to process {os.getpid()}, and this is process {child}: "
    assert len(lines) == 4 and all(line.startswith(refusal) for line in lines)
    assert "save a checkpoint there" in lines[0]
    assert first.fit().computed == 8 and first.budget.posts.keys() == {"training steps"}


# --- the ledger


def ledger(folder, *entries):
    "A journal of a checkpoint that need not be there, and its file."
    journal = Journal.start(folder/"run", entries)
    return journal, journal.path


def test_journal_keeps_what_was_appended(tmp_path):
    journal, path = ledger(tmp_path, "step 0 é")
    assert path == tmp_path/"run.ledger" and path.stat().st_mode & 0o777 == 0o600
    assert journal.append("step 1") == [] and journal.append("") == []
    assert Journal(tmp_path/"run").entries() == ["step 0 é", "step 1", ""]
    assert Journal(tmp_path/"run.prev").entries() == ["step 0 é", "step 1", ""]
    assert Journal(tmp_path/"run").append("step 2") == ["step 0 é", "step 1", ""]  # never looked
    with pytest.raises(ValueError, match="one line"):
        journal.append("two\nlines")
    assert journal.entries()[-1] == "step 2"


def test_torn_last_line_is_dropped_and_cut_off(tmp_path):
    journal, path = ledger(tmp_path, "step 0", "step 1")
    whole = path.read_bytes()
    last = whole.rfind(b"\n", 0, -1) + 1
    for cut in range(last, len(whole)):  # a kill anywhere in the last line
        path.write_bytes(whole[:cut])
        assert Journal(tmp_path/"run").entries() == ["step 0"]
    assert Journal(tmp_path/"run").append("") == ["step 0"]  # shorter than what it replaces
    assert Journal(tmp_path/"run").entries() == ["step 0", ""]
    assert path.read_bytes().endswith(b"\n")  # nothing of the old line is left behind the new one


def test_lines_that_are_lost_moved_or_foreign_are_refused(tmp_path):
    journal, path = ledger(tmp_path, "step 0", "step 1", "step 2")
    head, *lines = path.read_bytes().splitlines(keepends=True)
    broken = {"lost": [head, lines[0], lines[2]], "moved": [head, lines[1], lines[0], lines[2]],
              "twice": [head, lines[0], lines[0]], "beheaded": lines, "empty": [],
              "foreign": [b"hello\n"], "binary": [b"\x80\x02}q\x00.\n"], "cut": [head[:9]],
              "bit": [head, with_a_wrong_bit(lines[0])], "no end": [head, lines[0][:-1] + b"?"]}
    for pieces in broken.values():
        path.write_bytes(b"".join(pieces))
        with pytest.raises(ValueError, match="run.ledger"):
            Journal(tmp_path/"run").entries()


def test_failed_append_is_not_in_the_file(tmp_path, monkeypatch):
    journal, path = ledger(tmp_path, "step 0")
    whole, real = path.read_bytes(), os.write

    def half(file, raw):
        if len(raw) < 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, raw[:5])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space left on device.*run.ledger"):
        journal.append("step 1")
    monkeypatch.undo()
    assert path.read_bytes() == whole
    assert "run.ledger" in on_a_full_disk(len(whole) + 20, journal.append, "step 1, and more")
    assert path.read_bytes() == whole
    assert journal.append("step 1") == [] and journal.entries() == ["step 0", "step 1"]


def test_ledger_that_was_replaced_is_read_from_its_start(tmp_path):
    journal, path = ledger(tmp_path, "step 0")
    journal.append("step 1")
    other = Journal.start(tmp_path/"run", ["step 0", "step 1", "step 7"])
    assert journal.append("step 2") == ["step 0", "step 1", "step 7"]
    assert other.append("step 3") == ["step 2"]
    path.write_bytes(path.read_bytes()[:60])  # shorter than what we know
    with pytest.raises(ValueError, match="run.ledger"):
        other.append("step 4")


def write_lines(say, path, name):
    "Append 150 entries, and say what the ledger holds as far as we know."
    journal = Journal(path)
    known = journal.entries()
    for t in range(150):
        known += journal.append(f"{name} {t}") + [f"{name} {t}"]
    say.write("\n".join(known))


def test_three_writers_at_once_lose_nothing_and_see_each_other(tmp_path):
    journal, path = ledger(tmp_path)
    writers = [in_child(write_lines, tmp_path/"run", name) for name in "abc"]
    seen = [said.read().splitlines() for _, said in writers]
    for child, _ in writers:
        os.waitpid(child, 0)
    entries = journal.entries()
    assert sorted(entries) == sorted(f"{name} {t}" for name in "abc" for t in range(150))
    for name, known in zip("abc", seen):
        mine = [entry for entry in entries if entry.startswith(name)]
        assert mine == [f"{name} {t}" for t in range(150)]
        assert known == entries[:len(known)] and known[-1] == f"{name} 149"


def hold(say, journal):
    "Keep a ledger locked until the process is killed."
    with journal._open("r+b"):
        print("locked", file=say, flush=True)
        signal.pause()


def test_who_waited_writes_into_the_ledger_that_is_there_now(tmp_path):
    journal, path = ledger(tmp_path, "step 0")
    holder, said = in_child(hold, journal)
    said.readline()
    waits, _ = in_child(lambda say: journal.append("x"))
    select.select([], [], [], .3)
    assert os.waitpid(waits, os.WNOHANG) == (0, 0)  # still waiting
    Journal.start(tmp_path/"other", ["step 0", "step 1"])
    os.replace(tmp_path/"other.ledger", path)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    os.waitpid(waits, 0)
    assert journal.entries() == ["step 0", "step 1", "x"]
