"How do I attack my own epsilon?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "audits": """
        LAYERS audit_all noise_audit one_run_audit replay_sensitivity sampler_audit""",
    "evidence": """
        Canaries Finding FullTrainer Released Replay canary_distance coin_tests dirac_canaries
        dirac_model distance_of draw_counts draw_moves draw_projections draw_ratios draw_scores
        expected_reading flat fresh guesses_epsilon joined known_noise least_mu linear_loss
        marks_of nudged quiet_tensors reading release_tests replay_release row_of stranger
        torch_step trainer_run trainer_step""",
    "mutants": """
        MUTANTS Mutant Shift SmallTrainer clip_and_add lab_net lab_plan per_example""",
})
