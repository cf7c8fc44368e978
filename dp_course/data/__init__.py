"What is a batch, and where from?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "augmentation": """
        all_views multiplicity multiplicity_with_masks views""",
    "batches": """
        Views arguments call_model count flatten_views leaves logits_of losses_of take tree_map""",
    "datasets": """
        DataError OCT_SUBJECTS best_available load""",
    "drawings": """
        RETINA_COLORS RETINA_LAYERS boundaries dead_leaves drawn_bars leaf_images phantoms
        show_retina""",
    "examples": """
        Examples as_examples""",
    "scans": """
        boundary_error by_person dice majority_guess narrow overlap pixel_loss row_guess""",
    "tables": """
        Labelled is_table labelled readable""",
})
