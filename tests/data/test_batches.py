"Batches: trees of tensors, views that are said, models of one and of several arguments."

import pytest
import torch
import torch.nn.functional as F
from toys import loss

from dp_course.data import (
    Views,
    losses_of,
)


@pytest.mark.parametrize("tree", [torch.zeros(3), torch.zeros(3, 0, 2), {},
                                  (torch.zeros(3, 2), torch.zeros(3, 4))])
def test_what_has_no_views_is_refused(tree):
    with pytest.raises(ValueError, match="are no views"):
        Views(tree)


@pytest.mark.parametrize("loss_fn, got", [
    (F.cross_entropy, r"returned \(\)"), (lambda output, y: None, "returned NoneType"),
    (lambda output, y: output, r"returned \(4, 3\)")])
def test_losses_are_one_per_row(loss_fn, got):
    output, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match=got):
        losses_of(loss_fn, output, y, 4)
    assert losses_of(loss, output, y, 4).shape == (4,)
