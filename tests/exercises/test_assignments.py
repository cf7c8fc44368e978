"""The assignments can be taught with: solutions pass, blanks get nothing, mistakes are named,
copies hold no answer, and a submission can harm nobody but itself.

What needs nbgrader takes minutes: make test-teach installs it and runs everything; make test
skips it, with one line, whether nbgrader is there or not.
"""
import base64
import html
import html.parser
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import OrderedDict, namedtuple
from dataclasses import replace
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from functools import partial
from pathlib import Path

import nbformat
import pytest
import torch

from dp_course.cli import make_config
from dp_course.exercises import cards as exercises

ROOT = Path(__file__).resolve().parents[2]
for folder in ("assignments", "tools", "tests"):
    sys.path.insert(0, str(ROOT/folder))

import answers  # noqa: E402
import assign  # noqa: E402
import grade  # noqa: E402
import grade_box  # noqa: E402
import grade_sandbox  # noqa: E402
import grade_student  # noqa: E402
import grade_table  # noqa: E402
import leaderboard  # noqa: E402
import wrong_handins  # noqa: E402
from checks import SEED, a1, a2, a3, a4, a5, points  # noqa: E402

CHECKS = dict(a1=a1, a2=a2, a3=a3, a4=a4, a5=a5)
pytestmark = pytest.mark.usefixtures("nothing_remembered")
SLOWLY = pytest.mark.skipif("DP_COURSE_SLOW" not in os.environ, reason="make test-teach runs it")
needs_nbgrader = pytest.mark.skipif(
    not importlib.util.find_spec("nbgrader") or "DP_COURSE_SLOW" not in os.environ,
    reason="minutes, and nbgrader: make test-teach installs and runs it")
needs_box = pytest.mark.skipif(
    bool(grade_box.missing()), reason="bubblewrap, libseccomp or pyseccomp is missing here")


# --- the questions


def cells(name):
    return nbformat.read(ROOT/f"assignments/{name}.ipynb", 4).cells


def told(cell):
    return cell.metadata.get("nbgrader", {})


def by_hand(cell):
    return told(cell).get("grade") and told(cell).get("solution")


def questions():
    "(assignment, check, name of the function, source of its answer), in order."
    for name in CHECKS:
        answer = None
        for cell in cells(name):
            if by_hand(cell):
                continue
            if told(cell).get("solution"):
                answer = cell.source
            if told(cell).get("grade"):
                check, function = re.search(r"\.(check_\w+)\((\w+|\"\w+\")", cell.source).groups()
                if not function.startswith('"'):
                    yield name, check, function, answer


ASKED = {check: (name, function, answer) for name, check, function, answer in questions()}


@pytest.fixture(scope="module")
def spaces():
    "What every notebook defines, solutions included; the checks, for wrong answers."
    found = {}
    for name in CHECKS:
        space = dict(CHECKS)
        for cell in cells(name):
            if cell.cell_type == "code" and not told(cell).get("grade"):
                exec(cell.source, space)
        found[name] = space
    return found


def verdict(check, code, spaces, seed=SEED):
    name, function, _ = ASKED[check]
    space = dict(spaces[name], NOISE=spaces["a4"]["noise"], VERDICT=spaces["a4"]["verdict"])
    exec(code, space)
    return getattr(CHECKS[name], check)(space[function], seed)


def test_there_are_five_with_a_plot_and_a_paragraph_in_each():
    assert assign.names() == list(CHECKS)
    for name in CHECKS:
        graded = [told(c) for c in cells(name) if told(c).get("grade")]
        assert len(graded) >= 6 and sum(cell["points"] for cell in graded) == 20
        assert [c.cell_type for c in cells(name) if by_hand(c)] == ["code", "markdown"]
        assert len({cell["grade_id"] for cell in graded}) == len(graded)
        assert re.search(r"\d+-\d+ minutes", cells(name)[0].source)


@pytest.mark.quick(7)
@pytest.mark.parametrize("check", [pytest.param(check, marks=[SLOWLY]*(
    check in wrong_handins.SLOW - {"check_coins"})) for check in ASKED])
def test_a_solution_gets_full_marks(check, spaces):
    answer = ASKED[check][2]
    for seed in (SEED,) if check in wrong_handins.SLOW else (SEED, 1):
        card = verdict(check, answer, spaces, seed)
        assert card.solved, card
    assert points(card, 4) == 4.


@pytest.mark.quick(7)
@pytest.mark.parametrize("check", ASKED)
def test_a_blank_gets_nothing(check, spaces):
    name = ASKED[check][1]
    for blank in ("...", "return NotImplemented", "pass", "raise NotImplementedError"):
        card = verdict(check, f"def {name}(*args):\n    {blank}", spaces)
        assert not card.attempted and points(card, 4) == 0.


ROWS = [pytest.param(check, words, marks=[SLOWLY]*(check in wrong_handins.SLOW))
        for check, wrong in wrong_handins.WRONG.items() for words in wrong]


def test_every_question_has_three_wrong_answers():
    wrong = {check: [*wrong_handins.WRONG.get(check, ()), *wrong_handins.LEAKS.get(check, ())]
             for check in ASKED}
    assert all(len(answers) >= 3 for answers in wrong.values())
    assert set(wrong_handins.WRONG) | set(wrong_handins.LEAKS) == set(ASKED)


@pytest.mark.quick(20)
@pytest.mark.parametrize("check,words", ROWS)
def test_a_typical_mistake_gets_the_hint_meant_for_it(check, words, spaces):
    code = wrong_handins.named(wrong_handins.WRONG[check][words], ASKED[check][1])
    card = verdict(check, code, spaces)
    assert not card.solved and points(card, 4) < 4
    assert words in card.why, card
    assert card.hints


LOOKS_AT_NOTHING = """return 0.; return 1.; return math.inf; return True; return args[0];
return "nothing"; return "noise"; return "sensitivity"; return "sampling"; return False;
return [True]*len(args[0]);
return [False]*len(args[0]); raise ValueError; return torch.zeros(args[0].shape[1:]);
return torch.zeros_like(args[0]), torch.zeros_like(args[1]);
return torch.zeros(args[2], args[0].shape[1]), torch.zeros(args[2])""".replace("\n", " ")


@pytest.mark.parametrize("check", [pytest.param(check, marks=[SLOWLY]*(
    check in wrong_handins.SLOW)) for check in ASKED])
def test_an_answer_that_looks_at_nothing_earns_nothing(check, spaces):
    "Neither for being safe nor for being right by accident."
    for code in LOOKS_AT_NOTHING.split("; "):
        card = verdict(check, f"def {ASKED[check][1]}(*args):\n    {code}", spaces)
        assert points(card, 4) == 0, (code, card)


MANY = 9  # of some forty answers that train networks
LEAKS = [pytest.param(check, what, marks=[SLOWLY]*(check in wrong_handins.SLOW or turn > MANY))
         for check, wrong in wrong_handins.LEAKS.items() for turn, what in enumerate(wrong)]


@pytest.mark.quick(20)
@pytest.mark.parametrize("check,what", LEAKS)
def test_an_answer_that_breaks_privacy_earns_half_at_most(check, what, spaces):
    words, text = wrong_handins.LEAKS[check][what]
    card = verdict(check, wrong_handins.named(text, ASKED[check][1]), spaces)
    assert card.leaks and points(card, 4) <= 2, card
    assert words in card.why, card


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hundreds_of_wrong_answers_and_unusual_right_ones(all_of_them, spaces):
    "Wrong ones are refused in words, those that break privacy earn half at most, right ones all."
    def judge(check, code):
        return verdict(check, answers.named(code, ASKED[check][1]), spaces)
    assert not list(answers.complaints(ASKED, judge, all_of_them))


def test_zeros_of_the_usual_type_are_a_right_start(spaces):
    "What works on the images that a student sees works on the hidden cases."
    assert verdict("check_train", wrong_handins.TRAIN, spaces).solved


def test_a_float32_sampler_keeps_its_point(spaces):
    "Draws that are not bit-identical to ours are right if their distribution is."
    code = ("def noisy_sum(values, high, eps, generator):\n"
            "    sign = 2*torch.randint(2, (), generator=generator) - 1\n"
            "    size = torch.empty(()).exponential_(eps/high, generator=generator)\n"
            "    return values.float().clamp(0, high).sum() + sign*size")
    assert verdict("check_noisy_sum", code, spaces).solved


# --- the leaderboard


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    "A submission as A5 asks for it."
    folder = tmp_path_factory.mktemp("a5")/"submission"
    leaderboard.hand_in(make_config("digits-eps3"), folder)
    return folder


@pytest.fixture
def changed(honest, tmp_path):
    return shutil.copytree(honest, tmp_path/"changed")


def refusals(folder):
    return " ".join(why for _, why in leaderboard.findings(folder) if why)


