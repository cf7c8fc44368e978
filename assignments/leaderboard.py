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
from functools import cached_property, lru_cache
from pathlib import Path

import torch

from dp_course.cli import (
    Config,
    config_of,
    load_data,
    make_plan,
    make_schedule,
    make_trainer,
    verify,
)
from dp_course.data import call_model
from dp_course.privacy import PLDAccountant, SecretSeed, normal
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
DATA = {  # points begin here; the last three: the worst, the mean, the best of recorded runs
    "digits": (.90, .93, .947, .955, .961),   # runs/2026-11-23-digits-eps3-*.jsonl
    "fashion": (.80, .83, .840, .848, .853)}  # the tanh network in runs/2026-11-22-sweep-shoe.jsonl
NO_DATA = "cannot be verified on this machine"
ROUNDINGS = 20  # how many times what float32 did to the run another processor may have done
MOST_LUCK = 5.5  # standard deviations: a false alarm once in 10 million submissions
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
    record.write("start", **start_line(config, trainer, None, 0),
                 stream=trainer._secret.fingerprint)  # whose record it is
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

    @cached_property
    def ledger(self):
        "Entries of the file beside the checkpoint."
        lines = map(json.loads, Journal(self.folder/"checkpoint").entries())
        return {Entry(*line) for line in lines if line[0] != "run"}

    @cached_property
    def saved(self):
        "Entries that the checkpoint was written with."
        return {Entry(*entry) for entry in self.state["book"]["entries"]}

    @property
    def entries(self):
        "Of the checkpoint, and what was spent after it."
        return list(self.saved | self.ledger)

    @property
    def steps(self):
        "The training steps among them, in order."
        return sorted((e for e in self.entries if e.what == STEPS), key=lambda entry: entry.t)

    @property
    def config(self):
        return config_of(self.record)

    @cached_property
    def replay(self):
        "The run, repeated."
        _need([entry.t for entry in self.steps] == list(range(self.record[-1]["step"])),
              "forged: the ledger does not hold every step once, so the run cannot be repeated")
        return Replay(self)

    @cached_property
    def graded(self):
        "The run whose weights are graded: whoever writes digests could have chosen the noise."
        return self.replay if self.replay.exact else Replay(self, named=False)


def check_rules(it):
    "The data and the delta of the leaderboard; nothing tuned on the test part's way in."
    config = it.config
    _need(config.data in DATA, f"data is {config.data!r}: the leaderboard has {', '.join(DATA)}")
    _need(config.eps <= EPS, f"eps is {config.eps:g}, at most {EPS:g} is allowed")
    _need(config.delta <= DELTA, f"delta is {config.delta:g}, at most {DELTA:g} is allowed")
    _need(not config.n_val, f"n_val is {config.n_val}: hand in a run on the whole training set")
    _need(not (config.start or config.centre), "start and centre are not for this leaderboard")


