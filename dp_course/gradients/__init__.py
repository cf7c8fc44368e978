"One example's gradient, fast."
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "clipping": """
        AdaptiveClip AutoClip LayerClip bounded noise_std noised_fraction split_sigma which_are_short""",
    "dpsgd": """
        FlatClip ROUNDING example_grads loop_grad_sum noisy_mean trainable""",
    "engines": """
        bookkeeping bookkeeping_grad_sum ghost_grad_sum hook_grad_sum norms_only reweighted""",
    "isolation": """
        alone batched_tensors examples_apart forgetting row_by_row tensors_of""" ,
    "layers": """
        ConvWeight FoldedGroupNorm GhostNorm KeptGradients LinearWeight OuterProduct RULES
        StandardizedWeight Tap at_least_float32 convolution_rule gram_norms no_longer
        product_weight  weighted_rows""",
    "precision": """
        PRECISIONS bf16_engine bf16_product_ratio fixed_shape gains_from_bfloat16 has_bfloat16
        settled_precision""",
    "tape": """
        Call Tape clip_factors clipped empty_sum fast_grad_sum forward_backward kept_or_ghost
        one_pass vmap_grad_sum""",
    "thresholds": """
        ScheduledClip check_groups decay equal_split falling_noise layer_groups""",
    "units": """
        Units unit_engine unit_grad_sum whole_units""",
})
