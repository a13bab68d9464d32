"""Two plain runs of one pipeline's batches, in forked children; what differs between them differs by nature."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from lightning_avgpipe.utils.forked import Child, ForkError
from lightning_avgpipe.verify.fingerprint import how_different
from lightning_avgpipe.verify.plain import Batch, Traces

_APART_S = 1.0  # least time between the two runs, so that a clock in whole seconds differs between them

# kinds of results, as attributes of Traces and in words
KINDS = {
    "losses": "the loss",
    "gradients": "the gradient",
    "buffers": "the buffer",
    "attributes": "the attribute",
    "logged": "the logged value",
    "weights": "the weight after the optimizer step",
}
OF_USERS = ("attributes", "logged")  # kinds whose values may hold anything that user code computes

Natural = dict[tuple[str, str], str]  # what differs by nature: kind and family of names -> one name of the family


class PlainRuns:
    """Plain runs of the same batches in two children, forked at the same moment.

    The first trains while the pipeline trains. The second waits for its first batch, and costs nothing, until the first
    contradicts the pipeline and :meth:`repeated` is called. Iterations are compared in order, one at a time.

    Args:
        play: trains in a child on the batches of a connection; its first argument is the number of seconds to wait
            after the first batch has arrived.
        why_not: returns why the second run cannot begin now; None if it can.
    Raises:
        ForkError: a child could not be forked; then no child is left.
    """

    def __init__(self, play: Callable[[float, Connection], Any], why_not: Callable[[], str | None]) -> None:
        self._first = Child(partial(play, 0.0), "trains plainly, to verify the pipeline")
        try:
            self._second = Child(partial(play, _APART_S), "trains plainly once more, to tell what differs by nature")
        except ForkError:
            self._first.close()
            raise
        self._why_not = why_not
        self._sent: list[list[Batch]] = []  # by iteration
        # numbers of iterations: compared, sent to the second run, and received from the second run
        self._done = self._given = self._answered = 0
        self._expected: Traces | None = None
        self._again: Traces | None = None

    def send(self, batch: Batch) -> None:
        """Send a batch to the first run, and keep it for the second.

        Raises:
            ForkError: the child has died.
        """
        if not batch.evaluation:
            self._sent.append([])
        self._sent[-1].append(replace(batch, whole=None))
        self._first.send(batch)

    def expected(self, timeout_s: float | None) -> Traces:
        """Return the results of the first run for the next iteration to compare.

        Args:
            timeout_s: seconds to wait; None: wait as long as the child computes.
        Raises:
            TimeoutError: they have not arrived in time.
            Exception: the plain run has failed.
        """
        if self._expected is None:
            self._expected = self._first.receive(timeout_s)
        return self._expected

    def repeated(self, timeout_s: float | None) -> Traces:
        """Return the results of the second run for the next iteration to compare; see :meth:`expected`."""
        while self._answered <= self._done:
            if not self._given and (why := self._why_not()) is not None:
                raise ForkError(f"a second plain run cannot be made: {why}")
            if self._given == self._answered:  # send one at a time, since the child reads only before it computes
                self._given += 1
                for batch in self._sent[self._answered]:
                    self._second.send(batch)
            self._again = self._second.receive(timeout_s)
            self._answered += 1
        assert self._again is not None
        return self._again

    def next_iteration(self) -> None:
        """Go on to the next iteration, since this one has been compared."""
        self._done += 1
        self._expected = None

    def close(self) -> None:
        """End both children."""
        self._first.close()
        self._second.close()


def differing(one: Traces, other: Traces) -> Natural:
    """Return what differs between two plain runs of the same batch."""
    found: Natural = {}
    for kind in KINDS:
        first, second = getattr(one, kind), getattr(other, kind)
        for name in dict.fromkeys((*first, *second)):
            if not equal(first, second, name):
                found.setdefault((kind, _family(kind, name)), name)
    return found


def without(natural: Natural, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of a kind that do not differ by nature."""
    return {name: value for name, value in values.items() if (kind, _family(kind, name)) not in natural}


def equal(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    """Return whether an entry is the same in both, or in neither."""
    if name not in one or name not in other:
        return name not in one and name not in other
    return how_different(one[name], other[name]) is None


def _family(kind: str, name: str) -> str:
    """Return the family of a name. Either all names of a family are compared, or none.

    A coarse clock may show two runs the same time by chance. So a difference in one entry of a container counts for all
    of them, and one in an attribute or logged value for all whose names differ by a number only (layers of a model).
    """
    if kind not in OF_USERS:
        return name
    container = re.split(r"\[| has ", name.removeprefix("len("), maxsplit=1)[0]
    return re.sub(r"\d+", "#", container.removesuffix(")"))
