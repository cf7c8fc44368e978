"How does it become trustworthy?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "callbacks": """
        EMA HeadFirst NoisyAccuracy Plateau SCHEDULES Schedule TailAverage constant cosine
        linear public step_decay""",
    "checkpoints": """
        Journal append find_release load_checked load_release lock named save_atomic
        save_release writable_file write_all write_text write_weights""",
    "checks": """
        check_clip check_model check_parts check_plan check_run in_units is_frozen_norm is_ours
        name_of refuse_units""",
    "evaluation": """
        class_counts count_classes measure no_scores""",
    "fixes": """
        FrozenNorm fix""",
    "formats": """
        from_safetensors has_compiled_parts load_plain_state plain_name plain_state
        to_safetensors uncompiled""",
    "hints": """
        warn_of_rows""",
    "ledger": """
        Entry Ledger STEPS check_release flat_source name_apart""",
    "log": """
        Log""",
    "metrics": """
        accuracy binary_accuracy squared_error""",
    "micro_batches": """
        BatchReader digest_of fingerprint model_input same_draws""",
    "optimizers": """
        DPAdam made_optimizer""",
    "processes": """
        Peers ProcessTrainer join shard""",
    "records": """
        KINDS LABELS Record code_version composed_epsilon distinct end_line epoch_line flat_row
        latest_checkpoint leading load_runs mean_std new_record read_record read_runs recorded
        run_file runs_folders settings start_line stated sweep validation_note""",
    "report": """
        Report report_of""",
    "scaling": """
        gradient_noise matched_lr nonprivate_signal_noise scaled_lr sigma_table snr snr_ceiling""",
    "trainer": """
        Trainer""",
    "weights": """
        Weights""",
})
