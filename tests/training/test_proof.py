"What the proof once let through, and honest networks that it once refused."
import pytest
import torch
from leaks import noise, sequence
from torch import nn
from toys import loss

from dp_course.gradients import fast_grad_sum, loop_grad_sum, vmap_grad_sum
from dp_course.training import prove_separate

ENGINES = [fast_grad_sum, vmap_grad_sum, loop_grad_sum]


# --- honest


class Queries(nn.Module):
    "Learned questions, the same for every example, which attention answers."
    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 2, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        answers, _ = self.attention(self.queries.expand(len(x), -1, -1), x, x)
        return self.out(answers.flatten(1))


@pytest.mark.parametrize("engine", ENGINES)
def test_learned_queries_are_honest(engine):
    prove_separate(engine, Queries(), loss, sequence())


class Says(nn.Module):
    "Scores, and whatever else `f` makes of scores and rows."
    def __init__(self, f):
        super().__init__()
        self.out, self.f = nn.Linear(5, 10), f

    def forward(self, x):
        return self.f(self.out(x), x)


def of_first(output, y):
    return loss(output[0], y)


def of_logits(output, y):
    return loss(output["logits"], y)


def against_everybody(output, y):
    return loss(output[0] - output[0].mean(0), y)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("says, loss_fn", [
    (lambda scores, x: (scores, None), of_first),
    (lambda scores, x: {"logits": scores, "loss": None}, of_logits),
    (lambda scores, x: [scores, "scores", 3.5], of_first)], ids=["None", "dict", "text"])
def test_outputs_that_are_no_tensors_are_honest(says, loss_fn, engine):
    prove_separate(engine, Says(says), loss_fn, noise(5))


@pytest.mark.parametrize("says, loss_fn", [
    (lambda scores, x: (scores, None), against_everybody),
    (lambda scores, x: (scores, scores.detach().mean().item()),
     lambda output, y: output[1]*of_first(output, y)),
    (lambda scores, x: (scores, len(x)), lambda output, y: of_first(output, y)/output[1])],
    ids=["beside None", "mean", "number of rows"])
def test_a_loss_that_mixes_beside_them_is_refused(says, loss_fn):
    with pytest.raises(ValueError, match="mixes examples|not its own"):
        prove_separate(fast_grad_sum, Says(says), loss_fn, noise(5))
