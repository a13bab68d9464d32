"""SPP: stages on several devices each, chosen for links of different speed, with ``planner="spp"``.

``problem`` has the network and the times of plans, ``partition`` the candidates of the paper's planner, of which
``placement`` chooses one for replicas that take turns.

Source: Luo et al., *Efficient Pipeline Planning for Expedited Distributed DNN Training*, INFOCOM 2022.
"""

from lightning_avgpipe.planning.planner import SOURCES
from lightning_avgpipe.systems.spp.placement import SppSource

__all__ = ["SppSource"]

SOURCES["spp"] = SppSource
