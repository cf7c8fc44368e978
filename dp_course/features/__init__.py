"What needs no budget?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "cache": """
        cached_features digest in_tensors""",
    "encoders": """
        ENCODED ENCODERS EncoderMaps MADE_BY encoded encoder_features encoder_parts
        encoder_state find_start load_encoder load_start load_whole save_encoder stage_maps""",
    "patches": """
        LeafFeatures LeafNet LeafRecipe Patches WEIGHTS buy_mean clipped_mean emphasized
        feature_bound leaf_images leafed leaves_cnn leaves_linear patch_filters weighed""",
    "pretraining": """
        Pretraining Slices align_uniform judge leaf_stock normalized_features pick_up_slices
        pretrain_step probe random_views slice_of_run""",
    "public_features": """
        LAYERS PUBLIC PublicMetric describe drawn_bars fixed_views load_public_net
        public_featured public_rows said_by_layers untrained_features""",
    "public_nets": """
        PublicRun pick_up_public public_images public_step slice_of_training""",
    "public_start": """
        THEIRS hours labelled noise_to_signal ours training_flops""",
    "scattering": """
        ParallelSum private_channel_stats scatter_cnn""",
    "scattering_transform": """
        Scattering ScatteringFeatures ScatteringRecipe crop_spectrum dead_leaves
        filter_and_subsample filter_bank gabor morlet scattered""",
    "slices": """
        SlicedRun exit_code slice_options""",
    "transfer": """
        Adapter Centre MOVING NETS PublicTraining ResidualPair TASKS TRAININGS halving_stage
        labels_of_task new_head public_net train_only transfer_cnn with_adapters""",
})
