"""SPP: plans for links of different speed, in which stages may be on several devices each, with ``planner="spp"``.

``problem`` has the network and the times of plans, ``partition`` the planner of the paper, and ``placement`` plans for
replicas that take micro-batches in turns.

Source: Luo et al., *Efficient Pipeline Planning for Expedited Distributed DNN Training*, INFOCOM 2022.
"""

from lightning_avgpipe.planning.planner import SOURCES
from lightning_avgpipe.systems.spp.partition import SppPlan, execution_order, partition, plan
from lightning_avgpipe.systems.spp.placement import SppSource, plan_in_turns
from lightning_avgpipe.systems.spp.problem import device_order

__all__ = ["SppPlan", "SppSource", "device_order", "execution_order", "partition", "plan", "plan_in_turns"]

SOURCES["spp"] = SppSource
