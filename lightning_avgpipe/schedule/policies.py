"""Weight policies: when stages are updated, and which weights a micro-batch uses.

The policy ``"flush"`` drains the pipeline before each update, so that all actions of an iteration use the same weights.
Packages in ``systems`` add policies to ``POLICIES`` under which one pipeline goes on to the next batch in the order of
1F1B, while its stages are updated one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.recipes import build
from lightning_avgpipe.schedule.simulator import simulate
from lightning_avgpipe.schedule.timeline import Timeline


@dataclass(frozen=True)
class WeightPolicy:
    """A weight policy. This base class is the one that drains.

    Attributes:
        name: name of the policy.
        drains: whether the pipeline drains before each update.
    """

    name: str = "flush"
    drains: bool = True

    @property
    def repeats(self) -> bool:
        """Whether backwards use other weights than their forwards did, so that stages repeat forwards for them."""
        return False

    def check(self, num_stages: int, num_microbatches: int) -> None:
        """Check that a batch has enough micro-batches for the policy; raise ScheduleError otherwise."""

    def copies(self, num_stages: int, num_microbatches: int) -> list[int]:
        """Return how many copies of its weights each stage holds at most, including the current weights."""
        return [1] * num_stages

    def simulate(self, costs: StageCosts, num_microbatches: int, iterations: int, repeats: bool = True) -> Timeline:
        """Predict when each action runs. Updates take no time.

        Args:
            costs: seconds per action and message.
            num_microbatches: M, number of micro-batches of an update.
            iterations: number of updates from one drain to the next.
            repeats: whether to add the time of forwards that the policy repeats; otherwise the backwards include it.
        Raises:
            ScheduleError: ``iterations`` is below 1, or the policy needs more micro-batches.
        """
        return simulate(build("1f1b", costs.num_stages, num_microbatches), costs, iterations=iterations)

    def store(self, module: Any, optimizers: Callable[[], Sequence[Any]]) -> Any:
        """Return the store of the weight versions of a module; None if there is only one version.

        Args:
            module: whole module.
            optimizers: returns the current optimizers of the module.
        """
        return None

    def order(self, loop: Any) -> Any:
        """Return the order in which the iterations of a training loop run; None: the order with drains."""
        return None


POLICIES: dict[str, WeightPolicy] = {"flush": WeightPolicy()}

# Classes of option values that have a policy as their attribute ``policy`` -> an example of such a value, as code.
OPTION_TYPES: dict[type, str] = {}
OPTION_DOCS: list[str] = []  # sentences for the documentation of the option ``weight_policy``
