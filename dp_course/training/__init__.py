"How does it become trustworthy?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "averages": """
        swapped""",
    "callbacks": """
        EMA SCHEDULES Schedule TailAverage constant cosine linear step_decay""",
    "checkpoints": """
        Journal load_checked save_atomic write_all""",
    "guards": """
        check_label_kind check_labels check_model check_plan model_input prove_separate
        refuse_known refuse_mixed_clip refuse_mixed_loss refuse_mixed_rows refuse_mixing
        refuse_parameters_in_loss refuse_unbounded shaken""",
    "ledger": """
        Book Entry Ledger STEPS""",
    "optimizers": """
        DPAdam""",
    "plateau": """
        NoisyAccuracy Plateau public""",
    "processes": """
        Peers ProcessTrainer join shard""",
    "records": """
        KINDS LABELS Record class_counts code_version composed_epsilon count_classes distinct
        end_line epoch_line flat_row latest_checkpoint leading load_runs mean_std measure
        new_record no_scores peak_memory_mb read_record read_runs recorded run_file runs_folders
        settings start_line stated sweep synchronize validation_note""",
    "run": """
        Run accuracy binary_accuracy check_micro_batch check_parts made_optimizer squared_error""",
    "scaling": """
        gradient_noise matched_lr scaled_lr sigma_table snr snr_ceiling""",
    "signals": """
        nonprivate_signal_noise""",
    "trainer": """
        Trainer""",
    "units": """
        Units in_units most_rows prove_units refuse_units unit_engine unit_grad_sum whole_units""",
})
