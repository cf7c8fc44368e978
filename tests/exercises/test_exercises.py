"""The exercises answer: solutions pass, blanks get nothing, typical mistakes are named.

The tables in wrong_answers/ hold wrong answers, as code, and a few words of the diagnosis that
each must get.
Checks draw fresh cases, so a wrong answer is tried on several seeds. A solution that fails is a
false alarm of a check's statistics: below one in ten thousand a run for all of them together.
"""
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import cache, partial
from pathlib import Path

import nbformat
import pytest
import torch

import dp_course.exercises
from dp_course.exercises import Trial, how_far, listed
from dp_course.exercises import cards as exercises

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT/"tools"), str(ROOT/"tests")]
import answers  # noqa: E402
import student  # noqa: E402

pytestmark = pytest.mark.usefixtures("nothing_remembered")
TABLES = {path.stem: runpy.run_path(str(path))
          for path in sorted((ROOT/"tests/wrong_answers").glob("*.py"))}  # a file for each lesson
CONVERTED = list(TABLES)  # and for each room of the workshop that asks something


# --- what a notebook asks


def place(stem):
    "Where a notebook lies: a lesson, or a room of the workshop."
    nbs = ROOT/"nbs"
    path, = [*nbs.glob(f"{stem}.ipynb"), *nbs.glob(f"workshop/*/{stem}.ipynb")]
    return path.relative_to(nbs)


@cache
def cells(stem):
    return nbformat.read(ROOT/"nbs"/place(stem), 4).cells


def tagged(stem, tag):
    return [c for c in cells(stem) if c.cell_type == "code" and tag in c.metadata.get("tags", [])]


def asked(source):
    "(name of the check, name of the student's function) in the last line of a cell."
    return re.fullmatch(r"(check_\w+)\((\w+)\)", source.rstrip().split("\n")[-1]).groups()


def imports(stem):
    "What a lesson's import statements bring, and its own module."
    found = {}
    exec(student.imports(cells(stem)), found)
    checks = [f"check_{name}" for name in builds(stem)]
    return found | {check: getattr(dp_course.exercises, check) for check in checks}


def builds(stem):
    "Name of the function -> cell, of what the student builds in a lesson."
    return {student.built(cell).name: cell for cell in tagged(stem, "build")}


EXERCISES = [(stem, *asked(cell.source)) for stem in CONVERTED for cell in tagged(stem, "exercise")]
BUILDS = [(stem, f"check_{name}", name) for stem in CONVERTED for name in builds(stem)]
NAMES = {check: (stem, name) for stem, check, name in EXERCISES + BUILDS}

# Thousands of calls each, or an accountant's search for every answer: in `make test-slow`; of
# those that are not the longest, one wrong answer stays.
LONGEST = {"check_second_sigma", "check_smallest_batch", "check_poisson_by_jumps", "check_judge",
           "check_guilty", "check_survivor", "check_agreement"}
LONG = LONGEST | {
    "check_mean_error", "check_search_cost",
    "check_eps_of_rows", "check_believable", "check_compare", "check_spent", "check_fair_coins",
    "check_noise_for", "check_whole_bill"}


@pytest.fixture(scope="module")
def spaces():
    "The names that every lesson offers to its exercises."
    return {stem: imports(stem) for stem in CONVERTED}


def answer(code, check, spaces):
    "What a piece of code defines under the student's name."
    stem, name = NAMES[check]
    space = dict(spaces[stem])
    exec(code, space)
    return space[name]


def solution(check):
    "The model answer: of a build cell, or of a folded cell, without its check."
    stem, name = NAMES[check]
    if name in builds(stem):  # it may call those that were built before
        sources = [cell.source for cell in builds(stem).values()]
        return "\n\n".join(sources[:list(builds(stem)).index(name) + 1])
    code = next(c.source for c in tagged(stem, "solution") if asked(c.source)[0] == check)
    return code.rsplit("\n", 1)[0]


def verdict(code, check, spaces, seed=None):
    attempt = answer(code, check, spaces)
    return spaces[NAMES[check][0]][check](attempt, seed)


