"""A stage at work: its forwards, what they keep, and its backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe import tree
from lightning_avgpipe.capture.recorder import owned_tensors
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.runtime.copies import Copies
from lightning_avgpipe.runtime.message import Message
from lightning_avgpipe.runtime.program import StageProgram
from lightning_avgpipe.runtime.randomness import Drawing, RandomKey
from lightning_avgpipe.runtime.replay import replay

__all__ = ["Stage", "Task"]


@dataclass(frozen=True)
class Task:
    """One iteration's work, the same for all stages of a process.

    Attributes:
        run: ``run(i, *args[i])`` executes the step function on micro-batch i.
        args: arguments per micro-batch.
        finish: turns the result of micro-batch i on the last stage into the tensor to start its backward from;
            None if there is no backward.
        key: random numbers of this iteration.
    """

    run: Callable[..., Any]
    args: Sequence[Sequence[Any]]
    finish: Callable[[int, Any], Tensor] | None = None
    key: RandomKey = RandomKey(0)  # noqa: RUF009

    @property
    def trains(self) -> bool:
        """Whether forwards keep what backwards need."""
        return self.finish is not None


class _Gate:
    """Where a received value enters the step, and its gradient comes out.

    The gradient is what autograd found, with its strides: accumulated in a leaf it would be laid out anew, and the
    kernels of the stage before would round otherwise.
    """

    def __init__(self) -> None:
        self.gradient: Tensor | None = None


@dataclass(frozen=True)
class _Stash:
    """What a forward keeps: the gates that its gradients come out of, and the tensors that they start from."""

    gates: tuple[_Gate, ...]
    roots: tuple[Tensor, ...]


class _Enter(torch.autograd.Function):
    """A received leaf enters the step: without a copy, and yet such that in-place glue may change it."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, gate: _Gate) -> Tensor:
        ctx.gate = gate
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.gate.gradient = gradients[0]
        return None, None


class Stage:
    """Stage k of one pipeline.

    Args:
        program: its part of the step function.
        module: the whole module; parameters of other stages may be absent.
        device: where it computes.
        copies: parameters that other stages use as well.

    Attributes:
        stash: micro-batch -> what its forward keeps for its backward.
        results: on the last stage, what the step returned for each micro-batch.
    """

    def __init__(self, program: StageProgram, module: nn.Module, device: torch.device, copies: Copies) -> None:
        self.program = program
        self._copies = copies
        self._device = device
        self._units = {id(module.get_submodule(path)): path for path in program.graph.units}
        self._module = module
        self._owned = owned_tensors(module, ())
        self._drawing = Drawing.of(module, program.graph.drawing, program.graph.host_drawing)
        self.stash: dict[int, _Stash] = {}
        self.results: dict[int, Any] = {}

    def forward(self, task: Task, micro_batch: int, message: Message | None) -> Message | None:
        """Run one forward.

        Args:
            message: from the stage before; None for the first stage.
        Returns:
            The message for the next stage; None from the last.
        """
        program = self.program
        if message is not None and message.micro_batch != micro_batch:
            raise StepChangedError(
                f"stage {program.stage} wants micro-batch {micro_batch} and received {message.micro_batch}; "
                "the stages do not run the same schedule"
            )
        gates: list[_Gate] = []
        received: list[Tensor] = []
        if message is not None:
            for tensor, wanted in zip(message.tensors, message.requires_grad, strict=True):
                assert tensor is not None
                if wanted and task.trains:
                    gates.append(_Gate())
                    tensor = _Enter.apply(tensor.detach().requires_grad_(), gates[-1])
                received.append(tensor)
        with torch.profiler.record_function(f"avgpipe::F{micro_batch}"), self._copies.placed(program.stage) as copies:
            replayed = replay(
                program,
                partial(task.run, micro_batch),
                task.args[micro_batch],
                self._units,
                self._owned_now() | copies,
                received,
                message.entries if message is not None else (),
                RandomKey(task.key.seed, task.key.iteration, task.key.pipeline, micro_batch),
                self._drawing,
                self._device,
            )
            if program.is_last:
                self.results[micro_batch] = replayed.result
                if task.finish is not None:
                    # of a result with its graph the received values would stay until the iteration ends
                    self.results[micro_batch] = tree.map_tensors(Tensor.detach, replayed.result)
                    loss = task.finish(micro_batch, replayed.result)
                    self.stash[micro_batch] = _Stash(tuple(gates), (loss,))
                return None
        requires_grad = tuple(task.trains and tensor.requires_grad for tensor in replayed.sent)
        if task.trains:
            roots = tuple(t for t, asks in zip(replayed.sent, requires_grad, strict=True) if asks)
            self.stash[micro_batch] = _Stash(tuple(gates), roots)
        return Message(micro_batch, tuple(t.detach() for t in replayed.sent), requires_grad, replayed.entries)

    def _owned_now(self) -> dict[int, str]:
        glue_states = self.program.graph.glue_states  # such buffers may be other objects by now
        return owned_tensors(self._module, glue_states) if glue_states else self._owned

    def backward(self, micro_batch: int, message: Message | None) -> Message | None:
        """Run one backward: gradients of this stage's parameters accumulate.

        Args:
            message: gradients from the next stage; None on the last stage.
        Returns:
            Gradients for the stage before; None from the first.
        """
        stash = self.stash.pop(micro_batch)
        gradients = (None,) if message is None else message.tensors
        # copies are in place for what is recomputed
        with torch.profiler.record_function(f"avgpipe::B{micro_batch}"), self._copies.placed(self.program.stage):
            pairs = [
                (root, gradient)
                for root, gradient in zip(stash.roots, gradients, strict=True)
                if root.requires_grad and (gradient is not None or message is None)
            ]
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        if self.program.is_first:
            return None
        return Message(micro_batch, tuple(gate.gradient for gate in stash.gates))

    def clear(self) -> None:
        """Forget everything about unfinished micro-batches."""
        self.stash.clear()
        self.results.clear()
