"What a disk, a kill, a second process or a stranger's file can do to a run, and what it says."
import errno
import json
import os
import pickle
import random
import signal
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import warm
from toys import Bomb, equal, finished_in, released

from dp_course.cli import Job, config_of, make_config, plot_record, tidy, train
from dp_course.cli.main import main
from dp_course.training import Record, Trainer, read_record, recorded, records

ROOT = Path(__file__).resolve().parents[2]
MINI = "digits-eps3-fast"


def quiet(**asked):
    "Run a miniature without a word."
    config = make_config(MINI, **asked.pop("config", {}))
    return train(Job(config, **asked), say=lambda text: None, show=False)


def complaint(capsys, *typed):
    "The one line with which the command refuses."
    assert main([*map(str, typed)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("dp-train: ") and err.count("\n") == 1, err
    return err


def rows_of(path):
    "What a record says about its epochs, and at its end, apart from seconds."
    keys = ("kind", "step", "eps", "eps_pld", "eps_rdp", "test_accuracy", "finished", "lr", "clip")
    kept = [line for line in read_record(path) if line["kind"] in ("epoch", "end")]
    return [{key: line.get(key) for key in keys} for line in kept]


@pytest.fixture
def cut_short(tmp_path):
    "A folder with a run that was stopped after three of its six steps."
    quiet(out=tmp_path, seed=0, steps=3)
    record, = tmp_path.glob("*.jsonl")
    return record


# --- files of strangers


def test_foreign_checkpoint_is_one_line_and_runs_nothing(cut_short, capsys):
    checkpoint = cut_short.with_suffix(".checkpoint")
    before = cut_short.read_bytes()
    checkpoint.write_bytes(pickle.dumps(Bomb(), 2))
    said = complaint(capsys, MINI, "--resume", "--out", cut_short.parent)
    assert checkpoint.name in said and "the one before it is" in said, said
    assert not Bomb.went_off
    assert cut_short.read_bytes() == before, "a refused run writes nothing"
    os.replace(f"{checkpoint}.prev", checkpoint)
    assert main([MINI, "--resume", "--out", str(cut_short.parent)]) == 0


def rewrite(path, *lines):
    "Write a record by hand, as an older version did: without checksums."
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def changed(line, **values):
    return {**line, **values}


STRANGE = {  # what the first line becomes, and a word that names it
    "a step of -5": (lambda line: changed(line, step=-5), "step '-5'"),
    "half a step": (lambda line: changed(line, step=1.5), "step '1.5'"),
    "a list": (lambda line: changed(line, plan=[3]), "plan '[3]'"),
    "no preset": (lambda line: {"kind": "start"}, "no preset"),
    "a list for eps": (lambda line: changed(line, config={**line["config"], "eps": [3]}), "eps"),
    "an unknown key": (lambda line: changed(line, config={**line["config"], "flux": 1}), "'flux'"),
    "a name for n": (lambda line: changed(line, plan={**line["plan"], "n": "all"}), "n 'all'"),
    "no plan": (lambda line: {k: v for k, v in line.items() if k != "config"}, "config"),
    "no first weights": (lambda line: {k: v for k, v in line.items() if k != "init_seed"},
                         "init_seed"),
}


def test_strange_record_is_one_line(cut_short, capsys):
    first, *rest = read_record(cut_short)
    for kind, (change, word) in STRANGE.items():
        rewrite(cut_short, change(first), *rest)
        said = complaint(capsys, MINI, "--resume", "--out", cut_short.parent)
        assert word in said, (kind, said)


def flip(raw, bit):
    copy = bytearray(raw)
    copy[bit//8] ^= 1 << bit % 8
    return bytes(copy)


def test_wrong_bits_of_a_record_are_refused(cut_short):
    raw = cut_short.read_bytes()
    bits = random.Random(0).sample(range(8*len(raw)), 150)
    for bit in [*bits, *range(8*len(raw) - 80, 8*len(raw))]:
        cut_short.write_bytes(flip(raw, bit))
        with pytest.raises(ValueError, match="0.jsonl, ") as said:
            read_record(cut_short)
        assert len(str(said.value).splitlines()) == 1
    with pytest.raises(ValueError, match="last line, is damaged"):
        Record(cut_short, resume=True)


@pytest.mark.slow
def test_wrong_bits_of_an_older_record_are_refused_or_read_but_never_another_error(cut_short):
    rewrite(cut_short, *read_record(cut_short))
    raw = cut_short.read_bytes()
    for bit in random.Random(0).sample(range(8*len(raw)), 300):
        cut_short.write_bytes(flip(raw, bit))
        for read in (plot_record, lambda path: recorded(path.parent),
                     lambda path: config_of(read_record(path))):
            try:
                read(cut_short)
            except ValueError as error:
                assert len(str(error).splitlines()) == 1
        plt.close("all")


def test_record_of_an_older_version_goes_on(cut_short):
    rewrite(cut_short, *read_record(cut_short))
    assert quiet(out=cut_short.parent, resume=True)["finished"]
    lines = read_record(cut_short)
    assert lines[-1]["finished"] and not any("check" in line for line in lines)
    whole = cut_short.read_text()
    cut_short.write_text('"chick"'.join(whole.rsplit('"check"', 1)))
    with pytest.raises(ValueError, match="lost its checksum"):
        read_record(cut_short)


def test_foreign_files_in_out_are_left_alone(cut_short, capsys):
    folder = cut_short.parent
    for name, raw in {"notes.jsonl": b"[1, 2]\n", "notes.checkpoint": b"hello", "x.txt": b"",
                      "lonely.checkpoint": b"", "photo.png": b"\x89PNG"}.items():
        (folder/name).write_bytes(raw)
    assert main([MINI, "--resume", "--out", str(folder)]) == 0
    capsys.readouterr()
    assert (folder/"notes.checkpoint").read_bytes() == b"hello"
    assert (folder/"lonely.checkpoint").exists()
    assert "nothing to resume" in complaint(capsys, MINI, "--resume", "--out", folder)


# --- disks


def test_full_disk_in_the_middle_of_a_run_is_one_line(tmp_path, monkeypatch, capsys):
    calm = quiet(out=tmp_path/"calm", seed=0)
    real, done = os.write, []

    def half(file, raw):
        done.append(len(raw))
        if sum(done) > 250_000:  # in the second epoch
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, raw[:1000])

    wild = tmp_path/"wild"
    monkeypatch.setattr(os, "write", half)
    said = complaint(capsys, MINI, "--seed", 0, "--out", wild)
    monkeypatch.undo()
    assert "No space left on device" in said and "digits-eps3-fast-0." in said
    assert not list(wild.glob("*.tmp"))
    record, = wild.glob("*.jsonl")
    assert read_record(record)[-1]["kind"] in ("start", "epoch")
    end = quiet(out=wild, resume=True)
    assert equal(released(end["paths"]["weights"]), released(calm["paths"]["weights"]))
    assert rows_of(record) == rows_of(calm["paths"]["record"])


def test_disk_that_is_full_from_the_start_leaves_nothing(tmp_path, monkeypatch, capsys):
    def never(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", never)
    said = complaint(capsys, MINI, "--out", tmp_path/"new")
    assert "No space left on device" in said
    assert not list((tmp_path/"new").iterdir())


def test_read_only_folder_is_one_line(tmp_path, monkeypatch, capsys):
    def refuse(path, *args, **more):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(records, "open", refuse, raising=False)
    said = complaint(capsys, MINI, "--out", tmp_path)
    assert os.strerror(errno.EROFS) in said and str(tmp_path) in said
    said = complaint(capsys, MINI, "--out", ROOT/"Makefile")  # a file where a folder should be
    assert "Makefile" in said


# --- two at once


def test_second_process_is_told_and_the_lock_goes_with_the_first(cut_short, capsys):
    ready, say = os.pipe()
    holder = os.fork()
    if not holder:
        record = Record(cut_short, resume=True)  # kept until the process is killed
        os.write(say, b"1")
        signal.pause()
        record.close()
    os.read(ready, 1)
    before = cut_short.read_bytes()
    try:
        said = complaint(capsys, MINI, "--resume", "--out", cut_short.parent)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    assert "being written by another process" in said and cut_short.name in said
    assert cut_short.read_bytes() == before
    assert main([MINI, "--resume", "--out", str(cut_short.parent)]) == 0
    assert read_record(cut_short)[-1]["finished"]


def test_a_run_goes_on_with_less_memory_but_repeats_no_step_with_it(cut_short, capsys):
    checkpoint, asked = cut_short.with_suffix(".checkpoint"), ["--out", str(cut_short.parent)]
    older = checkpoint.read_bytes()
    assert main([MINI, "--resume", "--steps", "4", *asked]) == 0
    newest = checkpoint.read_bytes()
    checkpoint.write_bytes(older)
    said = complaint(capsys, MINI, "--resume", "--micro-batch", "7", *asked)
    usual = make_config(MINI).micro_batch
    assert "are to be repeated" in said and f"pass --micro-batch {usual}" in said
    checkpoint.write_bytes(newest)
    assert main([MINI, "--resume", "--steps", "5", "--micro-batch", "7", *asked]) == 0
    assert main([MINI, "--resume", *asked]) == 0
    lines = read_record(cut_short)
    sizes = [line["micro_batch"] for line in lines if line["kind"] == "resume"]
    assert sizes == [usual, 7, 7] and lines[-1]["finished"] and lines[-1]["computed"] == 6


# --- the end of a run


def test_secret_left_by_a_kill_after_the_last_line_is_destroyed_at_the_next_start(tmp_path):
    calm = tmp_path/"calm"
    end = quiet(out=calm, seed=0)
    record = end["paths"]["record"]
    end["paths"]["figure"].unlink()
    names = [".checkpoint", ".checkpoint.prev", ".checkpoint.tmp", ".checkpoint.ledger"]
    for name in names:
        record.with_suffix(name).write_bytes(b"a secret")
    assert tidy(calm) == [record.with_suffix(".checkpoint")]
    assert {p.suffix for p in calm.iterdir()} == {".jsonl", ".png", ".pt"}
    record.with_suffix(".checkpoint.prev").write_bytes(b"a secret")  # killed between two removals
    quiet(out=calm, seed=1, steps=1)
    assert not list(calm.glob("*-0.checkpoint*")) and list(calm.glob("*-1.checkpoint"))


def test_tidying_leaves_unfinished_and_busy_runs_alone(cut_short):
    folder = cut_short.parent
    before = sorted(folder.iterdir())
    assert tidy(folder) == [] and sorted(folder.iterdir()) == before
    *lines, end = read_record(cut_short)
    rewrite(cut_short, *lines, changed(end, finished=True))
    assert read_record(cut_short)[-1]["finished"]
    busy = Record(cut_short, resume=True)
    assert tidy(folder) == [] and cut_short.with_suffix(".checkpoint").exists()
    busy.close()
    assert tidy(folder) and not cut_short.with_suffix(".checkpoint").exists()
    assert tidy(folder/"nowhere") == []


# --- kills


def doomed(argv, moment, log):
    "Run the command, and die at the `moment`-th write, rename, removal or step: half a write done."
    ticks = [0]

    def tick(name):
        ticks[0] += 1
        if ticks[0] == moment:
            real["write"](log_file, f"{name}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return ticks[0] + 1 == moment

    names = ("write", "fsync", "replace", "link", "unlink")
    real = {name: getattr(os, name) for name in names}
    log_file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def wrapped(name):
        def function(*args, **more):
            if tick(name) and name == "write":  # the next tick is the last one
                real["write"](args[0], args[1][:len(args[1])//2])
                tick("half a write")
            return real[name](*args, **more)
        return function

    for name in names:
        setattr(os, name, wrapped(name))
    step = Trainer._private_step

    def private_step(self):
        tick(f"before step {self.t}")
        paid = step(self)
        tick(f"after step {self.t - 1}")
        return paid

    Trainer._private_step = private_step
    if moment is None:
        main(argv)
        real["write"](log_file, f"{ticks[0]} ticks\n".encode())
    else:
        main(argv)


def begin(server, out, moment, log):
    "Start the run in `out`, or go on with it; returns its exit code."
    more = ["--resume"] if list(out.glob("*.checkpoint")) else ["--seed", "5"]
    typed = [MINI, "--ema", ".9", "--views", "2", *more, "--out", str(out)]
    child = server.Process(target=doomed, args=(typed, moment, str(log)))
    child.start()
    child.join()
    return child.exitcode


def check_survivor(calm, wild):
    "Compare with a run that nobody touched."
    record, = finished_in(wild)
    reference, = finished_in(calm)
    weights = [path.with_suffix(".release.pt") for path in (record, reference)]
    assert equal(*map(released, weights))
    assert rows_of(record)[-1] == rows_of(reference)[-1]
    got, wanted = ([row for row in rows_of(path) if row["kind"] == "epoch"]
                   for path in (record, reference))
    assert got == wanted, "every epoch once, with the same numbers"
    tidy(wild)
    assert not list(wild.glob(record.stem + ".checkpoint*")), "the secret of a finished run"


def survive(tmp_path, kills, seed):
    "Kill runs at random moments until so many are dead, and compare each with a calm one."
    rng = random.Random(seed)
    server = warm.server()
    calm, log = tmp_path/"calm", tmp_path/"log"
    assert begin(server, calm, None, log) == 0
    total = int(log.read_text().split()[0])
    dead, folder = 0, 0
    while dead < kills:
        wild = tmp_path/f"wild{folder}"
        code = begin(server, wild, rng.randint(1, total), log)
        dead += code == -signal.SIGKILL
        if finished_in(wild):
            check_survivor(calm, wild)
            folder += 1
    if not finished_in(wild):
        begin(server, wild, None, log)
        check_survivor(calm, wild)
    return log.read_text().splitlines()


@pytest.mark.slow
def test_twenty_kills_at_any_system_call_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    died_at = survive(tmp_path, 20, seed=1)
    assert {"write", "half a write"} & set(died_at) and len(set(died_at)) > 4, died_at


# --- what is not private


def test_accuracy_on_private_examples_is_called_nonprivate(tmp_path, capsys):
    assert main([MINI, "--n-val", "200", "--out", str(tmp_path), "--seed", "0"]) == 0
    text = capsys.readouterr().out
    start, *rows, end = read_record(*tmp_path.glob("*.jsonl"))
    note = "validation accuracy, exact, on 200 held-out private images: outside the guarantee"
    assert all(row["nonprivate"] == note for row in rows) and end["nonprivate"] == note
    assert note in end["statement"] and note in text
    assert "test accuracy" not in text and text.count("nonprivate") >= 3
