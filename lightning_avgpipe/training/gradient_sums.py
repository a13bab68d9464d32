"""Sums of gradients over replicas, which start while the last backward still runs.

::

    backward of the last micro-batch    layer 3   layer 2   layer 1   layer 0
    sums of buckets                            3  --------- 2,1 ----------- 0 ------

In the first step all gradients are summed after the backward. Parameters that had dense gradients are then divided into
buckets, the last parameters first, since backwards reach them first. In later steps the sum of a bucket starts once all
its gradients are there, in the order of buckets, which is the same in all replicas. Gradients for which a later step
differs from the first are summed after the backward. No result depends on which sums start early, except for the order
in which three or more replicas add.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from lightning_avgpipe.comm.collectives import Collectives, TensorCollectives, buckets
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.schedule import Action
from lightning_avgpipe.utils.torch_compat import version_of

BUCKET_BYTES = 4 * 1024**2
"""The size, in bytes of gradients, from which a message during a backward takes no further gradient."""

_DENSE, _SPARSE, _LATE = 0, 1, 2

Named = Mapping[str, nn.Parameter]


@dataclass
class _Sent:
    """The gradient of a parameter at the time when its sum started."""

    gradient: Tensor
    version: int
    was_missing: bool

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Sent:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            return cls(torch.zeros_like(parameter), 0, gradient is None)
        return cls(gradient, version_of(gradient), False)

    def still(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter's gradient is still the one that was sent."""
        if self.was_missing:
            return parameter.grad is None
        return parameter.grad is self.gradient and version_of(self.gradient) == self.version


@dataclass
class _Bucket:
    """Parameters whose gradients are summed as one message."""

    parameters: Sequence[nn.Parameter]
    missing: set[int]  # the id of each parameter whose gradient of the last backward has not arrived