def reseal(folder, change):
    "Edit a record as somebody would who knows how its checksums are made."
    from dp_course.training.records import _sealed
    lines = []
    for text in (folder/"record.jsonl").read_text().splitlines():
        line = json.loads(text)
        del line["check"]
        change(line)
        lines.append(_sealed(json.dumps(line)))
    (folder/"record.jsonl").write_text("\n".join(lines) + "\n")


def test_an_honest_submission_stands(honest):
    assert refusals(honest) == ""
    assert leaderboard.standing(honest) > .85
    assert a5.check_submission(honest).solved
    assert a5.check_standing(honest).score[0] >= 1


def test_the_settings_that_are_handed_out_earn_nothing(tmp_path):
    "Eight of eight seeds ended between 81.9 and 86.9 %, standard deviation 1.7 %: 90 % is far."
    space = {}
    cell = next(cell for cell in cells("a5") if cell.source.startswith("config = "))
    exec(f"from dp_course.cli import Config\n{cell.source}", space)
    leaderboard.hand_in(space["config"], tmp_path/"s")
    assert refusals(tmp_path/"s") == ""
    assert points(a5.check_submission(tmp_path/"s"), 4) == 0
    assert points(a5.check_standing(tmp_path/"s"), 4) == 0


def test_the_tiers_are_what_recorded_runs_have_reached():
    "The last three: the worst, the mean and the best run, rounded down."
    ends = [json.loads(path.read_text().splitlines()[-1])["test_accuracy"]
            for path in sorted((ROOT/"runs").glob("*-digits-eps3-[0-9].jsonl"))]
    spread = min(ends), sum(ends)/len(ends), max(ends)
    assert len(ends) == 3
    assert leaderboard.DATA["digits"][2:] == tuple(math.floor(1000*a)/1000 for a in spread)


@pytest.mark.slow
def test_a_run_that_stays_where_it_began_stands(tmp_path):
    leaderboard.hand_in(replace(make_config("digits-eps3"), epochs=.5, lr=0.), tmp_path/"s")
    assert refusals(tmp_path/"s") == ""


def test_over_budget_is_refused_with_the_numbers(tmp_path):
    leaderboard.hand_in(replace(make_config("digits-eps3"), eps=5., epochs=3.), tmp_path/"s")
    assert re.search(r"they spend eps = 4.99\d? at delta = 1e-05: 3 is allowed|eps = 5 ",
                     refusals(tmp_path/"s"))
    assert leaderboard.standing(tmp_path/"s") == 0
    assert a5.check_submission(tmp_path/"s").score == (0, 1)


def test_an_edited_record_is_refused(changed):
    text = (changed/"record.jsonl").read_text()
    (changed/"record.jsonl").write_text(text.replace('"lr": 0.4', '"lr": 0.5', 1))
    assert "its checksum is another" in refusals(changed)
    assert a5.judged(changed)[0].count("checksum") == 1


@pytest.mark.parametrize("kind, change, words", [
    ("end", lambda line: line.update(test_accuracy=.99),
     "the record says 99.00%, the run repeated from its seed recognizes 9"),
    ("start", lambda line: line["plan"].update(sigma=2*line["plan"]["sigma"]),
     "forged: sigma is 4.44998 in the record, 2.22499 in the checkpoint")])
def test_a_forged_number_is_refused_with_the_true_one(changed, kind, change, words):
    reseal(changed, lambda line: line["kind"] == kind and change(line))
    assert words in refusals(changed)


def test_a_record_of_another_run_is_refused(changed):
    "Also one with the same settings, which says nearly the same."
    def change(line):
        if line["kind"] == "start":
            line["stream"] = "0"*len(line["stream"])
    reseal(changed, change)
    assert refusals(changed) == "forged: the record is that of another run"


def test_a_ledger_that_was_cut_is_refused(changed):
    "At the end of a line, so that every line is whole."
    path = changed/"checkpoint.ledger"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-5]))
    assert refusals(changed) == ("forged: the ledger lacks 5 of the 72 entries that the checkpoint "
                                 "was written with: it was cut or edited")


def test_a_run_without_privacy_and_without_a_ledger_is_refused(changed):
    "Nothing is spent where nothing is written; once a TypeError stood between it and the table."
    from dp_course.training import save_atomic

    def change(line):
        line.update({key: None for key in line if key.startswith("eps")})
        if line["kind"] == "start":
            line["config"]["eps"] = line["plan"]["eps"] = None
            line["plan"]["sigma"] = 0.
        else:
            line["step"] = line["computed"] = 0
    reseal(changed, change)
    state = leaderboard.Submission.read(changed).state
    state["book"]["entries"], state["counts"] = [], [0, *state["counts"][1:]]
    save_atomic(state, changed/"checkpoint")
    lines = (changed/"checkpoint.ledger").read_bytes().splitlines(keepends=True)
    (changed/"checkpoint.ledger").write_bytes(b"".join(lines[:-72]))
    said = refusals(changed)
    assert "eps is inf, at most 3 is allowed" in said
    assert "the run takes step 0, and the ledger does not have it" in said


def with_weights(folder, by):
    "Move the released weights by normal numbers of some size."
    from dp_course.training import save_atomic
    release = leaderboard.Submission.read(folder).release
    weights = {name: value + by*torch.randn(value.shape)
               for name, value in release["weights"].items()}
    save_atomic({**release, "weights": weights}, folder/"model.pt")


@pytest.mark.parametrize("by", [.02, 1e-4])
def test_another_model_is_refused(changed, by):
    "Also one that was tuned on the test part by a thousandth of its way."
    with_weights(changed, by)
    assert "of its way from the model that was released" in refusals(changed)


def test_the_weights_that_are_graded_are_the_graders(changed, honest):
    "Weights that differ by what rounding explains pass, and earn what the repeated run earns."
    with_weights(changed, 1e-9)
    assert leaderboard.standing(changed) == leaderboard.standing(honest)
    it = leaderboard._verified(str(changed))[1]
    assert leaderboard._distance(it.replay.weights, it.release["weights"]) > 0
    it.release["weights"] = dict.fromkeys(it.release["weights"], torch.zeros(()))
    assert leaderboard.accuracy(it.graded) == leaderboard.standing(honest)


