"The run, its record, and how it is read."
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "comparisons": """
        OPEN PUBLISHED REPORT Result Summary Table alike compare find_record full_ladder grouped
        images_of not_run_yet plot_record plot_records read_all result_of results_table row_name
        source_of summaries summarize verify""",
    "config": """
        ABOVE_0 AT_LEAST_0 AT_LEAST_1 BELOW_1 BUDGET CHANNELS Config DELTA Job NETWORKS
        NoPrivacy TRAINED check_rules check_types closest config_of eps_words first_line
        had_noise inf_for_null label_no_privacy make_config make_plan make_schedule must
        null_for_inf one_of overrides_of planned_steps run_name setting""",
    "estimates": """
        SHORT in_words is_there list_presets missing_start record_words rehearse run_images
        stand_in try_steps""",
    "main": """
        VERBS evaluate jobs_of make_parser numbers option_of options_of parse plot predict
        read_words truth""",
    "presets": """
        OPEN_END PRESETS UNCLIPPED miniature overrides_named""",
    "progress": """
        Interrupt Monitor Screen Stop announce_duration complain conclude describe_end
        describe_scores describe_start finish tidy""",
    "registry": """
        DATA ENGINES FEATURES HEADS MODELS ONE_LABEL ONE_MASK PIXELWISE SCANS Task adapt_model
        dice_words layer_scores load_scans make_network task_of""",
    "releases": """
        Released describe_network describe_release open_release read_image write_release""",
    "results": """
        power_of_test seeds_for""",
    "run": """
        train""",
    "setup": """
        Run discard load_data make_engine make_model make_optimizer make_trainer pick_up
        remove_beside set_up usable_precision""",
})
