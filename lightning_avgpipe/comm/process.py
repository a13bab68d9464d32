"""A process of a cluster: its rank, its device and its network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lightning_avgpipe.comm.network import Connector


@dataclass(frozen=True)
class Process:
    """A process of a cluster, as it was started.

    Attributes:
        rank: rank of the process among all.
        device: device on which it computes.
        timeout_s: longest wait for another process, in seconds.
        network: network that connects it with others; unused if there are none.
        deaths: returns, for each rank that this process started and that has died, how it ended.
    """

    rank: int
    device: torch.device
    timeout_s: float
    network: Connector
    deaths: Callable[[], Mapping[int, str]] = dict
