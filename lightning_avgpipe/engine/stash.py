"""What a stage keeps of a forward for its backward, and how received values enter a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.recompute import Observations, Surroundings
from lightning_avgpipe.engine.task import Task


class Gate:
    """Where a received value enters the step, and its gradient comes out.

    The gradient is what autograd found, with its strides: accumulated in a leaf it would be laid out anew, and the
    kernels of the stage before would round otherwise.

    Attributes:
        leaf: the value, with nothing before it.
        gradient: once it has come.
    """

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf
        self.gradient: Tensor | None = None


@dataclass(frozen=True)
class Stash:
    """What a forward keeps.

    Attributes:
        gates: that its gradients come out of.
        roots: the tensors that they start from.
        whole: why its backward cannot be split; empty if it may be.
    """

    gates: tuple[Gate, ...]
    roots: tuple[Tensor, ...]
    whole: str = ""

    @property
    def is_skipped(self) -> bool:
        """Of the last stage, whether there is no loss."""
        return not self.roots


@dataclass(frozen=True)
class Inputs:
    """What a forward keeps that will be repeated.

    Attributes:
        task: which holds the micro-batch.
        message: as received; None on the first stage.
        versions: of the received tensors.
        surroundings: what else the forward reads.
        observations: what it logged.
        ending: on the last stage where its backward starts, and the tensors of the result that lead there.
    """

    task: Task
    message: Message | None
    versions: tuple[int, ...]
    surroundings: Surroundings
    observations: Observations
    ending: tuple[Tensor | None, tuple[Tensor | None, ...]] | None

    @property
    def is_skipped(self) -> bool:
        """Of the last stage, whether there is no loss."""
        return self.ending is not None and self.ending[0] is None


class _Enter(torch.autograd.Function):
    """A received leaf enters the step: without a copy, and yet such that in-place glue may change it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, gate: Gate) -> Tensor:
        ctx.gate = gate
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.gate.gradient = gradients[0]
        return None, None


def entered(
    message: Message, values: Sequence[int], trains: bool, overwritten: frozenset[int]
) -> tuple[tuple[Gate, ...], list[Tensor]]:
    """The gates of received values, and the values as they enter the step.

    Args:
        message: as received.
        values: numbers of its tensors.
        trains: whether gradients come out of the gates.
        overwritten: numbers of the values that the step changes, and somebody needs once more.
    """
    gates: list[Gate] = []
    received: list[Tensor] = []
    for value, tensor, wanted in zip(values, message.tensors, message.requires_grad, strict=True):
        assert tensor is not None
        if value in overwritten:  # it, or its neighbour in this process, is needed once more
            tensor = tensor.clone()
        if wanted and trains:
            gates.append(Gate(tensor.detach().requires_grad_()))
            tensor = _Enter.apply(gates[-1].leaf, gates[-1])
        received.append(tensor)
    return tuple(gates), received