def check_spent(it):
    "eps, from every entry of the ledger and from the record."
    ledger = spent(it.entries, DELTA)
    _need(ledger <= 1.0005*EPS, f"the ledger holds {len(it.steps)} steps, and they spend eps = "
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
    steps = it.steps
    _need(len(steps) == end["computed"] and end["step"] == state["counts"][0],
          f"forged: the record says {end['computed']} steps, the ledger {len(steps)}")
    wrong = {(e.q, e.sigma) for e in steps} - {(plan.q, plan.sigma)}
    _need(not wrong, f"forged: steps at (q, sigma) = {wrong}, not ({plan.q:.6g}, {plan.sigma:.6g})")
    lost = len(it.saved - it.ledger)
    _need(not lost, f"forged: the ledger lacks {lost} of the {len(it.saved)} entries that the "
          "checkpoint was written with: it was cut or edited")
    stream = SecretSeed(*it.state["seed"][:2]).fingerprint
    _need(it.record[0].get("stream") == stream, "forged: the record is that of another run")
    _need(it.release["statement"] == end["statement"], "forged: record and release state another "
          "guarantee")


def check_seed(it):
    "One secret seed, and every step drawn once."
    start, secret, turns = it.state["seed"]
    stream = SecretSeed(start, secret).fingerprint + ".0"
    _need(not turns, f"re-seeded: seed {turns[0][0] if turns else ''!r} was given at step "
          f"{turns[0][1] if turns else ''}, to draw other noise")
    _need(secret, f"the seed {start!r} was given: noise that can be chosen can be chosen luckily, "
          "and taken off")
    again = len(it.steps) - len({entry.t for entry in it.steps})
    strange = sum(entry.stream != stream for entry in it.steps)
    _need(not again and not strange, f"re-seeded: {again} steps were drawn again, and {strange} "
          "from streams that are not this seed's first")


def _distance(a, b):
    "Between two sets of weights."
    return math.sqrt(sum((a[name].double() - b[name].double()).square().sum() for name in a))


def _ended(trainer):
    "The weights that a trainer would release, as float64."
    weights = dict(trainer.model.state_dict())
    for callback in trainer.callbacks:
        weights |= getattr(callback, "weights", {})
    return {name: value.detach().double() for name, value in weights.items()}


class Replay:
    """A run repeated from its secret seed, with the noise that its ledger names.

    The noise of a step hangs on the last bits of the sum that it hides, and another processor
    rounds those otherwise. The ledger keeps their digest, so the noise is known all the same."""
    def __init__(
        self,
        it,          # `Submission`
        wide=False,  # in float64: what rounding did is the distance to the float32 run
        named=True,  # or under the digests of this machine, which nobody has chosen
    ):
        self.named = named
        self.trainer = trainer = _prepared(it.config, it.state["seed"][0])
        self.begin, self.entries = _ended(trainer), {entry.t: entry for entry in it.steps}
        self.exact, self.along = True, []
        self.look = next(trainer.data.test_rows(500)) if named and not wide else None
        if wide:
            trainer.model.double()
            trainer._weights.note()
        self.own, trainer._step_entry = trainer._step_entry, self.step_entry
        trainer.fit()
        self.weights = _ended(trainer)

    def step_entry(self, total, norms, std, batch):
        "The entry of the next step, under the digest that the ledger has for it."
        mine = self.own(total, norms, std, batch)
        theirs = self.entries.get(mine.t)
        _need(theirs, f"forged: the run takes step {mine.t}, and the ledger does not have it")
        self.exact = self.exact and mine == theirs
        entry = mine._replace(digest=theirs.digest) if self.named else mine
        if self.look is not None:
            self.along.append(self.aligned(total, entry))
        return entry

    def aligned(self, total, entry):
        "How far the noise of a step goes along its sum, and along the test part's gradient."
        trainer, (x, y) = self.trainer, self.look
        noise = trainer._noise(entry)
        z = torch.cat([normal(g.shape, noise).flatten() for g in total.values()])
        output = call_model(trainer.model, trainer._reader().input(x))
        loss = trainer.loss_fn(output, y.to(trainer.device)).mean()
        grads = torch.autograd.grad(loss, list(trainer.params.values()))
        ways = [torch.cat([g.detach().double().flatten() for g in way])
                for way in (total.values(), grads)]
        return [(z@way/way.norm().clamp(min=1e-30)).item() for way in ways]

    def luck(self):
        "By how many standard deviations the noise of all steps went one of these ways."
        columns = list(zip(*self.along))
        return max((abs(sum(column))/math.sqrt(len(column)) for column in columns), default=0.)


def check_again(it):
    "The run, repeated from its secret seed and its ledger, ends in the model that was released."
    replay, wide = it.replay, Replay(it, wide=True)
    mine, theirs = replay.weights, it.release["weights"]
    same = mine.keys() == theirs.keys() and all(mine[k].shape == theirs[k].shape for k in mine)
    _need(same, f"the release holds {', '.join(theirs)}, not the weights of {it.config.model!r}")
    way = _distance(mine, replay.begin) or 1.  # nowhere, with a rate of zero
    rounding = _distance(mine, wide.weights)
    off = _distance(mine, theirs)
    _need(off <= ROUNDINGS*rounding + 1e-6*way, f"forged: repeated from its seed and its ledger "
          f"the run ends {off/way:.3g} of its way from the model that was released, and rounding "
          f"explains {rounding/way:.2g}")
    _need(replay.exact or replay.luck() < MOST_LUCK, "forged: the digests name noise that goes the "
          f"model's way by {replay.luck():.3g} standard deviations; noise that nobody chose goes "
          "nobody's way")


def accuracy(run):  # `Replay`
    "On the test part, of the weights that the grader recomputed."
    run.trainer.set_weights(run.weights)
    return run.trainer.evaluate()


def check_accuracy(it):
    "What the record says of the model is what the recomputed model does."
    said, found = it.record[-1]["test_accuracy"], accuracy(it.replay)
    _need(abs(said - found) < .003, f"forged: the record says {said:.2%}, the run repeated from "
          f"its seed recognizes {found:.2%}")


CHECKS = {
    "the rules: data, delta, no validation split": check_rules,
    "at most eps = 3, from ledger and record": check_spent,
    "record, ledger and model tell the same story": check_story,
    "one secret seed, every step drawn once": check_seed,
    "repeated from its seed and its ledger, the run ends in this model": check_again,
    "the record's accuracy is that of the repeated run": check_accuracy,
}


def findings(
    folder="submission",
):  # list of (what was checked, "" or why it is refused)
    "Verify a submission, as the grader does; the same files are verified once."
    return list(_verified(folder)[0])


def standing(
    folder="submission",
):  # accuracy of the weights that were recomputed, under this machine's noise; 0 if refused
    "Where a submission stands on the leaderboard."
    found, it = _verified(folder)
    return 0. if any(why for _, why in found) else accuracy(it.graded)


def line(
    folder="submission",
):  # dict; accuracy 0: the submission is refused
    "What the leaderboard says of a submission."
    found = {"accuracy": standing(folder)}
    if found["accuracy"]:
        it = _verified(folder)[1]
        shown = "data", "model", "batch_size", "epochs", "lr", "max_norm", "tuning_runs"
        found |= {name: getattr(it.config, name) for name in shown}
        found["run"] = it.record[0]["stream"]
    return found


def data_of(folder="submission"):
    "The data set that a submission is about."
    return _verified(folder)[1].config.data


def _verified(folder):  # findings, and the `Submission` with its replay; None: cannot be read
    paths = [Path(folder)/name for name in FILES]
    bytes_of = [path.read_bytes() if path.is_file() else b"" for path in paths]
    return _verify_once(str(folder), tuple(hashlib.sha256(b).hexdigest() for b in bytes_of))


@lru_cache(maxsize=16)
def _verify_once(folder, digests):
    try:
        it = Submission.read(folder)
    except Doubt as doubt:
        return [(text, str(doubt)) for text in CHECKS], None
    return [(text, _refusal(check, it)) for text, check in CHECKS.items()], it


def _refusal(check, it):
    "Why a check refuses a submission; empty if it does not."
    try:
        check(it)
    except Doubt as doubt:
        return str(doubt)
    except FileNotFoundError:
        return (f"{NO_DATA}: it has no copy of {it.config.data!r}; fetch one, or set "
                "DP_COURSE_DATA, and grade again")
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""
