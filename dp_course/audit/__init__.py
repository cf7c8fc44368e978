"How do I attack my own epsilon?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "audits": """
        AUDITS audit_all noise_audit one_run_audit replay_sensitivity sampler_audit""",
    "canaries": """
        canary_distance dirac_canaries dirac_model distance_of draw_scores expected_reading
        guesses_epsilon linear_loss reading""",
    "doors": """
        FullTrainer known_noise torch_step trainer_run trainer_step""",
    "findings": """
        Finding flat fresh joined row_of""",
    "mutants": """
        MUTANTS Mutant Shift SmallTrainer clip_and_add lab_net lab_plan per_example""",
    "noise": """
        Canaries draw_projections least_mu quiet_tensors""",
    "release": """
        CanaryMoves draw_moves release_tests replay_release""",
    "replay": """
        Replay draw_ratios nudged stranger""",
    "sampler": """
        coin_tests draw_counts marks_of""",
})
