"""Measure what a stage keeps in memory during an iteration, and predict what it would keep in another order.

::

    actions of a stage     F0    F1    B0    F2    B1    B2
    change in bytes        +s    +s    -s    +s    -s    -s
    kept                   s     2s    s     2s    s     0       the high-water mark is 2s; AFAB's would be 3s

What an action adds or frees does not depend on the order of actions. So the high-water mark of any other order (row)
follows from one measured iteration.

The lanes of several pipelines on a stage are counted together. The prediction for another row assumes that all of them
run it in step, so that all stashes are largest at the same time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.planning.memory import Holding
from lightning_avgpipe.schedule import Action
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.placeholder import has_memory
from lightning_avgpipe.utils.torch_compat import SavedHooks, storage_id, untraced


@dataclass(frozen=True)
class Footprint:
    """The memory that one stage uses, in bytes.

    Attributes:
        peak: most bytes in use, with weights, gradients, optimizer states and the batch.
        high_water: largest number of bytes that actions had added at the end of any action.
        changes: action -> bytes that it adds, summed over pipelines.
    """

    peak: int
    high_water: int
    changes: Mapping[Action, int]

    @classmethod
    def estimated(cls, held: int, stash: int, row: Sequence[Action]) -> Footprint:
        """Make a footprint from estimates.

        Args:
            held: bytes that the stage holds with any schedule.
            stash: bytes stashed per micro-batch, including the received values.
            row: actions of the stage in a schedule.
        """
        changes = {action: action.kind.stash * stash for action in row}
        high_water = _high_water(row, changes)
        return cls(held + high_water, high_water, changes)

    def predicted(self, row: Sequence[Action]) -> int:
        """Return the peak in bytes if the stage ran its actions in this order."""
        return self.peak + _high_water(row, self.changes) - self.high_water


def _high_water(row: Sequence[Action], changes: Mapping[Action, int]) -> int:
    return max(accumulate((changes[action] for action in row), initial=0))


class Meter(Observer, ABC):
    """An observer that measures the memory of a process's stages during one iteration."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[int, Action]]] = defaultdict(list)  # (pipeline, action), in order
        self._kept: dict[int, list[int]] = defaultdict(list)  # bytes before each action

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Run an action and measure it."""
        self._rows[work.stage].append((work.pipeline, work.action))
        self._kept[work.stage].append(self._now(work.stage))
        return self._measured(work, do)

    def finish(self, holdings: Mapping[int, Holding]) -> dict[int, Footprint]:
        """Return the measured footprints by stage. Their high water assumes that all pipelines reach theirs at once."""
        found = {}
        for stage, row in self._rows.items():
            kept, rows = [*self._kept[stage], self._now(stage)], defaultdict(list)
            changes: dict[Action, int] = defaultdict(int)
            for (pipeline, action), (before, after) in zip(row, pairwise(kept), strict=True):
                changes[action] += after - before
                rows[pipeline].append(action)
            high_water = _high_water(max(rows.values(), key=len), changes)
            found[stage] = Footprint(self._peak(stage, max(kept) - kept[0], holdings), high_water, dict(changes))
        return found

    @abstractmethod
    def _now(self, stage: int) -> int:
        """Return the bytes that the actions of a stage have added so far."""

    @abstractmethod
    def _measured(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        """Run an action, and note what it adds."""

    @abstractmethod
    def _peak(self, stage: int, top: int, holdings: Mapping[int, Holding]) -> int:
        """Return the peak of a stage in bytes, given the most that actions had added at the end of any of them."""


class HostMeter(Meter):
    """A meter that counts the storages that a backward will need, each once, as long as they exist.

    It counts tensors that autograd saves, received values, and sent or returned tensors. It does not count weights, the
    batch and temporary memory of operations. It is for devices whose allocator keeps no statistics.

    Args:
        excluded: weights, buffers and tensors of the batch, which are not counted.
    """

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        super().__init__()
        self._excluded = {storage_id(tensor) for tensor in excluded if has_memory(tensor)}
        self._alive: dict[int, dict[int, tuple[StorageWeakRef, int]]] = defaultdict(dict)
        self._received: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        self._total: dict[int, int] = defaultdict(int)
        self._highest: dict[int, int] = defaultdict(int)

    def _now(self, stage: int) -> int:
        alive = self._alive[stage]
        for key in [key for key, (reference, _) in alive.items() if reference.expired()]:
            self._total[stage] -= alive.pop(key)[1]
        return self._total[stage]

    def _measured(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        stage, micro_batch = work.stage, work.action.micro_batch

        def pack(tensor: Tensor) -> Tensor:
            # the tracer of the step must not see this
            with untraced():
                self._note(stage, tensor)
                return tensor.detach()  # an output that is not detached would keep its own graph alive

        with SavedHooks(pack, lambda tensor: tensor):
            output = do()
        received = self._received[stage, work.pipeline, micro_batch]
        if work.action.kind.stash > 0:
            for tensor in () if work.received is None else work.received.tensors:
                if tensor is not None and has_memory(tensor):
                    self._note(stage, tensor)
                    received.append(storage_id(tensor))
            for tensor in tree.tensors(work.results.get(micro_batch)) if output is None else output.tensors:
                if tensor is not None:
                    self._note(stage, tensor)
        elif work.action.kind.stash < 0:
            # a previous stage in this process still holds the values that it sent, and counts them
            while received:
                self._total[stage] -= self._alive[stage].pop(received.pop(), (None, 0))[1]
        return output

    def _note(self, stage: int, tensor: Tensor) -> None:
        if not has_memory(tensor):
            return
        storage, alive = tensor.untyped_storage(), self._alive[stage]
        key = storage_id(tensor)
        if key in self._excluded or key in alive:
            return
        alive[key] = StorageWeakRef(storage), storage.nbytes()
        self._total[stage] += storage.nbytes()
        self._highest[stage] = max(self._highest[stage], self._total[stage])

    def _peak(self, stage: int, top: int, holdings: Mapping[int, Holding]) -> int:
        return holdings[stage].total + max(top, self._highest[stage])


class DeviceMeter(Meter):
    """A meter that reads the statistics of the device's allocator, which include temporary memory of actions.

    It resets the allocator's own peak statistics.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._port = port_of(device)
        self._port.reset_peak()
        self._base = self._highest = self._port.allocated_bytes()
        self._own: dict[int, int] = defaultdict(int)  # bytes that each stage's actions have added so far

    def _now(self, stage: int) -> int:
        return self._own[stage]

    def _measured(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        before = self._port.allocated_bytes()
        output = do()
        after = self._port.allocated_bytes()
        self._highest = max(self._highest, before, after)
        self._own[work.stage] += after - before
        return output

    def _peak(self, stage: int, top: int, holdings: Mapping[int, Holding]) -> int:
        here = {k: holding.total - holding.unallocated for k, holding in holdings.items()}
        total = sum(here.values())
        # memory in use before the iteration is divided among the stages in proportion to what they hold
        base = self._base * here[stage] // total if total else self._base // len(self._rows)
        return base + holdings[stage].unallocated + top + self._port.peak_bytes() - self._highest
