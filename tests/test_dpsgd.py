"DP-SGD against oracles, under faults, and after a crash."
import gc
import math
import os
import pickle
import types
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from dp_course.accounting import PrivacyPlan, RDPAccountant
from dp_course.checkpoints import load_checked, save_atomic
from dp_course.dpsgd import FlatClip, example_grads, loop_grad_sum, noisy_mean
from dp_course.guards import refuse_mixing, refuse_unbounded
from dp_course.trainer import Trainer, step_generator

loss = partial(F.cross_entropy, reduction="none")


@dataclass
class Plan:
    "A plan that says what it is: no promise at all (eps is infinite), so that the noise can be switched off."
    n:int; batch_size:float; steps:int; sigma:float=0.; eps:float=math.inf; delta:float=1e-5
    accountant:type=RDPAccountant
    q = property(lambda self: self.batch_size/self.n)


def toy(n=12, classes=3, shape=(5,), dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, *shape, generator=g, dtype=dtype), torch.randint(classes, (n,), generator=g)
    return types.SimpleNamespace(train_x=x, train_y=y, test_x=x, test_y=y)


def linear(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(5, 3).to(dtype)


def trainer(plan=None, n=12, model=None, **kw): return Trainer(model or linear(), toy(n), plan or Plan(n, 4, 8, 1.), **kw)
def same(a, b): return all(torch.equal(u, v) for u, v in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# The engine

class Tied(nn.Module):
    "One matrix, used twice and known under two names."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)
        self.b.weight = self.a.weight
    def forward(self, x): return self.out(self.b(self.a(x).tanh()).tanh())


def conv():
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, bias=False),
                        nn.Flatten(), nn.Linear(16, 3))
    net[0].bias.requires_grad_(False)
    net[3].weight.requires_grad_(False)
    return net


def oracle(model, x, y, max_norm):
    "Per-example gradients by torch.func, clipped by hand."
    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    def f(params, x, y):
        rows = x if x.dim() == 4 else x[None]
        return loss(functional_call(model, params, (rows,)), y.expand(len(rows))).mean()
    grads = vmap(grad(f), (None, 0, 0))(params, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()])
    factors = max_norm/norms.square().sum(0).sqrt().clamp(min=max_norm)
    return {n: torch.einsum("b,b...->...", factors, g) for n, g in grads.items()}, norms


@pytest.mark.parametrize("net, shape", [(linear, (5,)), (Tied, (5,)), (conv, (2, 6, 6)), (conv, (3, 2, 6, 6))],
                         ids=["linear", "tied", "conv", "views"])
@pytest.mark.parametrize("b", [1, 5])
@pytest.mark.parametrize("max_norm", [.3, 1e9])
def test_loop_is_the_oracle(net, shape, b, max_norm):
    torch.manual_seed(0)
    model, data = net().double(), toy(b, shape=shape)
    got, norms = loop_grad_sum(model, loss, data.train_x, data.train_y, FlatClip(max_norm))
    want, want_norms = oracle(model, data.train_x, data.train_y, max_norm)
    assert list(got) == [n for n, p in model.named_parameters() if p.requires_grad] == list(want)
    for n in want: torch.testing.assert_close(got[n], want[n], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norms, want_norms, rtol=1e-12, atol=1e-12)
    assert all(p.grad is None for p in model.parameters())


def test_empty_batch_has_a_zero_sum():
    model, data = conv().double(), toy(1, shape=(2, 6, 6))
    grads, norms = loop_grad_sum(model, loss, data.train_x[:0], data.train_y[:0], FlatClip(1.))
    assert norms.shape == (5, 0) and len(grads) == 5 and all((g == 0).all() for g in grads.values())


def test_loss_must_be_per_row():
    with pytest.raises(ValueError, match="one loss per row"):
        loop_grad_sum(linear(), F.cross_entropy, toy(2).train_x, toy(2).train_y, FlatClip(1.))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_bad_example_contributes_zero(bad):
    model, data = linear(), toy(5)
    want, _ = loop_grad_sum(model, loss, data.train_x[1:], data.train_y[1:], FlatClip(.5))
    data.train_x[0] = bad
    got, norms = loop_grad_sum(model, lambda out, y: out.square().sum(1) if bad == 1e200 else loss(out, y),
                               data.train_x[:1], data.train_y[:1], FlatClip(.5))
    assert all((g == 0).all() for g in got.values()) and not norms.isfinite().all()
    got, _ = loop_grad_sum(model, loss, data.train_x, data.train_y, FlatClip(.5)) if bad != 1e200 else (want, None)
    for n in want: assert torch.equal(got[n], want[n])


