"""A U-Net on scans of the retina, split by person (lesson 20).

    python -m experiments segmentation pretrain    U-Net on phantoms; goes on where it was stopped
    python -m experiments segmentation guesses     majority, row of the pixel, phantoms alone
    python -m experiments segmentation head        from phantoms, the last layer alone
    python -m experiments segmentation norms       from phantoms, last layer and normalizations
    python -m experiments segmentation patients    the head at eps = 8, the unit being a patient
    python -m experiments segmentation all         from phantoms, every layer, at eps = 8
    python -m experiments segmentation scratch     every layer, from nothing
    python -m experiments segmentation ceilings    head, norms, all without privacy, rate searched
    python -m experiments segmentation head-views  the head with shifted and mirrored views

224 rows, 64 columns (means of eight), base width 16. Nine people with ten scans each; person 1 is
never tested on, the eight others are, two at a time: four rotations, 70 scans to train on. The
unit of privacy is a scan, but for "patients". Every private step takes all units (q = 1). Learning
rate and number of steps are chosen on person 1, held out of the first rotation's training people,
one seed each; then each rotation is trained anew, with a seed of its own, and tested at the last
step. Scores are means over the seven layers between vitreous and choroid, unless named otherwise.
"""
import sys
import time
from functools import lru_cache, partial

import torch

from dp_course.basics import data_root, keep_memory
from dp_course.data import (
    OCT_SUBJECTS,
    Examples,
    boundary_error,
    by_person,
    dice,
    load,
    majority_guess,
    multiplicity_with_masks,
    narrow,
    phantoms,
    pixel_loss,
    row_guess,
)
from dp_course.features import train_only
from dp_course.gradients import FlatClip, bf16_engine, fast_grad_sum, settled_precision
from dp_course.models import UNet, segment
from dp_course.privacy import PrivacyPlan
from dp_course.training import Trainer, load_checked, save_atomic
from experiments.harness import chosen, lines_of, lines_without_privacy, parameters

NAME = "segmentation"
DELTA, CLIP, SIZES = 1e-5, .1, dict(base=16, rows=224, columns=64, per_person=10)
HELD = {rotation: OCT_SUBJECTS[1 + 2*rotation:3 + 2*rotation] for rotation in range(4)}
TUNED_ON = OCT_SUBJECTS[:1]
LEARNS = {"head": "head", "norms": "norms", "patients": "head", "all": "all", "scratch": "all",
          "head-views": "head"}  # part -> as for `train_only`
PHANTOM_STEPS, PHANTOM_BATCH = 1500, 16
RATES = {  # (part, eps) -> settings that are tried
    ("head", 8.): [(lr, steps) for steps in (20, 60) for lr in (4., 16., 64.)],
    ("head", 200.): [(lr, 60) for lr in (16., 64., 256.)],
    ("norms", 8.): [(lr, 20) for lr in (1., 4., 16.)],
    ("norms", 200.): [(lr, 40) for lr in (4., 16., 64.)],
    ("patients", 8.): [(lr, 20) for lr in (1., 4., 16.)],
    ("all", 8.): [(lr, 20) for lr in (.1, .3, 1.)],
    ("scratch", 8.): [(lr, 30) for lr in (.3, 1., 4.)],
    ("scratch", 200.): [(lr, 60) for lr in (1., 4., 16.)],
    ("head-views", 8.): [(lr, 20) for lr in (1., 4., 16.)],
}
CEILINGS = {  # part -> Adam's rates that are tried without privacy, 20 epochs each, with views
    "head-views": (.004, .016, .064, .256, 1.024),
    "norms": (.004, .016, .064),
    "all": (.00025, .001, .004, .016),
}
PLAIN = {"head": 100, "norms": 20, "scratch": 80}  # epochs without privacy, Adam at 1e-3


# ---- data

@lru_cache(maxsize=1)
def scans():
    "All scans, at the size that is trained on."
    return narrow(load("oct"), SIZES["columns"])


def owners():
    return [person for person in OCT_SUBJECTS for _ in range(SIZES["per_person"])]


def split_of(cell, data):
    "The scans of a rotation; in tuning, person 1 is tested on and the rotation's two are gone."
    whose = torch.tensor(owners())
    held = HELD[cell["rotation"]]
    if cell["stage"] != "tune":
        return by_person(data, whose, held)
    kept = ~torch.isin(whose, torch.tensor(held))
    rest = data.replace(train_x=data.train_x[kept], train_y=data.train_y[kept])
    return by_person(rest, whose[kept], TUNED_ON)


def owners_of(cell):
    "Whose each training scan is."
    out = {*HELD[cell["rotation"]], *(TUNED_ON if cell["stage"] == "tune" else ())}
    return [person for person in owners() if person not in out]


def head_alone(cell):
    "Does only the last layer learn?"
    return LEARNS[cell["part"]] == "head" and cell["part"] != "head-views"


