"""The optimizers' step, which all processes make together: gradient norms, the loss scale, and shards of states."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from lightning_avgpipe.averaging.optimizers import clone_optimizer, unwrapped
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.patching import replaced


@contextlib.contextmanager
def norms_over_stages(parameters: Sequence[Tensor], cluster: Cluster) -> Iterator[None]:
    """Let ``torch.nn.utils.clip_grad_norm_`` clip by the norm over all processes within this context.

    Every process must then call it equally often. It works for every caller: the precision plugin, or a user's own
    code, under any name by which that code has imported it.

    Args:
        parameters: parameters of all processes, in the same order on each; only owners have gradients.
        cluster: cluster of the processes.
    """

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        gradients = [g for g in ([tensors] if isinstance(tensors, Tensor) else tensors) if not g.is_meta]
        total = global_norm(gradients, parameters, cluster, float(norm_type))
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(f"the norm of the gradients of all stages is {total.item()}, which cannot be clipped")
        return total.to(cluster.device, non_blocking=True)  # torch would move it and wait

    with replaced(clip_grad, "_get_total_norm", total_norm):
        yield


@torch.no_grad()
def global_norm(
    gradients: Sequence[Tensor], parameters: Sequence[Tensor], cluster: Cluster, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of the gradients of all processes. Every process calls it.

    Args:
        gradients: gradients of this process. The ``grad`` of a parameter that several processes hold counts once.
        parameters: as of :func:`norms_over_stages`.
        cluster: cluster of the processes.
        norm_type: order of the norm.

    Returns:
        The norm on the host, shape ``()``. It equals the norm in a single process bit for bit: every parameter's norm
        is computed by its owner, and the norm of the norms by all processes in the same order.
    """
    position = {id(p.grad): i for i, p in enumerate(parameters) if p.grad is not None}
    places = [position.get(id(gradient)) for gradient in gradients]
    known = [i for i in places if i is not None]
    # float64 is exact for the sum with other processes' zeros, and for the mean of equal norms
    norms = torch.zeros(2, len(parameters) + cluster.group.world_size, dtype=torch.float64, device="cpu")
    if known:
        own = [gradient for gradient, i in zip(gradients, places, strict=True) if i is not None]
        norms[0, known] = torch.stack(torch._foreach_norm(own, norm_type)).cpu().double()
        norms[1, known] = 1.0
    others = [gradient for gradient, i in zip(gradients, places, strict=True) if i is None]
    if others:  # gradients of other tensors, such as a plugin's copies of parameters in another precision
        of_others = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(others, norm_type)), norm_type)
        norms[:, len(parameters) + cluster.rank] = torch.stack(
            [of_others.cpu().double(), torch.ones((), dtype=torch.float64, device="cpu")]
        )
    cluster.group.sum(norms)
    dtype = parameters[0].dtype if parameters else torch.float32
    present = norms[1] > 0
    return torch.linalg.vector_norm((norms[0, present] / norms[1, present]).to(dtype), norm_type)


@contextlib.contextmanager
def without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Take the gradients of parameters away within this context.

    A parameter that has moved to another process or device meanwhile gets none back.
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


@contextlib.contextmanager
def scaling_together(
    scaler: GradScaler, cluster: Cluster, others: Callable[[Optimizer], Sequence[Optimizer]]
) -> Iterator[None]:
    """Treat an infinite gradient on one process, or in one pipeline, as one everywhere, within this context.

    Then all processes skip the same steps and change their scale equally, once. Every process enters the context. A
    scaler initialises itself when it scales the first loss, which only the last stage has, so this context initialises
    it. A stage without gradients reports no infinite one.

    Args:
        scaler: gradient scaler of this process.
        cluster: cluster of the processes; all groups decide together.
        others: returns, for an optimizer of the first pipeline, those of other pipelines that step after it.
    """
    if not scaler.is_enabled():
        yield
        return
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(cluster.device)
    agreement = _Agreement(scaler, cluster, others)
    with replaced(scaler, "_unscale_grads_", agreement.unscale), replaced(scaler, "update", agreement.update):
        yield


