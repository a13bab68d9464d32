"""Broadcast forward, for slow links: ``schedule`` has the order of actions, ``double`` how stages run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_avgpipe.engine import pipeline, stage
from lightning_avgpipe.schedule import kinds, recipes, rules
from lightning_avgpipe.schedule.kinds import BACKWARD
from lightning_avgpipe.strategy import combinations
from lightning_avgpipe.systems.broadcast.double import DoubleForwards, Doubles
from lightning_avgpipe.systems.broadcast.schedule import DOUBLE_FORWARD, GRAPH, RECIPE, Broadcast, check_forwards

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.options import Options

__all__ = ["DOUBLE_FORWARD", "GRAPH", "Broadcast"]


def _rolling(given: Options) -> None:
    """Refuse models that roll: copies of weights would have to travel while another iteration runs."""
    broadcasts = given.schedule == "broadcast" or isinstance(given.schedule, Broadcast)
    why = "weights are sent to the next stage before an iteration, which cannot be done while another one runs"
    if given.averaging.rolling is True:
        asked, instead = "Averaging(rolling=True)", "leave it out, or use Averaging(rolling=False)"
        refused = {"schedule": (broadcasts, why)}
        combinations.refuse(given, refused, lambda option, why: f"{asked} with {option}: {why}; {instead}")


kinds.register((GRAPH, BACKWARD), (DOUBLE_FORWARD, BACKWARD))
recipes.RECIPES["broadcast"] = RECIPE
rules.CHECKS.append(check_forwards)
stage.PARTS.append(DoubleForwards)
pipeline.PARTS.append(Doubles)
combinations.RULES.append(_rolling)
