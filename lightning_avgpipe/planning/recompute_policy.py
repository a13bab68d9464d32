"""The option ``recompute``: which stages or units repeat their forwards, and the costs of this."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_avgpipe.capture.costs import Costs, value_bytes
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule import FORWARD, Action
from lightning_avgpipe.utils.names import fitting, is_within


@dataclass(frozen=True)
class Recompute:
    """A choice of the forwards that are repeated before, or during, a backward.

    Attributes:
        stages: whether whole stages are repeated before their backward.
        modules: paths of the modules whose units are repeated one by one during the backward.
    """

    stages: bool = False
    modules: tuple[str, ...] = ()

    def includes(self, unit: str) -> bool:
        """Return whether a unit is repeated by itself, because it or a module that holds it was named."""
        return any(is_within(unit, name) for name in self.modules)

    def check(self, graph: CallGraph) -> None:
        """Check that the chosen units can be repeated.

        Raises:
            ConfigurationError: a named unit changes its inputs, or a repeated unit seeds random number generators or
                keeps their state.
        """
        for unit in sorted(graph.seeding):
            if self.stages or self.includes(unit):
                raise ConfigurationError(
                    f"recompute repeats '{unit}', which seeds torch's random numbers or keeps their state, and so may "
                    "draw others the second time; do without recompute, or name units that do not"
                )
        for node in graph.nodes:
            if node.kind == "call" and node.writes and self.includes(node.name):
                raise ConfigurationError(
                    f"recompute names '{node.name}', which changes its input in place (at {node.source}): nothing is "
                    "left to repeat it from. Name the units around it only, use recompute=True, or compute out of place"
                )

    def costs(self, graph: CallGraph, costs: Costs) -> Costs:
        """Return costs in which named units repeat their forward in the backward, and stash only their inputs.

        The costs of repeating whole stages are added later by the partition, since they depend on the stage.
        """
        if not self.modules:
            return costs
        again = [node.kind == "call" and self.includes(node.name) for node in graph.nodes]
        values = value_bytes(graph, (value.index for value in graph.values))
        backward = (b + f * r for f, b, r in zip(costs.forward, costs.backward, again, strict=True))
        stash = (min(s, v) if r else s for s, v, r in zip(costs.stash_bytes, values, again, strict=True))
        return replace(costs, backward=tuple(backward), stash_bytes=tuple(stash))


def chosen(module: nn.Module, recompute: bool | Sequence[str]) -> Recompute:
    """Return the choice that the option ``recompute`` makes for a module.

    Args:
        module: module that is divided.
        recompute: True, False, or paths of submodules and patterns for them (``blocks.*``).
    Raises:
        ConfigurationError: a name fits no submodule. The message says which names come close.
    """
    if isinstance(recompute, bool):
        return Recompute(stages=recompute)
    names = [name for name, _ in module.named_modules() if name]
    return Recompute(modules=tuple(fitting(recompute, names, "recompute", module)))


def repeated(row: Sequence[Action], is_last: bool) -> frozenset[int]:
    """Return the micro-batches whose forward a stage repeats.

    A forward is not repeated if its backward follows immediately, on the last stage or if the forward sends nothing.
    """
    at_once = {
        action.micro_batch
        for action, following in itertools.pairwise(row)
        if (is_last or action.kind.produces is None)
        and (action.kind.counts_as or action.kind) in following.kind.after
        and action.micro_batch == following.micro_batch
    }
    return frozenset(action.micro_batch for action in row if FORWARD in action.kind.after) - at_once
