"""The arrangement: which processes host which stages, from plan to plan."""

from __future__ import annotations

from dataclasses import replace

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.planning import Plan


class Arrangement:
    """Tells a cluster who hosts what. Every process calls its methods.

    Args:
        cluster: before any plan.

    Attributes:
        planned: as of the plan that is followed.
        placement: of several stages on each process, in the next plan.
        awaits_plan: whether a plan is made with the step that begins.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._given = self.planned = cluster.stage_map
        self.placement = cluster.stage_map.placement
        self.awaits_plan = False

    @property
    def has_changed(self) -> bool:
        """Whether processes host other stages than before any plan, but for groups that have left, or are about to."""
        return self.awaits_plan or self.planned != replace(self._given, layout=self.planned.layout)

    def begin(self, num_stages: int) -> None:
        """A plan will be made for so many stages."""
        self._cluster.rearrange(replace(self._given, num_stages=num_stages, placement=self.placement))

    def placed(self, plan: Plan) -> StageMap:
        """Who is to host the stages of a plan."""
        return self._cluster.stage_map.placed(plan.devices) if plan.devices else self._cluster.stage_map

    def follow(self, planned: StageMap) -> None:
        """The processes host the stages of a plan: of a new one, or again of the one before."""
        self.planned = planned
        self._cluster.rearrange(planned)
