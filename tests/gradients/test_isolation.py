"One example at a time: what is common to all stays as it was, and what cannot be run is explained."
import gc
import traceback

import pytest
import torch
import torch.nn.functional as F
from oracle import Net, batch, every, parameter, same
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from toys import doubles, loss

from dp_course.gradients import FlatClip, fast_grad_sum, loop_grad_sum, vmap_grad_sum
from dp_course.gradients.isolation import (
    alone,
    batched_tensors,
    examples_apart,
    forgetting,
)

vmapped = pytest.mark.parametrize("engine", [fast_grad_sum, vmap_grad_sum],
                                  ids=lambda e: e.__name__)


def total(engine, model, x, y, loss=loss):
    sums, _ = engine(model, loss, x, y, FlatClip(.5))
    return torch.cat([g.flatten() for g in sums.values()])


# --- nobody else's part moves (training/test_leaks.py has a hundred that try)


def less_the_mean(net, x):
    h = net.first(x)
    return net.last(h - h.mean(0))


@every
def test_a_model_that_mixes_a_batch_has_one_row_to_mix(engine):
    model = Net(less_the_mean, first=nn.Linear(4, 4), last=nn.Linear(4, 3)).double()
    x, y = batch((4,), 5)
    whole = total(engine, model, x, y)
    for i in range(5):
        others = [j for j in range(5) if j != i]
        gone = whole - total(engine, model, x[others], y[others])
        torch.testing.assert_close(gone, total(engine, model, x[i:i + 1], y[i:i + 1]),
                                   rtol=1e-10, atol=1e-12)
        assert gone.norm() <= .5*(1 + 1e-6)


@every
def test_a_loss_that_mixes_a_batch_has_one_row_to_mix(engine):
    model, (x, y) = nn.Linear(4, 3).double(), batch((4,), 4)

    def hardest(output, y):
        losses = loss(output, y)
        return losses*(losses == losses.max())

    assert torch.equal(total(engine, model, x, y, hardest), total(engine, model, x, y))


# --- attributes, buffers and parameters are what they were


class Restless(nn.Module):
    "Changes everything that it can reach."
    def __init__(self):
        super().__init__()
        self.lin, self.frozen = nn.Linear(4, 3), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.last, self.parts = None, {"child": nn.Tanh()}

    def forward(self, x):
        self.calls += 1
        self.mean = .9*self.mean + x[0]
        self.last = x
        self.another = self.frozen(x).tanh()
        self.extra = nn.Tanh()
        self.register_buffer("new", x[0].detach())
        self.train(not self.training)
        return self.lin(self.another + self.calls)


def state(model):
    places = [dict(vars(m)) for m in model.modules()]
    places = [{k: dict(v) if isinstance(v, dict) else v for k, v in p.items()} for p in places]
    return places, [t.clone() for t in (*model.parameters(), *model.buffers())]


@every
def test_a_model_is_left_as_it_was(engine):
    gc.collect()  # what other tests have left
    model, (x, y) = Restless().double(), batch((4,))
    model.lin.weight.grad = torch.ones_like(model.lin.weight)
    places, values = state(model)
    engine(model, loss, x, y, FlatClip(1.))
    after, now = state(model)
    assert after == places and all(map(torch.equal, now, values))
    assert torch.is_grad_enabled() and not batched_tensors()


@every
def test_a_model_is_left_as_it_was_by_an_error(engine):
    class Fails(Restless):
        def forward(self, x):
            super().forward(x)
            raise KeyError("on purpose")

    model, (x, y) = Fails().double(), batch((4,))
    places, values = state(model)
    with pytest.raises(KeyError, match="on purpose"):
        engine(model, loss, x, y, FlatClip(1.))
    with pytest.raises(RuntimeError, match="size mismatch|shapes cannot be multiplied|size"):
        engine(model, loss, doubles(4, 7), y, FlatClip(1.))
    after, now = state(model)
    assert after == places and all(map(torch.equal, now, values))


