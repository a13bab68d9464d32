"""Steps that do what stages must see through: trained as on one device, or refused by line."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_avgpipe.errors import AvgPipeError, CaptureError, PartitionError, StepChangedError
from tests.comparing import assert_equal
from tests.models import MLP, loader
from tests.strategy.steps import Layers, by_hand, piped
from tests.trainers import pipeline
from tests.zoo.comparison import check, in_stages


class Block(nn.Module):
    """A unit: it reads a number, so it is never opened."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.scale = nn.Linear(4, 4), nn.Dropout(0.0), 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * self.scale * (1 if self.training else 2)
        return self.drop(h) if h.sum().item() > -1e9 else h


class Marks(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        h.mark = 2.0  # type: ignore[attr-defined]
        return h


class Leaves(Block):
    """Leaves numbers in an attribute, and tells a listener."""

    load = (1, 1)
    listener: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.load = tuple((h > 0).sum(0).tolist())
        if self.listener is not None:
            self.listener[0].noted = sum(self.load)
        return h


class Ranges(Block):
    """Keeps the largest value so far, once there was one that is large enough."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if x.abs().max().item() > 1.0:
            self.largest.mul_(2.0)
        return self.use(h, self.largest)

    def use(self, h: Tensor, largest: Tensor) -> Tensor:
        return h / largest


class RangesOfClones(Ranges):
    def use(self, h: Tensor, largest: Tensor) -> Tensor:
        return h / largest.clone()


class Observes(Block):
    """Its buffer is empty until the first call, as those of observers of quantisation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor([]))

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().abs().amax(0)
        if self.largest.numel() == 0:
            self.largest.resize_(now.shape)
            self.largest.copy_(now)
        else:
            self.largest.copy_(torch.maximum(self.largest, now))
        return super().forward(x / self.largest.clone())


class Averages(Block):
    """Returns a view of a running mean, which it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.keep("mean", torch.zeros(4))

    def keep(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return super().forward(x), self.mean[None]


class AveragesInAnAttribute(Averages):
    def keep(self, name: str, tensor: Tensor) -> None:
        setattr(self, name, tensor)


class AveragesAPart(AveragesInAnAttribute):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.mean[:2].lerp_(x.mean(0)[:2], 0.5)
        return Block.forward(self, x), self.mean[None]


class AveragesInALayer(Averages):
    """The mean is that of a batch normalisation, which does not declare that it writes into it."""

    def keep(self, name: str, tensor: Tensor) -> None:
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Any:
        return Block.forward(self, self.norm(x)), self.norm.running_mean.detach()  # type: ignore[union-attr]


class Steps(L.LightningModule):
    """Four layers; a test says what the step does with them."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor | None], second: type[Block] = Block) -> None:
        super().__init__()
        self.step = step
        self.a, self.b, self.c, self.d = Block(), second(), Block(), Block()
        self.ema: Any = torch.zeros(4)
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)
        self.hidden: Any = None
        self.noted, self.left = 0, list[int]()

    def head(self, h: Tensor) -> Tensor:
        return self.d(self.c(h)).square().mean()

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor | None:
        return self.step(self, x)


def made(step: Any, second: type[Block] = Block, batches: Tensor | None = None) -> tuple[Steps, list[Tensor]]:
    torch.manual_seed(0)
    usual = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    return Steps(step, second), list(usual if batches is None else batches)


SPLIT: dict[str, Any] = {"num_stages": 2, "split_points": ["c"]}


# -- right -------------------------------------------------------------------------------------------------------------


def asks_for_strides(net: Any, x: Tensor) -> Tensor:
    turned = net.a(x).t()
    h = net.b(turned.t())
    loss = net.head(h)
    return loss * turned.stride(1) if not turned.is_contiguous() and not turned.is_leaf else loss


def changes_modes_between(net: Any, x: Tensor) -> Tensor:
    h = net.b(net.a(x))
    net.b.eval()
    net.b.scale = 3.0
    h = net.b(h)
    loss = net.head(h)
    net.b.train()
    net.b.scale = 1.0
    return loss


def keeps_an_average_of_early_values(net: Any, x: Tensor) -> Tensor:
    h = net.a(x) - net.ema
    net.ema = 0.9 * net.ema + 0.1 * h.detach().mean(0)
    return net.head(net.b(h))


