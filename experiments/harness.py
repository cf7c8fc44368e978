"""One harness for every sweep. A recipe is a module with

    NAME     "clipping": the record is <date>-sweep-clipping.jsonl
    PARTS    name of a part -> function(rows) -> cells, in order. A cell is a dict that says what
             to run; `rows` is what is recorded: a part lists its final runs when the tuning is done
    key      function(cell or row) -> tuple: which run this is
    run      function(cell) -> list of runs, each a list of lines as in `dp_course.training.records`
"""
import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from dp_course.basics import machine
from dp_course.cli import make_plan, make_schedule, make_trainer, usable_precision
from dp_course.features import release_mean
from dp_course.training import code_version, end_line, measure, run_file, start_line, sweep

RUNS = Path(__file__).resolve().parent.parent/"runs"


def today():
    return time.strftime("%Y-%m-%d", time.gmtime())


def parser_of(
    name,  # "views": the record is runs/<date>-views.json
    how,   # what is run, and how
):         # `ArgumentParser` with the option --out
    "Begin the command line of an experiment that is no sweep."
    parser = argparse.ArgumentParser(
        description=how, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RUNS/f"{today()}-{name}.json")
    return parser


def new_record(how, **settings):
    "Begin the record of such an experiment, before its work: the code is the one that runs."
    return {"date": today(), "how": how, **settings, "code": code_version(), "machine": machine()}


def record_of(recipe):
    "The record of a sweep: the one that is there, or a new one of today."
    try:
        return run_file(f"sweep-{recipe.NAME}")
    except FileNotFoundError:
        return RUNS/f"{today()}-sweep-{recipe.NAME}.jsonl"


def rows_of(recipe, path=None):
    "What is recorded, as `sweep` reads it; of two records of the same run the first."
    path = Path(path or record_of(recipe))
    seen = {}
    for row in sweep(path) if path.exists() else []:
        seen.setdefault(recipe.key(row), row)
    return list(seen.values())


def chosen(rows, **wanted):
    "The rows that have these values."
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def means(rows, name, by="accuracy", seeds=1):
    "value of a setting -> mean of what is read, for the values that have so many runs."
    found = {}
    for row in rows:
        found.setdefault(row[name], []).append(row[by])
    return {value: sum(seen)/len(seen) for value, seen in found.items() if len(seen) >= seeds}


def best_value(rows, name, wanted, by="accuracy"):
    "The best of the wanted values, the first of equals; None before all of them are tried."
    tried = means(rows, name, by)
    return max(wanted, key=tried.get) if set(wanted) <= set(tried) else None


def cells_by_rate(
    recorded,
    first,             # rate to begin with
    tuning,            # seeds with which a rate is tried
    seeds,             # of the final runs
    by=("accuracy",),  # what may choose: the best rate of each is run
    **same,            # what the cells have in common
):
    "What to run: a rate is final when it has a worse neighbour on either side."
    rows = chosen(recorded, stage="tune", **same)
    tried, around, best = set(), set(), set()
    for name in by:
        found = means(rows, "lr", name, seeds=len(tuning))
        lr = max(found, key=found.get, default=first)
        tried |= set(found)
        around |= {lr/2, lr, 2*lr}
        best.add(lr)
    cells = [dict(stage="tune", **same, lr=lr, seed=seed)
             for lr in sorted(tried | around) for seed in tuning]
    if around <= tried:
        cells += [dict(stage="final", **same, lr=lr, seed=seed)
                  for lr in sorted(best) for seed in seeds]
    return cells


def first_images(
    data,
    n:int,      # training images that are kept
    held:int,   # training images that are held out, for choosing a setting
    stage:str,  # "tune": tested on those; otherwise on the test set
):
    "The first n of the shuffled training images."
    split = data.split(held)
    test = split if stage == "tune" else data
    return test.replace(train_x=split.train_x[:n], train_y=split.train_y[:n])


