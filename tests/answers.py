"""Answers of students as text: slips.txt, right_answers.txt.

slips.txt: under each check perhaps a right answer, indented; then a wrong one a line, as code, or
as a part of the right answer and what stands there instead. `!` breaks privacy, `-` does not. In
brackets: words of the diagnosis, where another would be untrue.
"""
import json
import re
from pathlib import Path

HERE = Path(__file__).parent
DEAR = {"check_noise", "check_noise_for", "check_mean_error", "check_poisson_by_jumps",
        "check_whole_bill", "check_noisy_sum", "check_search_cost", "check_spent",
        "check_ledger_epsilon", "check_honest_total", "check_worst_move", "check_delta_apart",
        "check_naive_epsilon", "check_fast_sum", "check_train"}


def _code(told, base):
    "The code of a wrong answer: its own, or the right one with a part replaced."
    if " => " in told and base:
        old, new = map(json.loads, told.split(" => "))
        assert old in base, told
        return base.replace(old, new)
    return json.loads(told) if told.startswith('"') else told


def slips():
    "(check, what is wrong, code, whether it breaks privacy, words) of every wrong answer."
    check, base = "", ""
    for line in (HERE/"slips.txt").read_text().splitlines():
        if line.startswith("["):
            check, base = line[1:-1], ""
        elif line.startswith("    "):
            base += line[4:] + "\n"
        elif line:
            what, told = line[2:].split(": ", 1)
            words = re.search(r"\[(.*)\]$", what)
            yield check, what, _code(told, base), line[0] == "!", words[1] if words else ""


def right():
    "(check, how it is written, code) of right answers that look unlike ours."
    for part in re.split(r"(?m)^(?=\[)", (HERE/"right_answers.txt").read_text()):
        if part:
            head, code = part.split("\n", 1)
            check, how = head[1:].split("] ", 1)
            yield check, how, re.sub(r"(?m)^    ", "", code)


def named(code, name):
    "Code that defines an answer under the student's name."
    code = code.replace("{name}", name)
    whole = re.match(r"(def|import|memory)\b", code)
    return code if whole else f"{name} = {code}"


def complaints(checks, verdict, all_of_them):
    "What a judge gets wrong; `verdict(check, code)` is a card. Not all: without what is costly."
    for check, what, code, leaks, words in slips():
        if check in checks and (all_of_them or leaks and check not in DEAR):
            card = verdict(check, code)
            passed, total = card.score
            said = f"{check}, {what}: {passed} of {total}, {card.why!r}"
            if card.solved or not card.why:
                yield f"{said}: passed, or without a diagnosis"
            elif words and (words not in card.why or card.leaks != leaks):
                yield f"{said}: not {words!r}, or wrong about privacy"
            elif leaks and 2*passed > total:
                yield f"{said}: it breaks privacy and earns more than half"
    for check, how, code in right():
        if check in checks and (all_of_them or check not in DEAR):
            card = verdict(check, code)
            if not card.solved:
                yield f"right, but refused: {check}, {how}: {card}"