class GradientSums(Observer):
    """The sums of gradients over replicas; all replicas get the same bits.

    Args:
        replicas: group of the replicas.
        bucket_bytes: size, in bytes, from which a bucket takes no further parameter.

    Attributes:
        replicas: as given.
    """

    def __init__(self, replicas: TensorCollectives, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.replicas = replicas
        self._bucket_bytes = bucket_bytes
        self._spoiled: set[str] = set()  # parameters whose gradients have changed after they were sent; not sent early
        self._bucket_names: Sequence[Sequence[str]] = ()  # names, by bucket; the same in all replicas
        self._names: Sequence[str] = ()  # of all parameters when the buckets were made
        self._buckets: Sequence[_Bucket] = ()
        self._early: dict[int, _Sent] = {}  # by the id of the parameter, the gradients whose sums have started
        self._ends: list[Callable[[], None]] = []  # of the buckets whose sums have started, in their order
        self._last: Mapping[int, Action] = {}

    def watch(self, named: Named, rows: Mapping[int, Sequence[Action]]) -> None:
        """Prepare for an iteration that ends with an optimizer step. All replicas call it.

        Args:
            named: parameters whose gradients are summed, by name; the same names, in the same order, in all replicas.
                If they differ from those of the last step, all gradients are summed after the backward.
            rows: actions of each stage on this process.
        """
        known = self._bucket_names if tuple(named) == self._names else ()
        divided = [[named[name] for name in names] for names in known]
        self._buckets = [_Bucket(parameters, set(map(id, parameters))) for parameters in divided]
        self._early, self._ends = {}, []
        self._last = {}
        for stage, row in rows.items():
            if ends := [action for action in row if action.kind.stash < 0]:
                self._last[stage] = ends[-1]

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Perform an action; during the last backward of a stage, start the sums of buckets that become complete."""
        if self._last.get(work.stage) != work.action or not self._buckets:
            return do()
        with contextlib.ExitStack() as listening:
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    if id(parameter) in bucket.missing and parameter.requires_grad:
                        hook = parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket))
                        listening.callback(hook.remove)
            return do()

    def _arrived(self, bucket: _Bucket, parameter: Tensor) -> None:
        bucket.missing.discard(id(parameter))
        if not bucket.missing:
            self._begin_complete()

    @torch.no_grad()
    def _begin_complete(self, every: bool = False) -> None:
        for bucket in self._buckets[len(self._ends) :]:
            if bucket.missing and not every:
                return
            sent = {id(parameter): _Sent.of(parameter) for parameter in bucket.parameters}
            self._early |= sent
            self._ends.append(self.replicas.begin_sum([each.gradient for each in sent.values()]))

    def agree(self, processes: Collectives) -> None:
        """Start the remaining sums at the end of an iteration, before any other collective of the replicas."""
        self._begin_complete(every=True)

    @torch.no_grad()
    def finish(self, named: Named, votes: Tensor) -> Tensor:
        """Replace the gradients of all replicas by their sums. All replicas call it.

        A missing gradient counts as zero if another replica has one. A parameter without a gradient anywhere gets none.

        Args:
            named: parameters as for :meth:`watch`; if that was not called, no sum has been started early.
            votes: int32 tensor of any shape, which is summed in the same message.

        Returns:
            The sum of votes.
        """
        parameters, early, ends = list(named.values()), self._early, self._ends
        self._buckets, self._early, self._ends = (), {}, []
        kinds = _kinds(parameters, early)
        together = self.replicas.members.sum(torch.cat([kinds.flatten(), votes.flatten()]))
        dense, sparse, late = together[: kinds.numel()].view(kinds.shape).bool().tolist()
        rest: list[Tensor] = []
        for parameter, is_dense, is_late in zip(parameters, dense, late, strict=True):
            if is_dense:
                gradient = parameter.grad = _dense_gradient(parameter, early.get(id(parameter)), is_late)
                rest += [gradient] if is_late else []
        for end in ends:
            end()
        self.replicas.sum(rest)
        for parameter, is_dense, is_sparse in zip(parameters, dense, sparse, strict=True):
            if is_sparse and not is_dense:
                _sum_sparse(parameter, self.replicas)
        self._spoiled |= {
            name for (name, p), is_late in zip(named.items(), late, strict=True) if is_late and id(p) in early
        }
        self._names = tuple(named)
        suits = zip(named, dense, sparse, strict=True)
        suitable = [name for name, d, s in suits if d and not s and name not in self._spoiled]
        self._bucket_names = _in_buckets(named, suitable, self._bucket_bytes)
        return together[kinds.numel() :].view(votes.shape)


def _kinds(parameters: Sequence[nn.Parameter], early: Mapping[int, _Sent]) -> Tensor:
    """Return whether each gradient is dense, is sparse, or must still be summed, as 0 or 1; shape ``(3, P)``."""
    kinds = torch.zeros(3, len(parameters), dtype=torch.int32, device="cpu")
    for i, parameter in enumerate(parameters):
        if parameter.grad is not None:
            kinds[_SPARSE if parameter.grad.is_sparse else _DENSE, i] = 1
        sent = early.get(id(parameter))
        kinds[_LATE, i] = sent is None or not sent.still(parameter)
    return kinds


def _dense_gradient(parameter: nn.Parameter, sent: _Sent | None, is_late: bool) -> Tensor:
    """Return the tensor that holds the sum of a gradient: that of its early sum, or else one that is summed now.

    Args:
        parameter: parameter that has a dense gradient in some replica.
        sent: its gradient in a sum that was started early; None if there is none.
        is_late: whether it is summed now, because it was not sent early or has changed since, in some replica.
    """
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter) if is_late or sent is None else sent.gradient
    if gradient.is_sparse:
        return gradient.to_dense()
    return gradient.clone() if is_late and sent is not None else gradient  # the early sum still writes its own tensor


def _in_buckets(named: Named, names: Sequence[str], bucket_bytes: int) -> list[list[str]]:
    """Divide names into buckets, the last first. The result is the same in all replicas."""
    last_first = iter(names[::-1])
    return [list(islice(last_first, len(bucket))) for bucket in buckets([named[n] for n in names[::-1]], bucket_bytes)]


def _sum_sparse(parameter: nn.Parameter, replicas: TensorCollectives) -> None:
    """Sum a sparse gradient: the replicas exchange its rows and their indices."""
    gradient = parameter.grad
    mine: tuple[Tensor, Tensor] | None = None
    if gradient is not None:
        gradient = gradient.coalesce()
        mine = gradient.indices().cpu(), gradient.values().cpu()
    found = [rows for rows in replicas.members.exchange_objects(mine) if rows is not None]
    indices, values = (torch.cat(parts, dim) for parts, dim in zip(zip(*found, strict=True), (1, 0), strict=True))
    total = torch.sparse_coo_tensor(indices, values, parameter.shape, device=parameter.device).coalesce()
    parameter.grad = total.to(parameter.dtype)