@given(st.lists(st.lists(st.floats(0, 1e30), min_size=3, max_size=3), min_size=1, max_size=6), st.floats(1e-6, 1e6))
@settings(max_examples=200, deadline=None)
def test_flat_clip_bounds(columns, max_norm):
    norms, clip = torch.tensor(columns, dtype=torch.float64).T, FlatClip(max_norm)
    factors = clip(norms)
    assert factors.shape == norms.shape and (factors[0] == factors[1]).all()
    assert (torch.linalg.vector_norm(factors*norms, dim=0) <= max_norm*(1+1e-12)).all()
    assert (factors[0][torch.linalg.vector_norm(norms, dim=0) <= max_norm*(1-1e-12)] == 1).all()


def test_flat_clip_edges():
    clip = FlatClip(2.)
    assert clip(torch.zeros(3, 0)).shape == (3, 0) and (clip(torch.zeros(3, 2)) == 1).all()
    factors = clip(torch.tensor([[1., math.nan, math.inf, 3.], [1., 1., 1., 4.]]))
    assert factors.tolist() == [[1, 0, 0, pytest.approx(.4)]]*2
    assert clip.sensitivity == 2 and clip.std(1.5) == 3
    for bad in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="no bound"): FlatClip(bad)


@pytest.mark.parametrize("scale", [1e-3, 1., 1e8, 1e30, 1e300])
def test_one_example_moves_the_sum_by_at_most_c(scale):
    model, data, clip = linear(), toy(6), FlatClip(.7)
    z = scale*torch.randn(1, 5, dtype=torch.float64)
    a, _ = loop_grad_sum(model, loss, data.train_x, data.train_y, clip)
    b, _ = loop_grad_sum(model, loss, torch.cat([data.train_x, z]), torch.cat([data.train_y, data.train_y[:1]]), clip)
    assert torch.cat([(a[n]-b[n]).flatten() for n in a]).norm() <= .7*(1+1e-9)


class TooMuch(FlatClip):
    def __call__(self, norms): return (self.max_norm/norms).clamp(max=1)          # per layer, without 1/sqrt(l)
class TooQuiet(FlatClip):
    def std(self, sigma): return .9*sigma*self.sensitivity
class Mean(FlatClip):
    def __call__(self, norms): return (self.max_norm/norms.mean()).clamp(max=1).expand_as(norms)


@pytest.mark.parametrize("clip", [TooMuch(1.), TooQuiet(1.), Mean(1.)])
def test_clip_that_breaks_its_promise_is_refused(clip):
    with pytest.raises(ValueError, match="promises sensitivity"): refuse_unbounded(clip, 1., 4)
    with pytest.raises(ValueError, match="promises sensitivity"): trainer(clip=clip)
    refuse_unbounded(FlatClip(3.), 1., 4)


# The noise

def test_noise_has_the_std_it_says():
    # 400,000 draws: the sample std is within 5.5 standard errors, 0.6 %, but for one run in 2e7
    n, std, batch = 400_000, torch.tensor([3., .5]), 50.
    out = noisy_mean({"a": torch.ones(n), "b": torch.full((n,), 7.)}, std, batch, torch.Generator().manual_seed(1))
    for v, s, m in zip(out.values(), std, (1, 7)):
        assert abs((v*batch).std().item()/s.item()-1) < 5.5/math.sqrt(2*n)
        assert abs((v*batch).mean().item()-m) < 5.5*s.item()/math.sqrt(n)
    assert abs(torch.corrcoef(torch.stack(list(out.values())))[0, 1]) < 5.5/math.sqrt(n)


@pytest.mark.parametrize("std, batch", [(-1, 5), (math.nan, 5), (math.inf, 5), (1, 0), (1, -3), (1, math.nan)])
def test_noise_refuses_nonsense(std, batch):
    with pytest.raises(ValueError, match="plan.batch_size"): noisy_mean({"a": torch.ones(2)}, std, batch)


