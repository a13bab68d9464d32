"""Manual optimization on micro-batches: equal to accumulating by hand, piece by piece, or refused by name."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanSquaredError
from torchmetrics.classification import BinaryAccuracy

from lightning_avgpipe.errors import AvgPipeError, ConfigurationError, StepChangedError
from lightning_avgpipe.utils.random_streams import RandomKey, Streams
from tests.driver import assert_same_parameters
from tests.manual_models import Accumulating, ActorCritic, Gan, Manual, Wgan
from tests.models import MLP, loader
from tests.trainers import pipeline, trainer

M = 3  # of 8 samples: 3, 3 and 2


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


class ByHand:
    """What an author writes who accumulates: pieces, each a loop over micro-batches that have their random numbers."""

    log_options: Mapping[str, Any] = MappingProxyType({})

    def begin(self, batch: Any) -> None:
        pairs = zip(*(tensor.tensor_split(M) for tensor in batch), strict=True)
        number = 1 + self.trainer.fit_loop.epoch_loop.batch_progress.total.completed  # type: ignore[attr-defined]
        self.streams = Streams(RandomKey(torch.initial_seed(), number), M, torch.device("cpu"))
        self.pieces = [(pair, len(pair[0]) / len(batch[0])) for pair in pairs]
        self.logged: dict[str, list[tuple[Tensor, float]]] = {}

    def parts(self) -> Iterator[tuple[Any, float, int]]:
        for i, (pair, weight) in enumerate(self.pieces):
            with self.streams.drawing(i):
                yield pair, weight, i

    def note(self, name: str, value: Tensor, weight: float) -> None:
        self.logged.setdefault(name, []).append((value.detach(), weight))

    def end(self) -> None:
        for name, values in self.logged.items():
            weights = torch.tensor([weight for _, weight in values], dtype=torch.float64).float()
            value = (torch.stack([value for value, _ in values]) * weights).sum(0)
            self.log(name, value, **self.log_options)  # type: ignore[attr-defined]


class GanByHand(ByHand, Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.begin(batch)
        optimizer_g, optimizer_d = self.optimizers()
        latent = [torch.empty(0)] * M
        self.toggle_optimizer(optimizer_g)
        for (images, _), weight, i in self.parts():
            latent[i] = torch.randn(len(images), 4)
            loss = F.binary_cross_entropy(self.discriminator(self(latent[i])), torch.ones(len(images), 1))
            self.note("loss_g", loss, weight)
            self.manual_backward(loss * weight)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        for (images, _), weight, i in self.parts():
            valid, fake = torch.ones(len(images), 1), torch.zeros(len(images), 1)
            loss = F.binary_cross_entropy(self.discriminator(images), valid)
            loss = (loss + F.binary_cross_entropy(self.discriminator(self(latent[i]).detach()), fake)) / 2
            self.note("loss_d", loss, weight)
            self.manual_backward(loss * weight)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)
        self.end()


class WganByHand(ByHand, Wgan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.begin(batch)
        generator, critic = self.optimizers()
        for repetition in range(2):
            critic.zero_grad()
            for (real, _), weight, _ in self.parts():
                with torch.no_grad():
                    fake = self.generator(torch.randn(len(real), 4))
                loss = self.critic(fake).mean() - self.critic(real).mean() + 10 * self.penalty(real, fake)
                if repetition == 1:
                    self.note("critic", loss, weight)
                self.manual_backward(loss * weight)
            critic.step()
            for parameter in self.critic.parameters():
                parameter.data.clamp_(-0.3, 0.3)
        if batch_idx % 2 == 1:
            generator.zero_grad()
            for (real, _), weight, _ in self.parts():
                loss = -self.critic(self.generator(torch.randn(len(real), 4))).mean()
                self.manual_backward(loss * weight)
            generator.step()
        self.end()


class ActorCriticByHand(ByHand, ActorCritic):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.begin(batch)
        actor, critic, alpha = self.optimizers()
        critic.zero_grad()
        for (state, action), weight, _ in self.parts():
            with torch.no_grad():
                after = torch.cat((state, self.actor(state)), 1)
                target = torch.minimum(self.slow(after), self.hard(after))
            loss = F.mse_loss(self.critic(torch.cat((state, action), 1)), state.sum(1, keepdim=True) + 0.9 * target)
            self.note("q", loss, weight)
            self.manual_backward(loss * weight)
        self.clip_gradients(critic, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        critic.step()
        actor.zero_grad()
        entropies = [torch.zeros(())] * M
        for (state, _), weight, i in self.parts():
            chosen = self.actor(state)
            entropies[i] = -chosen.square().mean()
            loss = -self.critic(torch.cat((state, chosen), 1)).mean() - self.log_alpha.exp().detach() * entropies[i]
            self.manual_backward(loss * weight)
        nn.utils.clip_grad_norm_(self.actor.parameters(), 0.1)
        actor.step()
        alpha.zero_grad()
        for _, weight, i in self.parts():
            self.note("entropy", entropies[i], weight)
            self.manual_backward(self.log_alpha * entropies[i].detach() * weight)
        alpha.step()
        with torch.no_grad():
            for slow, parameter in zip(self.slow.parameters(), self.critic.parameters(), strict=True):
                slow.mul_(0.9).add_(parameter, alpha=0.1)
        if batch_idx % 2 == 0:
            self.hard.load_state_dict(self.critic.state_dict())
        self.end()


class AccumulatingByHand(ByHand, Accumulating):
    log_options = MappingProxyType({"on_step": True, "on_epoch": True})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.begin(batch)
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        for (inputs, targets), weight, _ in self.parts():
            output = self(inputs)
            loss = F.mse_loss(output, targets)
            self.manual_backward(loss / 2 * weight, retain_graph=True)
            self.manual_backward(output.abs().mean() / 20 * weight)
            self.note("loss", loss, weight)
        if batch_idx % 2 == 1:
            norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
            self.log("norm", norm)
            optimizer.step()
            optimizer.zero_grad()
        if self.trainer.is_last_batch:
            schedule.step()
        self.end()


class Kept(Manual):
    """Values that go from piece to piece in attributes, parameters frozen by hand, a mode that changes, a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)), nn.Linear(8, 8)
        self.accuracy, self.calls, self.updates = BinaryAccuracy(), 0, 0
        self.kept: dict[str, Tensor] = {}
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, two = self.optimizers()
        self.calls += 1
        self.middle = self.kept["middle"] = self.first(batch[0])
        loss = F.mse_loss(self.second(self.middle), batch[1])
        self.error.update(self.middle, batch[1])
        self.manual_backward(loss)
        one.step()
        self.zero_grad()
        self.first.eval()
        for parameter in self.first.parameters():
            parameter.requires_grad = False
        self.manual_backward(F.mse_loss(self.second(self.first(self.kept["middle"].detach())), batch[1]))
        two.step()
        two.zero_grad()
        for parameter in self.first.parameters():
            parameter.requires_grad = True
        self.first.train()
        self.error.update(self.second(self.middle), batch[1])
        self.accuracy(self.middle.sigmoid(), (batch[1] > 0).int())
        self.log("accuracy", self.accuracy)
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss.detach()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.updates += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in (self.first, self.second)]


