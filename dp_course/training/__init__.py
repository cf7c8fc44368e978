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
    "guard_clip": """
        refuse_mixed_clip refuse_unbounded""",
    "guard_labels": """
        check_label_kind check_labels refuse_parameters_in_loss""",
    "guard_model": """
        Seal check_model check_optimizer refuse_known refuse_mixing shaken""",
    "guard_plan": """
        check_plan in_units most_rows refuse_units""",
    "guard_rows": """
        model_input refuse_mixed_items""",
    "ledger": """
        Book Entry Ledger STEPS""",
    "optimizers": """
        DPAdam""",
    "plateau": """
        NoisyAccuracy Plateau public""",
    "processes": """
        Peers ProcessTrainer join shard""",
    "proof": """
        PROOFS prove_separate prove_units""",
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
})
