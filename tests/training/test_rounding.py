"Through a whole trainer, too, one example moves the clipped sum by C (1 + 1e-6) at most."
import pytest
import torch
from rounding import BOUND, C, alternating, blocks, dot, staircase
from test_processes import together
from torch import nn

from dp_course.data import Examples
from dp_course.gradients import FlatClip
from dp_course.privacy import PrivacyPlan, RDPAccountant
from dp_course.training import ProcessTrainer, Trainer

PATTERNS = [staircase, blocks, alternating]


def run_on(v, make=Trainer, micro_batch=None, **options):
    "A trainer in which row i has a gradient of length |v[i]|, spread over a Linear(64, 10)."
    n = len(v)
    x = torch.full((n, 64), 1/8)
    y = v[:, None].expand(n, 10)/10**.5
    plan = PrivacyPlan(n=n, batch_size=n/2, steps=1, eps=3., delta=1e-5, accountant=RDPAccountant)
    return make(nn.Linear(64, 10, bias=False), Examples(x, y), plan, loss_fn=dot,
                clip=FlatClip(C), micro_batch=micro_batch, **options)


def longest_move(run, rows):
    "How far the sum of everybody moves when one of some rows goes, at most."
    def total(idx):
        sums, _ = run._clipped_sum(idx, 0)
        return torch.cat([g.flatten() for g in sums.values()])

    everybody = torch.arange(run.plan.n)
    whole = total(everybody)
    return max((whole - total(everybody[everybody != row])).norm().item() for row in rows)


@pytest.mark.parametrize("micro_batch", [16, None])
def test_no_row_moves_a_trainers_sum_further_than_its_clip(micro_batch):
    for pattern in PATTERNS:
        run = run_on(pattern(600), micro_batch=micro_batch)
        assert .5*C < longest_move(run, (0, 256, 599)) <= BOUND, pattern


def of_two_processes(peers):
    return [longest_move(run_on(pattern(600), ProcessTrainer, micro_batch, peers=peers),
                         (0, 256, 599)) for pattern in PATTERNS for micro_batch in (16, None)]


@pytest.mark.slow
def test_no_row_moves_the_sum_of_two_processes_further_than_its_clip(tmp_path):
    one, other = together(2, of_two_processes, tmp_path)
    assert one == other and all(.5*C < moved <= BOUND for moved in one)
