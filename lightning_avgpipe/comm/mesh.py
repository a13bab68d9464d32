"""The mesh: a cluster under the names that callers knew it by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.clock import ClockOffset
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.device_layout import DeviceLayout
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.stage_map import StageMap

__all__ = ["Mesh"]

T = TypeVar("T")


class Mesh(Cluster):
    """Delegates."""

    def __init__(
        self,
        num_stages: int,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta,
        device_backend: str | None = None,
        reader: int = 0,
        device_layout: DeviceLayout | None = None,
        deaths: Callable[[], Mapping[int, str]] = dict,
        groups: type[ProcessGroups] = ProcessGroups,
    ) -> None:
        device_layout = device_layout or DeviceLayout(world_size)
        stage_map = StageMap.on(device_layout, num_stages, reader)
        network = groups(rank, device, timeout, device_backend)
        super().__init__(stage_map, rank, device, timeout, network, device_layout.sharing > 1, deaths)
        self.timeout = timeout
        self.recorder: Any = None
        self.meter: Any = None
        self.guard: Any = None
        self.when_agreed: Callable[[str], None] = lambda request: None
        self.num_stages, self.num_groups, self.layout = num_stages, stage_map.num_groups, stage_map.layout
        self.reader = reader

    def open(
        self, store: dist.Store | None = None, meet: Callable[[], object] = lambda: None, keeper: str | None = None
    ) -> None:
        opened = self._is_open
        super().open(store, meet, keeper)
        if not opened:
            self.control_channel.when_agreed(lambda request: self.when_agreed(request))

    @property
    def wiring(self) -> bool:
        return self._is_open

    @property
    def observers(self) -> tuple[Any, ...]:
        return tuple(observer for observer in (self.recorder, self.meter, self.guard) if observer is not None)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.group.ranks

    @property
    def world_size(self) -> int:
        return self.group.world_size

    def rank_of(self, stage: int) -> int:
        return self.stage_map.owner(stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return self.stage_map.stages(rank)

    def widen(self, num_pipelines: int) -> None:
        self.transport.widen(num_pipelines)

    def record(self, recorder: Any) -> None:
        self.recorder = recorder

    def agreed(self, request: str) -> bool:
        return self.control_channel.agreed(request)

    def report(self, error: BaseException) -> None:
        self.monitor.report(error)

    def together(self, what: str, collective: Callable[[], object]) -> None:
        self.group.together(what, collective)

    def barrier(self, what: str = "a barrier") -> None:
        self.group.barrier(what)

    def broadcast(self, item: T, source: int = 0) -> T:
        return self.group.broadcast(item, source)

    def gather_objects(self, item: T) -> list[T]:
        return self.group.gather_objects(item)

    def exchange_objects(self, item: T) -> list[T]:
        return self.group.exchange_objects(item)

    def clock(self) -> ClockOffset:
        return self.group.clock()

    def sum(self, tensor: Tensor) -> Tensor:
        return self.group.sum(tensor)