ELSEWHERE = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
import leaderboard
from dp_course.cli import make_config
torch.set_num_threads(int(sys.argv[3]))
leaderboard.hand_in(make_config("digits-eps3"), sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind,threads", [("avx2", 1), (None, 2)])
def test_a_run_of_another_processor_stands(tmp_path, kind, threads):
    "It rounds otherwise, so its noise is another: the ledger says which."
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if kind:
        usual = torch.backends.cpu.get_cpu_capability()
        env["ATEN_CPU_CAPABILITY"] = kind if usual == "AVX512" else "default"
    subprocess.run([sys.executable, "-c", ELSEWHERE, ROOT/"assignments", tmp_path/"s",
                    str(threads)], env=env, check=True)
    assert refusals(tmp_path/"s") == ""
    it = leaderboard._verified(str(tmp_path/"s"))[1]
    if it.replay.exact:
        pytest.skip("this machine rounds the same way with both")


def test_noise_that_was_chosen_is_refused(tmp_path, monkeypatch):
    "Whoever writes the digests names the noise: the best of a few in every step goes his way."
    prepared = leaderboard._prepared

    def choosing(config, seed=None):
        trainer = prepared(config, seed)
        own = trainer._step_entry

        def along(entry, total):
            noise = trainer._noise(entry)
            return sum((leaderboard.normal(g.shape, noise)*g).sum() for g in total.values())

        def chosen(total, norms, std, batch):
            entry = own(total, norms, std, batch)
            tries = [entry._replace(digest=f"{i:032x}") for i in range(4)]
            return max(tries, key=lambda entry: along(entry, total))
        trainer._step_entry = chosen
        return trainer
    monkeypatch.setattr(leaderboard, "_prepared", choosing)
    leaderboard.hand_in(make_config("digits-eps3"), tmp_path/"s")
    monkeypatch.undo()
    assert "the digests name noise that goes the model's way" in refusals(tmp_path/"s")


def with_other_digests(prepared, config, seed=None):
    "A trainer whose noise is named by whoever writes the ledger."
    trainer = prepared(config, seed)
    own = trainer._step_entry

    def named(*parts):
        entry = own(*parts)
        return entry._replace(digest=f"{entry.t:032x}")
    trainer._step_entry = named
    return trainer


def test_noise_that_was_named_is_not_graded(tmp_path, monkeypatch):
    "No gradient shows where chosen noise goes: four last steps brought a point on the test part."
    prepared, config = leaderboard._prepared, replace(make_config("digits-eps3"), epochs=3.)
    monkeypatch.setattr(leaderboard, "_prepared", partial(with_other_digests, prepared))
    leaderboard.hand_in(config, tmp_path/"s")
    monkeypatch.undo()
    assert refusals(tmp_path/"s") == ""
    it = leaderboard._verified(str(tmp_path/"s"))[1]
    own = prepared(config, it.state["seed"][0]).fit()
    assert leaderboard._distance(leaderboard._ended(own), it.release["weights"]) > 1e-2
    monkeypatch.setattr(type(own), "evaluate", lambda trainer: [
        p.detach().clone() for p in trainer.model.parameters()])
    assert all(map(torch.equal, own.evaluate(), leaderboard.standing(tmp_path/"s")))


def test_a_batch_that_was_chosen_is_refused(changed):
    "The second batch of a step is for runs that were changed; an honest ledger has the first."
    from dp_course.training import save_atomic
    state = leaderboard.Submission.read(changed).state
    entries = [[*e[:3], e[3][:-1] + "1", *e[4:]] if e[4] == 7 else e
               for e in state["book"]["entries"]]
    state["book"]["entries"] = entries
    save_atomic(state, changed/"checkpoint")
    lines = (changed/"checkpoint.ledger").read_text()
    assert "re-seeded: 1 steps were drawn again, and 1 from streams" in refusals(changed), lines


def test_a_reseeded_run_is_refused(tmp_path):
    "Go back to step 40, and draw the rest again with another seed."
    config, folder = replace(make_config("digits-eps3"), epochs=10.), tmp_path/"s"
    folder.mkdir()
    record = leaderboard.Record(folder/"record.jsonl")
    first = leaderboard._prepared(config)
    record.write("start", **leaderboard.start_line(config, first, None, 0))
    first.fit(40).save(folder/"checkpoint")
    again = leaderboard._prepared(config, 7).load(folder/"checkpoint").fit()
    again.save(folder/"checkpoint")
    again.release(folder/"model.pt")
    found = leaderboard.measure(again)["accuracy"]
    record.write("end", **leaderboard.end_line(config, again, 1., found, "steps"))
    assert "re-seeded: seed '7' was given at step 40" in refusals(folder)


def test_a_given_seed_is_refused(tmp_path, monkeypatch):
    prepared = leaderboard._prepared
    monkeypatch.setattr(leaderboard, "_prepared", lambda config, seed=None: prepared(config, 3))
    leaderboard.hand_in(replace(make_config("digits-eps3"), epochs=2.), tmp_path/"s")
    monkeypatch.undo()
    assert "the seed '3' was given" in refusals(tmp_path/"s")


def test_without_the_data_nothing_is_said_about_a_submission(changed, monkeypatch):
    def missing(config, seed=None):
        raise FileNotFoundError("digits: no folder")
    monkeypatch.setattr(leaderboard, "_prepared", missing)
    leaderboard._verify_once.cache_clear()
    said = refusals(changed)
    assert said.count(grade.NO_DATA) == 2 and "it has no copy of 'digits'" in said
    assert grade.NO_DATA == leaderboard.NO_DATA
    leaderboard._verify_once.cache_clear()


def test_the_same_files_are_verified_once(honest, monkeypatch):
    leaderboard.findings(honest)
    monkeypatch.setattr(leaderboard, "_prepared", None)
    assert refusals(honest) == ""


def test_what_is_missing_or_garbage_is_refused(changed):
    (changed/"model.pt").write_bytes(b"garbage")
    assert "model.pt" in refusals(changed)
    (changed/"checkpoint").unlink()
    assert "there is no checkpoint" in refusals(changed)
    assert a5.check_standing(changed).score == (0, 4)


# --- the copies


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    return assign.make(tmp_path_factory.mktemp("copies"))


@needs_nbgrader
def test_the_students_copy_holds_no_answer(copies):
    for name in CHECKS:
        text = (copies/f"student/{name}/{name}.ipynb").read_text()
        assert not re.search(r"BEGIN SOLUTION|HIDDEN TESTS|check_\w+|from checks", text)
        given = {c.source for c in nbformat.reads(text, 4).cells}
        for cell in cells(name):
            if told(cell).get("solution"):
                inside = cell.source.partition("### BEGIN SOLUTION\n")[2] or cell.source
                inside = re.split(r" *### END", inside)[0]
                for line in inside.splitlines():
                    assert len(line) < 12 or not any(line in source for source in given), line
    names = {path.name for path in (copies/"student").rglob("*") if path.is_file()}
    assert names == {f"{name}.ipynb" for name in CHECKS} | {"kit.py", "lab.py", "leaderboard.py"}


# --- the grader


def with_cells(copies, to, who, first="", last="", answer="", kind="student", name="a1"):
    "A submission made from a copy, with cells of its own at both ends, or another first answer."
    book = nbformat.read(copies/f"{kind}/{name}/{name}.ipynb", 4)
    if answer:
        next(cell for cell in book.cells if told(cell).get("solution")).source = answer
    for place, source in ((0, first), (len(book.cells) + 1, last)):
        if source:
            book.cells.insert(place, nbformat.v4.new_code_cell(source))
    (to/who).mkdir(parents=True, exist_ok=True)
    nbformat.write(book, to/who/f"{name}.ipynb")


def totals(rows):
    return {(who, name): sum(grade[1] for grade in grades) for who, name, grades, _ in rows}


ATTACKS = {
    "loops": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "sleeps": "import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0)\ntime.sleep(1000)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "leaves": "import os; os._exit(0)",
    "prints": "for i in range(10**6): print('all work and no play', i)",
    "fills": "hoard = [bytearray(2**28) for _ in range(100)]",
    "forks": "import os\nfor _ in range(8):\n    if not os.fork():\n        import time\n"
             "        time.sleep(1000)",
}

DELETES = """
import os, pathlib, shutil, signal
for place in {places}:
    shutil.rmtree(place, ignore_errors=True)
    for how in (os.chmod, os.truncate):
        try:
            how(place, 0)
        except OSError:
            pass
for path in pathlib.Path("..").rglob("*"):
    try:
        path.unlink()
    except OSError:
        pass
for pid in range(2, 2**15):
    try:
        os.kill(pid, signal.SIGKILL) if pid != os.getpid() else None
    except OSError:
        pass
"""


@pytest.fixture(scope="module")
def graded(copies, tmp_path_factory):
    "Rows for a class in which some mean harm; the folder of the submissions."
    base = tmp_path_factory.mktemp("class")
    folder, out = base/"submissions", base/"grades"
    loop = "def leak(p):\n    while True:\n        pass"
    with_cells(copies, folder, "loops_inside", answer=loop, kind="solution")
    leave = "def leak(p):\n    import os\n    os._exit(0)"
    with_cells(copies, folder, "leaves_inside", answer=leave, kind="solution")
    for who, source in ATTACKS.items():
        with_cells(copies, folder, who, first=source, kind="solution")
    places = [str(folder), str(out), str(ROOT/"assignments"), str(ROOT/"dp_course/basics.py")]
    with_cells(copies, folder, "deletes", DELETES.format(places=places), kind="solution")
    with_cells(copies, folder, "good", kind="solution")
    with_cells(copies, folder, "zz_last", kind="solution")
    with_cells(copies, folder, "blank")
    with_cells(copies, folder, "mistyped", answer="def leak(p)\n    pass", kind="solution")
    with_cells(copies, folder, "other_name", answer="def leaks(p):\n    pass", kind="solution")
    (folder/"garbage").mkdir()
    (folder/"garbage/a1.ipynb").write_text("{not JSON")
    (folder/"late_a1.ipynb").write_text((folder/"good/a1.ipynb").read_text())
    before = {path: path.read_bytes() for path in folder.rglob("*.ipynb")}
    limits = dict(seconds=200, cell_seconds=12, memory_mb=1500)
    rows = grade.grade(folder, out, limits=limits, say=lambda text: None)
    return rows, folder, out, before


@needs_nbgrader
@needs_box
def test_harm_is_stopped_and_the_rest_is_graded(graded):
    rows, folder, out, before = graded
    got = totals(rows)
    assert got["good", "a1"] == got["zz_last", "a1"] == got["late", "a1"] == 16
    assert got["blank", "a1"] == got["garbage", "a1"] == 0
    for who in ("crashes", "leaves"):  # that cell is lost, the rest is run in a new process
        assert got[who, "a1"] == 16, who
    assert got["leaves_inside", "a1"] == 12
    assert {path: path.read_bytes() for path in folder.rglob("*.ipynb")} == before
    notes = {who: note for who, _, _, note in rows}
    for who in ("loops", "sleeps", "fills", "prints"):  # one cell is stopped, the rest is theirs
        assert got[who, "a1"] == 16 or "more time" in notes[who], who
    assert got["loops_inside", "a1"] == 12
    for who in ("crashes", "leaves", "leaves_inside"):
        assert "signal" in notes[who] or "ended itself" in notes[who]
    assert notes["blank"] == "not attempted: 1, 2, 3, 4"
    assert "a name is not defined: 1" in notes["other_name"]
    assert got["other_name", "a1"] == 12
    assert "syntax error: 1" in notes["mistyped"] and got["mistyped", "a1"] == 12
    assert "endless loop, and stopped: 1" in notes["loops_inside"]
    assert notes["good"] == "by hand: 5, 6"
    assert "not attempted" in (out/"course/feedback/blank/a1/a1.html").read_text()
    page = (out/"course/feedback/leaves_inside/a1/a1.html").read_text()
    assert "the process ended itself" in page and "properties" in page
    book = nbformat.read(out/"course/autograded/prints/a1/a1.ipynb", 4)
    assert sum(len(o.get("text", "")) for c in book.cells if "outputs" in c
               for o in c.outputs) < 50_000
    assert "cannot read" in notes["garbage"]


@needs_nbgrader
@needs_box
def test_deleting_hits_only_ones_own_copy(graded):
    rows, folder, out, before = graded
    assert 0 <= totals(rows)["deletes", "a1"] <= 20
    assert len(rows) == len(before) and (out/"course/gradebook.db").exists()
    assert (ROOT/"dp_course/basics.py").stat().st_size > 1000
    assert (ROOT/"assignments").stat().st_mode & 0o700 == 0o700


@needs_nbgrader
@needs_box
def test_the_tables_say_what_the_gradebook_says(graded):
    import csv
    rows, folder, out, before = graded
    with open(out/"grades.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert sum(float(line["points"]) for line in lines if line["student"] == "good") == 16
    assert "| good | 16 | 16 | 20 | a1 by hand: 5, 6 |" in (out/"grades.md").read_text()
    assert 'blank,0,0,20,"a1 not attempted: 1, 2, 3, 4"' in (out/"students.csv").read_text()
    assert (out/"course/feedback/good/a1/a1.html").exists()


@SLOWLY
@needs_box
def test_a_cell_that_ends_the_process_costs_itself_alone(tmp_path):
    (tmp_path/"s").mkdir()
    sources = ["x = 1", "import os; os._exit(3)", "y = x + 1", "os.abort()", "y"]
    sandbox = grade.Sandbox(dict(seconds=200))
    try:
        found = sandbox.run(tmp_path/"s", [dict(source=s, grade=False) for s in sources])
    finally:
        sandbox.close()
    kinds = [[output.get("ename") for output in cell["outputs"]] for cell in found["cells"]]
    assert kinds[0] == kinds[2] == [] and kinds[1] == ["Ended"]
    assert kinds[3] == ["NameError"]  # `os` went with the cell that imported it
    assert found["cells"][4]["outputs"][0]["data"]["text/plain"] == "2"
    assert found["why"] == "in code cell 2 the process ended itself (exit code 3)"


@SLOWLY
@needs_box
def test_a_judge_who_is_kept_busy_goes_with_his_job(tmp_path):
    (tmp_path/"s").mkdir()
    busy = f"1\n{grade_sandbox.HIDDEN}\nimport time\ntime.sleep(1000)"
    sandbox = grade.Sandbox(dict(seconds=15))
    try:
        found = sandbox.run(tmp_path/"s", [dict(source=busy, grade=True)])
        children = Path(f"/proc/{sandbox.process.pid}/task/{sandbox.process.pid}/children")
        left = [pid for pid in children.read_text().split()
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"]
    finally:
        sandbox.close()
    assert found["why"] == "its supervisor was killed" and not left


def test_a_student_has_one_row_with_what_is_missing(tmp_path):
    rows = [("ada", "a1", [("a1-1", 4., 4.), ("a1-2", 1.5, 4.)], ""),
            ("ada", "a2", [("a2-1", 0., 4.)], "not attempted: 1"),
            ("bob", "a1", [("a1-1", 2., 4.), ("a1-2", 0., 4.)], "")]
    assert list(grade_table.by_student(rows)) == [
        ["student", "a1", "a2", "total", "of", "missing"],
        ["ada", "5.5", "0", "5.5", "12", "a2 not attempted: 1"],
        ["bob", "2", "", "2", "12", "a2 not handed in"]]
    grade_table.write_tables(rows, tmp_path)
    assert "| bob | 2 |  | 2 | 12 | a2 not handed in |" in (tmp_path/"grades.md").read_text()
    assert (tmp_path/"students.csv").read_text().count("\n") == 3


def test_who_is_not_graded_has_no_zero(tmp_path):
    "No points, in words: it was no mistake of hers."
    rows = [("ada", "a1", None, grade.UNGRADED.format("before its first cell it ended itself")),
            ("bob", "a1", [("a1-1", 2., 4.)], "")]
    table = list(grade_table.by_student(rows))
    assert table[1][:4] == ["ada", "", "0", "4"] and "a1 not graded" in table[1][4]
    grade_table.write_tables(rows, tmp_path)
    assert "ada" not in (tmp_path/"grades.csv").read_text()


ROSTER = """name,id,login
Ada Lovelace,12345,alove
Zoë O'Brien,67890,zob
Ann Lee,111,
Ann Lee-Jones,222,
"""


@pytest.mark.parametrize("who,student", [
    ("lovelaceada_12345_998877", "12345"), ("lovelaceada_LATE_4_998877", "12345"),
    ("Ada Lovelace_1234567_assignsubmission_file_", "12345"), ("ALOVE", "12345"),
    ("obrienzoe_67890_1", "67890"), ("Zoe O'Brien_3_assignsubmission_file_", "67890"),
    ("zoe", None), ("leeann_111_5", "111"), ("Ann Lee-Jones_7_assignsubmission_file_", None),
    ("mallory", None)])
def test_names_of_learning_platforms_become_one_student(tmp_path, who, student):
    (tmp_path/"roster.csv").write_text(ROSTER, encoding="utf-8")
    assert grade_table.Roster(tmp_path/"roster.csv").student(who) == student


def test_who_matches_nobody_is_listed(tmp_path):
    "And of two hand-ins of one student the last one counts."
    (tmp_path/"roster.csv").write_text(ROSTER, encoding="utf-8")
    names = "lovelaceada_12345_1_a1.ipynb", "alove_a1.ipynb", "mallory_a1.ipynb"
    for age, name in enumerate(names):
        (tmp_path/name).touch()
        os.utime(tmp_path/name, (age, age))
    roster = grade_table.Roster(tmp_path/"roster.csv")
    found = grade.of_roster(grade.find(tmp_path), roster)
    assert found == {("12345", "a1"): tmp_path/"alove_a1.ipynb"}
    assert grade.ignored(tmp_path, found) == ["lovelaceada_12345_1_a1.ipynb", "mallory_a1.ipynb"]
    table = list(grade_table.by_student([("12345", "a1", [("a1-1", 1., 4.)], "")], roster.names))
    assert [row[:3] for row in table[1:]] == [
        ["111", "Ann Lee", ""], ["12345", "Ada Lovelace", "1"], ["222", "Ann Lee-Jones", ""],
        ["67890", "Zoë O'Brien", ""]]


def test_the_later_of_two_times_counts(tmp_path):
    "Whoever hands in may lay a timestamp.txt of her own beside a notebook."
    (tmp_path/"a1.ipynb").touch()
    os.utime(tmp_path/"a1.ipynb", (1769000000, 1769000000))
    for text, day in (("2020-01-01 00:00:00 UTC", 21), ("2026-01-31 00:00:00.5 UTC", 31)):
        (tmp_path/"timestamp.txt").write_text(text)
        assert grade.when_handed_in(tmp_path/"a1.ipynb").day == day


@pytest.mark.parametrize("seconds,said", [(30, "1 min"), (3*3600, "3 h"), (90_000, "1 d 1 h")])
def test_lateness_is_said_in_words(seconds, said):
    assert grade_table.lateness(seconds) == said


@SLOWLY
@needs_box
@pytest.mark.parametrize("source,begun", [("import time; time.sleep(100)", True), ("1", False)])
def test_what_ends_before_her_code_is_no_zero(tmp_path, monkeypatch, source, begun):
    "Her own sleep is; a process that does not come up is not."
    if not begun:
        monkeypatch.setattr(grade_box, "readable", lambda: [])
        monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    (tmp_path/"s").mkdir()
    job = dict(folder=str(tmp_path/"s"), result=str(tmp_path/"result.json"), boxed=True,
               fresh=False, cells=[dict(source=source, grade=False)],
               limits={**grade_sandbox.LIMITS, "seconds": 40})
    grade_sandbox.supervise(job)
    found = json.loads((tmp_path/"result.json").read_text())
    assert found["begun"] == begun and found["why"]


@pytest.mark.parametrize("why", [
    "forged: sigma is 4 in the record, 2 in the ledger",
    "record.jsonl, line 2, is damaged, or was edited: its checksum is another"])
def test_forgery_is_said(why):
    told = {"nbgrader": {"grade_id": "a5-3", "grade": True, "locked": True}}
    said = nbformat.v4.new_output("display_data", {"text/plain": f"✗ verified\n  {why}; x"})
    refused = nbformat.v4.new_code_cell("findings()", metadata=told, outputs=[said])
    assert grade_table.endings([refused], ["a5-3"])["a5-3"] == f"suspected forgery ({why})"


def test_what_looks_like_cheating_is_said():
    sources = ["import gc, torch", "x = open('/proc/1/mem')", "from checks import a1",
               "__import__('ctypes')", "import math", "def f(:"]
    books = [nbformat.v4.new_code_cell(source) for source in sources]
    (said,) = grade_table.suspicions(books, set(), "a1")
    assert said.endswith("reaches for /proc, checks, ctypes, gc")
    assert not grade_table.suspicions(books, set(sources), "a1")  # they were handed out
    lines = [dict(student=who, run=run, accuracy=.9) for who, run in (
        ("ada", "r"), ("bob", "s"), ("eve", "r"))]
    assert grade_table.twins(lines) == {"ada": ["eve"], "eve": ["ada"]}


@needs_nbgrader
@needs_box
def test_another_week_adds_to_the_class(copies, tmp_path):
    "With due dates, lateness and points that were given by hand."
    with_cells(copies, tmp_path/"one", "ada", kind="solution")
    (tmp_path/"one/due.csv").write_text("assignment,due\na1,2026-01-10 12:00\n")
    os.utime(tmp_path/"one/ada/a1.ipynb", (1768000000, 1768000000))  # the 9th of January
    with_cells(copies, tmp_path/"two", "bob", kind="student")
    os.utime(tmp_path/"two/bob/a1.ipynb", (1769000000, 1769000000))
    (tmp_path/"two/eve").mkdir()
    wrong = "def possible(claims):\n    return [True]*len(claims)"
    with_cells(copies, tmp_path/"two", "eve", answer=wrong, kind="solution", name="a2")
    out = tmp_path/"out"
    grade.grade(tmp_path/"one", out, say=lambda text: None)
    rows = grade.grade(tmp_path/"two", out, say=lambda text: None, feedback=False)
    notes = {(who, name): note for who, name, _, note in rows}
    assert totals(rows) == {("ada", "a1"): 16, ("bob", "a1"): 0, ("eve", "a2"): 12}
    assert "late" not in notes["ada", "a1"] and "late by 11 d" in notes["bob", "a1"]
    with grade._book(out/"course") as book:
        given = book.find_submission_notebook("a1", "a1", "ada").grades
        for one in given:
            one.manual_score, one.needs_manual_grade = (2. if one.name in ("a1-5", "a1-6") else
                                                        None), False
        book.db.commit()
    assert grade.main(["--out", str(out)]) is None
    assert "| ada | 20 |  | 20 | 40 | a2 not handed in |" in (out/"grades.md").read_text()
    page = (out/"course/feedback/ada/a1/a1.html").read_text()
    assert "<math" in page and "border-left:4px" in page and "<meter" in page
    assert not re.search(r"https?://(?!www.w3.org)|<script", page)


def test_a_sandbox_that_will_not_end_costs_nobody_a_grade(tmp_path):
    sandbox = object.__new__(grade.Sandbox)
    sandbox.folder, sandbox.log = tmp_path/"sandbox", open(tmp_path/"log", "w")
    sandbox.process = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
    sandbox.close(patience=.1)
    assert sandbox.process.returncode


def test_an_unanswered_question_is_called_not_attempted():
    def cell(source, **told):
        return nbformat.v4.new_code_cell(source, metadata={"nbgrader": told})
    stub = "def f(x):\n    \"What.\"\n    # YOUR CODE HERE\n    ..."
    check = cell("f(1)", grade=True, points=4)
    book = [cell(stub, solution=True), check, cell(stub[:-3] + "return x", solution=True), check]
    assert grade.not_attempted(book) == {1}
    failed = dict(outputs=[grade_student._error("TypeError", "None")], value=None)
    assert grade.graded(check, failed, "", True)[0]["ename"] == "NotAttempted"
    right = grade.graded(check, dict(outputs=[], value=3.), "", True)
    assert right[-1]["data"] == {"text/plain": "3.0"}


def test_students_do_not_see_the_buttons_of_nbgrader():
    "Also where it is installed; `make lab TEACH=1` shows them."
    def said(*args):
        done = subprocess.run(["make", "-n", "lab", *args], cwd=ROOT, text=True,
                              capture_output=True)
        return done.stdout
    assert "JUPYTER_CONFIG_PATH" in said() and "tools/lab/students" in said()
    assert "JUPYTER_CONFIG_PATH" not in said("TEACH=1")
    page = json.loads((ROOT/"tools/lab/students/labconfig/page_config.json").read_text())
    assert page["disabledExtensions"] == {"@jupyter/nbgrader": True}


SCRIPTS = """<script>stolen()</script> <img src=x onerror="stolen()"> <svg onload="stolen()"></svg>
<a href="javascript:stolen()">x</a> [y](javascript:stolen()) <style>@import "http://stolen"</style>
<iframe srcdoc="<script>stolen()</script>"></iframe> ``` </pre><script>stolen()</script>
````
<script>stolen()</script>
"""


def running(page):
    "Whatever of somebody else's would run or be fetched when a page is looked at."
    found = []

    class Reader(html.parser.HTMLParser):
        tag = ""

        def handle_starttag(self, tag, attrs):
            self.tag = tag
            said = " ".join(f"{name}={value}" for name, value in attrs)
            runs = re.search(r"(^| )on\w+=|javascript:|srcdoc=", said)
            if "stolen" in said and (runs or tag in ("iframe", "object", "embed", "link")):
                found.append((tag, said))

        def handle_endtag(self, tag):
            self.tag = ""

        def handle_data(self, data):
            if self.tag in ("script", "style") and "stolen" in data:
                found.append((self.tag, data))
    Reader().feed(page)
    return found


def test_prose_of_a_students_is_shown_as_it_was_typed(tmp_path):
    "Ours is left as it is; cells keep what nbgrader knows them by, and nothing else."
    kinds = [nbformat.v4.new_markdown_cell, nbformat.v4.new_raw_cell, nbformat.v4.new_code_cell]
    told = {"nbgrader": {"grade_id": "q1", "solution": True}}
    ours = nbformat.v4.new_markdown_cell("# Ours <b>bold</b>")
    given = nbformat.v4.new_notebook(cells=[ours, nbformat.v4.new_code_cell("", metadata=told)])
    nbformat.write(given, tmp_path/"given.ipynb")
    strange = {"nbgrader": {"grade_id": SCRIPTS}, "format": "text/html"}
    cells = [ours, nbformat.v4.new_code_cell("x = 1", metadata=told)]
    cells += [kind(SCRIPTS, metadata=strange) for kind in kinds]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"title": SCRIPTS}),
                   tmp_path/"hers.ipynb")
    grade.tame(tmp_path/"hers.ipynb", tmp_path/"given.ipynb")
    book = nbformat.read(tmp_path/"hers.ipynb", 4)
    assert [cell.source for cell in book.cells[:2]] == [ours.source, "x = 1"]
    assert [dict(cell.metadata) for cell in book.cells] == [{}, told, {}, {}, {}]
    assert [cell.source for cell in book.cells[2:]] == [grade.as_typed(SCRIPTS)]*2 + [SCRIPTS]
    assert grade.as_typed("a ```` b") == "```````text\na ```` b\n```````"
    assert list(book.metadata) == ["kernelspec"]


