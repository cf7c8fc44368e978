"The run, its record, and how it is read."
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "building": """
        ENGINES FEATURES HEADS MODELS PIXELWISE ReportBlock bounded_cnn digit_filters
        edge_filters fit_out make_network report_wrn16_4""",
    "command": """
        Job OPTIONS make_parser parse read_settings""",
    "comparisons": """
        COLUMNS compare find_record grouped in_columns plot_records read_all row_name table_row""",
    "config": """
        CHOICES Config NoPrivacy check_types config_of eps_words finite first_line lr_at
        make_config make_plan make_schedule marked overrides_of planned_steps promises run_name
        told_by""",
    "estimates": """
        CLASSES SHORT image_seconds in_words is_there list_presets missing_start record_words
        rehearse run_images stand_in step_seconds""",
    "fairness": """
        class_accuracy class_release ordinary plot_classes rare""",
    "ladder": """
        OPEN PUBLISHED REPORT Row SOURCES images_of plot_ladder rung source_of""",
    "main": """
        VERBS answer evaluate make_verb_parser plot predict""",
    "presets": """
        OPEN_END PRESETS UNCLIPPED at_budgets miniature overrides_named""",
    "progress": """
        AtEpochs Bar Checkpoint EpochRow Evaluation Interrupt Lines RowWriter Run Stop Stopwatch
        TimeLimit announce_duration callbacks_of complain conclude describe_end describe_row
        describe_scores describe_start discard finish screen_of tidy""",
    "releases": """
        IMAGES Released describe_network open_release read_image write_release""",
    "results": """
        headline power_of_test seeds_for verify""",
    "segmentation": """
        noise_to_signal""",
    "setup": """
        load_data make_engine make_model make_optimizer make_trainer pick_up set_up
        usable_precision""",
    "tables": """
        Table changed plot_record plot_traces results_table""",
    "tasks": """
        ONE_LABEL ONE_MASK SCANS Task dice_words layer_scores load_scans task_of""",
})
