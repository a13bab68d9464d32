"""Define the work of an iteration, what a forward keeps for its backward, and how received values enter a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.recompute import ForwardState, Observations
from lightning_avgpipe.utils.random_streams import RandomKey


@dataclass(frozen=True)
class Task:
    """The work of one iteration, the same for all stages of a process.

    Attributes:
        run: ``run(i, *args[i])`` executes the step function on micro-batch i.
        args: arguments of the step, for each micro-batch.
        finish: ``finish(i, result)`` returns the tensor from which the backward of micro-batch i starts, given its
            result on the last stage, or None if the micro-batch has no loss. None: there are no backwards.
        key: key of the random numbers of this iteration and its first micro-batch.
        starts_from_kept: micro-batches whose forwards begin with kept outputs, see :class:`~.prefix.Shortcut`.
        around: ``around(i)`` is the context in which ``run`` calls the step function; None: only ``run`` can call it.
    """

    run: Callable[..., Any]
    args: Sequence[Sequence[Any]]
    finish: Callable[[int, Any], Tensor | None] | None = None
    key: RandomKey = RandomKey(0)  # noqa: RUF009
    starts_from_kept: frozenset[int] = frozenset()
    around: Callable[[int], AbstractContextManager[None]] | None = None

    @cached_property
    def trains(self) -> bool:
        """Whether forwards keep what backwards need."""
        return self.finish is not None

    def key_of(self, micro_batch: int) -> RandomKey:
        """Return the random key of micro-batch i."""
        key = self.key
        return RandomKey(key.seed, key.iteration, key.pipeline, key.micro_batch + micro_batch)


class ReceivedLeaf:
    """A gate of a stage: the point where a received value enters the step, and its gradient leaves the backward.

    The gradient is the very tensor that autograd computes, with its strides. Accumulated in ``leaf.grad``, it could get
    another memory layout, and kernels of the previous stage would round differently.

    Attributes:
        leaf: the received value, as a leaf.
        gradient: its gradient; None until it is computed.
    """

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf
        self.gradient: Tensor | None = None


class Stash(NamedTuple):
    """The data that a forward keeps for its backward.

    Attributes:
        gates: gates of the received values that require gradients.
        roots: tensors from which the backward starts.
    """

    gates: tuple[ReceivedLeaf, ...]
    roots: tuple[Tensor, ...]

    @property
    def is_skipped(self) -> bool:
        """Whether this is the last stage and the micro-batch has no loss."""
        return not self.roots


@dataclass(frozen=True)
class Inputs:
    """The data that a forward keeps to be repeated for its backward.

    Attributes:
        task: work of the iteration, which holds the micro-batch.
        message: received message; None on the first stage.
        versions: version counters of the received tensors.
        surroundings: the state that the forward reads.
        observations: results of ``self.log`` and metrics.
        ending: on the last stage, the loss and the leaves from which it was computed, one per tensor of the result, or
            None for a tensor that needs no gradient; None on other stages.
    """

    task: Task
    message: Message | None
    versions: tuple[int, ...]
    surroundings: ForwardState
    observations: Observations
    ending: tuple[Tensor | None, tuple[Tensor | None, ...]] | None

    @property
    def is_skipped(self) -> bool:
        """Whether this is the last stage and the micro-batch has no loss."""
        return self.ending is not None and self.ending[0] is None


class _Enter(torch.autograd.Function):
    """The entry of a received leaf into the step, without a copy, as a tensor that glue may change in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, gate: ReceivedLeaf) -> Tensor:
        ctx.gate = gate
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.gate.gradient = gradients[0]
        return None, None


# not Function.apply, which is replaced while steps are followed
_enter: Callable[[Tensor, ReceivedLeaf], Tensor] = super(torch.autograd.Function, _Enter).apply  # type: ignore[misc]


def enter_values(
    message: Message, values: Sequence[int], trains: bool, overwritten: frozenset[int]
) -> tuple[tuple[ReceivedLeaf, ...], list[Tensor]]:
    """Return the gates of received values, and the values as they enter the step.

    Args:
        message: received message.
        values: indices of its tensors' values.
        trains: whether gradients are needed.
        overwritten: indices of the values that the step changes in place although they are needed again.
    """
    gates: list[ReceivedLeaf] = []
    received: list[Tensor] = []
    for value, tensor, wanted in zip(values, message.tensors, message.requires_grad, strict=True):
        assert tensor is not None
        if value in overwritten:  # the original is needed again, here or by a neighbour in this process
            tensor = tensor.clone()
        if wanted and trains:
            gates.append(ReceivedLeaf(tensor.detach().requires_grad_()))
            tensor = _enter(gates[-1].leaf, gates[-1])
        received.append(tensor)
    return tuple(gates), received