def with_a_cell(change):
    "The text of a notebook whose one cell is changed."
    cell = dict(cell_type="code", metadata={}, source="", outputs=[], execution_count=None, id="a")
    change(cell)
    return json.dumps(dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=5))


STRANGE = {
    "no JSON": "{garbage", "nothing": "", "a list": "[]", "null": "null", "deep": "["*100_000,
    "no cells": '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": null}',
    "a word for a cell": '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": ["x"]}',
    "nbgrader is null": with_a_cell(lambda cell: cell["metadata"].update(nbgrader=None)),
    "nbgrader is a list": with_a_cell(lambda cell: cell["metadata"].update(nbgrader=[1])),
    "an id is a list": with_a_cell(lambda cell: cell["metadata"].update(nbgrader={"grade_id": []})),
    "no metadata": with_a_cell(lambda cell: cell.pop("metadata")),
    "no type": with_a_cell(lambda cell: cell.pop("cell_type")),
    "no source": with_a_cell(lambda cell: cell.pop("source")),
    "a source of numbers": with_a_cell(lambda cell: cell.update(source=5)),
    "half a character": with_a_cell(lambda cell: cell.update(source="\ud800")),
}


@pytest.mark.filterwarnings("ignore")
def test_a_strange_notebook_stops_no_class(tmp_path, monkeypatch):
    "It is called unreadable, and no part of it goes on."
    monkeypatch.setattr(grade, "LARGE", 10**5)
    monkeypatch.setattr(grade, "MOST", 3)
    release = tmp_path/"course/release/a1"
    release.mkdir(parents=True)
    nbformat.write(nbformat.v4.new_notebook(), release/"a1.ipynb")
    long = nbformat.v4.new_notebook(cells=[nbformat.v4.new_raw_cell("")]*4)
    for what, text in {**STRANGE, "many cells": nbformat.writes(long),
                       "large": "{" + " "*10**5}.items():
        (tmp_path/"a1.ipynb").write_text(text)
        said = grade.take(tmp_path/"course", "ada", "a1", tmp_path/"a1.ipynb", True)
        assert said.startswith(grade.UNREADABLE), what
    assert "larger than" in said