# ---- scores

def scored(predicted, y):
    "What a record keeps of a segmentation; `test_accuracy` is the mean Dice of the seven layers."
    overlap, distance = dice(predicted, y), boundary_error(predicted, y)
    return dict(test_accuracy=overlap[1:8].mean().item(),
                dice=[round(v, 4) for v in overlap.tolist()],
                dice_of_all=overlap.mean().item(),
                boundary=[round(v, 3) for v in distance.tolist()],
                boundary_mean=distance.mean().item())


def lines(cell, data, seconds, found, **config):
    "A run without a private trainer, as the harness wants it."
    told = cell | SIZES | config | dict(n=len(data), precision=precision())
    return [lines_without_privacy(sys.modules[__name__], told, data, seconds, **found)]


def precision():
    return settled_precision("auto")


def half():
    "Convolutions in bfloat16 where the processor has it."
    return torch.autocast("cpu", torch.bfloat16, enabled=precision() == "bf16")


# ---- phantoms

def weights_file():
    return data_root()/"segmentation"/f"unet{SIZES['base']}-phantoms.pt"


def pretrain(cell, steps=None, path=None):
    "Train on phantoms; every hundred steps what is there is kept, and a second call goes on."
    steps, path = steps or PHANTOM_STEPS, path or weights_file()
    began = time.perf_counter()
    torch.manual_seed(cell["seed"])
    model = UNet(SIZES["base"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    t = 0
    if path.exists():
        kept = load_checked(path, "segmentation pretraining")
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        t = kept["t"]
    while t < steps:
        for group in optimizer.param_groups:  # up for a twentieth, then down to zero
            group["lr"] = 3e-3*min(20*(t + 1)/steps, (1 - t/steps)/.95)
        x, y = phantom_batch(t)
        with half():
            output = model(x)
        optimizer.zero_grad()
        pixel_loss(output, y).mean().backward()
        optimizer.step()
        t += 1
        if t % 100 == 0 or t == steps:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_atomic(dict(kind="segmentation pretraining", t=t, model=model.state_dict(),
                             optimizer=optimizer.state_dict()), path)
            print(f"phantoms: step {t}, {time.perf_counter() - began:.0f} s", flush=True)
    x, y = phantom_batch(-1, 64)  # new ones
    data = Examples(x, y, x, y, name="phantoms")
    return lines(cell, data, time.perf_counter() - began, scored(segment(model, x), y),
                 phantom_steps=steps, batch_size=PHANTOM_BATCH,
                 parameters=parameters(model))


def normalized(x):
    "As `load('oct')` does."
    return (x/255 - .25)/.25


def phantom_batch(t, n=PHANTOM_BATCH):
    "The phantoms of a step are always the same ones."
    generator = torch.Generator().manual_seed(10_000 + t)
    x, y = phantoms(n, generator, SIZES["rows"], SIZES["columns"])
    return normalized(x), y


def start():
    "The weights that learnt from phantoms; a machine that has none trains them first."
    path = weights_file()
    if not path.exists():
        pretrain(cell_of("pretrain", "phantoms"))
    return load_checked(path, "segmentation pretraining")["model"]


def network(cell):
    "A U-Net, from phantoms or from nothing, of which only some parts learn."
    weights = None if cell["part"] == "scratch" else start()
    torch.manual_seed(cell["seed"])
    model = UNet(SIZES["base"])
    if weights:
        model.load_state_dict(weights)
    return train_only(model, LEARNS.get(cell["part"], "all"))


# ---- guesses

def guess(cell, data):
    "What is reached without a look at the pixels, or at any scan."
    began = time.perf_counter()
    if cell["part"].startswith("phantoms"):
        predicted = segment(network(cell), data.normalize(data.test_x))
    else:
        rule = dict(majority=majority_guess, row=row_guess)[cell["part"]]
        predicted = rule(data.train_y.long()).expand(data.test_y.shape)
    found = scored(predicted, data.test_y.long())
    return lines(cell, data, time.perf_counter() - began, found)


# ---- training

@torch.no_grad()
def with_features(model, data):
    "What the head sees of every scan: all that a network with a learning head has to keep."
    def seen(x):
        with half():
            return torch.cat([model.features(some).float() for some in data.normalize(x).split(8)])
    return data.replace(train_x=seen(data.train_x), test_x=seen(data.test_x))


def plainly(model, data, cell):
    "Train without privacy: Adam, batches of ten scans, shifted and mirrored with their masks."
    rate = cell["lr"] or 1e-3
    generator = torch.Generator().manual_seed(cell["seed"])
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(learning, lr=rate)
    augment = multiplicity_with_masks(1, crop=8)
    epochs = PLAIN[cell["part"]] if cell["steps"] is None else cell["steps"]
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = rate*(1 - epoch/epochs)
        for idx in torch.randperm(len(data), generator=generator).split(10):
            x, y = data.rows(idx)
            x = data.normalize(x)
            if not head_alone(cell):
                x, y = (views.tree[:, 0] for views in augment(x, y, generator))
            with half():
                output = model(x)
            optimizer.zero_grad()
            pixel_loss(output, y).mean().backward()
            optimizer.step()
    return epochs


def privately(model, data, cell):
    "Train on all scans at once, every step."
    unit = "example"
    if cell["part"] == "patients":
        unit, data = "patient", data.replace(groups=owners_of(cell))
    plan = PrivacyPlan(n=data.units, batch_size=data.units, steps=cell["steps"], eps=cell["eps"],
                       delta=DELTA, unit=unit)
    engine = bf16_engine(fast_grad_sum) if precision() == "bf16" else fast_grad_sum
    augment = None if head_alone(cell) else multiplicity_with_masks(1, crop=8)
    return Trainer(model, data, plan, loss_fn=pixel_loss, clip=FlatClip(CLIP), engine=engine,
                   seed=cell["seed"], micro_batch=8, augment=augment,
                   optimizer=partial(torch.optim.SGD, lr=cell["lr"], momentum=0.),
                   callbacks=[falling(cell["lr"], cell["steps"])])


def falling(lr, steps):
    "Lower the rate to zero."
    def callback(trainer):
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr*(1 - trainer.t/steps)
    return callback


def run(
    cell,       # stage, part, eps (None: no privacy), rotation, seed, lr, steps
    data=None,  # scans with the masks; default: those of the sweep
):              # one run, as `harness.work` wants it
    "Train once, and test on two people."
    keep_memory()
    if cell["stage"] == "pretrain":
        return pretrain(cell)
    data = split_of(cell, scans() if data is None else data)
    if cell["stage"] == "guess":
        return guess(cell, data)
    began = time.perf_counter()
    model = network(cell)
    learner, seen = model, data
    if head_alone(cell):
        learner, seen = model.head, with_features(model, data)
    trainer = None if cell["eps"] is None else privately(learner, seen, cell)
    epochs = plainly(learner, seen, cell) if trainer is None else trainer.fit().plan.steps
    seconds = time.perf_counter() - began
    found = scored(segment(model, data.normalize(data.test_x)), data.test_y.long())
    if trainer is None:
        learns = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return lines(cell, data, seconds, found, epochs=epochs, batch_size=10, parameters=learns)
    config = cell | SIZES | dict(C=CLIP, momentum=0., precision=precision())
    return [lines_of(sys.modules[__name__], config, trainer, seconds, **found)]


# ---- what to run

def key(row):
    return tuple(row.get(name) for name in "stage part target_eps rotation lr steps".split())


def cell_of(stage, part, rotation=0, eps=None, lr=None, steps=None):
    return dict(stage=stage, part=part, eps=eps, target_eps=eps, rotation=rotation, lr=lr,
                steps=steps, seed=rotation)


def best(recorded, part, eps):
    "The settings with the best score on person 1; None: not all were tried."
    tried = {(row["lr"], row["steps"]): row["accuracy"] for row in
             chosen(recorded, stage="tune", part=part, target_eps=eps)}
    wanted = RATES[part, eps] if eps else [(lr, 20) for lr in CEILINGS[part]]
    if not set(wanted) <= set(tried):
        return None
    return max(wanted, key=tried.get)


def part(name):
    "Tuning and four rotations of one part, at every eps."
    def cells(recorded):
        found = []
        for told, eps in RATES:
            if told != name:
                continue
            found += [cell_of("tune", name, 0, eps, *settings) for settings in RATES[name, eps]]
            settings = best(recorded, name, eps)
            if settings:
                found += [cell_of("final", name, rotation, eps, *settings) for rotation in HELD]
        return found + [cell_of("final", name, rotation) for rotation in HELD if name in PLAIN]
    return cells


def ceilings(recorded):
    "Without privacy: a search on person 1, then four rotations, from the same phantoms."
    found = [cell_of("guess", "phantoms-again", rotation) for rotation in HELD]
    for name, rates in CEILINGS.items():
        found += [cell_of("tune", name, 0, None, lr, 20) for lr in rates]
        settings = best(recorded, name, None)
        if settings:
            found += [cell_of("final", name, rotation, None, *settings) for rotation in HELD]
    return found


def guesses(recorded):
    return [cell_of("guess", name, rotation) for name in ("majority", "row", "phantoms")
            for rotation in HELD]


PARTS = {
    "pretrain": lambda recorded: [cell_of("pretrain", "phantoms")],
    "guesses": guesses,
    **{name: part(name) for name in LEARNS},
    "ceilings": ceilings,
}
PARTS["everything"] = lambda recorded: [cell for name in list(PARTS)[:-1]
                                        for cell in PARTS[name](recorded)]