@every
def test_a_loss_that_is_a_module_is_left_as_it_was(engine):
    class Counts(nn.CrossEntropyLoss):
        seen = None

        def forward(self, output, y):
            self.seen = output
            return super().forward(output, y)

    of = Counts()
    engine(nn.Linear(4, 3).double(), of, *batch((4,)), FlatClip(1.))
    assert of.seen is None and "seen" not in vars(of)


def test_forgetting_puts_back_what_was_deleted_or_replaced():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    weight, child = model[0].weight, model[1]
    with forgetting(model):
        del model[0].bias
        model[0].weight = nn.Parameter(torch.ones(2, 2))
        model[1] = nn.ReLU()
        model.colour = "red"
    assert model[0].weight is weight and model[1] is child and not hasattr(model, "colour")
    assert model[0].bias is not None


# --- a tensor of an example that is kept is refused


CACHE = {}


@every
def test_a_tensor_that_is_kept_is_refused_and_its_place_is_named(engine):
    def keeps(net, x):
        CACHE["last"] = x.sum()
        return net.lin(x)

    model = Net(keeps, lin=nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match="kept as last.*forward return it"):
        engine(model, loss, *batch((4,)), FlatClip(1.))
    CACHE.clear()


def assigns(t):
    t.data = t.data + 1


@vmapped
@pytest.mark.parametrize("count", [
    lambda t: t.add_(1), lambda t: t.data.add_(1), lambda t: t.view(1).data[0].add_(1), assigns,
    lambda t: torch.add(t, 1, out=t), lambda t: torch._foreach_add_([t], 1)])
@pytest.mark.parametrize("where", ["plain", "frozen"])
def test_calls_are_not_counted_in_a_tensor_that_was_there_before(engine, count, where):
    # their number tells how many micro-batches there were, and so how many examples were drawn
    def counts(net, x):
        count(getattr(net, where))
        return net.lin(x)

    model = Net(counts, lin=nn.Linear(4, 3), frozen=parameter(), plain=torch.zeros(())).double()
    model.frozen.requires_grad_(False)
    with pytest.raises(ValueError, match=f"as {where}, which outlives the call, is written into"):
        engine(model, loss, *batch((4,)), FlatClip(1.))


class CountsOnItsWayBack(torch.autograd.Function):
    calls = torch.zeros(())

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        CountsOnItsWayBack.calls += 1
        return g


def test_the_loop_does_not_let_a_backward_count_examples():
    model = Net(lambda net, x: CountsOnItsWayBack.apply(net.lin(x)), lin=nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match="which outlives the call, is written into"):
        loop_grad_sum(model, loss, *batch((4,)), FlatClip(1.))
    assert CountsOnItsWayBack.calls == 0