def test_what_is_graded_under_nobodys_name_is_listed(tmp_path):
    names = ["ada/a1.ipynb", "ada/a1 (1).ipynb", "bob/A1.ipynb", "b_c/a1.ipynb", "b c/a1.ipynb",
             "._x_a1.ipynb", ".git/a1.ipynb", "eve_a2.ipynb"]
    for name in names:
        (tmp_path/name).parent.mkdir(exist_ok=True)
        (tmp_path/name).touch()
    (tmp_path/"mallory/a1.ipynb").mkdir(parents=True)
    os.mkfifo(tmp_path/"mallory/a2.ipynb")
    found = grade.find(tmp_path)
    assert set(found) == {("ada", "a1"), ("b_c", "a1"), ("eve", "a2")}
    lost = ["ada/a1 (1).ipynb", "b c/a1.ipynb", "bob/A1.ipynb", "mallory/a1.ipynb",
            "mallory/a2.ipynb"]
    assert grade.ignored(tmp_path, found) == lost
    grade_table.write_tables([], tmp_path, lost)
    assert "- bob/A1.ipynb" in (tmp_path/"grades.md").read_text()


def test_a_backup_is_not_graded(tmp_path):
    "What lies deepest is the oldest; only a folder of its own name is nbgrader's."
    for name in ("ada/a1.ipynb", "ada/a1/a1.ipynb", "ada/old/a1.ipynb", "bob/old/a1.ipynb",
                 "eve/a1/a1.ipynb"):
        (tmp_path/name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path/name).touch()
    assert grade.find(tmp_path) == {("ada", "a1"): tmp_path/"ada/a1.ipynb",
                                    ("eve", "a1"): tmp_path/"eve/a1/a1.ipynb"}