def test_step_generators_repeat_and_differ():
    def draw(*a): return torch.rand(4, generator=step_generator(*a)).tolist()
    keys = [(s, stream, t) for s in (0, 5, 5+2**32, "5 ", 2**200) for stream in ("noise", "sample") for t in (0, 1, 2**33)]
    assert len({tuple(draw(*k)) for k in keys}) == len(keys) and draw(5, "noise", 1) == draw("5", "noise", 1)
    a, b = (torch.Generator().manual_seed(s) for s in (5, 5+2**32))
    assert torch.equal(torch.rand(9, generator=a), torch.rand(9, generator=b))  # why manual_seed is not enough
    # one number from each of 100,000 steps: mean and neighbour correlation within 5.5 standard errors (1 run in 1e7)
    u = torch.cat([torch.rand(1, generator=step_generator(3, "noise", t)) for t in range(20_000)])-.5
    assert abs(u.mean()) < 5.5/math.sqrt(12*20_000) and abs((u[1:]*u[:-1]).mean()) < 5.5/12/math.sqrt(20_000)


def test_trainer_noise_is_sigma_times_sensitivity():
    # 150,000 coordinates, no gradient: 5.5 standard errors are 1 %, a false alarm in 2e7 runs
    model, n, C, sigma = nn.Linear(1000, 150, bias=False), 10, .25, 1.7
    data = toy(n, shape=(1000,), dtype=torch.float32)
    zero = lambda model, loss_fn, x, y, clip: ({"weight": torch.zeros(150, 1000)}, torch.zeros(1, len(x)))
    tr = Trainer(model, data, Plan(n, 5, 2, sigma), clip=FlatClip(C), engine=zero)
    first = tr.step().model.weight.grad.clone()
    second = tr.step().model.weight.grad
    assert abs((first*5).std().item()/(sigma*C)-1) < 5.5/math.sqrt(2*150_000)
    assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 5.5/math.sqrt(150_000)


def test_every_purpose_has_its_own_randomness(monkeypatch):
    asked, make = [], step_generator
    monkeypatch.setattr("dp_course.dpsgd.step_generator", lambda *a: asked.append(a[:3]) or make(*a))
    tr = trainer(augment=lambda x, g: x, seed=9)
    asked.clear()
    tr.fit(3)
    assert len(asked) == len(set(asked)) == 12 and {a[1] for a in asked} == {"sample", "augment", "noise", "clip"}
    assert {a[0] for a in asked} == {"9"} and {a[2] for a in asked} == {0, 1, 2}


# The step

@pytest.mark.parametrize("make", [partial(torch.optim.SGD, lr=.3, momentum=.9), partial(torch.optim.Adam, lr=.01)])
def test_without_noise_and_clipping_it_is_plain_sgd(make):
    tr = trainer(Plan(12, 12, 6), optimizer=make, clip=FlatClip(1e12))
    plain, data = linear(), tr.data
    opt = make(plain.parameters())
    for _ in range(6):
        opt.zero_grad()
        F.cross_entropy(plain(data.train_x), data.train_y).backward()
        opt.step()
        tr.step()
        for p, w in zip(tr.model.parameters(), plain.parameters()): torch.testing.assert_close(p, w, rtol=1e-12, atol=1e-13)
    assert tr.epsilon() == math.inf


def test_update_is_divided_by_the_expected_batch():
    sizes, seen = [], []
    def engine(model, loss_fn, x, y, clip):
        sizes.append(len(x)); return {"weight": torch.full((3, 5), 8., dtype=torch.float64), "bias": torch.zeros(3, dtype=torch.float64)}, torch.ones(2, len(x))
    tr = trainer(Plan(100, 16, 20), n=100, engine=engine, callbacks=[lambda t: seen.append(t.model.weight.grad[0, 0].item())]).fit()
    assert len(set(sizes)) > 3 and set(seen) == {8/16} and tr.t == 20


