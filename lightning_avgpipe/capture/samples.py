"""Samples: what was measured of the nodes of steps, and which node is measured how often."""

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
    """One execution of a node alone, in seconds."""

    forward_s: float
    backward_s: float


@dataclass
class Samples:
    """What was measured, by kinds of calls: another graph with the same calls need not measure them again."""

    found: dict[Hashable, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    complete: set[Hashable] = field(default_factory=set)
    spent_s: float = 0.0

    def median(self, kind: Hashable) -> Sample:
        """The median of forwards, and that of backwards."""
        samples = self.found[kind]
        return Sample(statistics.median(s.forward_s for s in samples), statistics.median(s.backward_s for s in samples))


class Sampling:
    """Samples that are taken in one run of a step.

    Args:
        kinds: of its nodes; those of the same kind share their samples.
        samples: to which new ones are added.
        deadline: when repetitions end, as ``time.perf_counter()``.
    """

    def __init__(self, kinds: Sequence[Hashable], samples: Samples, deadline: float) -> None:
        self._kinds = kinds
        self._samples = samples
        self._deadline = deadline
        self._calls: dict[Hashable, int] = defaultdict(int)

    def wants(self, index: int) -> bool:
        """Whether a node is to be measured."""
        kind = self._kinds[index]
        return kind not in self._samples.complete and self._calls[kind] < _CALLS

    def add(self, index: int, sample: Sample) -> None:
        """A sample of a node that was measured in another way."""
        self._samples.found[self._kinds[index]].append(sample)

    def repeat(self, index: int, begin: float, warm_up: Sample, once: Callable[[], Sample]) -> None:
        """Measure a node a few times, or let the warm-up count where there is no time for more.

        Args:
            index: of the node.
            begin: of the warm-up, as ``time.perf_counter()``.
            warm_up: the first execution, which takes longer.
            once: executes the node.
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