@pytest.mark.parametrize("stem", CONVERTED)
def test_a_lesson_has_stubs_and_folded_solutions(stem):
    stubs, solutions = tagged(stem, "exercise"), tagged(stem, "solution")
    assert [asked(c.source) for c in stubs] == [asked(c.source) for c in solutions]
    for cell in stubs:
        assert re.search(r"\n    \.\.\.\n", cell.source), "a stub is a signature and `...`"
    for cell in solutions:
        assert cell.source.startswith("# solution\n"), "the folded cell shows its first line"
        assert cell.metadata.jupyter.source_hidden
    prose = "\n".join(c.source for c in cells(stem) if c.cell_type == "markdown")
    assert prose.count("### Exercise") == len(stubs)


def minutes(stem):
    "What a lesson's head says: (to read, for the exercises)."
    prose = "\n".join(c.source for c in cells(stem) if c.cell_type == "markdown")
    head = re.search(r"[^.]*?(\d+)(?: more)? for the exercises", prose)
    return int(re.search(r"\d+", head[0])[0]), int(head[1])


@pytest.mark.parametrize("stem", [stem for stem in CONVERTED if stem[:2].isdigit()])
def test_the_minutes_add_up(stem):
    prose = "\n".join(c.source for c in cells(stem) if c.cell_type == "markdown")
    asked_for = re.findall(r"^### (?:Exercise \d+|Build it) \(\w+, (\d+) minutes\)", prose, re.M)
    _, exercises_ = minutes(stem)
    assert len(asked_for) == len(tagged(stem, "exercise") + tagged(stem, "build"))
    assert exercises_ == sum(map(int, asked_for))


@pytest.mark.parametrize("check", [
    pytest.param(check, marks=[pytest.mark.slow]*(check in LONG)) for check in sorted(NAMES)])
def test_the_solution_passes_and_the_blank_gets_nothing(check, spaces):
    stem, name = NAMES[check]
    card = verdict(solution(check), check, spaces)
    assert card.solved, card
    for blank in ("...", "return NotImplemented", "pass", "raise NotImplementedError"):
        card = verdict(f"def {name}(*args):\n    {blank}", check, spaces)
        passed, total = card.score
        assert passed == 0 and total >= 3 and not card.attempted
        assert "not attempted" in repr(card)


WRONG = {check: wrong for table in TABLES.values() for check, wrong in table["WRONG"].items()}
SLOW = {check for table in TABLES.values() for check in table.get("SLOW", ())}


def test_every_exercise_is_in_the_table():
    assert set(WRONG) == set(NAMES)
    assert all(len(wrong) >= 3 for wrong in WRONG.values())


def wrong_answer(check, words):
    "Code that defines a wrong answer under the student's name."
    code = WRONG[check][words]
    return code if code.startswith("def") else f"{NAMES[check][1]} = {code}"


def is_long(check, words):
    return check in LONGEST or check in LONG and words != next(iter(WRONG[check]))


ROWS = [pytest.param(check, words, marks=[pytest.mark.slow]*is_long(check, words))
        for check in sorted(WRONG) for words in WRONG[check]]


def diagnosed(check, words, spaces, seed):
    card = verdict(wrong_answer(check, words), check, spaces, seed)
    assert not card.solved and card.numbers
    assert words in card.why, card
    assert 1 <= len(card.hints) <= 3 == card.of_hints


@pytest.mark.quick(120)
@pytest.mark.parametrize("check,words", ROWS)
def test_a_typical_mistake_gets_its_diagnosis(check, words, spaces):
    diagnosed(check, words, spaces, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("check", sorted(set(WRONG) - SLOW))
def test_other_cases_lead_to_the_same_diagnosis(check, spaces):
    for words in WRONG[check]:
        diagnosed(check, words, spaces, seed=2)


def test_no_list_names_a_check_that_is_gone():
    "Those of the assignments are written out in their folder."
    text = "".join(path.read_text() for path in ROOT.glob("assignments/checks/*.py"))
    asked_for = NAMES.keys() | set(re.findall(r"check_\w+", text))
    named = LONG | answers.DEAR | {row[0] for row in [*answers.slips(), *answers.right()]}
    assert not named - asked_for


ODD = {"nothing": None, "a text": "two", "a list": [1, 2],
       **{f"returns {answer!r:.20}": (lambda *given, answer=answer: answer)
          for answer in (float("nan"), "two", [1, 2], {}, 1j, torch.nn.Identity(), (None, None),
                         lambda *given: 1., torch.ones(2, 3))},
       "another signature": lambda: 1, "raises": lambda *given: [][0],
       "prints": lambda *given: print("so much"), "the first argument": lambda *given: given[0]}
OURS = ("argument must be", "size of tensor", "not iterable", "unpack", "ambiguous", "has no ",
        " at 0x")
FEW = [what for what in ODD if what in ("a text", "another signature", "prints") or "two" in what]


@pytest.mark.quick(40)
@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", [
    pytest.param(check, marks=[pytest.mark.slow]*(check in LONGEST)) for check in sorted(WRONG)])