def freezes_for_a_while(net: Any, x: Tensor) -> Tensor:
    net.b.requires_grad_(False)
    h = net.b(net.a(x))
    net.b.requires_grad_(True)
    return net.head(h)


def freezes_until_it_ends(net: Any, x: Tensor) -> Tensor:
    for parameter in net.b.parameters():
        parameter.requires_grad_(False)
    loss = net.head(net.b(net.a(x)))
    net.b.requires_grad_(True)
    return loss + net.b.linear.weight.square().mean()


def freezes_one_call_of_two(net: Any, x: Tensor) -> Tensor:
    net.a.requires_grad_(False)
    h = net.b(net.a(x))
    net.a.requires_grad_(True)
    return net.head(h + net.c(net.a(x)))


def begins_a_sum_with_a_buffer(net: Any, x: Tensor) -> Tensor:
    loss = net.zero
    loss.requires_grad_()
    return loss + net.head(net.b(net.a(x)))  # type: ignore[no-any-return]


def compares_its_own_tensors_with_values(net: Any, x: Tensor) -> Tensor:
    h, own = net.a(x), torch.arange(4.0) / 4
    chosen = (own < h) | (own.round() == h.round()) | (h >= own + 1)
    return net.head(net.b(h * chosen))  # type: ignore[no-any-return]


def reads_what_a_layer_has_left(net: Any, x: Tensor) -> Tensor:
    loss = net.head(net.b(net.a(x)))
    return loss * (1 + max(net.b.load))


def notes_that_it_leaves(net: Any, x: Tensor) -> Tensor:
    try:
        h = net.c(net.b(net.a(x)))
    finally:
        net.left.append(1)
    return net.d(h).square().mean() / len(net.left)