class KeptByHand(ByHand, Kept):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.begin(batch)
        one, two = self.optimizers()
        middle, losses = [torch.empty(0)] * M, []
        self.calls += 1
        for (inputs, targets), weight, i in self.parts():
            middle[i] = self.first(inputs)
            loss = F.mse_loss(self.second(middle[i]), targets)
            losses.append(loss.detach() * weight)
            self.error.update(middle[i], targets)
            self.manual_backward(loss * weight)
        one.step()
        self.zero_grad()
        self.first.eval()
        self.first.requires_grad_(False)
        for (_, targets), weight, i in self.parts():
            self.manual_backward(F.mse_loss(self.second(self.first(middle[i].detach())), targets) * weight)
        two.step()
        two.zero_grad()
        self.first.requires_grad_(True)
        self.first.train()
        for (_, targets), _, i in self.parts():
            self.error.update(self.second(middle[i]), targets)
        self.accuracy(torch.cat(middle).sigmoid(), (batch[1] > 0).int())
        self.log("accuracy", self.accuracy)
        self.log("error", self.error, on_step=False, on_epoch=True)
        return torch.stack(losses).sum()


def fitted(module: Any, runner: Any, batch_size: int = 8) -> dict[str, float]:
    torch.manual_seed(7)
    runner.fit(module, loader(MLP, 32, batch_size, shuffle=True), loader(MLP, 8, 4, seed=1))
    return {"step": runner.global_step, **{name: float(value) for name, value in runner.callback_metrics.items()}}


def abreast(**strategy: Any) -> Any:
    return pipeline(1, strategy={"num_microbatches": M, **strategy})


@pytest.mark.parametrize(
    ("model", "by_hand"),
    [(Gan, GanByHand), (Wgan, WganByHand), (ActorCritic, ActorCriticByHand), (Accumulating, AccumulatingByHand),
     (Kept, KeptByHand)],
)  # fmt: skip
def test_it_equals_accumulating_by_hand(model: type[Any], by_hand: type[Any]) -> None:
    torch.manual_seed(3)
    one = by_hand()
    torch.manual_seed(3)
    other = model()
    expected, found = fitted(one, trainer()), fitted(other, abreast())
    assert_same_parameters(one, other)
    buffers = dict(other.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in one.named_buffers())
    assert found == pytest.approx(expected, rel=1e-6)
    assert other.seen == pytest.approx(one.seen, rel=1e-6)
    assert all(getattr(one, name, None) == getattr(other, name, None) for name in ("calls", "updates"))


