"The run, its record, and how it is read."
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "command": """
        Job OPTIONS make_parser parse read_settings""",
    "comparisons": """
        OPEN PUBLISHED REPORT Rung SOURCES Summary Table alike compare find_record full_ladder
        grouped images_of not_run_yet plot_ladder plot_record plot_records plot_traces read_all
        results_table row_name rung source_of summarize""",
    "config": """
        CHOICES Config NoPrivacy check_types config_of eps_words first_line had_noise
        inf_for_null label_no_privacy make_config make_plan make_schedule null_for_inf
        overrides_of planned_steps run_name""",
    "estimates": """
        CLASSES SHORT in_words is_there list_presets missing_start record_words rehearse
        run_images stand_in step_seconds""",
    "main": """
        VERBS answer evaluate make_verb_parser plot predict""",
    "presets": """
        OPEN_END PRESETS UNCLIPPED miniature overrides_named""",
    "progress": """
        AtEpochs Bar Checkpoint EpochRow Evaluation Interrupt Lines RowWriter Run Stop Stopwatch
        TimeLimit announce_duration callbacks_of complain conclude describe_end describe_row
        describe_scores describe_start discard finish screen_of tidy""",
    "registry": """
        ENGINES FEATURES HEADS MODELS ONE_LABEL ONE_MASK PIXELWISE SCANS Task dice_words fit_out
        layer_scores load_scans make_network task_of""",
    "releases": """
        IMAGES Released describe_network open_release read_image write_release""",
    "results": """
        power_of_test seeds_for summaries verify""",
    "run": """
        train""",
    "setup": """
        load_data make_engine make_model make_optimizer make_trainer pick_up set_up
        usable_precision""",
})