def train_without_privacy(
    model,
    data,
    optimizer,      # its rate falls to zero in a straight line
    batch_size:int,
    steps:int,
    generator,
    augment=None,   # (normalized images, generator) -> images
    half=False,     # compute in bfloat16
    look=None,      # (step, model, optimizer), after every step
):
    "Ordinary training on uniformly drawn batches: no clip, no noise, no guarantee."
    lr = optimizer.param_groups[0]["lr"]
    for t in range(steps):
        optimizer.param_groups[0]["lr"] = lr*(1 - t/steps)
        x, y = data.rows(torch.randint(len(data), (batch_size,), generator=generator))
        x = data.normalize(x)
        if augment:
            x = augment(x, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            output = model(x)
        optimizer.zero_grad()
        cross_entropy(output.float(), y).backward()
        optimizer.step()
        if look:
            look(t + 1, model, optimizer)


@torch.no_grad()
def accuracy(model, data):
    "The share of test images that a network names right."
    right = [model(data.normalize(x)).argmax(1) == y for x, y in data.test_rows(1000)]
    return torch.cat(right).double().mean().item()


def parameters(model):
    "How many numbers a network has."
    return sum(p.numel() for p in model.parameters())


def lines_of(
    recipe,
    cell,     # settings, as `recipe.run` got them
    trainer,  # at its last step
    seconds,
    **found,  # what the last line is to hold besides the usual; `test_accuracy` must be there
):            # [start line, end line]
    "Describe a run that is done."
    settings = {"preset": f"sweep-{recipe.NAME}", **cell}
    start = start_line(settings, trainer, cell["seed"], cell["seed"])
    end = end_line(settings, trainer, seconds, found["test_accuracy"], "steps") | found
    del end["statement"]  # the plan says the same, in a tenth of the space
    return [{"kind": "start", **start}, {"kind": "end", **end}]


def tuned(
    recipe,
    config,     # `Config` of one run
    data,       # its validation split
    cell,       # settings, as `recipe.run` got them
    stop=None,  # step; default: the last of the plan
):              # one run, as `work` wants it
    "Train once, as `dp-train` would, and judge on the held-out images."
    plan = make_plan(config, len(data))
    trainer = make_trainer(config, data, cell["seed"], cell["seed"])
    if config.centre:
        release_mean(trainer, config.centre)
    trainer.callbacks.append(make_schedule(config, plan.steps))
    began = time.perf_counter()
    trainer.fit(min(stop or plan.steps, plan.steps))
    found = measure(trainer)
    settings = asdict(config) | cell
    del settings["preset"]  # the record is a sweep's
    settings["precision"] = usable_precision(config, trainer.device)
    return [lines_of(recipe, settings, trainer, time.perf_counter() - began,
                     test_accuracy=found["accuracy"], eps_pld=plan.epsilon_after(trainer.t),
                     accuracy_unaveraged=found.get("accuracy_unaveraged"))]


def lines_without_privacy(
    recipe,
    cell,    # settings, as `recipe.run` got them; `seed` among them
    data,
    seconds,
    **found,  # what the last line is to hold besides the usual; `test_accuracy` must be there
):            # [start line, end line]
    "Describe a run of ordinary training: no plan, no epsilon."
    start = dict(
        kind="start",
        preset=f"sweep-{recipe.NAME}",
        config=cell,
        plan=None,
        data=data.name,
        seed=cell["seed"],
        device="cpu",
        precision=cell.get("precision", "float32"),
        code=code_version(),
        machine=machine(),
        started=time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()),
    )
    end = dict(
        kind="end",
        finished=True,
        why="steps",
        eps_pld=None,
        tested_on=len(data.test_y),
        seconds=round(seconds, 1),
    )
    return [start, end | found]


def write(path, runs):
    "Append whole runs at once: a crash or a second process cuts none in two."
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for run in runs for line in run)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, text.encode())
        os.fsync(file)
    finally:
        os.close(file)


def work(
    recipe,
    part,            # a key of `recipe.PARTS`
    path,            # of the record; what is there is skipped
    minutes=1e9,     # start no further run after this long
    reverse=False,   # begin at the other end: two processes can share the work
    say=print,
):                   # True: nothing is left
    "Run what is not recorded yet."
    began = time.monotonic()
    while True:
        rows = rows_of(recipe, path)
        done = set(map(recipe.key, rows))
        todo = [cell for cell in recipe.PARTS[part](rows) if recipe.key(cell) not in done]
        if not todo:
            say("nothing is left")
            return True
        if time.monotonic() - began > 60*minutes:
            say(f"{len(todo)} runs are left, at least: call it again")
            return False
        cell = todo[-1 if reverse else 0]
        runs = recipe.run(cell)
        write(path, runs)
        end = runs[-1][-1]
        say(*recipe.key(cell), f"accuracy {end['test_accuracy']:.4f}  {end['seconds']:.1f} s")


def main(recipes, argv=None):
    "The command line: python -m experiments SWEEP PART."
    parts = "; ".join(f"{name}: {', '.join(recipe.PARTS)}" for name, recipe in recipes.items())
    parser = argparse.ArgumentParser(
        "python -m experiments", description="Run a sweep; what is recorded is skipped.",
        epilog=parts)
    parser.add_argument("sweep", choices=recipes)
    parser.add_argument("part")
    parser.add_argument("--minutes", type=float, default=1e9, help="then start no further run")
    parser.add_argument("--reverse", action="store_true",
                        help="begin at the other end: two processes can share the work")
    parser.add_argument("--out", type=Path, help="record to go on with (default: that in runs/)")
    args = parser.parse_args(argv)
    recipe = recipes[args.sweep]
    if args.part not in recipe.PARTS:
        parts = ", ".join(recipe.PARTS)
        parser.error(f"{args.sweep} has no part {args.part!r}: pass one of {parts}")
    torch.set_num_threads(1)  # as in the records
    work(recipe, args.part, args.out or record_of(recipe), args.minutes, args.reverse)
