"Batches: trees of tensors, views that are said, models of one and of several arguments."

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import loss

from dp_course.data import (
    Views,
    arguments,
    call_model,
    count,
    flatten_views,
    leaves,
    losses_of,
    take,
    tree_map,
)

TREE = {"age": torch.arange(3.), "words": (torch.zeros(3, 5), [torch.ones(3, 2)])}


def test_trees_keep_their_form():
    doubled = tree_map(lambda u, v: u + v, TREE, TREE)
    assert type(doubled["words"]) is tuple and type(doubled["words"][1]) is list
    assert doubled["age"].tolist() == [0, 2, 4]
    assert [tuple(v.shape) for v in leaves(TREE)] == [(3,), (3, 5), (3, 2)]
    assert count(take(TREE, torch.tensor([2, 0]))) == 2


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


def test_views_of_a_tree():
    views = Views({"a": torch.arange(6).view(3, 2), "b": torch.zeros(3, 2, 4)})
    assert len(views) == count(views) == 3 and views.k == 2
    assert len(leaves(views)) == 2 and len(take(views, slice(1, 3))) == 2
    rows, labels, b, k = flatten_views(views, torch.tensor([7, 8, 9]))
    assert rows["a"].tolist() == [0, 2, 4, 1, 3, 5] and rows["b"].shape == (6, 4)
    assert labels.tolist() == [7, 8, 9]*2 and (b, k) == (3, 2)
    _, own, _, _ = flatten_views(views, Views(torch.arange(6).view(3, 2)))
    assert own.tolist() == [0, 2, 4, 1, 3, 5]  # labels of views move with them


@pytest.mark.parametrize("dimensions", range(1, 7))
def test_dimensions_say_nothing_about_views(dimensions):
    x = torch.zeros(*[2]*dimensions)
    rows, _, b, k = flatten_views(x, torch.zeros(2))
    assert rows is x and (b, k) == (2, 1)


class Pair(nn.Module):
    def forward(self, left, right=None):
        return left if right is None else left - right


def test_batches_go_in_by_name_by_position_or_whole():
    a, b = torch.ones(2), torch.zeros(2)
    assert call_model(Pair(), {"right": a, "left": b}).tolist() == [-1, -1]
    assert call_model(Pair(), (a, b)).tolist() == [1, 1]
    assert call_model(Pair(), (a,)).tolist() == [1, 1]
    assert call_model(Pair(), {"other": a})["other"] is a
    assert call_model(nn.Identity(), a) is a
    assert arguments(Pair(), (a, a, a)) == (((a, a, a),), {})
    assert call_model(torch.compile(Pair(), backend="eager"), (a, b)).tolist() == [1, 1]


@pytest.mark.parametrize("loss_fn, got", [
    (F.cross_entropy, r"returned \(\)"), (lambda output, y: None, "returned NoneType"),
    (lambda output, y: output, r"returned \(4, 3\)")])
def test_losses_are_one_per_row(loss_fn, got):
    output, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match=got):
        losses_of(loss_fn, output, y, 4)
    assert losses_of(loss, output, y, 4).shape == (4,)