class Looks(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@every
def test_a_mode_that_a_model_does_not_leave_is_taken_off(engine):
    model = Net(lambda net, x: (Looks().__enter__(), net.lin(x))[1], lin=nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match="inside the model before forward returns"):
        engine(model, loss, *batch((4,)), FlatClip(1.))
    assert not torch._C._len_torch_function_stack()


# --- random numbers do not tell an example's place in the batch


def seeds_torch(net, x):
    torch.manual_seed(0)
    return net.lin(x + torch.rand(4, dtype=x.dtype))


def seeds_a_copy(net, x):
    with torch.random.fork_rng():
        return seeds_torch(net, x)


@vmapped
@pytest.mark.parametrize("how", [seeds_torch, seeds_a_copy])
def test_nobody_sets_the_seed_of_all_examples(engine, how):
    model = Net(how, lin=nn.Linear(4, 3)).double()
    x, y = batch((4,))
    with pytest.raises(ValueError, match="pass engine=loop_grad_sum"):
        engine(model, loss, x, y, FlatClip(.5))
    whole, others = (total(loop_grad_sum, model, x[low:], y[low:]) for low in (0, 1))
    assert (whole - others).norm() <= .5*(1 + 1e-6)
    torch.manual_seed(1)  # as ever


@every
def test_nobody_draws_from_a_generator_that_counts_the_examples(engine):
    generator = torch.Generator()
    model = Net(lambda net, x: net.lin(x + torch.rand(4, dtype=x.dtype, generator=generator)),
                lin=nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match="a torch.Generator of your own"):
        engine(model, loss, *batch((4,)), FlatClip(.5))


@every
def test_a_cache_that_is_emptied_in_time_is_nobody_s_business(engine):
    def forward(net, x):
        net.rows.append(x)
        return net.lin(net.rows.pop())

    model = Net(forward, lin=nn.Linear(4, 3)).double()
    model.rows = []
    same(engine, model, *batch((4,)))


# --- hooks


def hooks_its_output(net, x):
    h = net.lin(x)
    h.register_hook(lambda g: 2*g)
    return h


@every
@pytest.mark.parametrize("how", [
    hooks_its_output,
    lambda net, x: (lambda h: (h.grad_fn, h)[1])(net.lin(x)),
    lambda net, x: (lambda h: (torch.autograd.graph.register_multi_grad_hook([h], print), h)[1])(
        net.lin(x))], ids=["register_hook", "grad_fn", "multi_grad_hook"])
def test_a_hook_is_refused(engine, how):
    with pytest.raises(ValueError, match="hook inside the model.*returned by forward"):
        engine(Net(how, lin=nn.Linear(4, 3)).double(), loss, *batch((4,)), FlatClip(1.))


def test_a_hook_is_refused_in_any_function_of_rows():
    def hooked(v):
        v.register_hook(print)
        return v

    with pytest.raises(ValueError, match="hook inside the model"):
        examples_apart(hooked, doubles(3, 2))


@vmapped
def test_hooks_from_outside_see_no_gradient(engine):
    "Of parameters and modules: they are not called."
    model, (x, y), seen = nn.Sequential(nn.Linear(4, 3)).double(), batch((4,)), []
    model[0].weight.register_hook(seen.append)
    model[0].register_full_backward_hook(lambda *given: seen.append(given))
    engine(model, loss, x, y, FlatClip(1.))
    assert not seen


@every
def test_forward_hooks_are_part_of_the_model(engine):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model[0].register_forward_hook(lambda m, args, output: 2*output)
    model[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    same(engine, model, *batch((4,)))


# --- what vmap cannot run: which line, and the way out


class WithoutContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2*x

    @staticmethod
    def backward(ctx, g):
        return 2*g


class WithoutRule(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return 2*x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 2*g


class WithRule(WithoutRule):
    generate_vmap_rule = True


def branches(net, x):
    h = net.lin(x)
    if h.sum() > 0:  # this line
        return h
    return -h


def reads_a_number(net, x):
    h = net.lin(x)
    return h*h.max().item()  # this line


def saves_memory(net, x):
    return net.lin(checkpoint(net.first, x, use_reentrant=False))  # this line


def writes_into_what_is_shared(net, x):
    h = torch.zeros(1, 4, dtype=x.dtype)
    h[:, :2] = x[:, :2]  # this line
    return net.lin(h)


def writes_into_a_weight(net, x):
    with torch.no_grad():
        net.lin.weight[0] = x[0]  # this line
    return net.lin(x)


def writes_into_a_frozen_weight(net, x):
    net.frozen.copy_(x[0])  # this line
    return net.lin(x)


def differentiates(net, x):
    x = x.detach().requires_grad_()  # this line
    slope, = torch.autograd.grad(net.first(x).sin().sum(), x, create_graph=True)
    return net.lin(slope)


def remembers(net, x):
    return net.lin(net.lstm(x[:, None])[0][:, 0])  # this line


def looks_at_numpy(net, x):
    return net.lin(x*float(x.detach().numpy().max()))  # this line


def picks_by_a_mask(net, x):
    return net.lin(x*len(x[x > 0]))  # this line


STOPS = [
    (branches, "torch.where for an if"), (reads_a_number, "torch.where for an if"),
    (saves_memory, "micro_batch= instead of activation checkpoints"),
    (writes_into_what_is_shared, "compute a new tensor instead of writing"),
    (writes_into_a_weight, "compute a new tensor instead of writing"),
    (writes_into_a_frozen_weight, "compute a new tensor instead of writing"),
    (differentiates, "torch.func.grad where it calls torch.autograd.grad"),
    (remembers, "opacus.layers.DPLSTM"), (looks_at_numpy, "not of NumPy"),
    (picks_by_a_mask, "build it from other functions"),
    (lambda net, x: WithoutContext.apply(net.lin(x)), "build it from functions"),  # this line
    (lambda net, x: WithoutRule.apply(net.lin(x)), "build it from functions"),  # this line
    (lambda net, x: WithRule.apply(net.lin(x)), "build it from functions")]  # this line


def stopped(how):
    return Net(how, lin=nn.Linear(4, 3), first=nn.Linear(4, 4), frozen=parameter(4),
               lstm=nn.LSTM(4, 4)).double()


@pytest.mark.filterwarnings("ignore")
@vmapped
@pytest.mark.parametrize("how, way", STOPS, ids=lambda v: getattr(v, "__name__", ""))
def test_one_message_says_which_line_and_what_to_do(engine, how, way):
    model = stopped(how)
    model.frozen.requires_grad_(False)
    with pytest.raises(ValueError) as caught:
        engine(model, loss, *batch((4,)), FlatClip(1.))
    text = str(caught.value)
    assert "the model for one example, stops at test_isolation.py, line" in text
    assert "# this line" in text and way in text and "or pass engine=loop_grad_sum" in text
    assert len(text) < 600
    shown = "".join(traceback.format_exception(caught.value))
    assert len(shown.splitlines()) < 60 and "During handling" not in shown


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", [how for how, _ in STOPS if "weight" not in how.__name__],
                         ids=lambda v: v.__name__)
def test_the_loop_runs_it(how):
    same(loop_grad_sum, stopped(how), *batch((4,)))


@vmapped
def test_the_loss_is_looked_through_as_well(engine):
    def hard(output, y):
        return F.cross_entropy(output, y) if output.sum() > 0 else output.sum()

    with pytest.raises(ValueError, match="test_isolation.py, line .*torch.where"):
        engine(nn.Linear(4, 3).double(), hard, *batch((4,)), FlatClip(1.))


@vmapped
def test_other_errors_come_as_they_are(engine):
    with pytest.raises(RuntimeError, match="broken on purpose"):
        def broken(output, y):
            raise RuntimeError("broken on purpose")

        engine(nn.Linear(4, 3).double(), broken, *batch((4,)), FlatClip(1.))


# --- the parts


def test_examples_apart_calls_any_function_of_trees():
    given = {"a": doubles(3, 2), "b": doubles(3)}
    found = examples_apart(lambda tree: (tree["a"] - tree["a"].mean()).norm() + tree["b"], given)
    want = torch.stack([(a - a.mean()).norm() + b for a, b in zip(*given.values())])
    torch.testing.assert_close(found, want)
    with pytest.raises(ValueError, match="calls augment for one example"):
        examples_apart(lambda v: v if v.sum() > 0 else -v, given["a"], who="augment")


def test_alone_reads_a_file_as_it_is(tmp_path):
    torch.save(torch.arange(6.), tmp_path/"table.pt")

    def total(copied, x):
        return x + torch.load(tmp_path/"table.pt").sum()

    assert alone(total, (), torch.zeros(1)).item() == 15


def test_draws_of_an_example_alone_move_the_generator_once():
    "However many numbers an example takes, the next one's draws are the same."
    model = Net(lambda net, x: net.lin(x + torch.rand(1, 4, dtype=x.dtype)), lin=nn.Linear(4, 3))
    model, (x, y), after = model.double(), batch((4,)), []
    for times in (1, 5):
        def noisy(output, y, times=times):
            return loss(output, y) + 0*torch.rand(times).sum()

        torch.manual_seed(0)
        loop_grad_sum(model, noisy, x, y, FlatClip(1.))
        after.append(torch.rand(1))
    assert torch.equal(*after)
