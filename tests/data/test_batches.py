"What is no batch, no views and no loss of a batch is refused."

import pytest
import torch
import torch.nn.functional as F
from toys import loss

from dp_course.data import Views, count, losses_of


def test_examples_are_counted_or_refused():
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        count((torch.zeros(2), torch.zeros(3)))
    with pytest.raises(ValueError, match="first dimensions are"):
        count({})


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
