"""Costing: find the costs of nodes by measuring them on the device, or by counting operations."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Literal

from lightning_avgpipe.capture.cost_cache import CostCache, fingerprint
from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.measure import measure
from lightning_avgpipe.capture.node_trial import Samples
from lightning_avgpipe.planning.divisible import Divisible, Step

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Costing:
    """The settings of how costs are found.

    Attributes:
        kind: ``"measured"``: on the device; ``"flops"``: counted operations.
        cache: cache of measured costs; None: costs are measured every time.
        samples: measurements on this device for earlier plans, which are reused.
    """

    kind: Literal["measured", "flops"] = "flops"
    cache: CostCache | None = None
    samples: Samples = field(default_factory=Samples, compare=False)

    def measured(self, subject: Divisible, step: Step, graph: CallGraph) -> Costs:
        """Return the measured costs of a step's units, from the cache if it has them."""
        key, about = fingerprint(graph, subject.module, subject.place)
        costs = self.cache.load(key, len(graph.nodes)) if self.cache is not None else None
        if costs is None:
            begin = time.perf_counter()
            costs = measure(graph, step.run, step.args, subject.module, subject.place, self.samples)
            _log.info("measured %d nodes of %s in %.1f s", len(graph.nodes), step.name, time.perf_counter() - begin)
            if self.cache is not None:
                self.cache.save(key, costs, about)
        return costs
