"""The plain step: gradients are clipped and the optimizer steps once more, for the whole model in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_avgpipe.elastic.optimizer_clone import clone_optimizer, parameters_in
from lightning_avgpipe.verify.comparison import Difference, first_difference
from lightning_avgpipe.verify.state import clone


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped.

    Attributes:
        limit: of the norm or of each element; None clips nothing.
        by_norm: which of both.
    """

    limit: float | None
    by_norm: bool

    @classmethod
    def of(cls, trainer: pl.Trainer) -> Clipping | None:
        """As the trainer does it; None if user code has a say."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        hooks: list[tuple[type, type]] = [(type(trainer.lightning_module), pl.LightningModule)]
        hooks += [(type(callback), pl.Callback) for callback in callbacks]
        for kind, base in hooks:
            for name in ("configure_gradient_clipping", "on_before_optimizer_step"):
                if getattr(kind, name, None) is not getattr(base, name, None) and not _ours(kind):
                    return None
        return cls(trainer.gradient_clip_val, trainer.gradient_clip_algorithm != "value")


@dataclass
class StepNotes:
    """What one process sees of one optimizer's step, by names of parameters that it answers for.

    Attributes:
        unclipped: gradients as they come from backwards, without the scale of losses.
        clipped: gradients as the optimizer gets them.
        before: weights.
        states: of the optimizer, before.
        after: weights after it; empty if the step was skipped.
    """

    unclipped: dict[str, Tensor | None] = field(default_factory=dict)
    clipped: dict[str, Tensor | None] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)

    def join(self, other: StepNotes) -> None:
        """Take over what another process has seen."""
        for name in ("unclipped", "clipped", "before", "states", "after"):
            getattr(self, name).update(getattr(other, name))

    def see_states(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Note the optimizer's states, before it steps."""
        for parameter, state in optimizer.state.items():
            if id(parameter) in names:
                self.states[names[id(parameter)]] = {key: clone(value) for key, value in state.items()}

    def after_step(self, optimizer: Optimizer, mine: Mapping[str, Tensor]) -> RemovableHandle:
        """Note these weights when the optimizer has stepped, until the handle is left."""

        def note(*_: Any) -> None:
            self.after = {name: clone(p) for name, p in mine.items()}  # last by the outermost class's step

        return optimizer.register_step_post_hook(note)


class PlainStep:
    """An optimizer like another one, as it is now, for copies of all parameters of a model.

    Args:
        optimizer: about to step.
        names: id of a parameter -> its name.
        device: of the copies.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], device: torch.device) -> None:
        own = {id(p): _room(p, device) for p in parameters_in(optimizer)}
        self._optimizer = clone_optimizer(optimizer, own)
        self._parameters = {names[i]: p for i, p in own.items()}

    def check(self, notes: StepNotes, clipping: Clipping | None, skips: bool) -> Iterator[Difference | None]:
        """Compare with what the processes have seen.

        Args:
            notes: of all processes.
            clipping: None if hooks may have changed gradients otherwise.
            skips: whether infinite gradients skip the step.
        """
        for name, parameter in self._parameters.items():
            with torch.no_grad():
                parameter.copy_(notes.before[name])
            parameter.grad = _moved(notes.unclipped.get(name), parameter)
            state = notes.states.get(name)
            if state is not None:
                self._optimizer.state[parameter] = {k: _beside(parameter, v) for k, v in state.items()}
        finite = all(p.grad is None or bool(p.grad.isfinite().all()) for p in self._parameters.values())
        if clipping is not None:
            self._clip(clipping)
            clipped = {name: p.grad for name, p in self._parameters.items()}
            yield first_difference("the clipped gradient", clipped, {n: notes.clipped.get(n) for n in clipped})
        if skips and not finite:
            for name, after in notes.after.items():
                if not torch.equal(after, notes.before[name]):
                    yield Difference("the weight", name, "it has changed, although a gradient is infinite")
            return
        for name, parameter in self._parameters.items():
            parameter.grad = _moved(notes.clipped.get(name), parameter)
        self._optimizer.step()
        weights = {name: p.detach() for name, p in self._parameters.items()}
        found = notes.after or notes.before
        yield first_difference("the weight after the optimizer step", weights, {n: found[n] for n in weights})

    def _clip(self, clipping: Clipping) -> None:
        parameters = parameters_in(self._optimizer)
        if not clipping.limit:
            return
        if clipping.by_norm:
            norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
            clip_grads_with_norm_(parameters, clipping.limit, norm)
        else:
            clip_grad_value_(parameters, clipping.limit)


def _room(parameter: Tensor, device: torch.device) -> nn.Parameter:
    data = torch.empty_like(parameter, device=device if parameter.is_meta else None)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def _moved(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.detach().to(parameter.device, copy=True)


def _beside(parameter: Tensor, value: Any) -> Any:
    """States lie beside their parameter, except for counters, which stay where the optimizer has put them."""
    if isinstance(value, Tensor):
        return value.to(parameter.device if value.shape == parameter.shape else value.device, copy=True)
    return value


def scales(trainer: pl.Trainer) -> bool:
    """Whether losses are scaled, so that infinite gradients skip a step."""
    return any(isinstance(x, GradScaler) and x.is_enabled() for x in vars(trainer.precision_plugin).values())


def _ours(kind: type) -> bool:
    return kind.__module__.startswith(("lightning_avgpipe.", f"{pl.__name__}.callbacks"))
