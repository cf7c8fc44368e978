"""Turn the records of the first version into the one schema.

    git worktree add ../old f518068
    python experiments/convert.py ../old/runs runs

Every run that is rewritten says so in the field `converted` of its start line. Nothing is
invented: what an old row did not say is absent or null. Only names change: `accuracy` becomes
`test_accuracy` (of the split that the run was tested on), and `kind` becomes `stage`.
"""
import json
import sys
from pathlib import Path

SINCE = "commit f518068"
CONVERTED = f"by experiments/convert.py from {SINCE}; what is absent was not said there"


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def pick(row, keys, **renamed):
    "The fields of a row that are there, some under a new name."
    found = {key: row[key] for key in keys.split() if key in row}
    return found | {new: row[old] for new, old in renamed.items() if old in row}


def run(preset, start, config, plan, end, between=()):
    "The lines of one run."
    first = {"kind": "start", "preset": preset, "config": config, **start, "plan": plan}
    first["converted"] = CONVERTED
    return [first, *between, {"kind": "end", **end}]


# ---- sweeps: one old row was one run

def clipping(row):
    "A row of tools/sweep_clipping.py."
    stage = {"stage": row["kind"]}
    config = stage | pick(row, "method speed lr C momentum accountant task")
    start = pick(row, "seed seed_policy", data="task", machine="versions")
    plan = pick(row, "n batch_size steps delta q sigma") | {"eps": None}
    end = pick(row, "eps_rdp delta tested_on seconds first_std last nonfinite",
               step="steps", eps_pld="eps", test_accuracy="accuracy")
    return run("sweep-clipping", start, config, plan, {"finished": True, **end})


def scaling(row):
    "A row of tools/sweep_scaling.py."
    # those of `signal` measure a gradient at other batch sizes than the run's
    stage = {"val": "tune", "test": "final"}.get(row["split"], "measure")
    config = {"stage": stage} | pick(row, "part split model lr momentum max_norm epochs noise")
    if row["steps"] != row["planned"]:
        config["steps"] = row["steps"]
    if stage == "measure":
        config["batch_size"] = row["batch_size"]
    start = pick(row, "data parameters seed") | {"machine": pick(row, "torch python threads")}
    plan = pick(row, "n delta q sigma", steps="planned", eps="target_eps")
    plan["batch_size"] = round(row["q"]*row["n"]) if stage == "measure" else row["batch_size"]
    end = {"finished": row["steps"] == row["planned"]}
    end |= pick(row, "delta tested_on seconds signal scatter mean_square predicted",
                step="steps", eps_pld="eps", test_accuracy="accuracy")
    return run("sweep-scaling", start, config, plan, end)


def tricks(row):
    "A row of tools/sweep_tricks.py; the oldest have no `setting` and mean 'many'."
    config = {"stage": {"val": "tune", "test": "final"}[row["split"]]}
    config |= pick(row, "setting rung split lr norm ws k optimizer schedule max_norm")
    start = pick(row, "data parameters seed seed_policy device")
    start["machine"] = pick(row, "torch python threads")
    plan = pick(row, "n batch_size steps delta q sigma") | {"eps": None}
    end = pick(row, "delta ema ema_no_warmup tail seconds",
               step="steps", eps_pld="eps", test_accuracy="accuracy")
    return run("sweep-tricks", start, config, plan, {"finished": True, **end})


def classes(row):
    "A row of tools/sweep_classes.py: ordinary training, so there is no plan and no eps."
    config = {"stage": {"tuning": "tune", "ordinary": "final"}[row["kind"]]}
    config |= pick(row, "private model lr momentum schedule epochs batch_size")
    start = pick(row, "data seed machine")
    end = pick(row, "tested_on class_accuracy classes tuning_runs seconds",
               eps_pld="eps", test_accuracy="accuracy")
    return run("sweep-classes", start, config, None, {"finished": True, **end})


def each(convert):
    "Convert a file row by row."
    return lambda rows: [line for row in rows for line in convert(row)]


# ---- tuning runs: one old row was one run, the first and last lines were about all of them

def digits_tuning(rows):
    head, *rows = rows
    lines = []
    for row in rows:
        config = {"stage": "tune", "n_val": 287}
        config |= pick(row, "run model lr batch_size epochs max_norm schedule")
        plan = pick(head, "eps delta") | pick(row, "batch_size") | {"n": 1150}
        end = {"finished": True, "tested_on": 287}
        end |= pick(row, "validation_accuracy", test_accuracy="validation_accuracy")
        start = pick(head, "data note") | pick(row, "seed")
        lines += run("digits-eps3-tuning", start, config, plan, end)
    return lines


def curve_of(row):
    "Steps and accuracies (%) on the way, in either old form."
    named = [(step, f"val_accuracy_step_{step}") for step in (91, 181)]
    return row.get("steps_accuracies") or [(step, row[key]) for step, key in named if key in row]


def scatter_tuning(rows):
    "Both tunings of the scattering presets; accuracies were in percent, `val_accuracy` still is."
    head, *rows, tail = rows
    lines = []
    for row in rows:
        config = {"stage": "tune", "n_val": 5000} | pick(head, "momentum")
        config |= pick(row, "features model lr schedule max_norm")
        plan = {"n": 45_000, "eps": 3.} | pick(head, "batch_size steps delta q sigma")
        plan |= pick(row, "batch_size steps sigma")
        epochs = [{"kind": "epoch", "step": step, "test_accuracy": round(accuracy/100, 6)}
                  for step, accuracy in curve_of(row)]
        end = {"finished": "stopped_after" not in row, "tested_on": 5000}
        end |= pick(row, "stopped_after val_accuracy val_accuracy_average val_accuracy_ema seconds "
                         "val_accuracy_step_91 val_accuracy_step_181")
        if "val_accuracy" in row:
            end["step"] = row.get("stopped_after", plan["steps"])
            end["test_accuracy"] = round(row["val_accuracy"]/100, 6)
        start = pick(head, "data seed note") | pick(row, "parameters")
        start |= pick(tail, "tuning_runs before")
        lines += run(head["preset"], start, config, plan, end, epochs)
    return lines


# ---- single records

def scattering_speed(rows):
    "A measurement: nothing was trained, so there is no config and no plan, only rows."
    start, *rows, end = rows
    first = start | {"config": None, "plan": None, "converted": CONVERTED}
    return [first, *(row | {"kind": "row"} for row in rows), end]


CONVERTERS = {
    "sweep-clipping": each(clipping),
    "sweep-scaling": each(scaling),
    "sweep-tricks": each(tricks),
    "sweep-classes": each(classes),
    "digits-eps3-tuning": digits_tuning,
    "scatter-cnn-eps3-tuning": scatter_tuning,
    "scatter-linear-eps3-tuning": scatter_tuning,
    "scattering-speed": scattering_speed,
}


def main(old, new):
    for name, convert in CONVERTERS.items():
        path = Path(old)/f"2026-11-21-{name}.jsonl"
        lines = convert(read(path))
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        (Path(new)/path.name).write_text(text, encoding="utf-8")
        print(f"{path.name}: {len(lines)} lines")


if __name__ == "__main__":
    main(*sys.argv[1:])
