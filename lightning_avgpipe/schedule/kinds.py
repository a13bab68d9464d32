"""Kinds of actions, as data: what each waits for, sends, keeps and costs.

::

    F  forward          message from the stage before -> message to the stage after     stashes the micro-batch
    B  backward         own F, message from the stage after -> message to the one before           frees it
    I  input gradient   the half of a backward that others wait for: as B, but frees nothing yet
    W  weight gradient  the other half: own I; sends nothing, so that it may run whenever it is convenient; frees it
    G  graph            a forward that others do not wait for: as F, but sends nothing: what it gets has gone on already
    D  double forward   as F, for the stage before as well, which it does without a graph: there this is a G

The letters are those of torch.distributed.pipelining; papers on zero-bubble schedules write B for what is I here.
Rules that follow from these data are in ``rules``; a stage has a handler for each kind that it can run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Of several stages on each process: stage k after k - 1 on the next, or there and back.
Placement = Literal["loop", "v"]
Direction = Literal["forward", "backward"]  # in which a message travels: to the stage after, or to the one before


@dataclass(frozen=True, eq=False, repr=False)
class Kind:
    """What an action does with a micro-batch on a stage. There is one object of each kind, in every process.

    Attributes:
        symbol: as in ``F3``.
        name: for people.
        cost: the field of ``StageCosts`` with the seconds that it takes.
        consumes: the direction of the message that it waits for; None: it waits for none.
        produces: the direction of the message that it sends; None: it sends none.
        after: kinds that the stage has run on the micro-batch before.
        stash: change of the number of stashed micro-batches: 1 from the begin of the action on, -1 from its end on.
        priority: of what may run, the lowest goes first.
        counts_as: a kind that other kinds may wait for in its place; None: only itself.
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
