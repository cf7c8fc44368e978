"""The private leaderboard of A5: train, hand in, and verify what was handed in.

A submission is a folder with four files: the record of the run, the released model, the checkpoint
and its ledger. The last two hold the secret seed: they are for the grader's eyes only, who
repeats the run with it. Whoever verifies needs no trust in the one who trained.
"""
import hashlib
import json
import math
import time
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dp_course.cli import (
    Config,
    config_of,
    load_data,
    make_plan,
    make_schedule,
    make_trainer,
    verify,
)
from dp_course.privacy import PLDAccountant
from dp_course.training import (
    STEPS,
    Entry,
    Journal,
    Record,
    end_line,
    load_checked,
    measure,
    read_record,
    start_line,
)

EPS, DELTA = 3., 1e-5
DATA = {"digits": (.85, .90, .93, .945), "fashion": (.70, .76, .80, .83)}  # points begin here
NO_DATA = "cannot be verified on this machine"
FILES = "record.jsonl", "model.pt", "checkpoint", "checkpoint.ledger"


@lru_cache(maxsize=2)
def _data(data, features, pixel_std, n_val):
    "A data set; its features are computed once."
    return load_data(Config(data=data, features=features, pixel_std=pixel_std, n_val=n_val))


def _prepared(config, seed=None):
    "A trainer before its first step: all that a run is made of, from settings and a seed."
    data = _data(config.data, config.features, config.pixel_std, config.n_val)
    trainer = make_trainer(config, data, seed)
    trainer.callbacks.append(make_schedule(config, trainer.plan.steps))
    return trainer


def hand_in(
    config:Config,
    folder="submission",  # new: a run that is there already is not overwritten
):                        # test accuracy
    "Train privately from a secret seed, and write what is handed in."
    # FileExistsError: the folder holds a run
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    trainer = _prepared(config)
    record = Record(folder/"record.jsonl")
    record.write("start", **start_line(config, trainer, None, 0))
    began = time.perf_counter()
    trainer.fit()
    seconds = time.perf_counter() - began
    trainer.save(folder/"checkpoint")
    trainer.release(folder/"model.pt")
    accuracy = measure(trainer)["accuracy"]
    record.write("end", **end_line(config, trainer, seconds, accuracy, "steps"))
    record.close()
    return accuracy


class Doubt(ValueError):
    "Why a submission is refused."


def _need(ok, numbers):
    if not ok:
        raise Doubt(numbers)


def spent(
    entries,  # of a ledger: `Entry` or lists like it
    delta,
):            # eps
    "What a ledger costs: an entry that stands there twice is one look, any other is another look."
    account = PLDAccountant()
    looks = Counter((entry.q, entry.sigma) for entry in {Entry(*entry) for entry in entries})
    for (q, sigma), count in looks.items():
        account.step(q, sigma, count)
    return account.epsilon(delta) if entries else 0.


@dataclass
class Submission:
    "What was handed in, read without running anything."
    folder:Path
    record:list
    release:dict
    state:dict

    @classmethod
    def read(cls, folder):
        folder = Path(folder)
        missing = [name for name in FILES if not (folder/name).is_file()]
        _need(not missing, f"there is no {', '.join(missing)}")
        try:
            record = read_record(folder/"record.jsonl")
            release = load_checked(folder/"model.pt", "dp_course release 1")
            state = load_checked(folder/"checkpoint", "dp_course checkpoint 3")
        except (OSError, ValueError) as error:
            raise Doubt(str(error).replace(f"{folder}/", "")) from None
        _need(len(record) > 1 and record[-1]["kind"] == "end", "the record has no last line")
        return cls(folder, record, release, state)

    @property
    def entries(self):
        "Of the checkpoint, and what was spent after it."
        lines = map(json.loads, Journal(self.folder/"checkpoint").entries())
        later = [line for line in lines if line[0] != "run"]
        return list({Entry(*entry) for entry in [*self.state["book"]["entries"], *later]})

    @property
    def config(self):
        return config_of(self.record)


def check_rules(it):
    "The data and the delta of the leaderboard; nothing tuned on the test part's way in."
    config = it.config
    _need(config.data in DATA, f"data is {config.data!r}: the leaderboard has {', '.join(DATA)}")
    _need(config.delta <= DELTA, f"delta is {config.delta:g}, at most {DELTA:g} is allowed")
    _need(not config.n_val, f"n_val is {config.n_val}: hand in a run on the whole training set")
    _need(not (config.start or config.centre), "start and centre are not for this leaderboard")


def check_spent(it):
    "eps, from every entry of the ledger and from the record."
    ledger = spent(it.entries, DELTA)
    steps = sum(Entry(*entry).what == STEPS for entry in it.entries)
    _need(ledger <= 1.0005*EPS, f"the ledger holds {steps} steps, and they spend eps = "
          f"{ledger:.4g} at delta = {DELTA:g}: {EPS:g} is allowed")
    try:
        verify(it.record)
    except ValueError as error:
        raise Doubt(str(error)) from None


