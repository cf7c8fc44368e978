"How does it become trustworthy?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "callbacks": """
        EMA HeadFirst NoisyAccuracy Plateau SCHEDULES Schedule TailAverage constant cosine
        linear public step_decay swapped temporary_weights""",
    "checkpoints": """
        Journal append load_checked lock named save_atomic write_all""",
    "evaluation": """
        class_counts count_classes measure no_scores""",
    "guard_clip": """
        refuse_fading refuse_mixed_clip refuse_unbounded""",
    "guard_engine": """
        prove_engine prove_units""",
    "guard_labels": """
        check_label_kind check_labels refuse_mixed_loss refuse_parameters_in_loss""",
    "guard_model": """
        FrozenNorm Seal check_model check_optimizer dropouts fix refuse_known shaken""",
    "guard_plan": """
        check_plan in_units most_rows refuse_units""",
    "guard_rows": """
        model_input refuse_mixed_items same_draws""",
    "ledger": """
        Entry Ledger STEPS""",
    "metrics": """
        accuracy binary_accuracy squared_error""",
    "micro_batches": """
        BatchReader digest_of fingerprint""",
    "optimizers": """
        DPAdam""",
    "processes": """
        Peers ProcessTrainer join shard""",
    "proof": """
        PROOFS prove_again prove_separate""",
    "records": """
        KINDS LABELS Record code_version composed_epsilon distinct end_line epoch_line flat_row
        latest_checkpoint leading load_runs mean_std new_record read_record read_runs recorded
        run_file runs_folders settings start_line stated sweep validation_note""",
    "scaling": """
        gradient_noise matched_lr nonprivate_signal_noise scaled_lr sigma_table snr snr_ceiling""",
    "trainer": """
        Trainer load_release save_release""",
})
