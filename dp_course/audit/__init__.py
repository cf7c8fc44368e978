"How do I attack my own epsilon?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "adapters": """
        Finding FullTrainer flat fresh joined know_noise row_of torch_step trainer_run
        trainer_step""",
    "audits": """
        AUDITS audit_all noise_audit one_run_audit replay_sensitivity sampler_audit""",
    "canaries": """
        Canaries canary_distance dirac_canaries dirac_model distance_of draw_projections
        draw_scores expected_reading guesses_epsilon least_mu linear_loss reading""",
    "mutants": """
        MUTANTS Mutant Shift SmallTrainer clip_and_add lab_net lab_plan per_example""",
    "replay": """
        CanaryMoves Replay check_claim draw_moves draw_ratios nudged quiet_tensors release_tests
        replay_release stranger""",
    "sampler": """
        coin_tests draw_counts marks_of""",
})