class Simple(Manual):
    """One optimizer; subclasses say what lies before its step, and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.table = nn.Linear(8, 8), nn.Embedding(4, 8)
        self.center = nn.Parameter(torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.backwards(loss, batch)
        self.before(batch)
        optimizer.step()
        self.behind(loss)

    def backwards(self, loss: Tensor, batch: Any) -> None:
        self.manual_backward(loss)

    def before(self, batch: Any) -> None: ...

    def behind(self, loss: Tensor) -> None: ...

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]


class LeavesOut(Simple):
    def before(self, batch: Any) -> None:
        if len(batch[0]) == 2:  # the last one
            self.optimizers().zero_grad()


class StepsLess(Simple):
    def before(self, batch: Any) -> None:
        self.is_last = len(batch[0]) == 2

    def behind(self, loss: Tensor) -> None:
        if not self.is_last:
            self.optimizers().step()


class AssignsGradients(Simple):
    def backwards(self, loss: Tensor, batch: Any) -> None:
        for parameter, gradient in zip(self.net.parameters(), torch.autograd.grad(loss, [*self.net.parameters()]), strict=True):  # fmt: skip # noqa: E501
            parameter.grad = gradient


class Centers(Simple):
    def before(self, batch: Any) -> None:
        with torch.no_grad():
            self.center.lerp_(batch[0].mean(0), 0.1)


class Renormalises(Simple):
    def before(self, batch: Any) -> None:
        self.table.max_norm = 0.1
        self.table(batch[0].sum(1).long() % 4)


class Sums(Simple):
    total = 0.0

    def before(self, batch: Any) -> None:
        self.total += float(batch[0].sum())

    def behind(self, loss: Tensor) -> None:
        self.total += float(loss)


class Decays(Simple):
    def behind(self, loss: Tensor) -> None:
        self.optimizers().param_groups[0]["lr"] *= 0.9


class Plateau(Simple):
    def behind(self, loss: Tensor) -> None:
        self.lr_schedulers().step(loss.detach())


class Closure(Simple):
    def before(self, batch: Any) -> None:
        self.optimizers().step(closure=lambda: None)


class Unknown(Simple):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)

    def behind(self, loss: Tensor) -> None:
        self.own.step()


class Queue(Simple):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, 8))

    def before(self, batch: Any) -> None:
        self.queue[: len(batch[0])] = batch[0]


REFUSED: list[tuple[type[Any], type[AvgPipeError], str]] = [
    (LeavesOut, StepChangedError, r"comes to step\(\) of optimizer 0 at .* in micro-batch 0, and to zero_grad"),
    (StepsLess, StepChangedError, r"comes to step\(\) of optimizer 0 at .* in micro-batch 0, and to its end in .* 2"),
    (AssignsGradients, StepChangedError, "grad of 'net.weight' .* is given a tensor"),
    (Centers, StepChangedError, "lerp_ of 'center' .* is given a tensor"),
    (Renormalises, StepChangedError, "embedding of 'table.weight' .* is given a tensor"),
    (Sums, StepChangedError, "assigns 'total' once more after micro-batches have met"),
    (Decays, ConfigurationError, "changes 'lr' of optimizer 0 anew in each micro-batch"),
    (Plateau, StepChangedError, r"step\(\) of scheduler 0 at .* is given"),
    (Unknown, ConfigurationError, "steps a SGD that configure_optimizers has not returned"),
    (Queue, StepChangedError, "__setitem__ of 'queue' .* is given"),
    (Closure, ConfigurationError, r"gives step\(\) of optimizer 0 a closure"),
]


@pytest.mark.parametrize(("model", "kind", "message"), REFUSED)
def test_what_micro_batches_cannot_do_together_is_refused_by_name(
    model: type[Any], kind: type[AvgPipeError], message: str
) -> None:
    fitted(model(), trainer())
    with pytest.raises(kind, match=message):
        fitted(model(), abreast())


class Follows(Manual):
    """Losses whose backwards micro-batches have, and something behind the step; written once for both ways."""

    by_hand = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for part in zip(*(tensor.tensor_split(M) for tensor in batch), strict=True) if self.by_hand else [batch]:
            weight = len(part[0]) / len(batch[0])
            torch.autograd.backward([loss * weight for loss in self.losses(part)])
        optimizer.step()
        self.behind()

    def losses(self, batch: Any) -> list[Tensor]:
        return [F.mse_loss(self.net(batch[0]), batch[1]), self.net[2].weight.square().mean()]

    @torch.no_grad()
    def behind(self) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), 1e-2)


class Averages(Follows):
    """A model that counts its updates in a buffer, and tensors in a list that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.net)
        self.shadows = [p.detach().clone() for p in self.net.parameters()]

    @torch.no_grad()
    def behind(self) -> None:
        self.average.update_parameters(self.net)
        for shadow, parameter in zip(self.shadows, self.net.parameters(), strict=True):
            shadow.lerp_(parameter, 0.1)
        self.seen += [float(shadow.sum()) for shadow in self.shadows]


