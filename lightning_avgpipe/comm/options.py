"""Options: what a user may set about the links between processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from lightning_avgpipe.utils.allowed import Allowed, check, choice, documented, either, flag, optional, suggesting_names


def _is_matrix(value: Any) -> bool:
    """Return whether a value is a square matrix, as lists, of positive finite numbers; the diagonal may be anything."""
    if not isinstance(value, (list, tuple)) or any(
        not isinstance(row, (list, tuple)) or len(row) != len(value) for row in value
    ):
        return False
    links = [speed for u, row in enumerate(value) for v, speed in enumerate(row) if u != v]
    return all(isinstance(speed, (int, float)) and 0 < speed < math.inf for speed in links) and len(value) > 0


def _is_backend(value: Any) -> bool:
    """Return whether torch.distributed knows a backend, or one for each kind of device: ``cpu:gloo,cuda:nccl``."""
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


@suggesting_names()
@documented(ALLOWED)
@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between processes, and what travels on them: ``AvgPipeStrategy(links=Links(...))``.

    Args:
        bandwidth: bandwidth of the links, for a planner that places stages by it: ``"measured"`` before the plan, one
            pair at a time, or bytes per second from each process (row) to each other one.
        wire: format in which activations and their gradients travel between processes. None: as they are.
            ``"bf16"``: rounded to bfloat16, half of the bytes of float32. ``"int8"``: each row (the last dimension)
            as multiples of its largest magnitude / 127, rounded up or down at random without bias, from streams of
            their own, so that a run repeats bit for bit; about a quarter of the bytes. ``"auto"``: per hop the mildest
            of these in which a transfer takes no longer than the slowest stage computes for a micro-batch, by measured
            links and times; the plan says what it saves. Stages compute in the types that they had. In training,
            tensors that require a gradient are narrowed if they have two dimensions or more and a floating type wider
            than the format (also float64). Integers, masks, tables, outputs of frozen layers, scalars, gradients of
            tied parameters, evaluation, averaging and checkpoints stay exact.
        reader: which stage's process reads the data: ``"last"`` (global rank 0, where the loss is) or ``"first"``, so
            that large inputs need not travel and only labels do. Rank 0's hooks and callbacks then see less of a batch.
        send_batch: tensors of a batch that a process gets: ``"needed"`` by its stages (others are placeholders with a
            shape), or ``"all"``, for hooks and callbacks that look at batches on every rank.
        shared_memory: whether messages between processes of one host, which compute there, travel through memory that
            both have, instead of the network. Processes with networks of their own do not share memory.
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
