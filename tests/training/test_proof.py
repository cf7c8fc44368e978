"What the proof once let through, and honest networks that it once refused."
import pytest
import torch
from leaks import noise, sequence, trained
from torch import nn
from toys import loss

from dp_course.data import Examples
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


# --- what counts


class Counts(nn.Module):
    "Counts something at each call, in a buffer or in a number, and may look at it."
    def __init__(self, counted, look=lambda x, n: x):
        super().__init__()
        self.out, self.counted, self.look, self.n = nn.Linear(5, 10), counted, look, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.n += 1
        self.seen += self.counted(x)
        return self.out(self.look(x, self.n))


def nothing(x):
    return 0


def calls(x):
    return 1


def every_other(x, n):
    return -x if n % 2 else x


def annealed(x, n):
    return x/(1 + 1e-3*n)


ONE_CALL = dict(engine=fast_grad_sum)
SEVERAL = [dict(engine=loop_grad_sum), dict(engine=fast_grad_sum, micro_batch=7)]


@pytest.mark.parametrize("counted, look", [
    (nothing, every_other), (nothing, annealed), (calls, lambda x, n: x)],
    ids=["a sign", "a temperature", "a buffer"])
def test_who_counts_calls_needs_one_call_a_step(counted, look):
    trained(Counts(counted, look), **ONE_CALL)
    for options in SEVERAL:
        with pytest.raises(ValueError, match="keeps count of its calls: at call 2"):
            trained(Counts(counted, look), **options)


@pytest.mark.parametrize("options", [ONE_CALL, *SEVERAL], ids=["fast", "loop", "micro-batches"])
def test_a_buffer_that_counts_rows_is_refused(options):
    with pytest.raises(ValueError, match="seen is another one after a batch of 5 rows"):
        trained(Counts(len), **options)


class WritesItsOwn(Counts):
    "Keeps the mean of what it saw where no buffer is, and writes it into its state."
    def forward(self, x):
        self.mean = x.detach().mean()
        return self.out(x)

    def state_dict(self, *args, **options):
        mean = getattr(self, "mean", torch.ones(()))
        return super().state_dict(*args, **options) | {"mean": mean}


def test_what_a_state_dict_of_its_own_writes_down_is_looked_at():
    with pytest.raises(ValueError, match="keeps|remembers"):
        trained(WritesItsOwn(nothing))


# --- a network for which a proof does not try many rows


def wide(before=nn.Identity()):
    "Four million multiplications a row."
    return nn.Sequential(before, nn.Linear(5, 2000), nn.Linear(2000, 2000), nn.Linear(2000, 10))


class Centred(nn.Module):
    "Centres large batches."
    def forward(self, x):
        return x - x.mean(0) if len(x) > 60 else x


def harder_half(output, y):
    each = loss(output, y)
    return each*(each >= each.detach().median()) if len(y) > 60 else each


def sign_of_the_hardest(output, y):
    each = loss(output, y)
    return each*output[each.argmax(), 0].sign().detach() if len(y) > 60 else each


@pytest.mark.parametrize("model, loss_fn, who", [
    (lambda: wide(Centred()), loss, "the model"), (wide, harder_half, "loss_fn"),
    (wide, sign_of_the_hardest, "loss_fn")], ids=["model", "harder half", "sign"])
def test_a_large_network_and_its_loss_are_tried_at_the_size_of_the_run(model, loss_fn, who):
    with pytest.raises(ValueError, match=f"{who} mixes examples.*number of the others"):
        prove_separate(loop_grad_sum, model(), loss_fn, noise(5), largest=107)


def test_a_large_network_that_does_not_mix_is_honest():
    assert prove_separate(fast_grad_sum, wide(), loss, noise(5), largest=107)[:2] == (3, 4)


# --- engines of one's own


def tripled(engine, size):
    def tripled_at(model, loss_fn, x, y, clip):
        "Three times too much in batches of one size."
        sums, norms = engine(model, loss_fn, x, y, clip)
        return ({name: 3*v for name, v in sums.items()} if len(y) == size else sums), norms
    return tripled_at


def mean_where_nothing_is_cut(model, loss_fn, x, y, clip):
    asked = []

    def noted(norms):
        asked.append(clip(norms))
        return asked[-1]

    sums, norms = fast_grad_sum(model, loss_fn, x, y, noted)
    whole = (torch.cat(asked, 1) == 1).all()
    return ({name: v/len(y) for name, v in sums.items()} if whole else sums), norms


@pytest.mark.parametrize("engine, words", [
    (tripled(fast_grad_sum, 1), "at a batch of 1 made-up rows"),
    (tripled(fast_grad_sum, 2), "at a batch of 2 made-up rows"),
    (mean_where_nothing_is_cut, r"factors are \[1\.0, 1\.0, 1\.0, 1\.0\]")],
    ids=["one row", "two rows", "factors of 1"])
def test_an_engine_is_tried_with_few_rows_and_with_factors_of_one(engine, words):
    with pytest.raises(ValueError, match=words):
        prove_separate(engine, nn.Linear(5, 10), loss, noise(5))


# --- labels and losses


MANY = 1000


def unless_three(output, y):
    y = y["class"] if isinstance(y, dict) else y
    return loss(output, y)*(1 - 2*(y == 3).any().float())


@pytest.mark.parametrize("wrap, options", [
    (lambda y: {"class": y}, {}), (lambda y: y, {"augment": lambda x, y, generator: (x, y)})],
    ids=["named labels", "augment"])
def test_each_label_is_tried_whatever_form_they_have(wrap, options):
    data = Examples(torch.randn(MANY, 5), wrap(torch.arange(MANY)))
    with pytest.raises(ValueError, match="loss_fn mixes examples"):
        prove_separate(loop_grad_sum, nn.Linear(5, MANY), unless_three, data, **options)


def test_half_precision_is_honest():
    data = Examples(torch.randn(50, 5).half(), torch.arange(50) % 10)
    prove_separate(fast_grad_sum, nn.Linear(5, 10).half(), loss, data)


def test_a_loss_that_works_in_place_is_honest():
    prove_separate(fast_grad_sum, nn.Linear(5, 10), lambda output, y: loss(output.mul_(2), y),
                   noise(5))
