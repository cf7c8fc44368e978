"What is a batch, and where from?"
# Written by `make export`: every public name of these rooms, loaded when it is first used.
from dp_course import _door

__getattr__, __dir__, __all__ = _door(__name__, {
    "batches": """
        Views arguments call_model count flatten_views leaves losses_of take tree_map""",
    "datasets": """
        DataError Examples OCT_SUBJECTS as_examples best_available load""",
    "drawings": """
        RETINA_COLORS RETINA_LAYERS boundaries dead_leaves drawn_bars leaf_images phantoms
        show_retina""",
    "scans": """
        boundary_error by_person dice learn_only majority_guess narrow overlap pixel_loss
        row_guess segment""",
    "views": """
        all_views multiplicity multiplicity_with_masks""",
})
