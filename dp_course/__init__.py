"""Differentially private deep learning: a course that you run, and the package that it exports.

help(Trainer) explains every parameter. docs/i_want.md shows each of these lines at work:

to write the loop myself          while trainer.left(): trainer.step()
to know a price before I pay      noise_multiplier(q=q, steps=500, eps=3, delta=1e-5)
to schedule the learning rate     callbacks=[Schedule(.5, "cosine", plan.steps)]
to log to CSV, TensorBoard, W&B   callbacks=[Log("run.csv")], Log(writer), Log(wandb.log)
to average the weights            callbacks=[EMA(.9)]
to use Adam                       optimizer=DPAdam.from_plan(plan, clip, lr=.01)
to learn the clipping threshold   clip=AdaptiveClip(plan.batch_size)
to look at private data, paid     callbacks=[Plateau(NoisyAccuracy(x, y, ...), every=5)]
to read tables, or a memmap       Examples(x, y), Examples(df, y="sick")
to protect who has many rows      Examples(x, y, groups=owners), PrivacyPlan(..., unit="person")
to use another loss or metric     Trainer(..., loss_fn=loss, metric=binary_accuracy)
to predict numbers                Trainer(..., loss_fn=nn.MSELoss(), metric=squared_error)
to use a model of Hugging Face    Trainer(bert, Examples({"input_ids": ids, ...}, y), plan)
to train a GAN                    Trainer(critic, ..., augment=with_fakes)
to train a diffusion model        Trainer(net, ..., augment=noised)
to train a net with BatchNorm     fix(model), fix(model, frozen=True)
to train in phases, one budget    PrivacyPlan(..., after=trainer.budget)
to correlate the noise of steps   PrivacyPlan(..., noise="banded", bands=8)
to fine-tune a part, or adapters  model[1].requires_grad_(False)
to save memory                    micro_batch=32
to compute in bfloat16            precision="bf16", or "auto": the faster one
to use several processes          ProcessTrainer(..., peers=join()), started by torchrun
to go on after a crash            trainer.save(path), load(path)
to publish a model, and use it    trainer.release(path), load_release(path, model)
to publish a model card           trainer.report().save("README.md")
to publish the best of several    Search(..., runs=10).best(train, candidates), save_release(...)
"""
__version__ = "0.3.0"

import json
import sys
from functools import lru_cache
from importlib import import_module
from pathlib import Path


@lru_cache(None)
def _help():
    "What the sources say beside every parameter: room -> name -> text. `make export` writes it."
    return json.loads((Path(__file__).parent/"_help.json").read_text(encoding="utf-8"))


@lru_cache(None)
def _document(
    room,  # name of a module that is loaded
):
    "Let `help()` say what the source of a room says in comments."
    for name, text in _help().get(room, {}).items():
        thing = sys.modules[room]
        for part in name.split("."):
            thing = vars(thing)[part]
        getattr(thing, "__func__", thing).__doc__ = text


def _door(
    package,  # its name
    rooms,    # dict: room -> the names that it offers, in one string
):            # `__getattr__`, `__dir__` and `__all__` of the package (PEP 562)
    "Offer the names of rooms that are loaded only when a name is used."
    homes = {name: room for room, names in rooms.items() for name in names.split()}

    def __getattr__(name):
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        room = f"{package}.{homes[name]}"
        module = import_module(room)
        _document(room)
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)  # next time it is found at once
        return value

    return __getattr__, lambda: sorted({*vars(sys.modules[package]), *homes}), sorted(homes)


# `__init__.pyi` says the same to type checkers; `make export` writes it
__getattr__, __dir__, __all__ = _door(__name__, {
    "privacy": "Budget PrivacyPlan Search epsilon noise_multiplier",
    "data": "Examples load",
    "gradients": """FlatClip AdaptiveClip LayerClip fast_grad_sum loop_grad_sum vmap_grad_sum
        hook_grad_sum ghost_grad_sum bookkeeping_grad_sum""",
    "training": """Trainer ProcessTrainer join EMA Log Schedule Plateau NoisyAccuracy DPAdam accuracy
        binary_accuracy squared_error save_release load_release fix""",
    "audit": """replay_sensitivity noise_audit one_run_audit sampler_audit replay_release
        MUTANTS""",
})