def test_nothing_of_a_students_is_a_row_a_formula_or_markup(tmp_path):
    "Names of files in other alphabets than ours, too."
    forged = "x.ipynb\n| eve | 20 | 20 | 20 | <b>\x1b[2J"
    (tmp_path/os.fsdecode(b"caf\xe9.ipynb")).touch()
    lost = [*grade.ignored(tmp_path, {}), forged]
    grade_table.write_tables([("@eve", "a1", [("a1-1", 0., 4.)], "=1+1: 1")], tmp_path, lost)
    shown = (tmp_path/"grades.md").read_text()
    bar, forged = "&#124;", "&#60;b&#62;?&#91;2J"
    assert f"- caf?.ipynb\n- x.ipynb?{bar} eve {bar} 20 {bar} 20 {bar} 20 {bar} {forged}\n" in shown
    assert "](" not in grade_table.as_text("a](javascript:stolen())")
    assert (tmp_path/"grades.csv").read_text().splitlines()[1] == "'@eve,a1,a1-1,0,4,'=1+1: 1"


def test_what_nbgrader_knows_of_a_cell_is_ours(tmp_path):
    given = {"nbgrader": {"grade_id": "q1", "grade": True, "solution": False}}
    swapped = {"nbgrader": {"grade_id": "q1", "grade": False, "solution": True}}
    for name, told in (("given", given), ("hers", swapped)):
        cell = nbformat.v4.new_code_cell("x = 1", metadata=told)
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path/f"{name}.ipynb")
    grade.tame(tmp_path/"hers.ipynb", tmp_path/"given.ipynb")
    assert dict(nbformat.read(tmp_path/"hers.ipynb", 4).cells[0].metadata) == given


@pytest.mark.parametrize("check,before", [("check_mended_step", 5000), ("check_clipped_sum", 4)])
def test_answers_that_grow_when_they_are_subtracted_are_refused(check, before, spaces):
    "(n,1) minus (1,n) has n^2 numbers: in the judge, not in the box."
    flips = []

    def grows(grads, *rest):
        flips.append(0)
        return torch.zeros(*((grads.shape[1], 1), (1, grads.shape[1]))[len(flips) % 2])
    card = getattr(CHECKS[ASKED[check][0]], check)(grows, SEED)
    assert not card.solved
    trial = exercises.Trial(grows, check)
    with trial.holds("a sum"):
        a3.bounded(trial, lambda rows: trial(rows), (torch.ones(2, before),),
                   [(torch.ones(1, before),)], 1.)
    assert "shapes" in trial.outcomes[0].numbers


def test_of_a_copied_cell_the_last_one_is_graded(tmp_path):
    "Also where an editor has put a mark of byte order at the beginning."
    told = {"nbgrader": {"grade_id": "q1", "grade": True}}
    cells = [nbformat.v4.new_code_cell(text, metadata=told) for text in ("x = 1", "x = 2")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells[:1]), tmp_path/"given.ipynb")
    text = nbformat.writes(nbformat.v4.new_notebook(cells=cells))
    (tmp_path/"hers.ipynb").write_text("\ufeff" + text, encoding="utf-8")
    grade.tame(tmp_path/"hers.ipynb", tmp_path/"given.ipynb")
    kept = nbformat.read(tmp_path/"hers.ipynb", 4).cells
    assert [dict(cell.metadata) for cell in kept] == [{}, told]


def test_what_would_run_is_seen():
    "So that the test of the feedback page can fail."
    assert len(running(SCRIPTS)) >= 5 and running(html.escape(SCRIPTS)) == []


@needs_nbgrader
@needs_box
def test_no_script_of_a_students_runs_in_a_feedback_page(copies, tmp_path):
    show = (f"from IPython.display import display\nbad = {SCRIPTS!r}\n"
            "for kind in ('html', 'markdown', 'latex', 'plain', 'javascript', 'vnd.mermaid'):\n"
            "    display({f'text/{kind}': bad}, raw=True)\nprint(bad)\n"
            "raise type(bad, (Exception,), {})(bad)")
    with_cells(copies, tmp_path/"s", "ada", first=show)
    path = tmp_path/"s/ada/a1.ipynb"
    book = nbformat.read(path, 4)
    raw = nbformat.v4.new_raw_cell(SCRIPTS, metadata={"format": "text/html"})
    book.cells += [nbformat.v4.new_markdown_cell(SCRIPTS), raw]
    language = {"name": SCRIPTS, "pygments_lexer": SCRIPTS}
    book.metadata = {"title": SCRIPTS, "language_info": language,
                     "kernelspec": {"name": "python3", "display_name": SCRIPTS}}
    nbformat.write(book, path)
    grade.grade(tmp_path/"s", tmp_path/"out", say=lambda text: None)
    page = (tmp_path/"out/course/feedback/ada/a1/a1.html").read_text()
    assert page.count("stolen") >= 10  # it is shown, in prose and in outputs
    assert running(page) == []
    assert "Four questions" in page  # ours is still prose
    book = nbformat.read(tmp_path/"out/course/autograded/ada/a1/a1.ipynb", 4)
    shown = [kind for cell in book.cells for output in cell.get("outputs", ())
             for kind, text in output.get("data", {}).items() if "stolen" in str(text)]
    assert set(shown) == {"text/plain"}  # nothing that a formgrader would run


