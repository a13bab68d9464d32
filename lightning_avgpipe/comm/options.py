"""Options: what a user may set about the links between processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from lightning_avgpipe.utils.allowed import Allowed, check, choice, either, flag, has_options, optional


def _is_matrix(value: Any) -> bool:
    """Return whether a value is a square matrix (lists) of positive finite numbers, except on its diagonal."""
    if not isinstance(value, (list, tuple)) or any(
        not isinstance(row, (list, tuple)) or len(row) != len(value) for row in value
    ):
        return False
    links = [speed for u, row in enumerate(value) for v, speed in enumerate(row) if u != v]
    return all(isinstance(speed, (int, float)) and 0 < speed < math.inf for speed in links) and len(value) > 0


def _is_backend(value: Any) -> bool:
    """Return whether a value is None, a backend of torch.distributed, or one per device: ``cpu:gloo,cuda:nccl``."""
    known = set(dist.Backend.backend_list) - {dist.Backend.UNDEFINED}
    return value is None or (
        isinstance(value, str) and all(part.rpartition(":")[2].lower() in known for part in value.split(","))
    )


ALLOWED = {
    "bandwidth": either(
        choice("measured"),
        Allowed("a list with a row of bytes per second for each process", "[[1e9, 1e8], [1e8, 1e9]]", _is_matrix),
    ),
    "wire": optional(choice("bf16", "int8", "auto"), "full precision"),
    "reader": choice("last", "first"),
    "send_batch": choice("needed", "all"),
    "shared_memory": flag(),
    "backend": Allowed(
        "a backend that torch.distributed knows, one for each kind of device, or None",
        "'cpu:gloo,cuda:nccl'",
        _is_backend,
    ),
}


@has_options(ALLOWED)
@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between processes, and what travels on them: ``AvgPipeStrategy(links=Links(...))``.

    Args:
        bandwidth: bandwidth of the links, for a planner that places stages by it: ``"measured"`` before planning, or
            bytes per second from each process (row) to each other one (column).
        wire: format in which activations and their gradients travel between processes. None: their own types.
            ``"bf16"``: rounded to bfloat16, half of the bytes of float32. ``"int8"``: each row (the last dimension)
            as multiples of its largest magnitude / 127, with unbiased stochastic rounding from random streams of its
            own, so that a run repeats bit for bit; about a quarter of the bytes. ``"auto"``: for each hop, the most
            precise of these with which a transfer takes no longer than the slowest stage computes for a micro-batch,
            by measured links and times; the plan says what it saves. The types in which stages compute do not change.
            In training, tensors that require a gradient are rounded if they have two dimensions or more and a floating
            type wider than the format (also float64). Integers, masks, tables, outputs of frozen layers, scalars,
            gradients of tied parameters, evaluation, averaging and checkpoints stay exact.
        reader: which stage's process reads the data: ``"last"`` (global rank 0, where the loss is) or ``"first"``, so
            that only labels travel, not large inputs. Hooks and callbacks on rank 0 then see less of a batch.
        send_batch: tensors of a batch that a process gets: ``"needed"`` by its stages (others are placeholders with a
            shape), or ``"all"``, for hooks and callbacks that look at batches on every rank.
        shared_memory: whether messages between processes that compute on the CPU of one host travel through shared
            memory instead of the network. Processes in different network namespaces use the network.
        backend: backend of torch.distributed, as ``process_group_backend`` of ddp. None: gloo for CPU, NCCL for CUDA.
    Raises:
        ConfigurationError: an option has a value that cannot work.
    """

    bandwidth: list[list[float]] | Literal["measured"] = "measured"
    wire: Literal["bf16", "int8", "auto"] | None = None
    reader: Literal["last", "first"] = "last"
    send_batch: Literal["needed", "all"] = "needed"
    shared_memory: bool = True
    backend: str | None = None

    def __post_init__(self) -> None:
        check(ALLOWED, vars(self), "Links")