def test_another_kind_of_answer_is_refused_in_words(check, all_of_them, spaces, capsys):
    for what in ODD if all_of_them else FEW:
        odd = ODD[what]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # ours would stand above the student's card
            card = spaces[NAMES[check][0]][check](odd, 1)
        assert not card.solved, (what, card)
        if card.attempted:
            assert card.why or card.numbers, (what, card)
            mine = "your function raised" not in card.numbers
            assert not [word for word in OURS if mine and word in repr(card)], (what, card)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hundreds_of_wrong_answers_and_unusual_right_ones(all_of_them, spaces):
    "Wrong ones are refused in words, those that break privacy earn half at most, right ones all."
    def judge(check, code):
        return verdict(answers.named(code, NAMES[check][1]), check, spaces, seed=1)
    assert not list(answers.complaints(NAMES, judge, all_of_them))


# --- the machinery


def judge(function, seed=None):
    trial = Trial(function, "check_it", seed, ("one", "two", "three"))
    with trial.holds("twice"):
        trial.same(lambda x: 2*x["a"], {"a": torch.ones(3)})
    with trial.holds("tiny"):
        trial.same(lambda x: 2*x["a"], {"a": 1e-9})
    return trial.card()


def zero(x):
    x["a"] = x["a"]*0
    return 0


def test_what_is_changed_is_a_copy():
    net = torch.nn.Linear(2, 1)
    before = net.weight.clone()

    def cheat(theirs):
        with torch.no_grad():
            theirs.weight.zero_()
        return 0.
    trial = Trial(cheat, "check_net")
    with trial.holds("the sum of the weights"):
        trial.same(lambda net: net.weight.sum(), net)
    assert trial.card().score == (0, 1) and torch.equal(net.weight, before)
    assert judge(zero).score == (0, 2)


class AlwaysEqual:
    def __eq__(self, other):
        return True


class LyingText(str):
    __eq__, __hash__ = AlwaysEqual.__eq__, str.__hash__


class LyingTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            wanted = func.__name__ in ("detach", "cpu", "double", "squeeze", "flatten")
            return args[0] if wanted else torch.zeros(3)


@pytest.mark.parametrize("liar", [AlwaysEqual(), LyingText("no"), [AlwaysEqual()]])
def test_an_answer_is_not_asked_whether_it_is_right(liar):
    trial = Trial(lambda x: liar, "check_it", 1)
    with trial.holds("a word"):
        trial.same(lambda x: "yes", 1)
    with trial.holds("the same word, compared by the check"):
        trial.need(trial(1) == "yes", "it is another word")
    with trial.holds("one of two words"):
        trial.need(trial.said(lambda trial: (1,), 3, ("yes", "maybe"))["yes"] == 3, "not yes")
    assert trial.card().score == (0, 3)


def test_a_tensor_that_answers_for_itself_is_a_plain_one():
    lie = torch.ones(3).as_subclass(LyingTensor)
    assert judge(lambda x: lie).score == (0, 2)
    assert judge(lambda x: (2*torch.as_tensor(x["a"])).as_subclass(LyingTensor)).solved