def test_inclusion_rate():
    # each of 40 examples in 1,500 steps at q = .3: 5.8 standard errors each way, all 40 pass but once in 4 million runs;
    # variance of the batch size n q (1-q) = 8.4 within 5.5 of its standard errors, sqrt(2/1500) = 3.7 %
    n, steps, q, count, sizes = 40, 1500, .3, torch.zeros(40), []
    data = types.SimpleNamespace(train_x=torch.arange(n, dtype=torch.float32)[:, None], train_y=torch.zeros(n, dtype=torch.long))
    def engine(model, loss_fn, x, y, clip):
        count[x[:, 0].long()] += 1; sizes.append(float(len(x)))
        return {"weight": torch.zeros(2, 1)}, torch.zeros(1, len(x))
    Trainer(nn.Linear(1, 2, bias=False), data, Plan(n, q*n, steps), engine=engine, seed=5).fit()
    assert ((count/steps-q).abs() < 5.8*math.sqrt(q*(1-q)/steps)).all()
    assert abs(torch.tensor(sizes).var().item()/(n*q*(1-q))-1) < 5.5*math.sqrt(2/steps)
    assert not (count == steps*q).all()  # shuffling would give every example the same count


def test_empty_batch_takes_a_noisy_step_and_is_charged():
    calls = []
    def engine(*a): calls.append(1); return loop_grad_sum(*a)
    tr = trainer(Plan(12, 1e-9, 3, 1., ), engine=engine)
    before = tr.model.weight.clone()
    tr.fit(2)
    assert not calls and not torch.equal(before, tr.model.weight) and tr.t == tr.computed == 2
    assert tr.accountant.history[0][2] == 2 and tr.nonprivate_nonfinite == 0


def test_bad_example_in_training_is_counted_and_harmless():
    tr = trainer(Plan(12, 12, 3, 1.))
    tr.data.train_x[3, 1] = math.nan
    tr.data.train_x[7, 1] = math.inf
    tr.fit()
    assert tr.model.weight.isfinite().all() and tr.nonprivate_nonfinite == 6


@pytest.mark.parametrize("micro", [1, 3, 100])
def test_micro_batches_change_nothing(micro):
    def jitter(x, g): return x + .1*torch.randn(x.shape, generator=g, dtype=x.dtype)
    whole, parts = (trainer(Plan(12, 9, 5, .5), clip=FlatClip(.3), seed=1, micro_batch=m, augment=jitter).fit() for m in (None, micro))
    for p, w in zip(parts.model.parameters(), whole.model.parameters()): torch.testing.assert_close(p, w, rtol=1e-12, atol=1e-13)


def test_views_go_through_the_trainer():
    data = toy(8, shape=(2, 6, 6))
    def flips(x, g): return torch.stack([x, x.flip(-1)], 1)
    tr = Trainer(conv().double(), data, Plan(8, 8, 1), clip=FlatClip(.2), augment=flips, optimizer=partial(torch.optim.SGD, lr=0.))
    want, _ = oracle(tr.model, flips(data.train_x, None), data.train_y, .2)
    tr.step()
    for n, p in tr.params.items(): torch.testing.assert_close(p.grad*8, want[n], rtol=1e-10, atol=1e-12)


def test_frozen_parameters_stay_and_cost_nothing():
    net = conv().double()
    tr = Trainer(net, toy(8, shape=(2, 6, 6)), Plan(8, 4, 3, 1.), optimizer=torch.optim.SGD(net.parameters(), lr=1., weight_decay=.1))
    before = {n: p.clone() for n, p in net.named_parameters()}
    for p in net.parameters(): p.grad = torch.ones_like(p)  # left over from something else
    tr.fit()
    for n, p in net.named_parameters():
        assert torch.equal(p, before[n]) != p.requires_grad and (p.grad is None) != p.requires_grad


def test_a_step_that_fails_is_charged_and_its_noise_never_used_again():
    fail, noise = [True], []
    def engine(*a):
        if fail.pop() if fail else False: raise RuntimeError("out of memory")
        return loop_grad_sum(*a)
    tr = trainer(Plan(12, 12, 3, 1.), engine=engine, seed=3)
    with pytest.raises(RuntimeError): tr.step()
    tr.step()
    other = trainer(Plan(12, 12, 3, 1.), seed=3).step()
    assert tr.t == tr.computed == 2 and not torch.equal(tr.model.weight.grad, other.model.weight.grad)


# What the trainer refuses

def test_step_after_the_last_is_refused():
    plan = PrivacyPlan(12, 4, 5, 3., 1e-5, RDPAccountant)
    tr = trainer(plan).fit()
    before = tr.model.weight.clone()
    with pytest.raises(ValueError, match="step 6 .*eps=3.0 buys 5 steps"): tr.step()
    assert torch.equal(before, tr.model.weight) and tr.t == 5 and tr.epsilon() <= 3
    with pytest.raises(ValueError, match="not paid"): trainer(plan).fit(6)
    with pytest.raises(AttributeError): tr.plan = plan
    with pytest.raises(AttributeError): tr.t = 0


