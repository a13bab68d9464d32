"""The kinds of actions as data: what each waits for, sends, stashes and costs.

::

    F  forward          message from the stage before -> message to the stage after     stashes the micro-batch
    B  backward         own F, message from the stage after -> message to the one before           frees it
    I  input gradient   the half of a backward that others wait for: as B, but frees nothing yet
    W  weight gradient  the other half: own I; sends nothing, so it may run at any time after I; frees it
    G  graph            a forward that no stage waits for: as F, but sends nothing, as its input was relayed already
    D  double forward   as F, after the forward of the stage before, which runs here without a graph and there as G

The letters are those of torch.distributed.pipelining; papers on zero-bubble schedules write B for what is I here.
The module ``rules`` derives rules from these data. A stage has a handler for each kind that it can run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Placement of several stages on each process: stage k on the process after that of k - 1, or there and back as a V.
Placement = Literal["loop", "v"]
Direction = Literal["forward", "backward"]  # of a message: to the stage after, or to the one before


@dataclass(frozen=True, eq=False, repr=False)
class Kind:
    """A kind of action on a micro-batch. Every process has exactly one object of each kind.

    Attributes:
        symbol: letter of the kind, as in ``F3``.
        name: name of the kind in messages and pictures.
        cost: field of ``StageCosts`` with the seconds that an action takes.
        consumes: direction of the message that an action waits for; None: it waits for none.
        produces: direction of the message that an action sends; None: it sends none.
        after: kinds that the stage must have run on the micro-batch before.
        stash: change of the number of stashed micro-batches: 1 from the begin of the action on, -1 from its end on.
        priority: of the actions that may run, the one with the lowest priority value goes first.
        counts_as: kind as which an action counts for kinds that wait for it; None: its own kind.
    """

    symbol: str
    name: str
    cost: str
    consumes: Direction | None
    produces: Direction | None
    after: tuple[Kind, ...]
    stash: int
    priority: int
    counts_as: Kind | None = None

    def __repr__(self) -> str:
        return self.symbol

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _of_symbol, (self.symbol,)


FORWARD = Kind("F", "forward", "forward_s", "forward", "forward", (), 1, 1)
BACKWARD = Kind("B", "backward", "backward_s", "backward", "backward", (FORWARD,), -1, 0)
INPUT_GRADIENT = Kind("I", "input gradient", "input_s", "backward", "backward", (FORWARD,), 0, 0)
WEIGHT_GRADIENT = Kind("W", "weight gradient", "weight_s", None, None, (INPUT_GRADIENT,), -1, 2)
GRAPH = Kind("G", "graph", "forward_s", "forward", None, (), 1, 1, FORWARD)
DOUBLE_FORWARD = Kind("D", "double forward", "double_s", "forward", "forward", (), 1, 1, FORWARD)

KINDS = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, GRAPH, DOUBLE_FORWARD)

# The ways in which a stage may treat a micro-batch; the first is that of an iteration that does not train.
COURSES = (
    (FORWARD,),
    (FORWARD, BACKWARD),
    (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT),
    (GRAPH, BACKWARD),
    (DOUBLE_FORWARD, BACKWARD),
)


def _of_symbol(symbol: str) -> Kind:
    return next(kind for kind in KINDS if kind.symbol == symbol)