class _Agreement:
    """One decision on the gradients of all optimizers that step together, made when the first one is unscaled."""

    def __init__(
        self, scaler: GradScaler, cluster: Cluster, others: Callable[[Optimizer], Sequence[Optimizer]]
    ) -> None:
        self._look = scaler._unscale_grads_
        self._update = scaler.update
        self._cluster = cluster
        self._others = others
        self._waiting: list[Optimizer] = []  # optimizers that are unscaled already and step later
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
        """Update the scale after the step of the last optimizer; a scaler calls this method after every step."""
        if self._turns_left:
            self._turns_left -= 1
            return
        self._waiting = []
        self._update(*args)


# -- shards of optimizer states ----------------------------------------------------------------------------------------


_TRIED_STEPS = 3


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
    gradients of parameters that others step. The optimizer must treat each parameter independently, as nearly all do;
    :func:`check_separable` tries this.

    Args:
        module: module with the parameters.
        cluster: cluster of the processes; without replicas all methods do nothing.
    """

    def __init__(self, module: nn.Module, cluster: Cluster) -> None:
        self._module = module
        self._cluster = cluster
        self._parts: list[list[Tensor]] = []  # by replica, the parameters that it steps

    def assign(self, optimizers: Sequence[Optimizer]) -> None:
        """Divide the placed parameters of this process among the replicas, and drop the states that others keep."""
        replicas = self._cluster.replicas
        if replicas is None:
            self._parts = []
            return
        self._parts = [[] for _ in range(replicas.count)]
        here: list[Tensor] = [p for p in self._module.parameters() if not p.is_meta]
        for alike in ([p for p in here if p.requires_grad], [p for p in here if not p.requires_grad]):
            for parameter, replica in zip(alike, shards([p.numel() for p in alike], replicas.count), strict=True):
                self._parts[replica].append(parameter)
        for other in self._of_others():
            for optimizer in optimizers:
                optimizer.state.pop(other, None)

    def _of_others(self) -> Iterator[Tensor]:
        replicas = self._cluster.replicas
        return (p for n, part in enumerate(self._parts) if replicas and n != replicas.number for p in part)

    @contextlib.contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Make a step of the optimizer a step of all replicas together within this context. All of them step."""
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

        with replaced(inner, "step", together):  # the first closure assigns parameters, so hide after it
            yield

    def _exchange(self) -> None:
        """Copy each parameter from the replica that has stepped it to all others."""
        for replica, part in enumerate(self._parts):
            assert self._cluster.replicas is not None
            self._cluster.replicas.copy([p.detach() for p in part if p.grad is not None], replica)


def check_separable(optimizer: Optimizer) -> None:
    """Check, by trying, that an optimizer treats each parameter independently, so that it can step a part of them.

    Raises:
        ConfigurationError: the optimizer does not, or cannot be tried.
    """
    name = type(optimizer).__name__
    refused = (
        f"shard='optimizer' with {name}, which %s: each replica steps a part of the parameters, so use an "
        "optimizer that treats each by itself, such as SGD or AdamW, or leave shard out"
    )
    try:
        together, alone = _tried(optimizer, True), _tried(optimizer, False)
    except Exception as error:  # of any type: it is the user's code
        raise ConfigurationError(refused % f"cannot step some of them ({type(error).__name__}: {error})") from error
    if not torch.equal(together, alone):
        raise ConfigurationError(refused % "makes the step of a parameter depend on others")


def _tried(optimizer: Optimizer, together: bool) -> Tensor:
    """Return a small parameter after a few steps of the optimizer, together with others or alone."""
    generator = torch.Generator().manual_seed(0)

    def like(parameter: Tensor) -> Tensor:
        return torch.rand((2,) * parameter.ndim, generator=generator, device="cpu").to(parameter.dtype)

    groups = [(group, group["params"][0]) for group in optimizer.param_groups if group["params"]]
    small = [nn.Parameter(like(parameter)) for _, parameter in groups]
    own = {id(p): to for (group, _), to in zip(groups, small, strict=True) for p in group["params"]}
    made = clone_optimizer(optimizer, own)
    for name in vars(made):
        if name.endswith("hooks"):
            vars(made)[name] = OrderedDict()
    made.state.clear()
    made.param_groups[:] = [{**group, "params": [to]} for (group, _), to in zip(groups, small, strict=True)]
    first, further = small[0], nn.Parameter(like(small[0]))
    made.param_groups[0]["params"].append(further)
    for _ in range(_TRIED_STEPS):
        for parameter in (first, further, *small[1:]):
            gradient = like(parameter)  # always drawn, so that both runs draw the same numbers
            parameter.grad = gradient if together or parameter is first else None
        made.step()
    return first.detach()