def puts_random_numbers_back(net: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.rand(4)
    return net.head(net.b(net.a(x)))


def seeds_a_generator_of_its_own(net: Any, x: Tensor) -> Tensor:
    h = net.b(net.a(x)) + torch.rand(4, generator=torch.Generator().manual_seed(3))
    return net.head(h)


def copies_values_and_states(net: Any, x: Tensor) -> Tensor:
    h = net.b(net.a(x))
    copies = copy.deepcopy({"x": x, "h": h.detach(), "state": net.d.state_dict()})
    return net.head(h + copies["h"] + copies["x"]) + copies["state"]["linear.weight"].mean()


def calls_all(net: Any, x: Tensor) -> Tensor:
    return net.head(net.b(net.a(x)))  # type: ignore[no-any-return]


def uses_a_running_mean_later(net: Any, x: Tensor) -> Tensor:
    h, mean = net.b(net.a(x))
    return net.d(net.c(h) * mean).square().mean()  # type: ignore[no-any-return]


def writes_into_an_array_of_its_own(net: Any, x: Tensor) -> Tensor:
    mask = torch.from_numpy(np.zeros(4, np.float32))
    mask[0] = 1.0
    return net.head(net.b(net.a(x)) + mask)  # type: ignore[no-any-return]


def looks_at_a_gradient_of_the_last_stage(net: Any, x: Tensor) -> Tensor:
    h = net.c(net.b(net.a(x)))
    h.register_hook(lambda gradient: gradient * 0.5)
    return net.d(h).square().mean()


@pytest.mark.parametrize(
    ("step", "second"),
    [
        (asks_for_strides, Block),
        (changes_modes_between, Block),
        (keeps_an_average_of_early_values, Block),
        (freezes_for_a_while, Block),
        (freezes_until_it_ends, Block),
        (freezes_one_call_of_two, Block),
        (begins_a_sum_with_a_buffer, Block),
        (compares_its_own_tensors_with_values, Block),
        (reads_what_a_layer_has_left, Leaves),
        (notes_that_it_leaves, Block),
        (puts_random_numbers_back, Block),
        (seeds_a_generator_of_its_own, Block),
        (looks_at_a_gradient_of_the_last_stage, Block),
        (copies_values_and_states, Block),
        (calls_all, Observes),
        (uses_a_running_mean_later, Averages),
        (uses_a_running_mean_later, AveragesInAnAttribute),
        (uses_a_running_mean_later, AveragesAPart),
        (uses_a_running_mean_later, AveragesInALayer),
        (writes_into_an_array_of_its_own, Block),
    ],
)
def test_an_unusual_step_is_trained_as_on_one_device(step: Any, second: type[Block]) -> None:
    check(partial(made, step, second), **SPLIT, schedule="afab")


# -- refused -----------------------------------------------------------------------------------------------------------


def catches_everything(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    try:
        loss = net.head(net.b(h))
    except:  # noqa: E722
        net.noted += 1
        loss = h.mean()
    return loss


def skips_what_fails(net: Any, x: Tensor) -> Tensor | None:
    net.noted += 1
    try:
        h = net.a(x)
        return net.head(net.b(h)) if net.global_step == 0 else net.d(net.b(net.c(h))).square().mean()
    except Exception:
        return None


def asks_for_history(net: Any, x: Tensor) -> Tensor:
    h = net.b(net.a(x))
    loss = net.head(h)
    return loss * 2 if "Mul" in type(h.grad_fn).__name__ else loss


def reads_a_mark(net: Any, x: Tensor) -> Tensor:
    h = net.b(net.a(x))
    return net.head(h) * getattr(h, "mark", 1.0)


def goes_on_with_its_state(net: Any, x: Tensor) -> Tensor:
    h = net.b(net.a(x if net.hidden is None else x + net.hidden))
    net.hidden = h
    loss = net.head(h)
    net.hidden = net.hidden.detach()
    return loss


def turns_dropout_on_at_the_end(net: Any, x: Tensor) -> Tensor:
    loss = net.head(net.b(net.a(x)))
    net.b.drop.p = 0.5
    return loss


def assigns_past_modules(net: Any, x: Tensor) -> Tensor:
    loss = net.head(net.b(net.a(x)))
    object.__setattr__(net.b, "scale", 0.5 + loss.item())
    return loss


def reads_what_a_layer_has_left_on_another(net: Any, x: Tensor) -> Tensor:
    net.b.listener = (net,)
    return net.head(net.b(net.a(x))) * (1 + net.noted)


def reads_what_a_layer_left_in_the_step_before(net: Any, x: Tensor) -> Tensor:
    return net.head(net.b(net.a(x) * max(net.b.load)))


def seeds(net: Any, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return net.head(net.b(net.a(x)) + torch.rand(4))


def goes_back_to_a_random_state(net: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    h = net.a(x) + torch.rand(4)
    torch.set_rng_state(state)
    return net.head(net.b(h) + torch.rand(4))


class CallsLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def calls_a_layer_in_a_function(net: Any, x: Tensor) -> Tensor:
    return net.head(CallsLayer.apply(net.a(x), net.b))  # type: ignore[no-any-return]


def seeds_a_generator_that_all_share(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    torch.default_generator.manual_seed(1)
    return net.head(net.b(h) + torch.rand(4))


def freezes(net: Any, x: Tensor) -> Tensor:
    net.b.requires_grad_(False)
    return net.head(net.b(net.a(x)))


def looks_at_a_gradient(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    h.register_hook(lambda gradient: gradient * 0.5)
    return net.head(net.b(h))


def puts_a_hook_on_a_parameter(net: Any, x: Tensor) -> Tensor:
    net.d.linear.weight.register_hook(lambda gradient: gradient * 0.5)
    return net.head(net.b(net.a(x)))


def copies_a_layer(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = copy.deepcopy(net.d)(net.a(x).detach())
    return net.head(net.b(net.a(x))) + target.mean()


def adds_to_a_part_of_an_attribute(net: Any, x: Tensor) -> Tensor:
    net.ema[:2] += x.mean()
    return net.head(net.b(net.a(x)) + net.ema)  # type: ignore[no-any-return]


LINE = r"test_unusual_steps\.py:\d+ in"


@pytest.mark.parametrize(
    ("step", "second", "message"),
    [
        (catches_everything, Block, rf"catches every exception at {LINE} catches_everything.*except Exception"),
        (skips_what_fails, Block, "does not do what it did"),
        (asks_for_history, Block, rf"the step asks at {LINE} asks_for_history for grad_fn of the result of unit 'b'"),
        (reads_a_mark, Marks, rf"unit 'b', called at {LINE} reads_a_mark, returns a tensor with an attribute 'mark'"),
        (goes_on_with_its_state, Block, rf"'hidden' is read at {LINE} goes_on.* assigned at.*for each layer"),
        (turns_dropout_on_at_the_end, Block, rf"'b\.drop\.p' is read at {LINE} forward and assigned at {LINE} turns"),
        (assigns_past_modules, Block, rf"'b\.scale' is read at {LINE} forward and assigned at a line that goes past"),
        (
            reads_what_a_layer_has_left_on_another,
            Leaves,
            rf"'noted' is read at {LINE} reads_.*, and unit 'b' assigns it",
        ),
        (
            reads_what_a_layer_left_in_the_step_before,
            Leaves,
            rf"'b\.load' is read at {LINE} reads_.*, and unit 'b' assigns it for the next micro-batch",
        ),
        (seeds, Block, rf"seeds torch's random numbers at {LINE} seeds.* between submodules.*seed in the forward"),
        (goes_back_to_a_random_state, Block, rf"random numbers at {LINE} goes_back.*\(torch.set_rng_state\)"),
        (calls_a_layer_in_a_function, Block, rf"CallsLayer\.apply\(\) at {LINE} calls_a_layer\w* calls 'b' itself"),
        (seeds_a_generator_that_all_share, Block, rf"random numbers before it comes to {LINE} seeds_a_generator"),
        (freezes, Block, rf"sets requires_grad of 'b\.linear\.weight' at {LINE} freezes"),
        (
            looks_at_a_gradient,
            Block,
            rf"register_hook\(\) at {LINE} looks_at.* the gradient of the result of unit 'a' at .*autograd.Function",
        ),
        (puts_a_hook_on_a_parameter, Block, rf"register_hook\(\) at {LINE} puts.*parameter 'd\.linear\.weight'"),
        (
            adds_to_a_part_of_an_attribute,
            Block,
            rf"add_\(\) at {LINE} adds_to.* changes a tensor in place that lives on",
        ),
        (copies_a_layer, Block, rf"copies 'd\.linear\.weight' with copy\.deepcopy at {LINE} copies_a_layer.*__init__"),
    ],
)
def test_what_stages_cannot_do_is_refused_with_its_line(step: Any, second: type[Block], message: str) -> None:
    with pytest.raises(AvgPipeError, match=message):
        in_stages(partial(made, step, second), **SPLIT)


def test_a_buffer_that_changes_later_where_a_backward_needs_it_is_refused_by_name_and_a_clone_helps() -> None:
    small_and_large = torch.stack([torch.full((4, 4), 0.1), torch.full((4, 4), 2.0)])
    with pytest.raises(AvgPipeError, match=r"seems to change the buffer 'b\.largest' in place.*\(stage 0\).*clone\(\)"):
        in_stages(partial(made, calls_all, Ranges, small_and_large), **SPLIT, schedule="afab")
    check(partial(made, calls_all, RangesOfClones, small_and_large), **SPLIT, schedule="afab")


def test_one_compiled_submodule_does_not_hide_what_the_step_assigns() -> None:
    module, batches = made(goes_on_with_its_state)
    module.a.compile(backend="eager")
    with pytest.raises(AvgPipeError, match="'hidden' is read at"):
        in_stages(lambda: (module, batches), **SPLIT)


class StepsSchedule(MLP):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1000)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        try:
            self.lr_schedulers().step()  # type: ignore[union-attr]
        except Exception:  # of ours too, which must not be lost
            return loss
        return loss


class CountsOperations(MLP):
    begin = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx < self.begin:
            return super().training_step(batch, batch_idx)
        with FlopCounterMode(display=False) as counter:
            loss = super().training_step(batch, batch_idx)
        return loss * counter.get_total_flops()


class CountsLater(CountsOperations):
    begin = 1


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class Normalizes(MLP):
    """Its backward changes what later forwards read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = Checkpointed(spectral_norm(nn.Linear(8, 8)))


class AssignsSubmodule(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.layers[0] = self.layers[2]  # type: ignore[index]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (StepsSchedule, CaptureError, rf"{LINE} training_step the step changes hyper-param"),
        (CountsOperations, PartitionError, r"the step is in a _?FlopCounterMode"),
        (CountsLater, StepChangedError, r"the step is in a _?FlopCounterMode"),
        (Normalizes, StepChangedError, r"the backward of a micro-batch changes '.*_u'"),
        (AssignsSubmodule, CaptureError, r"assigns a submodule, so that .*'layers.2.weight' is 'layers.0"),
    ],
)
def test_effects_that_stages_cannot_have_together_are_refused(make: Any, error: type[Exception], message: str) -> None:
    options: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 4}
    with pytest.raises(error, match=message):
        pipeline(2, strategy=options).fit(make(), loader(MLP, 16, 8))


# -- what is left ------------------------------------------------------------------------------------------------------


def test_a_model_that_was_trained_can_be_freed() -> None:
    def train() -> weakref.ref[Any]:
        held: dict[str, Any] = {}

        class Encloses(Steps):
            def head(self, h: Tensor) -> Tensor:
                return super().head(h * held["model"].c.scale)

        held["model"] = Encloses(calls_all)
        in_stages(lambda: (held["model"], made(calls_all)[1]), **SPLIT)
        return weakref.ref(held["model"])

    left = train()
    gc.collect()
    assert left() is None


class Shifted(nn.Module):
    """A parametrization: adds what the step has computed."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.shift


class Adds(Layers):
    """Calls a layer with another weight."""

    def changed(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.b.weight + 0.1 * self.a.weight, self.b.bias)

    def through(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.changed(self.a(x)).relu()).relu())  # type: ignore[no-any-return]


class Parametrizes(Adds):
    """Does so by a module that it makes and lets go of, as peft does with the weights of experts."""

    def changed(self, x: Tensor) -> Tensor:
        register_parametrization(self.b, "weight", Shifted(0.1 * self.a.weight))
        try:
            return self.b(x)  # type: ignore[no-any-return]
        finally:
            remove_parametrizations(self.b, "weight", leave_parametrized=False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_step_may_make_modules_for_itself_and_parametrize_a_layer_meanwhile(device: str) -> None:
    """Also if the layer has no contents yet; with ones that it has, as by hand."""
    module = piped(Parametrizes().to(device), split_points=["c"], costs="flops")
    assert_equal(module, piped(Adds().to(device), split_points=["c"], costs="flops"))
    if device == "cpu":
        assert_equal(module, by_hand(Parametrizes()))


DISTRIBUTION = SimpleNamespace(random_state=np.random.mtrand._rand)  # as those of SciPy have it


class NamesADistribution(Layers):
    """Names a global that holds NumPy's common generator, and draws from it for batches only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1.0 if DISTRIBUTION.random_state else 0.0)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        np.random.rand()
        return batch


def test_the_common_generators_are_nobodys_own() -> None:
    assert_equal(piped(NamesADistribution()), by_hand(NamesADistribution()))


# -- submodules that look at gradients of what is outside of them -----------------------------------------------------


class Hooks(nn.Linear):
    """Scales the gradient of its input by a hook, whoever else uses the input."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: 0.1 * gradient)
        return super().forward(x)


class Weighs(nn.Module):
    """Weighs two losses by their gradients for a weight of another layer, or for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, losses: list[Tensor], shared: Tensor) -> Tensor:
        norms = [torch.autograd.grad(loss, shared, retain_graph=True)[0].norm() for loss in losses]
        return losses[0] + self.scale * (norms[0] / norms[1]).detach() * losses[1]


class Balances(Layers):
    """Balances two losses.

    Args:
        by_value: whether by the gradients for a value, else for the weight of the layer that makes it.
    """

    def __init__(self, by_value: bool) -> None:
        super().__init__()
        self.weighs, self.by_value = Weighs(), by_value

    def loss(self, batch: Any) -> Tensor:
        x, target = batch
        h = self.a(x).relu()
        losses = [functional.mse_loss(self.c(h), target), functional.l1_loss(self.d(h), target)]
        return self.weighs(losses, h if self.by_value else self.a.weight)  # type: ignore[no-any-return]


class HooksTheBatch(Layers):
    """Looks between layers at the gradient of a tensor of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        x.register_hook(lambda gradient: self.seen.append(gradient))
        return super().loss(batch)


class KeepsTheGradient(HooksTheBatch):
    def loss(self, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        x.retain_grad()
        return super().loss((x, batch[1]))


@pytest.mark.parametrize("make", [HooksTheBatch, KeepsTheGradient])
def test_one_stage_alone_may_ask_for_the_gradient_of_a_tensor_of_the_batch(make: Callable[[], HooksTheBatch]) -> None:
    one, expected = piped(make(), num_stages=1), by_hand(make())
    assert_equal(one, expected)
    assert [gradient.tolist() for gradient in one.seen] == [gradient.tolist() for gradient in expected.seen]
    with pytest.raises(PartitionError, match=rf"\(\) at {LINE} loss asks for the gradient of a tensor of the batch"):
        piped(make(), split_points=["c"])


class Derives(nn.Module):
    """Adds the derivative of what it gets by another tensor, as far as it depends on that one."""

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(x.sum(), by, create_graph=True, allow_unused=True)
        return x if found is None else x + found


class ForceField(nn.Module):
    """Energies of atoms, and the forces on them: minus the gradient of the energy for their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, positions: Tensor) -> Tensor:
        energy = self.energy(positions)
        (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy - gradient


class Shares(Layers):
    """Several submodules use a value, a tensor of the batch or what the step makes of it; one asks for its gradient.

    Args:
        way: one of the methods.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.hooks, self.derives, self.shift = way, Hooks(), Derives(), nn.Parameter(torch.ones(8))
        self.field = ForceField()

    def through(self, x: Tensor) -> Tensor:
        return getattr(self, self.way)(x.clone().requires_grad_())  # type: ignore[no-any-return]

    def value_hooked_last(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.d(self.c(self.b(h) + self.hooks(h)))  # type: ignore[no-any-return]

    def value_hooked_first(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.d(self.c(self.hooks(h) + self.b(h)))  # type: ignore[no-any-return]

    def hooked_last(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.a(x).relu()) + self.hooks(x))  # type: ignore[no-any-return]

    def hooked_first(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.hooks(x).relu()) + self.b(x))  # type: ignore[no-any-return]

    def hooked_before_its_double_is_used(self, x: Tensor) -> Tensor:
        doubled = 2 * x
        return self.d(self.c(self.hooks(x).relu()) + self.b(doubled))  # type: ignore[no-any-return]

    def hooked_alone(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.hooks(x).relu()))  # type: ignore[no-any-return]

    def derived(self, x: Tensor) -> Tensor:
        return self.c(self.derives(2 * (x + self.shift), x))  # type: ignore[no-any-return]

    def derived_by_way_of_its_triple(self, x: Tensor) -> Tensor:
        return self.c(self.derives(2 * (3 * x + self.shift), x))  # type: ignore[no-any-return]

    def derived_within_a_submodule(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.field(x)).relu())  # type: ignore[no-any-return]


OF_BATCH = rf"unit '(hooks|derives)' at {LINE} \w+ asks for the gradient of a tensor of the batch, which .* uses too"
OF_VALUE = r"unit '(hooks|weighs)' at .* asks for the gradient of .* uses too"


@pytest.mark.parametrize(
    ("make", "split", "message"),
    [
        (partial(Shares, "value_hooked_last"), "hooks", OF_VALUE),
        (partial(Balances, False), "c", OF_VALUE),
        (partial(Shares, "hooked_last"), "hooks", OF_BATCH),
        (partial(Shares, "hooked_first"), "c", OF_BATCH),
        (partial(Shares, "hooked_before_its_double_is_used"), "c", OF_BATCH),
        (partial(Shares, "derived"), "derives", OF_BATCH),
        (partial(Shares, "derived_by_way_of_its_triple"), "derives", OF_BATCH),
    ],
)
def test_no_cut_divides_the_gradient_that_a_submodule_asks_for(
    make: Callable[[], Layers], split: str, message: str
) -> None:
    with pytest.raises(PartitionError, match=message):
        piped(make(), split_points=[split])


@pytest.mark.parametrize(
    ("make", "split"),
    [
        # before the first use of the value
        *((partial(Shares, "value_hooked_first"), split) for split in ("hooks", "b", "c")),
        (partial(Balances, True), "c"),
        (partial(Shares, "hooked_last"), "d"),
        (partial(Shares, "hooked_first"), "d"),
        (partial(Shares, "hooked_alone"), "c"),
        (partial(Shares, "derived"), "c"),
        (partial(Shares, "derived_within_a_submodule"), "c"),
    ],
)
def test_a_cut_that_leaves_such_a_gradient_whole_stays_possible(make: Callable[[], Layers], split: str) -> None:
    assert_equal(piped(make(), split_points=[split]), by_hand(make()))
