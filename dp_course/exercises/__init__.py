"Is my answer right, and why not?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "architecture": """
        check_fair_choice check_holm check_layer_shares check_tempered check_whole_bill""",
    "attacks": """
        check_exposure check_found_at check_log_ratio check_missing_gradient check_pin_chance
        check_share_right""",
    "audit": """
        check_eps_at_least check_moved_by check_share_at_least check_survivor check_verdicts""",
    "averages": """
        check_second_moment check_shares check_warm_ema""",
    "by_hand": """
        check_clipped check_clipped_sum check_dp_sgd check_private_mean check_steal
        check_update_std check_worst_move""",
    "cards": """
        AGAIN Blank Card Exercise PROGRESS Progress Refused Trial above below fresh_copy gap
        has_no_end how_far is_noise judge_generator listed mine record used_generator""",
    "clipping": """
        check_bias_and_noise check_gradient_sigma check_judge check_next_threshold
        check_smallest_fair""",
    "correlated": """
        check_banded_eps check_longest_move check_next_noise check_tree_nodes
        check_weights_error""",
    "cost": """
        check_delta_curve check_gaussian_rdp check_least_sigma check_markov_epsilon
        check_second_sigma check_total_rdp""",
    "fast_gradients": """
        check_conv_ghost check_ghost_norms check_hook_gradients check_late_sum check_mixed""",
    "features": """
        check_head_sum check_output_errors check_shift_of_first""",
    "normalization": """
        check_mixes_rows check_raw_norms check_renormalize check_standardized
        check_without_batchnorm""",
    "promise": """
        check_allowed check_coin_answers check_excess check_group_delta check_guilty
        check_laplace_delta check_laplace_noise check_sampled_delta check_sum_moves""",
    "public_start": """
        check_centred check_noise_length check_own_rate""",
    "resnet20": """
        check_compare check_eps_of_rows check_private_loop""",
    "results": """
        check_row check_search_cost check_welch""",
    "rooms": """
        check_believable check_cheapest_noise check_delta_apart check_noises_in check_on_grid
        check_parts_of_noise check_seeds_to_claim check_spent""",
    "sampling": """
        check_caught check_fair_coins check_poisson_batch check_poisson_by_jumps
        check_safe_epsilon check_sampled_rdp""",
    "scaling": """
        check_crossover check_matched_rate check_points_lost check_run_snr check_smallest_batch
        check_step_noises""",
    "segmentation": """
        check_agreement check_dice_scores check_noise_over_signal check_own_share""",
    "start": """
        check_is_right check_mean_error check_rms check_secrets""",
    "trainer": """
        check_checkpoint check_must_pay check_noise_for check_private_accuracy
        check_private_step""",
    "views": """
        check_clipped_views check_common_part check_mean_noises check_naive_epsilon""",
})
