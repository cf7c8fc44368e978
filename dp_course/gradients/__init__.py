"One example's gradient, fast."
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "clipping": """
        AdaptiveClip AutoClip LayerClip Sensitivity bounded noise_std noised_fraction
        sensitivity_of split_sigma which_are_short""",
    "dpsgd": """
        FlatClip ROUNDING example_grads loop_grad_sum noisy_mean trainable""",
    "engines": """
        bookkeeping bookkeeping_grad_sum ghost_grad_sum hook_grad_sum norms_only reweighted""",
    "isolation": """
        Isolation Kept VmapStops alone batched_tensors beneath contents_put_back current_level
        examples_apart explained forgetting is_batched logical outside physical refuse_modes
        replaced row_by_row tensors_of""",
    "kernels": """
        COMPOSED KERNELS attention bag_of_embeddings embedding refuse_shared_table weight_norm""",
    "layers": """
        ConvWeight Convolution FoldedGroupNorm GhostNorm KeptGradients LinearWeight OuterProduct
        RULES StandardizedWeight Tap TransposedConvolution as_made at_least_float32
        convolution_rule folded gram_norms no_longer product_weight unfolded weighted_rows""",
    "libraries": """
        unreadable""",
    "precision": """
        PRECISIONS bf16_engine bf16_product_ratio fixed_shape gains_from_bfloat16 has_bfloat16
        innermost settled_precision""",
    "tape": """
        Substitutes Tape clip_factors clipped eager empty_sum fast_grad_sum forward_backward
        kept_or_ghost one_pass vmap_grad_sum without_autocast""",
    "thresholds": """
        ScheduledClip check_groups decay equal_split falling_noise layer_groups""",
    "units": """
        Units unit_engine unit_grad_sum whole_units""",
})
