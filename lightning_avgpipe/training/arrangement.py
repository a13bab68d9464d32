"""The arrangement: which processes host which stages, from plan to plan."""

from __future__ import annotations

from dataclasses import replace

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.topology import StageMap
from lightning_avgpipe.planning import Plan


class Arrangement:
    """The assignment of stages to the processes of a cluster. Every process calls its methods.

    Args:
        cluster: cluster before any plan.

    Attributes:
        planned: stage map of the current plan.
        placement: placement of several stages on each process, for the next plan.
        awaits_plan: whether a new plan is to be made with the step that begins.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._given = self.planned = cluster.stage_map
        self.placement = cluster.stage_map.placement
        self.awaits_plan = False

    def begin(self, num_stages: int) -> None:
        """Arrange the processes for ``num_stages`` stages, for which a plan will be made."""
        self._cluster.rearrange(replace(self._given, num_stages=num_stages, placement=self.placement))

    def placed(self, plan: Plan) -> StageMap:
        """Return the stage map for a plan."""
        return self._cluster.stage_map.placed(plan.devices) if plan.devices else self._cluster.stage_map

    def follow(self, planned: StageMap) -> None:
        """Arrange the processes for the stage map of a plan, a new one or the last one again."""
        self.planned = planned
        self._cluster.rearrange(planned)
