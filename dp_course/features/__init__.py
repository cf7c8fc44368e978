"What needs no budget?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "cache": """
        cached_features digest image_parts in_tensors with_features""",
    "deflation": """
        CosineNet DeepMaps DeepRecipe DeflatedRows Deflation LogScattering SecondLayer
        cosine_grad_sum deflated leading_directions leaves_deflated random_projection
        soft_leaves two_kinds""",
    "encoders": """
        ENCODED ENCODERS EncoderMaps MADE_BY encoded encoder_parts encoder_state encoder_words
        find_start is_small load_encoder load_start load_whole low_precision save_encoder
        stage_maps""",
    "patches": """
        LeafFeatures LeafNet LeafRecipe ParallelSum Patches WEIGHTS clipped_mean emphasized
        feature_bound leafed leaves_cnn leaves_linear log_moduli part_averages parts_of_code
        patch_filters release_mean scatter_cnn weighed""",
    "pretraining": """
        Pretraining ResumableRun align_uniform drawn_run leaf_stock pretrain_step
        public_accuracy public_images public_run public_step random_views""",
    "public_nets": """
        NETS PublicTraining ResidualPair TASKS TRAININGS halving_stage labels_of_task
        load_public_net public_net transfer_cnn""",
    "scattering_transform": """
        Scattering ScatteringFeatures ScatteringRecipe Unit channel_unit crop_spectrum
        filter_and_subsample filter_bank gabor morlet place_unit private_channel_stats scattered""",
    "transfer": """
        Adapter Centre MOVING PUBLIC PublicFeatures PublicMetric describe fixed_views
        layer_features new_head public_featured public_rows train_only untrained_features
        with_adapters""",
})