def check_story(it):
    "Record, checkpoint and release tell of the same run."
    end, state = it.record[-1], it.state
    plan = make_plan(it.config, it.record[0]["plan"]["n"])
    for name in ("n", "batch_size", "steps", "eps", "delta", "q", "sigma"):
        said, there = it.record[0]["plan"][name], state["config"][f"plan.{name}"]
        made = getattr(plan, name)
        _need(said == there and math.isclose(said, made, rel_tol=1e-6),
              f"forged: {name} is {said:.6g} in the record, {there:.6g} in the checkpoint, and "
              f"{made:.6g} by its own settings")
    steps = [Entry(*entry) for entry in it.entries if entry[0] == STEPS]
    _need(len(steps) == end["computed"] and end["step"] == state["counts"][0],
          f"forged: the record says {end['computed']} steps, the ledger {len(steps)}")
    wrong = {(e.q, e.sigma) for e in steps} - {(plan.q, plan.sigma)}
    _need(not wrong, f"forged: steps at (q, sigma) = {wrong}, not ({plan.q:.6g}, {plan.sigma:.6g})")
    _need(it.release["statement"] == end["statement"], "forged: record and release state another "
          "guarantee")


def check_seed(it):
    "One secret seed, and every step drawn once."
    start, secret, turns = it.state["seed"]
    _need(not turns, f"re-seeded: seed {turns[0][0] if turns else ''!r} was given at step "
          f"{turns[0][1] if turns else ''}, to draw other noise")
    _need(secret, f"the seed {start!r} was given: noise that can be chosen can be chosen luckily, "
          "and taken off")
    steps = [Entry(*entry) for entry in it.entries if entry[0] == STEPS]
    again = len(steps) - len({entry.t for entry in steps})
    streams = len({entry.stream.split(".")[0] for entry in steps})
    _need(not again and streams == 1, f"re-seeded: {again} steps were drawn again, from "
          f"{streams} seeds")


def _distance(a, b):
    "Between two sets of weights."
    return math.sqrt(sum((a[name].double() - b[name].double()).square().sum() for name in a))


def check_again(it):
    "The run, repeated from its secret seed, ends in the model that was released."
    # Another processor rounds otherwise: a hundredth of the way is allowed, other noise is far off
    trainer = _prepared(it.config, it.state["seed"][0])
    begin = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.fit()
    mine = dict(trainer.model.state_dict())
    for callback in trainer.callbacks:
        mine |= getattr(callback, "weights", {})
    theirs = it.release["weights"]
    same = mine.keys() == theirs.keys() and all(mine[k].shape == theirs[k].shape for k in mine)
    _need(same, f"the release holds {', '.join(theirs)}, not the weights of {it.config.model!r}")
    way = _distance(mine, begin)
    off = _distance(mine, theirs)/way
    _need(off < .01, f"forged: repeated from its seed the run ends {off:.3g} of its way from the "
          "model that was released")
    return trainer


def accuracy(it):
    "Of the released model, on the test part."
    trainer = _prepared(it.config)
    trainer.model.load_state_dict(it.release["weights"])
    return trainer.evaluate()


def check_accuracy(it):
    "What the record says of the model is what the model does."
    said, found = it.record[-1]["test_accuracy"], accuracy(it)
    _need(abs(said - found) < .003, f"forged: the record says {said:.2%}, the released model "
          f"recognizes {found:.2%}")


CHECKS = {
    "the rules: data, delta, no validation split": check_rules,
    "at most eps = 3, from ledger and record": check_spent,
    "record, ledger and model tell the same story": check_story,
    "one secret seed, every step drawn once": check_seed,
    "the record's accuracy is the model's": check_accuracy,
    "repeated from its seed, the run ends in this model": check_again,
}


def findings(
    folder="submission",
):  # list of (what was checked, "" or why it is refused)
    "Verify a submission, as the grader does; the same files are verified once."
    paths = [Path(folder)/name for name in FILES]
    bytes_of = [path.read_bytes() if path.is_file() else b"" for path in paths]
    return list(_findings(str(folder), tuple(hashlib.sha256(b).hexdigest() for b in bytes_of)))


@lru_cache(maxsize=16)
def _findings(folder, digests):
    try:
        it = Submission.read(folder)
    except Doubt as doubt:
        return [(text, str(doubt)) for text in CHECKS]
    found = []
    for text, check in CHECKS.items():
        try:
            check(it)
        except Doubt as doubt:
            found.append((text, str(doubt)))
        except FileNotFoundError:
            found.append((text, f"{NO_DATA}: it has no copy of {it.config.data!r}; fetch one, or "
                          "set DP_COURSE_DATA, and grade again"))
        except Exception as error:
            found.append((text, f"{type(error).__name__}: {str(error)[:300]}"))
        else:
            found.append((text, ""))
    return found


def standing(
    folder="submission",
):  # accuracy; 0 if the submission is refused
    "Where a submission stands on the leaderboard."
    if any(why for _, why in findings(folder)):
        return 0.
    return accuracy(Submission.read(folder))
