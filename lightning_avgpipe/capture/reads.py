"""Define the reads of attributes and variables in one step, and watch those of variables outside of modules.

Python has no hook for reads of global variables, as it has for those of attributes. So the frames whose code names such
a variable are traced, instruction by instruction, as by a debugger.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lightning_avgpipe.capture.draft import END_OF_STEP
from lightning_avgpipe.state.outside import loads_of, variables

Key = tuple[str, str]  # path of a module and name of an attribute or buffer; or "" and the full name of a variable
Now = Callable[[], tuple[int, bool]]  # returns the number of nodes so far, and whether a unit is running

# Methods of collections that change them and return nothing.
_WRITING = ("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "update")


class Read(NamedTuple):
    """A read of an attribute, or of an object.

    Attributes:
        position: number of nodes before.
        in_unit: whether the running node reads it, on one stage; otherwise each stage that gets that far reads it.
        source: the line that reads it.
        held: the object that the attribute holds.
        carried: whether the object may come from the previous step.
        adds: whether the line only adds to a collection, so that it does not read its contents.
        own: whether the running unit has assigned the attribute itself.
    """

    position: int
    in_unit: bool
    source: str
    held: Any = None
    carried: bool = True
    adds: bool = False
    own: bool = False

    @property
    def end(self) -> int:
        """The first position after the read."""
        return self.position + self.in_unit

    def apart_from(self, node: int) -> tuple[int, int]:
        """Return the first and last position at which a cut would part the read from a change by a node."""
        if not self.in_unit:  # every stage that gets that far reads it
            return max(1, min(self.position, node + 1)), END_OF_STEP
        return min(node, self.position) + 1, max(node, self.position)


def as_free(reads: Iterable[Read], position: int) -> list[Read]:
    """Return the reads, with those at this position marked as between units, since every stage runs the unit there."""
    return [read._replace(in_unit=False) if read.position == position else read for read in reads]


def in_order(reads: Iterable[Read]) -> list[Read]:
    """Return reads by position, then by source line."""
    return sorted(reads, key=lambda read: read[:3])


def only_adds(frame: types.FrameType, held: Any) -> bool:
    """Return whether the next operation on a loaded collection only adds to it, so that its contents are not read.

    ``self.outputs.append(self.loss(batch))`` and ``self.features[name] = output`` load the collection first. Counted as
    reads, these would keep the whole step on one stage.
    """
    if type(held) not in (list, dict, set, deque):
        return False
    following = itertools.dropwhile(lambda i: i.offset <= frame.f_lasti, _instructions(frame.f_code))
    first = next(following, None)
    if first is None or (first.argval in _WRITING and first.opname in ("LOAD_ATTR", "LOAD_METHOD")):
        return first is not None
    loaded = 0  # the key of an item
    for instruction in itertools.chain((first,), following):
        if not instruction.opname.startswith("LOAD_"):
            return instruction.opname == "STORE_SUBSCR" and loaded == 1
        loaded += instruction.opname != "LOAD_ATTR"
    return False


@functools.lru_cache(maxsize=256)
def _instructions(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


class VariableReads:
    """The reads of some variables in one step.

    Args:
        module: module whose code names the variables.
        keys: the variables, by an empty path and full name.
        now: returns the position, and whether a unit is running.

    Attributes:
        reads: variable -> its reads. A variable whose reads cannot be seen counts as read at the beginning. These are
            variables that no instruction names (default arguments), and all of them if a debugger already traces.
    """

    def __init__(self, module: nn.Module, keys: Collection[Key], now: Now) -> None:
        self._variables = variables(module, keys)
        self._loads = loads_of(module, [name for _, name in keys]) if keys else {}
        self._now = now
        seen = {name for loads in self._loads.values() for names in loads.values() for name in names}
        self.reads: dict[Key, list[Read]] = {key: [] if key[1] in seen else self._unseen(key) for key in keys}

    def _unseen(self, key: Key) -> list[Read]:
        return [Read(0, False, "a line that does not name it", self._variables[key])]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch reads within this context."""
        if not self._loads:
            yield
            return
        if sys.gettrace() is not None:
            self.reads = {key: self._unseen(key) for key in self.reads}
            yield
            return
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if frame.f_code not in self._loads:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._look

    def _look(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        for name in self._loads[code].get(frame.f_lasti, ()) if event == "opcode" else ():
            variable = self._variables["", name]
            source = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
            adds = only_adds(frame, variable.state().get("value"))
            self.reads["", name].append(Read(*self._now(), source, variable, adds=adds))
        return self._look
