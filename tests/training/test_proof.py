"What the proof once let through, and honest networks that it once refused."
import pytest
import torch
from leaks import sequence
from toys import loss
from torch import nn

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
