"""Zero bubble: schedules that split backwards in two, so that the gradients of weights fill idle time.

``schedules`` has the kinds of actions and the orders, and ``halves`` runs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_avgpipe.engine import stage
from lightning_avgpipe.schedule import kinds, recipes
from lightning_avgpipe.schedule.kinds import FORWARD
from lightning_avgpipe.strategy import combinations
from lightning_avgpipe.systems.zero_bubble.halves import Halves
from lightning_avgpipe.systems.zero_bubble.schedules import INPUT_GRADIENT, RECIPES, WEIGHT_GRADIENT, halved

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.options import Options

__all__ = ["INPUT_GRADIENT", "WEIGHT_GRADIENT", "halved"]


def _compiled(given: Options) -> None:
    """Refuse to split the backwards of compiled units."""
    splitting = ["auto", *(name for name, recipe in RECIPES.items() if recipe.splits)]
    why = "the backward of a compiled unit cannot be split; use a schedule with whole ones, such as 'advance_forward'"
    if given.compile is not False:
        refused = {"schedule": (given.schedule in splitting, why)}
        combinations.refuse(given, refused, lambda option, why: f"compile={given.compile!r} with {option}: {why}")


kinds.register((FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT))
recipes.RECIPES.update(RECIPES)
stage.PARTS.append(Halves)
combinations.RULES.append(_compiled)
