"""Broadcast forward: activations skip every other stage on their way, at the cost of running its forward twice.

::

    groups of three   root r, mid r + 1, leaf r + 2, from the last stage on; each leaf is the root of the next group
    K = 6             0 -> 1 => 2 => 3 => 4 => 5        roots 1, 3     mids 2, 4     leaves 3, 5

The mid relays the root's message to the leaf, in segments and without waiting for its own forward. The leaf runs the
mid's forward, keeping nothing for a backward and with a copy of the mid's weights, and then its own. The mid builds its
graph just before its backward, while the gradient is still on its way. So the leaf takes longer, but only half as many
hops of a value wait for each other: this is faster if links are slow.

::

    G  graph            a forward that no stage waits for: like F, but sends nothing, since its input was relayed
    D  double forward   like F, after the forward of the stage before, which that stage runs as G
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.builders import formula
from lightning_avgpipe.schedule.kinds import BACKWARD, FORWARD, Kind
from lightning_avgpipe.schedule.recipes import Recipe
from lightning_avgpipe.utils.allowed import check, has_options, whole

GRAPH = Kind(
    "G", "graph", lambda costs, k: costs.forward_s[k], "forward", None, (), 1, 1, "#b07aa1", FORWARD, relayed=True
)
DOUBLE_FORWARD = Kind(
    "D", "double forward", lambda costs, k: costs.forward_s[k] + (costs.forward_s[k - 1] if k else 0.0), "forward",
    "forward", (), 1, 1, "#76665c", FORWARD,
)  # fmt: skip


def leaf_stages(num_stages: int) -> range:
    """Return the leaves, from the last stage on. The stage before a leaf is a mid, and the one before that a root."""
    return range(num_stages - 1, 1, -2)


_ALLOWED = {"segments": whole(1, 1000, 8)}


@has_options(_ALLOWED)
@dataclass(frozen=True)
class Broadcast:
    """A callable that builds 1F1B with broadcast forward for K stages and M micro-batches.

    Attributes:
        segments: number of segments of a message, beta. It takes ``2 latency + (1 + 1 / beta) transfer`` through a mid.
    Raises:
        ConfigurationError: ``segments`` is not allowed.
    """

    segments: int = 8

    def __post_init__(self) -> None:
        check(_ALLOWED, vars(self), "Broadcast")

    @property
    def __name__(self) -> str:
        return "broadcast"

    def __call__(self, num_stages: int, num_microbatches: int) -> Schedule:
        """Build the schedule. With fewer than three stages it is 1F1B."""
        plain, leaves = formula("1f1b", num_stages, num_microbatches), leaf_stages(num_stages)
        rows = list(plain.rows)
        for leaf in leaves:
            rows[leaf] = tuple(a._replace(kind=DOUBLE_FORWARD) if a.kind is FORWARD else a for a in rows[leaf])
            rows[leaf - 1] = tuple(_late(num_microbatches))
        return replace(plain, name="broadcast", rows=tuple(rows), segments=self.segments if leaves else 1)


def _late(num_microbatches: int) -> Iterator[Action]:
    for i in range(num_microbatches):
        yield Action(GRAPH, i)
        yield Action(BACKWARD, i)


def check_forwards(schedule: Schedule) -> None:
    """Check that stages can run the forwards of a schedule; raise ScheduleError otherwise."""
    relays = schedule.relays
    for stage, row in enumerate(schedule.rows):
        kinds = {action.kind for action in row if action.kind.consumes == "forward"}
        wanted = GRAPH if stage in relays else DOUBLE_FORWARD if stage - 1 in relays else FORWARD
        if kinds - {wanted} or stage in relays - {*range(schedule.num_stages - 1)}:
            raise ScheduleError(
                f"stage {stage} of the schedule {schedule.name!r} runs {', '.join(sorted(k.name for k in kinds))}; "
                f"a stage that runs {GRAPH.name} ({GRAPH}) runs no other forwards, has one that runs {FORWARD} or "
                f"{DOUBLE_FORWARD} before it, and one after it that runs {DOUBLE_FORWARD.name} ({DOUBLE_FORWARD}) only"
            )


RECIPE = Recipe(
    lambda num_stages, count, *_: Broadcast()(num_stages, count),
    "any",
    about='For slow links: ``"broadcast"``, or ``Broadcast(segments=8)`` of ``lightning_avgpipe``: values pass every '
    "other stage unread, to a stage that has its weights as well. ``'auto'`` does not take it.",
)
