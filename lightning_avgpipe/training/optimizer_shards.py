"""Shards of optimizer states: the replicas of a stage divide the states among themselves, and each steps its part."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.averaging.optimizers import after_trial_steps, holds_two_kinds, unwrapped
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.training.stepping import without_gradients
from lightning_avgpipe.utils.patching import replaced


def shards(sizes: Sequence[int], count: int) -> list[int]:
    """Return which replica keeps the states of each parameter: large ones first, each to the least loaded replica.

    Args:
        sizes: numbers of elements of the parameters.
        count: number of replicas.
    """
    loads, found = [0] * count, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        found[i] = loads.index(min(loads))
        loads[found[i]] += sizes[i]
    return found


class OptimizerShards:
    """The division of optimizer states among the replicas of this process's stages (ZeRO-1).

    ::

        replica 0    gradients of a b c, all summed    steps a    sends a, gets b c
        replica 1    gradients of a b c, all summed    steps b c  sends b c, gets a

    An optimizer skips parameters without gradient, and makes no state for them. So while it steps, a replica hides the
    gradients of the parameters that others step. The optimizer must treat each parameter independently, as nearly all
    do; :func:`check_separable` checks it by a trial.

    Args:
        module: module with the parameters.
        cluster: cluster of the processes; without replicas all methods do nothing.
    """

    def __init__(self, module: nn.Module, cluster: Cluster) -> None:
        self._module = module
        self._cluster = cluster
        self._parts: list[list[Tensor]] = []  # by replica, the parameters that it steps

    def assign(self, optimizers: Sequence[Optimizer]) -> None:
        """Divide the parameters of this process among its replicas, and drop the states that other replicas keep."""
        replicas = self._cluster.replicas
        if replicas is None:
            self._parts = []
            return
        self._parts = [[] for _ in range(replicas.count)]
        here: list[Tensor] = [p for p in self._module.parameters() if not p.is_meta]
        for some in ([p for p in here if p.requires_grad], [p for p in here if not p.requires_grad]):
            for parameter, replica in zip(some, shards([p.numel() for p in some], replicas.count), strict=True):
                self._parts[replica].append(parameter)
        for other in self._of_others():
            for optimizer in optimizers:
                optimizer.state.pop(other, None)

    def _of_others(self) -> Iterator[Tensor]:
        replicas = self._cluster.replicas
        return (p for n, part in enumerate(self._parts) if replicas and n != replicas.group_number for p in part)

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Within this context, let each replica step its own part when the optimizer steps, then exchange parameters.

        All replicas enter the context and step.
        """
        inner = unwrapped(optimizer)
        step = inner.step

        @functools.wraps(step)
        def together(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as hidden:
                if closure is None:
                    hidden.enter_context(without_gradients(self._of_others()))
                    result = step(*args, **kwargs)
                else:
                    given = closure

                    def run() -> Any:
                        found = given()
                        hidden.enter_context(without_gradients(self._of_others()))
                        return found

                    result = step(run, *args, **kwargs)
            self._exchange()
            return result

        with replaced(inner, "step", together):  # the first closure assigns parameters, so they are hidden after it
            yield

    def _exchange(self) -> None:
        """Copy each parameter from the replica that has stepped it to the others."""
        for replica, part in enumerate(self._parts):
            assert self._cluster.replicas is not None
            self._cluster.replicas.copy([p.detach() for p in part if p.grad is not None], replica)


def check_separable(optimizer: Optimizer, sharded: bool) -> None:
    """Check, by a trial, that an optimizer treats each parameter independently, so that it can step a part of them.

    Args:
        optimizer: optimizer to check; it does not change.
        sharded: whether replicas divide its states, so that results must be equal bit for bit. Otherwise processes
            divide the stages; then small differences are allowed, and an optimizer that cannot be tried passes.

    Raises:
        ConfigurationError: the optimizer does not treat each parameter independently, or cannot be tried.
    """
    name = type(optimizer).__name__
    refused = (
        f"shard='optimizer' with {name}, which %s: each replica steps a part of the parameters, so use an "
        "optimizer that treats each by itself, such as SGD or AdamW, or leave shard out"
        if sharded
        else f"stages on several processes with {name}, which %s: each process steps the parameters of its stages, so "
        "use an optimizer that treats each by itself, such as SGD or AdamW, or one process (devices=1)"
    )
    if sharded and holds_two_kinds(optimizer):
        raise ConfigurationError(refused % "has a method eval that changes only weights whose states it has")
    try:
        together, alone = (after_trial_steps(optimizer, both).param_groups[0]["params"][0] for both in (True, False))
    except Exception as error:  # of any type: it is the user's code
        if not sharded:
            return
        raise ConfigurationError(refused % f"cannot step some of them ({type(error).__name__}: {error})") from error
    rounding = 0.0 if sharded else 1e-6  # operations on several parameters at once may round differently
    if not torch.allclose(together, alone, rounding, 0.0, equal_nan=True):
        raise ConfigurationError(refused % "makes the step of a parameter depend on others")