ESCAPES = {  # what -> Python that says how far it came; PermissionError and the like: not far
    "a process of its own": "os.fork()",
    "a new program": "subprocess.run(['/bin/sh', '-c', 'true'], check=True)",
    "a Unix socket": "socket.socket(socket.AF_UNIX)",
    "a UDP socket": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "a raw disk": "os.mknod('disk', 0o60600, os.makedev(254, 0))",
    "the passwords": "open('/etc/shadow').read()",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "the host's name": "libc('sethostname', b'x', 1)",
    "memory shared with others": "libc('shmget', 5, 100, 0o1666)",
    "memory past the limit": "os.memfd_create('hoard')",
    "namespaces": "libc('unshare', 0x10000000)",
    "another process": "libc('ptrace', 16, 1, 0, 0)",
    "a full disk": "open('hoard', 'wb').write(bytes(2**26))",
    "the root's memory": "open('/hoard', 'wb')",
    "the devices' memory": "open('/dev/hoard', 'wb')",
    "the submission itself": "open(os.path.join(given, 'new'), 'w')",
    "the hidden checks": "os.listdir(os.path.join(root, 'assignments'))",
    "the tools": "[f for f in os.listdir(root + '/tools') if f != 'grade_student.py'][0]",
    "the teacher's environment": "os.environ['TEACHERS_TOKEN']",
    "the environment of the first process": "open('/proc/1/environ').read().split('TEACHERS')[1]",
    "shared memory of its own": "open('/dev/shm/hoard', 'wb')",
    "a program by posix_spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "a connection by name": "socket.create_connection(('1.1.1.1', 53), 2)",
    "a larger limit": "os.nice(-5)",
    "a hard link out of the submission": "os.link('/usr/bin/env', 'linked')",
    "the teacher's files": "os.listdir(teachers)",
    "a pair of sockets": "socket.socketpair()",
    "a queue of messages": "libc('mq_open', b'/queue', 0o102, 0o600, 0)",
    "semaphores shared with others": "libc('semget', 5, 1, 0o1666)",
    "the kernel's keys": "libc('syscall', 248, b'user', b'k', b'v', 1, -3)",
    "page faults, handled": "libc('syscall', 323, 0)",
    "the keys of others": "libc('syscall', 250, 11, 0)",
    "calls in a ring": "libc('syscall', 425, 8, b'\\0'*120)",
    "a new root": "os.chroot('/')",
    "a mount": "libc('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
    "the kernel's settings": "os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)",
    "the kernel's memory": "open('/proc/kcore', 'rb').read(9)[0]",
    "the kernel's addresses": "open('/proc/kallsyms').read(9)[0]",
    "the kernel's buttons": "open('/proc/sysrq-trigger').read(9)[0]",
    "a process of the teacher's": "[p for p in os.listdir('/proc') if p.isdigit()][2]",
    "a descriptor that was left open": "[f for f in os.listdir('/proc/self/fd')][4]",
    "another user": "os.setuid(0)",
    "more rights": "libc('prctl', 47, 2, 21, 0, 0)",
    "a file with another owner's rights": "os.chmod(os.path.join(given, '.'), 0o4777)",
    "home": "open('/root/.bashrc')",
    "the teacher's ledgers": "os.listdir('/box/data/ledgers')[0]",
    "other mounts": "[m for m in open('/proc/mounts') if ' / ' in m and ' rw' in m][0]",
    "a second process, bubblewrap's": "[p for p in os.listdir('/proc') if p.isdigit()][1]",
    "the teacher's PATH": "open('/proc/1/environ').read().split(':/')[2]",
    "a second library of the course": "open(root + '/dp_course/basics.py', 'a')",
}
PROGRAM = """
import ctypes, os, socket, subprocess, sys, time
root, given, teachers = sys.argv[1:]
def libc(name, *args):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)
for what, source in {escapes}.items():
    try:
        eval(source)
        print("ESCAPED:", what)
    except (OSError, LookupError):
        pass
print("tried them all")
"""


def boxed(program, folder, *args):
    "What a program prints in the box."
    with grade_box.calls_file() as calls:
        words = [sys.executable, "-c", program, *map(str, args)]
        command = grade_box.command(words, folder, calls.fileno(), megabytes=50)
        done = subprocess.run(command, pass_fds=[calls.fileno()], capture_output=True, text=True)
    return done.stdout + done.stderr


@needs_box
def test_nothing_escapes_from_the_box(tmp_path, monkeypatch):
    monkeypatch.setenv("TEACHERS_TOKEN", "secret")
    program = PROGRAM.format(escapes=ESCAPES)
    said = boxed(program, tmp_path, ROOT, grade_box.GIVEN, tmp_path.parent)
    assert said == "tried them all\n"


@needs_box
def test_the_escapes_work_outside_of_the_box(tmp_path):
    "So that the test above can fail."
    tame = {what: ESCAPES[what] for what in ("a process of its own", "a Unix socket",
            "memory past the limit", "the hidden checks", "the teacher's files")}
    tame["a process of its own"] = "os.fork() or os._exit(0)"
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(escapes=tame), ROOT, tmp_path,
                           tmp_path], capture_output=True, text=True)
    assert done.stdout.count("ESCAPED") == len(tame), done.stderr


STUBBORN = """#!/bin/sh
echo "bwrap: setting up uid map: Permission denied" >&2
exit 1
"""


def test_a_bubblewrap_that_cannot_run_is_refused_before_anything_is_graded(monkeypatch, tmp_path):
    (tmp_path/"bin").mkdir()
    (tmp_path/"bin/bwrap").write_text(STUBBORN)
    (tmp_path/"bin/bwrap").chmod(0o755)
    (tmp_path/"s").mkdir()
    (tmp_path/"s/ada_a1.ipynb").write_text("{}")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    said = grade.main([str(tmp_path/"s"), "--out", str(tmp_path/"out")])
    assert "Permission denied" in said and "apparmor_restrict_unprivileged_userns" in said
    assert not (tmp_path/"out").exists()


BOUNDS = {  # what -> Python that says how many of them there can be
    "threads": "import threading\nn = 0\ntry:\n    while n < 2000:\n        n += 1\n"
               "        threading.Thread(target=time.sleep, args=(2,), daemon=True).start()\n"
               "except RuntimeError:\n    pass\nn",
    "pipes": "n, kept = 0, []\ntry:\n    while n < 2000:\n        kept.append(os.pipe())\n"
             "        n += 1\nexcept OSError:\n    pass\n"
             "for pair in kept:\n    os.close(pair[0]), os.close(pair[1])\nn"}


@SLOWLY
@needs_box
def test_threads_and_pipes_have_an_end(tmp_path):
    (tmp_path/"s").mkdir()
    sandbox = grade.Sandbox(dict(seconds=100))
    try:
        found = sandbox.run(tmp_path/"s", [dict(source=f"import os, time\n{s}", grade=False)
                                           for s in BOUNDS.values()])
    finally:
        sandbox.close()
    for what, cell in zip(BOUNDS, found["cells"]):
        assert int(cell["outputs"][-1]["data"]["text/plain"]) < 200, what
    cage = grade_box.Cage(100)
    assert cage.folders == [folder for folder in cage.folders if folder.is_dir()]
    cage.remove()
    assert not any(folder.exists() for folder in cage.folders)


def test_of_her_outputs_text_and_pictures_are_kept():
    def png(wide, high):
        size = wide.to_bytes(4, "big") + high.to_bytes(4, "big")
        return base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + size + b"\x08").decode()
    picture = png(640, 480)
    data = {"text/plain": "<b>", "text/html": SCRIPTS, "text/markdown": SCRIPTS,
            "image/svg+xml": SCRIPTS, "image/png": picture}
    said = dict(output_type="display_data", data=data, metadata={"x": SCRIPTS})
    kept = grade_sandbox.shown_output(said)
    assert kept["data"] == {"text/plain": "<b>", "image/png": picture} and not kept["metadata"]
    for bad in ('" onerror="stolen()', "aGVsbG8=", png(60_000, 60_000), 5, None):
        assert grade_sandbox.as_picture(bad) is None


def test_an_answer_that_nobody_asked_for_is_called_cheating():
    class Channel:
        def send(self, data):
            pass

        def receive(self, most):
            return self.said
    judge = object.__new__(grade_sandbox.Judge)
    judge.channel, judge.dumps = Channel(), repr
    for said in (b'{"value": 4.0}', b'["guess", {"value": 4.0}]', b"[]", b"\xff"):
        judge.channel.said = said
        with pytest.raises(grade_sandbox.Forged, match="suspected cheating"):
            judge.ask("run")


def test_a_mistake_is_paid_for_once(spaces):
    "A question that calls a wrong function gets the course's, and hers is put back."
    asked = grade.Questions("a3")
    cell = next(c for c in cells("a3") if told(c).get("grade_id") == "a3-4")
    task = asked.job(cell, "def train(*a):\n    return loop_sum(*a)")
    assert task["needs"] == ["clipped_sum", "fast_sum", "loop_sum"][1:]
    owed = {}
    for value in (4., None):
        grade_sandbox.owe(owed, dict(task, function="fast_sum", reference="x"), value)
        assert bool(owed) == (value is None)
    space = {"fast_sum": 1}
    source = next(c.source for c in cells("a3") if "def fast_sum" in c.source)
    hers = grade_student.lend(space, asked.imports, {"fast_sum": source, "new": "new = 5"})
    assert callable(space["fast_sum"]) and hers == {"fast_sum": 1, "new": None}


def test_without_the_box_root_grades_nothing(monkeypatch, tmp_path):
    (tmp_path/"ada_a1.ipynb").write_text("{}")
    monkeypatch.setattr(grade_box.shutil, "which", lambda name: None)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert "apt-get install bubblewrap" in grade.main([str(tmp_path), "--unprotected"])
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert "apt-get install bubblewrap" in grade.main([str(tmp_path)])


CHEATS = {
    "patches": "import dp_course.exercises.cards as e\n"
               "e.Card.score = property(lambda card: (5, 5))\n"
               "e.Trial.need = lambda *a: None\nimport sys\n"
               "for m in [m for n, m in sys.modules.items() if n.startswith('checks')]:\n"
               "    m.points = lambda card, most: float(most)",
    "takes_over": "import __main__ as m\n"
                  "fake = dict(output_type='execute_result', metadata={}, execution_count=1,\n"
                  "            data={'text/plain': '4.0'})\n"
                  "m.run_cell = lambda *a: dict(outputs=[fake], value=4.)\n"
                  "m.answer = lambda *a: dict(value=4., score=[5, 5], printed='4.0')\n"
                  "m._shown = lambda *a: [fake]",
    "talks_first": "import gc, json, socket, struct\n"
                   "said = json.dumps(dict(outputs=[], value=4.)).encode()\n"
                   "for s in [o for o in gc.get_objects() if isinstance(o, socket.socket)]:\n"
                   "    for _ in range(20):\n"
                   "        s.sendall(struct.pack('<Q', len(said)) + said)",
    "looks_for_cells": "import gc\nhidden = [o for o in gc.get_objects() if isinstance(o, str)\n"
                       "          and 'BEGIN HIDDEN TESTS' in o]\nassert hidden, 'nothing'",
    "reads_the_checks": "import checks.a1 as a1, gc, sys\nleak = debias = lambda *a: 0",
    "prints": "print('4.0')",
}