def test_no_traceback_of_ours():
    def crash(x):
        raise SystemExit(3)
    for odd in (crash, lambda x: "text", lambda: 1, lambda x: [1, [2, 3]], lambda x: object(), 7,
                lambda x: lambda: 1, lambda x: {"a": 1}, float, lambda x: [None], lambda x: torch):
        card = judge(odd)
        assert card.score == (0, 2) and card.attempted
        assert card.numbers and "Traceback" not in repr(card)
    assert "SystemExit: 3" in judge(crash).numbers
    assert "`raise SystemExit(3)`" in judge(crash).numbers


def test_the_global_generator_stays_where_it_was():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    judge(lambda x: torch.manual_seed(5) and 2*x["a"])
    assert torch.rand(1) == expected


def test_a_decorated_attempt_is_told_from_another():
    frozen, given = torch.no_grad()(lambda x: 1), partial(lambda k, x: 2, 3)
    shown = [len(judge(f).hints) for f in (frozen, torch.no_grad()(lambda x: 5), given, given)]
    assert shown == [1, 2, 3, 3]


def test_fixed_cases_show_no_seed(spaces):
    "The first property of rms is two given numbers; the last one draws its tensors."
    check = spaces["00_start"]["check_rms"]
    assert "(seed=" not in repr(check(lambda x: x.abs().max(), 3))
    assert "(seed=3)" in repr(check(lambda x: x.square().mean(-1).sqrt(), 3))


# --- the student's copy


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "A student's folder, made from the notebooks as they are."
    folder = tmp_path_factory.mktemp("course")/"student"
    with pytest.MonkeyPatch.context() as patch:  # signatures go to a folder of its own
        patch.setenv("JUPYTER_DATA_DIR", str(folder.parent/"jupyter"))
        student.make(folder)
    return folder


def test_the_copy_is_made_once(copy):
    lesson = copy/"00_start.ipynb"
    kept = lesson.read_bytes()
    lesson.write_text("mine")
    (copy/exercises.PROGRESS).write_text('{"mine": 1}')
    (copy/"01_promise.ipynb").unlink()
    assert student.make(copy) == 1  # what is missing comes back
    assert lesson.read_text() == "mine" and "mine" in (copy/exercises.PROGRESS).read_text()
    lesson.write_bytes(kept)
    (copy/exercises.PROGRESS).write_text("")


def test_solutions_stand_in_a_second_place(copy):
    for stem in CONVERTED:
        lesson = nbformat.read(copy/place(stem), 4)
        assert not [c for c in lesson.cells if student.is_solution(c)]
        assert not any("# solution" in c.source for c in lesson.cells)
        kept = nbformat.read(copy/f"solutions/{stem}.ipynb", 4)
        folded = [c for c in kept.cells if student.is_solution(c)]
        assert [c.source for c in folded] == [c.source for c in tagged(stem, "solution")]
        assert all(c.metadata.jupyter.source_hidden for c in folded)


def test_a_guess_is_a_guess_in_the_copy(copy):
    "Saved results stand only where nobody waits for them; what makes a package stays at home."
    diagrams, late, folded = 0, 0, 0
    for path in set(copy.rglob("*.ipynb")) - {copy/"index.ipynb"}:
        before = None
        for cell in nbformat.read(path, 4).cells:
            if cell.cell_type == "code":
                hidden = cell.metadata.get("jupyter", {}).get("outputs_hidden", False)
                shown = student.is_late(cell) and cell.outputs and not hidden
                assert not (shown and student.asks(before)), (path, cell.id)
                folded += hidden
                drawn = student.is_diagram(cell)
                assert student.is_late(cell) or drawn or not cell.outputs, (path, cell.id)
                assert not drawn or cell.metadata.jupyter.source_hidden, (path, cell.id)
                assert not (drawn and student.asks(before)), (path, cell.id)
                diagrams, late = diagrams + drawn, late + student.is_late(cell)
                assert not re.search(r"(?m)^#\|\s*(export|default_exp)|^_all_", cell.source), path
                assert cell.source.strip() or not cell.metadata.get("tags"), path
            before = cell
    assert diagrams >= 15 and late >= 5, "pictures and the results of slow cells are shown"
    assert folded >= 6, "where a guess was asked for, a click shows them"


