"Clips that let a little through, learn too cheaply or elsewhere, or noise less than is paid for."
import math

import pytest
import torch
from toys import linear, toy

from dp_course.gradients import (
    AdaptiveClip,
    FlatClip,
    LayerClip,
    ScheduledClip,
    decay,
    falling_noise,
)
from dp_course.privacy import PrivacyPlan, RDPAccountant, normal
from dp_course.training import Trainer, refuse_mixed_clip, refuse_unbounded

RATIOS = decay(1., .25, 300).tolist()


def plan_of(accountant=RDPAccountant, steps=300):
    return PrivacyPlan(n=12, batch_size=4, steps=steps, sigma=5., delta=1e-5, accountant=accountant)


FALLING = plan_of(falling_noise(RATIOS, RDPAccountant))


def test_a_schedule_of_another_plan_with_the_same_sigma_is_refused():
    "Its noise fell to a quarter while the plan charged for all of it: 5.7 was said, 17.6 was true."
    clip = ScheduledClip([1.]*300, FALLING)
    with pytest.raises(ValueError, match="another plan"):
        Trainer(linear(), toy(12), plan_of(), clip=clip)


class Fades(FlatClip):
    "Counts its steps, and noises each less than the one before."
    t = 0

    def update(self, norms, generator=None):
        self.t += 1

    def std(self, sigma):
        return sigma*self.max_norm*.9**self.t


class Fixed(FlatClip):
    "Noise for the threshold that it began with."
    def std(self, sigma):
        return sigma


def test_a_step_with_less_noise_than_the_plan_pays_for_is_not_taken():
    def raised(trainer):
        trainer.clip.max_norm = 2.
    run = Trainer(linear(), toy(12), plan_of(), clip=Fixed(1.), callbacks=[raised]).step()
    with pytest.raises(ValueError, match="less noise than the plan"):
        run.step()
    assert run.computed == 1


class Falls(FlatClip):
    "The schedule's noise, or what it will be later."
    t = ahead = 0

    def update(self, norms, generator=None):
        self.t += 1

    def std(self, sigma):
        return RATIOS[self.t + self.ahead]*sigma*self.max_norm


def test_nor_one_with_the_noise_of_the_next_step():
    def hurried(trainer):
        trainer.clip.ahead = 1
    run = Trainer(linear(), toy(12), FALLING, clip=Falls(1.), callbacks=[hurried]).step()
    with pytest.raises(ValueError, match="less noise than the plan"):
        run.step()


class FadesLate(FlatClip):
    "A number per tensor, of which the second shrinks after what was tried ahead."
    t = 0

    def update(self, norms, generator=None):
        self.t += 1

    def std(self, sigma):
        return torch.tensor([1., .1 if self.t > 70 else 1.])*sigma*self.max_norm


def test_noise_per_tensor_is_looked_at_in_every_step_too():
    run = Trainer(linear(), toy(12), plan_of(), clip=FadesLate(1.))
    run._t = run.clip.t = 70
    with pytest.raises(ValueError, match="promises sensitivity"):
        run.fit(2)
    assert run.computed == 1


class CheapLater(AdaptiveClip):
    "Pays for its count as it should, for 150 steps."
    t = 0

    def update(self, norms, generator=None):
        usual = self.bit_sigma
        self.t += 1
        self.bit_sigma = usual if self.t < 150 else usual/10
        super().update(norms, generator)
        self.bit_sigma = usual


def test_what_a_clip_learns_is_weighed_again_after_200_steps():
    run = Trainer(linear(), toy(12), plan_of(), clip=CheapLater(4., bit_sigma=4.))
    run._t = run.clip.t = 200
    with pytest.raises(ValueError, match="with too little noise"):
        run.step()
    assert run.computed == 0


def test_a_falling_plan_is_proved_again_with_the_noise_of_its_step():
    "Step 200 was refused once: the schedule's own noise looked too small."
    run = Trainer(linear(), toy(12), FALLING, clip=ScheduledClip([1.]*300, FALLING))
    for _ in range(199):
        run._t += 1
        run.clip.update(None)
    run.fit(3)
    assert run.t == 202


