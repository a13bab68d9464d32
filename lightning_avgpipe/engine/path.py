"""Define the message about what nodes returned on the stages so far."""

from __future__ import annotations

from typing import NamedTuple

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.state.parcel import Parcel
from lightning_avgpipe.utils.placeholder import Description

# Description of a node's result, with the objects that it wrote into if there are any.
Entry = Description | Parcel


class OffPathNode(NamedTuple):
    """A node that was not captured, and the description of its result."""

    node: Node
    entry: Entry


class Path(NamedTuple):
    """The nodes that earlier stages executed with a micro-batch, if these were not the captured ones.

    Attributes:
        entries: descriptions of the results of captured nodes, then steps.
        values: indices of the values that are sent.
        shared: indices of the values that share memory.
        ended: whether the step has returned None.
    """

    entries: tuple[Entry | OffPathNode, ...]
    values: tuple[int, ...]
    shared: frozenset[int]
    ended: bool = False
