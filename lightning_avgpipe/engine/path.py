"""Paths: what nodes gave on the stages so far, as the later ones are told."""

from __future__ import annotations

from typing import NamedTuple

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.utils.parcel import Parcel
from lightning_avgpipe.utils.placeholder import Description

# What a node gave: described, or what it wrote into objects too.
Entry = Description | Parcel


class Step(NamedTuple):
    """A node off the captured path, and what it gave."""

    node: Node
    entry: Entry


class Path(NamedTuple):
    """What the stages so far did with a micro-batch, if it was not what was captured.

    Attributes:
        entries: of captured nodes what they gave; then steps.
        values: the numbers of those that are sent.
        shared: those of them that share memory.
        ended: whether the step has returned None.
    """

    entries: tuple[Entry | Step, ...]
    values: tuple[int, ...]
    shared: frozenset[int]
    ended: bool = False
