"""Collect samples of the nodes' costs, and decide which node is measured how often."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_CALLS = 2  # equal calls that are measured in one run of the step
_REPETITIONS = 3
_SHORT_S = 0.02  # repetitions of one call end after this time


class Sample(NamedTuple):
    """The seconds of one execution of a node alone."""

    forward_s: float
    backward_s: float


@dataclass
class Samples:
    """Samples by kind of call, shared by graphs that have the same calls."""

    found: dict[Hashable, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    complete: set[Hashable] = field(default_factory=set)
    spent_s: float = 0.0

    def median(self, kind: Hashable) -> Sample:
        """Return the median of the forwards, and that of the backwards."""
        samples = self.found[kind]
        return Sample(statistics.median(s.forward_s for s in samples), statistics.median(s.backward_s for s in samples))

    def take(self, other: Samples) -> None:
        """Replace these samples by another process's, which started from these."""
        self.found, self.complete, self.spent_s = other.found, other.complete, other.spent_s


class Sampling:
    """The samples that are taken in one run of a step.

    Args:
        kinds: kind of each node; nodes of the same kind share their samples.
        samples: collection to which new samples are added.
        deadline: time at which repetitions end, as ``time.perf_counter()``.
    """

    def __init__(self, kinds: Sequence[Hashable], samples: Samples, deadline: float) -> None:
        self._kinds = kinds
        self._samples = samples
        self._deadline = deadline
        self._calls: dict[Hashable, int] = defaultdict(int)

    def wants(self, index: int) -> bool:
        """Return whether a node is to be measured in this run."""
        kind = self._kinds[index]
        return kind not in self._samples.complete and self._calls[kind] < _CALLS

    def add(self, index: int, sample: Sample) -> None:
        """Add a sample of a node."""
        self._samples.found[self._kinds[index]].append(sample)

    def repeat(self, index: int, begin: float, warm_up: Sample, once: Callable[[], Sample]) -> None:
        """Measure a node a few times, or use the warm-up as its sample if there is no time for more.

        Args:
            index: index of the node.
            begin: start of the warm-up, as ``time.perf_counter()``.
            warm_up: first execution, which takes longer.
            once: execute the node once more.
        """
        self._calls[self._kinds[index]] += 1
        took = time.perf_counter() - begin
        share = max(0.0, self._deadline - time.perf_counter()) / (len(self._kinds) - index)
        if took > share:
            self.add(index, warm_up)
            return
        for _ in range(_REPETITIONS):
            self.add(index, once())
            if time.perf_counter() - begin > min(share, _SHORT_S) + took:
                break
