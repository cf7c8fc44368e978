"How does it become something that I can trust?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "callbacks": """
        EMA HeadFirst NoisyAccuracy Plateau SCHEDULES Schedule TailAverage constant cosine
        linear public step_decay temporary_weights""",
    "checkpoints": """
        Journal load_checked save_atomic write_all""",
    "guards": """
        check_label_kind check_labels check_model check_plan model_input prove_separate
        refuse_known refuse_mixed_clip refuse_mixed_loss refuse_mixed_rows refuse_mixing
        refuse_parameters_in_loss refuse_unbounded shaken""",
    "ledger": """
        Book Entry Ledger STEPS""",
    "measuring": """
        class_counts count_classes measure no_scores peak_memory_mb synchronize""",
    "metrics": """
        accuracy binary_accuracy squared_error""",
    "optimizers": """
        DPAdam""",
    "processes": """
        Peers ProcessTrainer join shard""",
    "reading": """
        BatchReader""",
    "records": """
        KINDS LABELS Record code_version composed_epsilon distinct end_line epoch_line flat_row
        latest_checkpoint leading load_runs mean_std new_record read_record read_runs recorded
        run_file runs_folders settings start_line stated sweep validation_note""",
    "scaling": """
        gradient_noise matched_lr nonprivate_signal_noise scaled_lr sigma_table snr snr_ceiling""",
    "trainer": """
        Trainer load_release""",
    "units": """
        Units in_units most_rows prove_units refuse_units unit_engine unit_grad_sum whole_units""",
})
