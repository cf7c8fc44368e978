"Differentially private deep learning: what the course exports, and its public names."
__version__ = "0.2.0"

from . import definition, models, results, scaling, scattering  # help() shows these, too
from .accounting import PrivacyPlan, epsilon, noise_multiplier
from .audit import MUTANTS, noise_audit, one_run_audit, replay_sensitivity, sampler_audit
from .clipping import AdaptiveClip, LayerClip
from .data import Examples, load
from .docs import document_package
from .dpsgd import FlatClip, loop_grad_sum
from .gradients import (
    bookkeeping_grad_sum,
    fast_grad_sum,
    ghost_grad_sum,
    hook_grad_sum,
    vmap_grad_sum,
)
from .trainer import Trainer
from .tricks import EMA

document_package()  # what the sources say beside each parameter stands in help(), too