def test_epsilon_grows_to_the_budget_and_not_beyond():
    plan, eps = PrivacyPlan(12, 4, 6, 2., 1e-5, RDPAccountant), []
    tr = trainer(plan)
    assert tr.epsilon() == 0
    for _ in range(6): eps.append(tr.step().epsilon())
    assert eps == sorted(eps) and eps[2] == pytest.approx(plan.epsilon_after(3)) and .99*2 < eps[-1] <= 2


def test_plan_and_data_must_agree():
    with pytest.raises(ValueError, match=r"n=12.*13 examples"): Trainer(linear(), toy(13), Plan(12, 4, 2, 1.))
    bad = toy(12); bad.train_y = bad.train_y[:-1]
    with pytest.raises(ValueError, match="11 labels"): Trainer(linear(), bad, Plan(12, 4, 2, 1.))
    loader = DataLoader(TensorDataset(toy().train_x, toy().train_y), 4)
    with pytest.raises(ValueError, match="no loader"): Trainer(linear(), loader, Plan(12, 4, 2, 1.))


def test_plan_that_lies_is_refused():
    class Fast(Plan): q = .01
    with pytest.raises(ValueError, match="batch_size/n"): trainer(Fast(12, 4, 2, 1.))
    with pytest.raises(ValueError, match="costs eps=inf"): trainer(Plan(12, 4, 2, 0., eps=3.))
    with pytest.raises(ValueError, match="costs eps="): trainer(Plan(12, 4, 200, 1., eps=3.))
    class Quiet(PrivacyPlan): sigma = .1
    with pytest.raises(ValueError, match="costs eps="): trainer(Quiet(12, 4, 5, 3., 1e-5, RDPAccountant))


class Mix(nn.Module):
    def forward(self, x): return x-x.mean(0)
class HiddenMix(nn.Module):
    "A branch that is switched off at the start."
    def __init__(self): super().__init__(); self.gain, self.out = nn.Parameter(torch.zeros(())), nn.Linear(5, 3)
    def forward(self, x): return self.out(x+self.gain*x.amax(0))
class Remember(nn.Module):
    "A running mean that is used later."
    def __init__(self): super().__init__(); self.register_buffer("m", torch.zeros(5)); self.out = nn.Linear(5, 3)
    def forward(self, x):
        if self.training: self.m.lerp_(x.detach().mean(0).to(self.m), .1)
        return self.out(x)
class Noisy(nn.Module):
    def forward(self, x): return x+torch.randn_like(x)
class Count(nn.Module):
    "State outside of the buffers."
    def __init__(self): super().__init__(); self.seen = 0.
    def forward(self, x): self.seen = .9*self.seen+x.detach().mean(); return x*(1+self.seen)
class Sequence(nn.Module):
    "Takes the batch for a sequence: an example sees those before it."
    def __init__(self): super().__init__(); self.rnn = nn.LSTM(5, 3)
    def forward(self, x): return self.rnn(x)[0]


def nest(m): return nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Tanh(), m), nn.Linear(5, 3))

@pytest.mark.parametrize("model, words", [
    (nest(nn.BatchNorm1d(5)), r"1\.1 \(BatchNorm1d\).*GroupNorm"), (nest(nn.SyncBatchNorm(5)), r"1\.1 \(SyncBatchNorm\).*GroupNorm"),
    (nest(nn.BatchNorm1d(5, track_running_stats=False)), r"1\.1 \(BatchNorm1d\)"), (nest(nn.Dropout(.1)), r"1\.1 \(Dropout\).*p=0"),
    (nest(Mix()), r"1\.1 \(Mix\) mixes examples.*GroupNorm"), (HiddenMix(), r"the model \(HiddenMix\) mixes examples"), (nest(Noisy()), r"1\.1 \(Noisy\) draws random"),
    (Remember(), r"Remember"), (nest(Count()), r"1\.1 \(Count\)"), (Sequence(), "LSTM|Sequence"),
    (nn.Sequential(nn.Unflatten(1, (5, 1)), nn.InstanceNorm1d(5, track_running_stats=True), nn.Flatten(), nn.Linear(5, 3)), r"1 \(InstanceNorm1d\)")],
    ids=["bn", "syncbn", "bn_batch", "dropout", "mix", "hidden", "noise", "buffer", "count", "lstm", "instance"])