class SeesPowers(Follows):
    """A buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


class Checkpoints(Follows):
    """Backwards within a backward."""

    def losses(self, batch: Any) -> list[Tensor]:
        inputs = batch[0].clone().requires_grad_()
        return [F.mse_loss(checkpoint(self.net, inputs, use_reentrant=True), batch[1])]


class ByItself(Follows):
    """Gradients that are scaled and used without an optimizer."""

    def behind(self) -> None:
        for parameter in self.net.parameters():
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]
            parameter.data -= 0.1 * parameter.grad  # type: ignore[operator]


@pytest.mark.parametrize("model", [Averages, SeesPowers, Checkpoints, ByItself])
def test_what_follows_a_step_happens_once_and_what_a_forward_does_for_each(model: type[Follows]) -> None:
    torch.manual_seed(3)
    one = model()
    other = copy.deepcopy(one)
    one.by_hand = True
    fitted(one, trainer())
    fitted(other, abreast())
    assert_same_parameters(one, other)
    buffers = dict(other.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in one.named_buffers())
    assert other.seen[-4:] == one.seen[-4:]  # each micro-batch notes them


class Fails(Simple):
    def __init__(self, fails: Callable[[int], None], where: str) -> None:
        super().__init__()
        self.fails, self.where = fails, where
        self.ended: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        try:
            super().training_step(batch, batch_idx)
        finally:
            self.ended.append(batch_idx)

    def before(self, batch: Any) -> None:
        if self.where == "before" and len(batch[0]) == 2:
            self.fails(0)

    def behind(self, loss: Tensor) -> None:
        if self.where == "behind":
            self.fails(0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.where == "step":
            self.fails(0)


def broken(_: int) -> None:
    raise ValueError("broken on purpose")


@pytest.mark.parametrize("where", ["before", "step", "behind"])
def test_an_error_in_one_micro_batch_ends_all(where: str) -> None:
    module = Fails(broken, where)
    with pytest.raises(ValueError, match="broken on purpose") as caught:
        fitted(module, abreast())
    assert any(f"of {M} of a step that optimizes manually" in note for note in caught.value.__notes__)
    assert len(module.ended) == M


def test_an_interrupt_ends_all() -> None:
    module = Fails(lambda _: signal.raise_signal(signal.SIGINT), "before")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(SystemExit):
            fitted(module, abreast())
    finally:  # Lightning ignores it from then on
        signal.signal(signal.SIGINT, before)
    assert len(module.ended) == M


class Measures(Simple):
    """Counts the samples that wait for their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting, self.most = 0, 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        def pack(tensor: Tensor) -> Tensor:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            return tensor

        def unpack(tensor: Tensor) -> Tensor:
            self.waiting -= 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            super().training_step(batch, batch_idx)


def test_one_micro_batch_at_a_time_waits_for_its_backward() -> None:
    one, other = Measures(), Measures()
    fitted(one, trainer())
    fitted(other, abreast())
    assert one.waiting == other.waiting == 0
    assert one.most == other.most > 0


class Summed(Simple):
    def backwards(self, loss: Tensor, batch: Any) -> None:
        self.manual_backward(loss * batch[0].numel() / 100)
        self.log("loss", loss * batch[0].numel(), reduce_fx="sum")


def test_losses_may_be_summed_and_the_last_batch_small() -> None:
    torch.manual_seed(3)
    one, other = Summed(), Summed()
    other.load_state_dict(one.state_dict())
    expected, found = fitted(one, trainer(), 15), fitted(other, abreast(loss_reduction="sum"), 15)
    assert found == pytest.approx(expected)
    assert_same_parameters(one, other, exact=False)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_any_precision(precision: Any) -> None:
    torch.manual_seed(3)
    one = WganByHand()
    torch.manual_seed(3)
    other = Wgan()
    fitted(one, trainer(precision=precision))
    fitted(other, pipeline(2, strategy={"num_microbatches": M}, precision=precision))
    assert_same_parameters(one, other)
    assert torch.get_default_dtype() is torch.float32