class EndlessWhereNothingIs(FlatClip):
    "0/0 of a gradient that is zero."
    def __call__(self, norms):
        whole = norms.double().norm(dim=0)
        found = torch.where(whole == 0, math.inf, super().__call__(norms)[0].double())
        return found.expand_as(norms)


class LooksAtTheFirst(FlatClip):
    "Leaves out who has no finite first gradient."
    def __call__(self, norms):
        factors = super().__call__(norms.nan_to_num(1., 1.))
        return torch.where(norms[0].isfinite(), factors, 0.)


def test_a_clip_that_lets_an_infinite_last_tensor_through_is_refused():
    with pytest.raises(ValueError, match="NaN or infinite norm through"):
        refuse_unbounded(LooksAtTheFirst(1.), 1., 3)


class Slack(FlatClip):
    def __call__(self, norms):
        return super().__call__(norms)*(1 + 5e-6)


class NormalizesInFloat32(FlatClip):
    "The squares of a gradient of 1e-25 are 0 there."
    def __call__(self, norms):
        whole = norms.float().square().sum(0).sqrt().clamp(min=1e-30).double()
        return torch.where(whole.isfinite(), .999*self.max_norm/whole, 0.).expand_as(norms)


@pytest.mark.parametrize("clip", [EndlessWhereNothingIs(1.), Slack(1.), NormalizesInFloat32(1.)])
@pytest.mark.parametrize("tensors", [1, 30])
def test_a_clip_that_lets_a_little_through_is_refused(clip, tensors):
    with pytest.raises(ValueError, match="promises sensitivity"):
        refuse_unbounded(clip, 1., tensors)


class Band(FlatClip):
    "Counts who is about as long as the threshold, with hardly any noise."
    def update(self, norms, generator=None):
        whole = norms.double().norm(dim=0)
        near = ((whole > .5*self.max_norm) & (whole < 2*self.max_norm)).sum().item()
        self.max_norm *= math.exp(.05*(.5 - near + .01*normal((1,), generator).item()))


class Faint(FlatClip):
    "Keeps a count under much noise, and pays nothing for it."
    told = 0.

    def update(self, norms, generator=None):
        self.told = (norms[0] > 0).sum().item() + 25*normal((1,), generator).item()


class TwoCounts(AdaptiveClip):
    "Follows two quantiles and pays for one."
    second = 2.

    def update(self, norms, generator=None):
        first = self.max_norm
        super().update(norms, generator)
        self.max_norm, moved = self.second, self.max_norm
        super().update(norms, generator)
        self.second, self.max_norm = self.max_norm, moved
        assert first > 0


class PaidForOneOfTwo(LayerClip):
    "Two groups, and the noise on each count is that of one."
    def std(self, sigma):
        return AdaptiveClip(self.batch_size, bit_sigma=self.bit_sigma).std(sigma)*self.sensitivity


@pytest.mark.parametrize("clip", [
    Band(1.), Faint(1.), TwoCounts(8., bit_sigma=3.),
    PaidForOneOfTwo([1., 1.], groups=[0, 1], batch_size=8., bit_sigma=3.)])
def test_a_clip_that_learns_for_too_little_is_refused(clip):
    with pytest.raises(ValueError, match="too little noise"):
        refuse_unbounded(clip, 1., 2)


class SlightlyMixed(FlatClip):
    def __call__(self, norms):
        longer = (norms.double().norm(dim=0) > 1).double().mean()
        return super().__call__(norms)*(1 - 2e-5*longer)


def test_a_clip_that_mixes_a_little_is_refused():
    with pytest.raises(ValueError, match="mixes examples"):
        refuse_mixed_clip(SlightlyMixed(1.), 2)


KEPT = {"max_norm": 1.}


class Elsewhere(FlatClip):
    "Learns openly, and keeps it in a global variable."
    def __call__(self, norms):
        return FlatClip(KEPT["max_norm"])(norms)

    def update(self, norms, generator=None):
        KEPT["max_norm"] = norms.double().norm(dim=0).median().clamp(max=1).item()


class InItsClass(FlatClip):
    now = 1.

    def __call__(self, norms):
        return FlatClip(type(self).now)(norms)

    def update(self, norms, generator=None):
        type(self).now = norms.double().norm(dim=0).median().clamp(max=1).item()


