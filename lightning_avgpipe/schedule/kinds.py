"""The kinds of actions as data: what each kind waits for, sends, stashes and costs.

::

    F  forward          message from the stage before -> message to the stage after     stashes the micro-batch
    B  backward         own F, message from the stage after -> message to the one before           frees it

Packages in ``systems`` register further kinds, with the sequences in which stages run them. The letters are those of
torch.distributed.pipelining. The module ``rules`` derives rules from these data. A stage has a handler for each kind
that it can run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lightning_avgpipe.schedule.costs import StageCosts

# Placement of several stages on each process: stage k on the process after that of stage k - 1, in a loop; or there and
# back, in the shape of a V.
Placement = Literal["loop", "v"]
Direction = Literal["forward", "backward"]  # of a message: to the stage after, or to the one before


@dataclass(frozen=True, eq=False, repr=False)
class Kind:
    """A kind of action on a micro-batch. Every process has exactly one object of each kind.

    Attributes:
        symbol: letter of the kind, as in ``F3``.
        name: name of the kind in messages and pictures.
        seconds: returns the seconds that an action of a stage takes, unless the costs give them for this kind.
        consumes: direction of the message that an action waits for; None: it waits for none.
        produces: direction of the message that an action sends; None: it sends none.
        after: kinds that the stage must have run on the micro-batch before.
        stash: change of the number of stashed micro-batches: 1 when the action starts, or -1 when it ends.
        priority: of the actions that may run, the one with the lowest priority value goes first.
        colour: colour in pictures.
        counts_as: kind that an action of this kind counts as, for kinds that have it in ``after``; None: its own kind.
        relayed: whether the message that an action waits for is also passed on to the next stage.
    """

    symbol: str
    name: str
    seconds: Callable[[StageCosts, int], float]
    consumes: Direction | None
    produces: Direction | None
    after: tuple[Kind, ...]
    stash: int
    priority: int
    colour: str
    counts_as: Kind | None = None
    relayed: bool = False

    def __repr__(self) -> str:
        return self.symbol

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _of_symbol, (self.symbol,)


FORWARD = Kind("F", "forward", lambda costs, k: costs.forward_s[k], "forward", "forward", (), 1, 1, "#4c84c4")
BACKWARD = Kind(
    "B", "backward", lambda costs, k: costs.backward_s[k], "backward", "backward", (FORWARD,), -1, 0, "#5fa65a"
)

KINDS: list[Kind] = [FORWARD, BACKWARD]

# The possible sequences of actions of a micro-batch on one stage; the first is for iterations without training.
ACTION_SEQUENCES: list[tuple[Kind, ...]] = [(FORWARD,), (FORWARD, BACKWARD)]


def register(*sequences: tuple[Kind, ...]) -> None:
    """Register further sequences of kinds that a stage may run on a micro-batch in training, and the kinds in them."""
    ACTION_SEQUENCES.extend(sequences)
    KINDS.extend(dict.fromkeys(kind for sequence in sequences for kind in sequence if kind not in KINDS))


def _of_symbol(symbol: str) -> Kind:
    return next(kind for kind in KINDS if kind.symbol == symbol)