def test_a_lesson_of_the_copy_imports_every_name_that_it_uses(copy, tmp_path):
    "A lesson imports no private name; a room of the workshop only one that a cell needs."
    for path in [*copy.glob("*.ipynb"), *copy.glob("workshop/**/*.ipynb")]:
        cells = [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
        code = "\n\n".join(re.sub(r"(?m)^\s*[%!].*$", "pass", c.source) for c in cells)
        (tmp_path/f"{path.parent.name}_{path.stem}.py").write_text(code + "\n")
        for names in re.findall(r"(?m)^from dp_course\S* import (\([^)]*\)|.*)", code):
            for name in re.findall(r"\b_\w+", names):
                assert path.parent != copy, (path, name)
                assert len(re.findall(rf"\b{name}\b", code)) > 1, (path, name)
    found = subprocess.run([Path(sys.executable).parent/"ruff", "check", "--isolated", "--select",
                            "F821", "--output-format", "concise", tmp_path],
                           capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_links_of_the_copy_lead_somewhere(copy):
    (copy.parent/"nbs").mkdir(exist_ok=True)
    for path in copy.rglob("*.ipynb"):
        prose = "\n".join(c.source for c in nbformat.read(path, 4).cells
                          if c.cell_type == "markdown")
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", prose)
        outside = [link for link in links if not (path.parent/link).exists()]
        beside = [ROOT/"student"/path.parent.relative_to(copy)/link for link in outside]
        assert not [link for link in beside if not Path(os.path.normpath(link)).exists()]


def test_make_lab_opens_the_copy():
    for source, folder in (("", "student"), ("1", "nbs")):
        shown = subprocess.run(["make", "-n", "lab", f"SOURCE={source}"], cwd=ROOT, text=True,
                               capture_output=True, check=True).stdout
        assert f"{folder}/index.ipynb" in shown.split("jupyter lab")[1]
        assert ("tools/student.py" in shown) == (folder == "student")


def test_progress_is_kept_in_the_students_folder(copy, monkeypatch, spaces):
    monkeypatch.chdir(copy)
    assert student.PROGRESS == exercises.PROGRESS
    asked_for = {stem: set(checks) for stem, checks in listed(".").items()}
    assert asked_for == {stem: {check for s, check, _ in EXERCISES + BUILDS if s == stem}
                         for stem in CONVERTED}
    check = spaces["00_start"]["check_rms"]
    check(lambda x: x.norm())
    assert "□□□□ 0 of 4" in repr(how_far())
    check(lambda x: x.square().mean().sqrt())
    check(lambda x: x.norm())  # a later mistake takes nothing away
    assert re.search(r"00_start +□*■□* 1 of 4", repr(how_far())), how_far()
    kept = json.loads((copy/exercises.PROGRESS).read_text())
    assert kept["check_rms"]["best"] == [4, 4] and kept["check_rms"]["tries"] == 2
    monkeypatch.chdir(copy/"workshop/training")  # a room's kernel runs there
    spaces["processes"]["check_noises_in"](lambda moves, std: round((moves.var()/std**2).item()))
    assert not Path(exercises.PROGRESS).exists()
    assert re.search(r"processes +■□□ 1 of 3", repr(how_far())), how_far()
    assert "check_noises_in" in json.loads((copy/exercises.PROGRESS).read_text())
    monkeypatch.chdir(copy/"solutions")  # whoever runs a solution has not solved it
    spaces["00_start"]["check_secrets"](lambda m: m)
    assert "check_secrets" not in json.loads((copy/exercises.PROGRESS).read_text())


def test_progress_of_an_earlier_version_is_read(tmp_path, monkeypatch):
    "It does not say which code passed."
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT/"nbs/00_start.ipynb", tmp_path)
    kept = '{"check_secrets": {"best": [4, 4], "tries": 1, "last": "a"}}'
    (tmp_path/exercises.PROGRESS).write_text(kept)
    assert "1 of 4" in repr(how_far())


@pytest.mark.parametrize("text", [
    '{"check_rms": 1}', '{"check_rms": {"best": 2}}', "[", "[1]", None])
def test_a_strange_folder_stops_no_lesson(text, spaces, tmp_path):
    "Progress of another form, a folder of its name, a broken notebook, a copy of another."
    kept = tmp_path/exercises.PROGRESS
    kept.mkdir() if text is None else kept.write_text(text)
    for name in ("00_start", "00_start-Copy1"):
        shutil.copyfile(ROOT/"nbs/00_start.ipynb", tmp_path/f"{name}.ipynb")
    (tmp_path/"01_broken.ipynb").write_text('{"cells": [5]}')
    assert spaces["00_start"]["check_rms"](lambda x: x.square().mean().sqrt()).solved
    assert [row[0] for row in how_far().rows()] == ["00_start"]


def test_what_a_card_says_is_true_of_the_property_that_it_shows(spaces):
    "A later property's diagnosis is shown with its name; one number tells no slip from another."
    card = verdict("late_sum = lambda x, g, f: torch.einsum('b,bto,bti->oi', f + .1, g, x)",
                   "check_late_sum", spaces, 1)
    assert "another property fails, too (a bad example counts nothing): 0*NaN" in card.why
    check = exercises.Exercise(
        "check_same", "`same(x)`: x.", truth=lambda x: x, hints=("a", "b", "c"),
        properties={"one": [(2.,)], "more": [(20.,), (30.,)]}, slips={"squared": lambda x: x*x})
    assert check(lambda x: x*x).why == "squared"
    assert "squared" not in check(lambda x: x + 2).why


def test_right_answers_are_right_where_gradients_are_off(spaces):
    code = {check: solution(check) for check in ("check_conv_ghost", "check_raw_norms")}
    with torch.no_grad():
        assert all(verdict(text, check, spaces).solved for check, text in code.items())


# --- what never ends is stopped


_counts = exercises.Exercise(
    "check_count", "`count(n)`: n.", truth=lambda n: n, hints=("a", "b", "c"),
    properties={"one": [(1,)], "two": [(2,)], "three": [(3,)]})


def _loops(n):
    while n == 2:
        pass
    return n


def _sleeps(n):
    try:
        time.sleep(1000*(n == 2))
    except Exception:
        pass
    return n


@pytest.mark.parametrize("slow, line", [(_loops, "pass|while n == 2:"), (_sleeps, "time.sleep")])
def test_what_never_ends_is_stopped_with_the_call_and_the_line(slow, line, monkeypatch):
    monkeypatch.setattr(exercises, "_SECONDS", .1)
    began = time.monotonic()
    card = _counts(slow)
    assert time.monotonic() - began < 5
    assert card.score == (1, 3) and "a loop that never ends" in card.why
    assert re.search(rf"stopped after 0.1 s, in call 2, for \(2\), in your line `({line})",
                     card.numbers)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0., 0.)