@pytest.mark.parametrize("kind", [Elsewhere, InItsClass])
def test_a_clip_that_keeps_what_it_learns_elsewhere_is_refused(kind):
    KEPT["max_norm"] = InItsClass.now = 1.
    with pytest.raises(ValueError, match="outside itself"):
        refuse_mixed_clip(kind(1.), 2)


class FadesByTensor(Fades):
    def std(self, sigma):
        return torch.full((2,), super().std(sigma))


class Grows(FlatClip):
    "A bound that is doubled in each step, under the same promise."
    factor = 1.

    def __call__(self, norms):
        return FlatClip(self.factor*self.max_norm)(norms)

    def update(self, norms, generator=None):
        self.factor *= 2


class NoiseOfTheFirstStep(AdaptiveClip):
    "Follows the norms; the noise does not follow."
    def std(self, sigma):
        return AdaptiveClip(self.batch_size).std(sigma)


class NeverBelowHalf(AdaptiveClip):
    "Clips at .5 at least; promise and noise follow the quantile further down."
    def __call__(self, norms):
        return FlatClip(max(self.max_norm, .5))(norms)


@pytest.mark.parametrize("clip", [Fades(1.), FadesByTensor(1.), Grows(1.), NeverBelowHalf(80.),
                                  NoiseOfTheFirstStep(80., lr=.02)])
def test_a_clip_whose_noise_does_not_last_is_refused_before_the_first_step(clip):
    with pytest.raises(ValueError, match="promises sensitivity"):
        Trainer(linear(), toy(12), plan_of(), clip=clip)


class Said(FlatClip):
    "Whatever it was given for a standard deviation."
    said = None

    def std(self, sigma):
        return self.said


@pytest.mark.parametrize("said", [None, {}, torch.ones(3), math.inf, -1., "much", [1., math.nan]])
def test_a_standard_deviation_that_is_none_is_refused_in_words(said):
    clip = Said(1.)
    clip.said = said
    with pytest.raises(ValueError, match="is no noise for 2 tensors|promises sensitivity"):
        refuse_unbounded(clip, 1., 2)


class Keeps(FlatClip):
    "Keeps what `of` says of the norms, as a number or as text."
    of, kept = None, 0.

    def update(self, norms, generator=None):
        self.kept = self.of(norms)


@pytest.mark.parametrize("of", [
    lambda norms: norms.isnan().any(0).sum().item(), lambda norms: (norms == 0).all(0).sum(),
    lambda norms: (norms == 0).any(0).sum().item(), lambda norms: int(norms.shape[1] == 0),
    lambda norms: f"{norms.norm():.3g}"])
def test_a_clip_that_counts_rare_norms_is_refused(of):
    clip = Keeps(1.)
    clip.of = of
    with pytest.raises(ValueError, match="learns kept from the norms without noise"):
        refuse_mixed_clip(clip, 2)


class WithSlots:
    "Keeps what it learns in a slot, where there is no dict."
    __slots__ = ("max_norm", "kept")

    def __init__(self):
        self.max_norm, self.kept = 1., 0.

    sensitivity = property(lambda self: self.max_norm)

    def __call__(self, norms):
        return FlatClip(self.max_norm)(norms)

    def std(self, sigma):
        return sigma*self.max_norm

    def update(self, norms, generator=None):
        self.kept = norms.sum().item()


def test_a_slot_hides_nothing():
    with pytest.raises(ValueError, match="learns kept from the norms without noise"):
        refuse_mixed_clip(WithSlots(), 2)


class SkipsEmptyBatches(AdaptiveClip):
    "Does not move without examples: who comes alone is seen."
    def update(self, norms, generator=None):
        if norms.shape[1]:
            super().update(norms, generator)


def test_a_clip_that_skips_empty_batches_is_refused():
    with pytest.raises(ValueError, match="too little noise"):
        refuse_unbounded(SkipsEmptyBatches(8., bit_sigma=3.), 1., 2)


def test_noise_that_cannot_be_drawn_is_refused_before_it_is_paid():
    "A step was charged, and then its standard deviation of 5e30 was refused."
    with pytest.raises(ValueError, match="from 0 to 1e25"):
        Trainer(linear(), toy(12), plan_of(), clip=FlatClip(1e30))
