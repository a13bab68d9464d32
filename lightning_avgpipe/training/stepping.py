"""The optimizer step, which all processes take together: norms of gradients, the loss scale, and shards of states."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils import _foreach_utils as grouping

from lightning_avgpipe.averaging.optimizers import after_trial_steps, holds_two_kinds, unwrapped
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.patching import Replacement, all_replaced, replaced


class NormsOverStages:
    """Norms of gradients over the stages of all processes. Processes wait for each other when a norm is computed.

    Attributes:
        cluster: as given.
        taken: whether a norm was computed since this was last set to False; the same on all processes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.taken = cluster, False

    def clipping(self, parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return a context within which ``torch.nn.utils.clip_grad_norm_`` clips by the norm over all processes.

        Within it, every process must call that function equally often. It works for every caller: the precision
        plugin, and a user's own code, under whatever name that has imported the function.

        Args:
            parameters: parameters of all processes, in the same order on each; only owners have gradients.
        """

        def total_norm(
            tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
        ) -> Tensor:
            gradients = [g for g in ([tensors] if isinstance(tensors, Tensor) else tensors) if not g.is_meta]
            self.taken = True
            total = global_norm(gradients, parameters, self.cluster, float(norm_type))
            if error_if_nonfinite and not total.isfinite():
                norm = total.item()
                raise RuntimeError(f"the norm of the gradients of all stages is {norm}, which cannot be clipped")
            return total.to(self.cluster.device, non_blocking=True)  # otherwise torch would move it, and wait

        return replaced(clip_grad, "_get_total_norm", total_norm)


@torch.no_grad()
def global_norm(
    gradients: Sequence[Tensor], parameters: Sequence[Tensor], cluster: Cluster, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of the gradients of all processes. Every process calls it.

    Args:
        gradients: gradients of this process. The ``grad`` of a parameter that several processes hold counts once.
        parameters: as for :meth:`NormsOverStages.clipping`.
        cluster: cluster of the processes.
        norm_type: order of the norm.

    Returns:
        The norm on the host, shape ``()``. It equals the norm in a single process bit for bit: every parameter's norm
        is computed by its owner, and the norm of the norms by all processes in the order that torch has on the host.
    """
    position = {id(p.grad): i for i, p in enumerate(parameters) if p.grad is not None}
    places = [position.get(id(gradient)) for gradient in gradients]
    known = [i for i in places if i is not None]
    # in float64, adding the zeros of other processes and taking the mean of equal norms are exact
    norms = torch.zeros(2, len(parameters) + cluster.group.world_size, dtype=torch.float64, device="cpu")
    if known:
        own = [gradient for gradient, i in zip(gradients, places, strict=True) if i is not None]
        norms[0, known] = _norms(own, norm_type).cpu().double()
        norms[1, known] = 1.0
    others = [gradient for gradient, i in zip(gradients, places, strict=True) if i is None]
    if others:  # gradients of other tensors, such as a plugin's copies of parameters in another precision
        of_others = torch.linalg.vector_norm(_norms(others, norm_type), norm_type)
        norms[:, len(parameters) + cluster.rank] = torch.stack(
            [of_others.cpu().double(), torch.ones((), dtype=torch.float64, device="cpu")]
        )
    cluster.group.sum(norms)
    dtypes = [p.dtype.to_real() for p in parameters]
    dtypes += [torch.float64 if torch.float64 in dtypes else torch.float32] * cluster.group.world_size  # for others
    present: list[int] = (norms[1] > 0).nonzero().flatten().tolist()
    found = dict.fromkeys(dtypes[i] for i in present) or {torch.float32: None}
    kinds: list[Any] = [torch.empty(0, dtype=dtype, device="cpu") for dtype in found]  # the same order on all devices
    order = [dtype for _, dtype in grouping._group_tensors_by_device_and_dtype([kinds])]
    present.sort(key=lambda i: order.index(dtypes[i]))
    total = functools.reduce(torch.promote_types, order)
    return torch.linalg.vector_norm((norms[0, present] / norms[1, present]).to(total), norm_type)


def _norms(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of each gradient, computed as in torch, which groups them by data type."""
    listed: list[Any] = list(gradients)
    groups: dict[Any, Any] = grouping._group_tensors_by_device_and_dtype([listed], with_indices=True)
    found: dict[int, Tensor] = {}
    for (same_type,), numbers in groups.values():
        found.update(zip(numbers, torch._foreach_norm(same_type, norm_type), strict=True))
    return torch.stack([found[i] for i in range(len(listed))])


@contextlib.contextmanager
def without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Hide the gradients of parameters within this context.

    A parameter that has moved to another process or device within it does not get its gradient back.
    """
    gradients = [(p, p.grad) for p in parameters]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            same = gradient is not None and gradient.device == parameter.device
            parameter.grad = gradient if same else None


# -- the loss scale ----------------------------------------------------------------------------------------------------


def scalers_of(precision: Any) -> list[GradScaler]:
    """Return the gradient scalers that a precision plugin has in its attributes."""
    return [value for value in vars(precision).values() if isinstance(value, GradScaler)]


def scaling_together(
    precision: Any, cluster: Cluster, others: Callable[[Optimizer], Sequence[Optimizer]]
) -> AbstractContextManager[None]:
    """Return a context within which gradient scalers count an infinite gradient of any process or pipeline.

    So all processes skip the same steps, and change their scale equally and once. Every process enters the context. A
    scaler usually initialises itself when it scales the first loss; only the last stage has losses, so this function
    initialises it. A stage without gradients reports no infinite one.

    Args:
        precision: precision plugin of this process, which has the gradient scalers.
        cluster: cluster of the processes; all groups decide together.
        others: returns, for an optimizer of the first pipeline, those of the other pipelines, which step after it.
    """
    replacements: list[Replacement] = []
    for scaler in filter(GradScaler.is_enabled, scalers_of(precision)):
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(cluster.device)
        agreement = _Agreement(scaler, cluster, others)
        replacements.append((scaler, "_unscale_grads_", agreement.unscale))
        replacements.append((scaler, "update", agreement.update))
    return all_replaced(replacements)


class _Agreement:
    """One decision on the gradients of all optimizers that step together, made when the first one is unscaled."""

    def __init__(
        self, scaler: GradScaler, cluster: Cluster, others: Callable[[Optimizer], Sequence[Optimizer]]
    ) -> None:
        self._look = scaler._unscale_grads_
        self._update = scaler.update
        self._cluster = cluster
        self._others = others
        self._waiting: list[Optimizer] = []  # optimizers whose gradients are unscaled already, and that step later
        self._turns_left = 0
        self._found: dict[torch.device, Tensor] = {}

    def unscale(self, optimizer: Optimizer, *args: Any) -> dict[torch.device, Tensor]:
        if any(optimizer is waiting for waiting in self._waiting):
            return self._found
        self._waiting = list(self._others(optimizer))
        self._turns_left = len(self._waiting)
        found = [vote for each in (optimizer, *self._waiting) for vote in self._look(each, *args).values()]
        votes = torch.zeros((), dtype=torch.float64, device="cpu")
        if found:
            votes += torch.stack([vote.reshape(()) for vote in found]).sum().cpu()
        anywhere = self._cluster.world.sum(votes) > 0
        self._found = {self._cluster.device: anywhere.to(self._cluster.device, torch.float32)}
        return self._found

    def update(self, *args: Any) -> None:
        """Update the scale after the step of the last optimizer only; this is called after every optimizer's step."""
        if self._turns_left:
            self._turns_left -= 1
            return
        self._waiting = []
        self._update(*args)


# -- shards: the replicas of a stage divide the states among themselves, and each steps its part -----------------------


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