@needs_nbgrader
@needs_box
def test_a_score_cannot_be_forged(copies, tmp_path):
    "Checks run in another process: what is patched, said or printed in this one earns nothing."
    for who, source in CHEATS.items():
        with_cells(copies, tmp_path/"s", who, first=source)
    with_cells(copies, tmp_path/"s", "at_the_end", last=CHEATS["patches"])
    answer = "def leak(p):\n    return NotImplemented"
    with_cells(copies, tmp_path/"s", "string", answer=answer)
    rows = grade.grade(tmp_path/"s", tmp_path/"out", say=lambda text: None, feedback=False)
    assert set(totals(rows).values()) == {0}
    book = nbformat.read(tmp_path/"out/course/autograded/reads_the_checks/a1/a1.ipynb", 4)
    assert "No module named 'checks'" in str(book.cells[0].outputs)


def test_answers_travel_as_plain_data():
    import numpy as np
    x = torch.randn(2, 3)
    given = [1, 2.5, math.inf, "a", None, True, (1, [2]), {"w": x, 3: x.bfloat16()}, x.double(),
             torch.zeros(0, 4), torch.arange(3), np.float64(2.), np.eye(2), ..., NotImplemented]
    said = json.loads(json.dumps(grade_sandbox.encode(given)))
    got = grade_sandbox.decode(said)
    assert got[:7] == given[:7] and got[-2:] == given[-2:]
    assert torch.equal(got[7]["w"], x) and torch.equal(got[7][3], x.bfloat16())
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got[8:11], given[8:11]))
    assert got[11] == 2. and (got[12] == given[12]).all()
    class Word(str, Enum):
        noise = "noise"
    Pair, Two = namedtuple("Pair", "W b"), IntEnum("Two", {"two": 2})
    own = [Pair(x, [1]), OrderedDict(w=1.), Fraction(1, 4), Decimal("inf"), Word.noise, Two.two]
    got = grade_sandbox.decode(json.loads(json.dumps(grade_sandbox.encode(own))))
    assert torch.equal(got[0][0], x) and type(got[0]) is tuple
    assert got[1:] == [{"w": 1.}, .25, math.inf, "noise", 2]
    rare = [np.longdouble(2), np.ones(2, np.longdouble), np.ones(2, ">f4"),
            torch.eye(2).to_sparse()]
    got = grade_sandbox.decode(json.loads(json.dumps(grade_sandbox.encode(rare))))
    for value, want in zip(got, (2., [1, 1], [1, 1], torch.eye(2))):
        assert torch.equal(torch.as_tensor(value).double(), torch.as_tensor(want).double())
    strange = grade_sandbox.decode(grade_sandbox.encode(object()))
    assert repr(strange) == "an object of type object"
    short = {"tensor": "AAAA", "dtype": "float32", "shape": [7]}
    for bad in (short, {"word": "x"}, {"a": 1, "b": 2}):
        with pytest.raises((ValueError, RuntimeError, KeyError)):
            grade_sandbox.decode(bad)


def test_a_function_that_was_interrupted_is_not_called_again():
    "Its question is lost; the time is for those after it."
    class Judge:
        slow, used, asked = None, 0., 0

        def seconds_left(self):
            return 9 - self.used

        def ask(self, *message):
            self.asked += 1
            return {"raised": ["TooMuch", "more time than a cell may take"]}
    judge = Judge()
    for _ in range(3):
        with pytest.raises(Exception, match="more time than a cell may take"):
            grade_sandbox.Remote(judge, "leak")(.5)
    assert judge.asked == 1
    judge.slow, judge.used = None, 10.  # many short calls
    with pytest.raises(Exception, match="more time than a question may take"):
        grade_sandbox.Remote(judge, "leak")(.5)
    assert judge.asked == 1


def test_a_slow_answer_is_waited_for(monkeypatch):
    "Were the judge's call cut off by an alarm, its answer would be taken for the next one's."
    monkeypatch.setattr(exercises, "_SECONDS", .02)
    usual = signal.getsignal(signal.SIGALRM)
    try:
        grade_sandbox.no_alarm()
        trial = exercises.Trial(lambda: time.sleep(.1) or 1., "check")
        assert trial() == 1.
    finally:
        signal.signal(signal.SIGALRM, usual)


def test_an_answer_has_an_end(monkeypatch):
    "Lists of millions keep the judge busy, not the student."
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)

    monkeypatch.setattr(grade_student, "ANSWER", 100)

    class Shell:
        user_ns = dict(long=lambda: [0]*50, huge=lambda: 10**5000, fine=lambda: [0]*9)
    kinds = [grade_student.answer(Shell, name, (), 0, 9).get("raised", [""])[0]
             for name in Shell.user_ns]
    assert kinds == ["TooMuch", "ValueError", ""]


def test_what_travels_to_a_student_holds_no_answer_to_another_question(monkeypatch):
    "Functions among the arguments are sent with all that they refer to."
    import cloudpickle
    sent = []
    monkeypatch.setattr(exercises.Trial, "__call__", lambda trial, *args: sent.append(args) or 2.)
    a2.check_underpays(lambda *args: False, 0)
    cloudpickle.register_pickle_by_value(a2)
    try:
        for args in sent:
            assert not re.search(rb"possible|steps_left|exact", cloudpickle.dumps(args))
    finally:
        cloudpickle.unregister_pickle_by_value(a2)
    assert len(sent) > 4


def test_what_was_too_slow_in_sight_is_not_checked():
    judge = object.__new__(grade_sandbox.Judge)
    judge.fresh, judge.room, judge.hidden, judge.owed = False, 1000, None, {}
    judge.ask = lambda *message, most: dict(outputs=[], value=None, slow=True)
    found = judge.cell(dict(source=f"f(1)\n{grade_sandbox.HIDDEN}\ncheck(f)", grade=True))
    assert found["value"] is None and found["outputs"][0]["ename"] == "TooMuch"


def test_errors_keep_their_names():
    for error in (ValueError("a"), ZeroDivisionError("b"), grade_student.TooMuch("c")):
        again = grade_sandbox.raised(type(error).__name__, str(error))
        assert type(again).__name__ == type(error).__name__ and str(again) == str(error)
    assert isinstance(grade_sandbox.raised("ValueError", ""), ValueError)
    own = grade_sandbox.raised("CannotPay", "x", "ValueError")
    assert isinstance(own, ValueError) and type(own).__name__ == "CannotPay"
    assert isinstance(grade_sandbox.raised("UnicodeDecodeError", "x"), Exception)
    assert isinstance(grade_sandbox.raised("SystemExit", "x"), Exception)


@needs_nbgrader
@needs_box
def test_solutions_of_all_five_get_full_marks_and_blanks_none(copies, honest, tmp_path):
    for name in CHECKS:
        with_cells(copies, tmp_path/"s", "ada", kind="solution", name=name)
        with_cells(copies, tmp_path/"s", "blank", name=name)
    (tmp_path/"s/bob").mkdir()
    shutil.copytree(copies/"solution/a5", tmp_path/"s/bob/a5")
    shutil.copytree(honest, tmp_path/"s/bob/a5/submission")
    rows = grade.grade(tmp_path/"s", tmp_path/"out", say=lambda text: None, feedback=False)
    got = totals(rows)
    assert {name: got["ada", name] for name in ("a1", "a2", "a3", "a4")} == dict.fromkeys(
        ("a1", "a2", "a3", "a4"), 16)
    assert {got["blank", name] for name in CHECKS} == {0}
    assert got["ada", "a5"] == 8  # she handed in no model
    assert got["bob", "a5"] >= 8 + 4 + 1
    board = (tmp_path/"out/leaderboard.md").read_text()
    assert "| 1 | 9" in board and "digit_filters" in board and "bob" not in board


@needs_nbgrader
def test_make_says_what_to_do_without_a_folder(tmp_path):
    found = subprocess.run([sys.executable, ROOT/"tools/grade.py", str(tmp_path)], text=True,
                           capture_output=True)
    assert found.returncode == 1 and "holds no notebook" in found.stderr
    found = subprocess.run([sys.executable, ROOT/"tools/grade.py", "no-such"], text=True,
                           capture_output=True)
    assert found.returncode == 1 and "no folder" in found.stderr