def test_models_that_mix_examples_are_refused_by_name(model, words):
    model = model.double()
    before, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with pytest.raises(ValueError, match=words): trainer(model=model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("model", [nest(nn.LayerNorm(5)), nest(nn.GroupNorm(1, 5)), nest(nn.Dropout(0.)), nest(nn.PReLU())])
def test_models_that_keep_examples_apart_are_not(model):
    model = model.double().eval()
    before, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    trainer(model=model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and torch.equal(rng, torch.get_rng_state())
    assert not model.training and not any(m._forward_hooks for m in model.modules())


def test_augmentation_that_mixes_examples_is_refused():
    with pytest.raises(ValueError, match="mixup"): trainer(augment=lambda x, g: .5*x+.5*x.roll(1, 0))
    trainer(augment=lambda x, g: x+torch.randn(x.shape, generator=g, dtype=x.dtype))


def test_optimizer_must_hold_the_model():
    with pytest.raises(ValueError, match="lacks weight, bias"): trainer(optimizer=torch.optim.SGD(linear().parameters(), lr=1.))
    with pytest.raises(ValueError, match="lacks everything"):
        net = linear()
        opt = torch.optim.SGD(net.parameters(), lr=1.)
        trainer(model=net.requires_grad_(False), optimizer=opt)


# What others get to see

def reachable(root):
    "Every tensor that can be reached from an object, modules, classes and globals left out."
    seen, todo, found = set(), [root], []
    while todo:
        o = todo.pop()
        if id(o) in seen or isinstance(o, (types.ModuleType, type)) or isinstance(o, dict) and "__builtins__" in o: continue
        seen.add(id(o))
        if isinstance(o, torch.Tensor): found += [o] + ([o.grad] if o.grad is not None else [])
        todo += gc.get_referents(o)
    return found


def test_callbacks_see_nothing_that_was_not_noised():
    secrets = []  # bytes, not tensors: the test's own copies must not be found
    def engine(*a):
        grads, norms = loop_grad_sum(*a)
        flat = torch.cat([g.flatten() for g in grads.values()])
        secrets.extend(v.numpy().tobytes() for v in (norms, norms.square().sum(0).sqrt(), flat, *grads.values(), *(g/4 for g in grads.values())))
        return grads, norms
    def look(tr):
        visible = {t.detach().contiguous().numpy().tobytes() for t in reachable(tr)}
        assert secrets and not visible & set(secrets)
        assert all(p.grad is not None for p in tr.model.parameters())
    tr = trainer(Plan(12, 4, 4, 1.), engine=engine, callbacks=[look]).fit()
    tr.leak = loop_grad_sum(tr.model, loss, tr.data.train_x, tr.data.train_y, tr.clip)[1]
    assert any(torch.equal(t, tr.leak) for t in reachable(tr))  # the search can find what is there


def test_seed_policy_is_told():
    a, b = trainer(), trainer()
    assert not torch.equal(a.step().model.weight, b.step().model.weight) and a._seed != b._seed and len(a._seed) == 64
    plan = PrivacyPlan(12, 4, 5, 3., 1e-5, RDPAccountant)
    assert "reproducible: the seed is not secret" in trainer(plan, seed=1).statement()
    assert "Seed: secret" in trainer(plan).statement() and "by 0 of 5 steps" in trainer(plan).statement()
    assert same(trainer(seed=4).fit().model, trainer(seed=4).fit().model)


# Crashes

class Average:
    "An EMA with a state."
    def __init__(self): self.weights = {}
    def __call__(self, tr):
        for n, p in tr.params.items(): self.weights[n] = self.weights.get(n, p.detach().clone()).lerp(p.detach(), .3)
    def state_dict(self): return self.weights
    def load_state_dict(self, s): self.weights = dict(s)


class Learnt(FlatClip):
    "A threshold with a history."
    def update(self, norms, generator=None): self.max_norm *= 1+.1*torch.rand(1, generator=generator).item()


def run(seed=7, plan=None, lr=.5):
    return trainer(plan or Plan(12, 4, 8, .7), seed=seed, optimizer=partial(torch.optim.SGD, lr=lr, momentum=.9),
                   callbacks=[Average(), lambda tr: None], clip=Learnt(1.))


def test_resumed_run_is_bit_identical(tmp_path):
    whole = run().fit()
    first = run().fit(3)
    first.save(tmp_path/"c")
    rest = run(lr=99.)
    torch.manual_seed(123)
    rest.load(tmp_path/"c")
    assert rest.t == rest.computed == 3
    rest.fit()
    assert same(rest.model, whole.model) and rest.clip == whole.clip and rest.t == rest.computed == 8
    assert all(torch.equal(rest.callbacks[0].weights[k], v) for k, v in whole.callbacks[0].weights.items())
    assert first.fit().load(tmp_path/"c").computed == 8 and first.t == 3
    again = first.fit()  # back in time in one process: the same steps, not charged twice
    assert same(again.model, whole.model) and again.computed == 8


def test_secret_seed_survives(tmp_path):
    a = run(seed=None).fit(3)
    a.save(tmp_path/"c")
    b = run(seed=None).load(tmp_path/"c")
    assert same(a.fit().model, b.fit().model) and b.seed_policy == "secret"
    assert (tmp_path/"c").stat().st_mode & 0o077 == 0


def test_ledger_holds_steps_with_other_randomness(tmp_path):
    run(seed=7).fit(5).save(tmp_path/"c")
    other = run(seed=8).load(tmp_path/"c")
    assert other.t == other.computed == 5
    with pytest.raises(ValueError, match="not paid"): other.fit(4)
    assert other.computed == 8 and not same(other.model, run(seed=7).fit().model)
    mine = run(seed=8).fit(2).load(tmp_path/"c")     # two steps of its own before
    assert mine.computed == 7 and mine.left() == 1
    assert mine.accountant.history[0][2] == 7
    mine.step()
    with pytest.raises(ValueError, match="step 9"): mine.step()
    mine.save(tmp_path/"d")
    assert run(seed=8).load(tmp_path/"d").computed == 8
    assert run(seed=None).load(tmp_path/"d").seed_policy.startswith("reproducible")


def test_new_seed_never_repeats_noise_it_has_used(tmp_path):
    run(seed=7).fit(1).save(tmp_path/"c")
    a = run(seed=8).fit(2)                            # its step 1 had other weights before it
    used = a.model.weight.grad.clone()
    a.load(tmp_path/"c").step()
    fresh = run(seed=8).load(tmp_path/"c").step()
    assert torch.equal(a.model.weight, fresh.model.weight)  # repeatable
    noise = lambda tr, t: torch.randn(3, generator=step_generator(tr._seed, "noise", t))
    assert not torch.equal(noise(a, 1), torch.randn(3, generator=step_generator(8, "noise", 1))) and not torch.equal(used, a.model.weight.grad)
    a.save(tmp_path/"d")
    assert same(run(seed=8).load(tmp_path/"d").fit().model, a.fit().model)


@pytest.mark.parametrize("kind", ["cut", "text", "empty", "pickle", "other"])
def test_bad_checkpoint_is_named_and_the_one_before_loads(tmp_path, kind):
    path, tr = tmp_path/"run.checkpoint", run().fit(2)
    tr.save(path)
    tr.step().save(path)
    raw = path.read_bytes()
    if kind == "other": torch.save({"weights": torch.zeros(2)}, path)
    else: path.write_bytes({"cut": raw[:len(raw)*2//3], "text": b"hello", "empty": b"", "pickle": pickle.dumps(Bomb(), 2)}[kind])
    fresh = run()
    before = {k: v.clone() for k, v in fresh.model.state_dict().items()}
    with pytest.raises(ValueError, match="run.checkpoint .*the one before it is .*run.checkpoint.prev"): fresh.load(path)
    assert fresh.t == 0 and all(torch.equal(v, before[k]) for k, v in fresh.model.state_dict().items())
    assert fresh.load(f"{path}.prev").t == 2 and not Bomb.went_off
    with pytest.raises(FileNotFoundError, match="there is no"): fresh.load(tmp_path/"nothing")


class Bomb:
    went_off = False
    def __reduce__(self): return setattr, (Bomb, "went_off", True)


@pytest.mark.parametrize("where", ["fsync", "replace", "link"])
def test_crash_while_saving_leaves_the_old_checkpoint(tmp_path, monkeypatch, where):
    path, tr = tmp_path/"c", run().fit(2)
    tr.save(path)
    tr.step()
    def crash(*a): raise KeyboardInterrupt
    monkeypatch.setattr(os, where, crash)
    with pytest.raises(KeyboardInterrupt): tr.save(path)
    monkeypatch.undo()
    assert run().load(path).t == 2
    tr.save(path)
    assert run().load(path).t == 3


def test_disk_without_hard_links_still_keeps_two(tmp_path, monkeypatch):
    def no_links(*a): raise PermissionError
    monkeypatch.setattr(os, "link", no_links)
    for v in range(3): save_atomic({"kind": "x", "v": v}, tmp_path/"c")
    assert load_checked(tmp_path/"c", "x")["v"] == 2 and load_checked(tmp_path/"c.prev", "x")["v"] == 1


def test_state_that_would_not_load_is_not_written(tmp_path):
    save_atomic({"kind": "x", "v": 1}, tmp_path/"c")
    with pytest.raises(ValueError, match="not written"): save_atomic({"kind": "x", "v": Bomb()}, tmp_path/"c")
    assert load_checked(tmp_path/"c", "x")["v"] == 1 and not Bomb.went_off
    with pytest.raises(ValueError, match="not a y"): load_checked(tmp_path/"c", "y")


def test_checkpoint_of_another_plan_is_refused(tmp_path):
    run().fit(2).save(tmp_path/"c")
    for plan, words in ((Plan(12, 4, 9, .7), r"plan.steps: 8 there, 9 here"), (Plan(12, 6, 8, .7), "plan.batch_size: 4 there, 6 here"),
                        (Plan(12, 4, 8, .8), "plan.sigma: 0.7 there, 0.8 here")):
        fresh = run(plan=plan)
        with pytest.raises(ValueError, match=words): fresh.load(tmp_path/"c")
        assert fresh.t == 0
    with pytest.raises(ValueError, match="parts"): trainer(Plan(12, 4, 8, .7), clip=Learnt(1.)).load(tmp_path/"c")


def test_release_holds_weights_and_statement_only(tmp_path):
    plan = PrivacyPlan(12, 4, 5, 3., 1e-5, RDPAccountant)
    tr = trainer(plan, seed=None).fit(2)
    tr.release(tmp_path/"r")
    got = torch.load(tmp_path/"r", weights_only=True)
    assert set(got) == {"kind", "weights", "statement"} and torch.equal(got["weights"]["weight"], tr.model.weight)
    assert "by 2 of 5 steps" in got["statement"] and tr._seed.encode() not in (tmp_path/"r").read_bytes()
    average = Average()
    tr = trainer(plan, callbacks=[average]).fit(3)
    tr.release(tmp_path/"r")
    got = torch.load(tmp_path/"r", weights_only=True)["weights"]
    assert torch.equal(got["weight"], average.weights["weight"]) and not torch.equal(got["weight"], tr.model.weight)


def test_mean_over_views_comes_before_the_norm():
    model, x, y = conv().double(), torch.randn(3, 2, 6, 6, dtype=torch.float64), torch.tensor(1)
    together = example_grads(model, loss, x, y)
    apart = [example_grads(model, loss, v, y) for v in x]
    for n, g in together.items(): torch.testing.assert_close(g, sum(a[n] for a in apart)/3, rtol=1e-10, atol=1e-12)


def test_probe_sees_integers_too():
    class Tokens(nn.Module):
        def __init__(self, mix): super().__init__(); self.e, self.out, self.mix = nn.Embedding(7, 4), nn.Linear(4, 2), mix
        def forward(self, x): h = self.e(x).mean(1); return self.out(h-h.mean(0) if self.mix else h)
    data = types.SimpleNamespace(train_x=torch.randint(7, (9, 6)), train_y=torch.randint(2, (9,)))
    Trainer(Tokens(False), data, Plan(9, 3, 2, 1.)).fit()
    with pytest.raises(ValueError, match="mixes"): Trainer(Tokens(True), data, Plan(9, 3, 2, 1.))
    refuse_mixing(Tokens(False), data.train_x[:4], torch.stack([data.train_x[i] for i in (4, 1, 5, 6)]))