def test_many_slow_calls_are_stopped_together(monkeypatch):
    monkeypatch.setattr(exercises, "_SECONDS", .1)
    trial = Trial(lambda n: time.sleep(.01) or n, "check_count")
    with trial.holds("a thousand"):
        trial.all_same(lambda n: n, [(n,) for n in range(1000)])
    assert 2 <= trial.calls and "stopped after 0.1 s" in trial.card().numbers and trial.used < 1


def test_an_alarm_of_somebody_else_is_left_alone():
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 100)
        assert _counts(lambda n: n).solved
        assert 90 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("where", ["in a thread", "on Windows"])
def test_where_there_is_no_alarm_a_check_works_without(where, monkeypatch):
    cards = []
    if where == "on Windows":
        monkeypatch.delattr(signal, "setitimer")
        cards.append(_counts(lambda n: n))
    else:
        thread = threading.Thread(target=lambda: cards.append(_counts(lambda n: n)))
        thread.start()
        thread.join()
    assert cards[0].solved


def test_zeros_alone_are_no_evidence_of_a_slip():
    "Another slip that is clamped to 0 was named: that a term is missing which was there."
    def above(least):
        return lambda x: max(0., x - least)
    check = exercises.Exercise(
        "check_same", "`same(x)`: x.", truth=lambda x: x, hints=("a", "b", "c"),
        properties={"small": [(1.,), (2.,)], "large": [(20.,), (30.,)]},
        slips={"five is taken away": above(5), "nine is taken away": above(9)})
    assert check(above(5)).why == "five is taken away"
    assert "taken away" not in check(above(8)).why
