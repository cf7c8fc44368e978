"One example's gradient, fast."
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "attention": """
        broadcast_parameters self_attention self_attention_of with_copies""",
    "clipping": """
        AdaptiveClip AutoClip LayerClip noised_fraction split_sigma""",
    "dpsgd": """
        FlatClip ROUNDING example_grads loop_grad_sum noisy_mean trainable""",
    "engines": """
        bookkeeping bookkeeping_grad_sum ghost_grad_sum hook_grad_sum norms_only""",
    "layers": """
        ConvWeight FoldedGroupNorm GhostNorm KeptGradients LinearWeight OuterProduct RULES
        StandardizedWeight Tap at_least_float32 convolution_rule gram_norms no_longer
        product_weight rule_of weighted_rows""",
    "slow_engines": """
        reweighted vmap_grad_sum""",
    "tape": """
        PRECISIONS Tape bf16_engine bf16_product_ratio call_with clip_factors clipped eager
        empty_sum fast_grad_sum fast_pools fixed_shape forward_backward gains_from_bfloat16
        has_bfloat16 kept_or_ghost one_pass recording refuse refuse_statistics settled_precision
        vmappable""",
    "thresholds": """
        ScheduledClip check_groups decay equal_split falling_noise layer_groups""",
    "units": """
        Units unit_engine unit_grad_sum whole_units""",
})
