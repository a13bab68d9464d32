"""A process of a cluster, as it was started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lightning_avgpipe.comm.network import Network


@dataclass(frozen=True)
class Process:
    """This one.

    Attributes:
        rank: among all.
        device: on which it computes.
        timeout_s: longest wait for another process, in seconds.
        network: connects it with others; not asked if there are none.
        deaths: rank among all -> how it ended, of those processes started by this one that have died.
    """

    rank: int
    device: torch.device
    timeout_s: float
    network: Network
    deaths: Callable[[], Mapping[int, str]] = dict
