"""Expressions: what becomes of an object that a line of code has loaded, and when.

::

    self.outputs.append(self.loss(batch))      loads the list, runs the step, and only adds to the list then
    self.total += self.loss(batch).item()      loads the number, runs the step, and takes the number then
    self.count["steps"] += 1                   looks at one item of the dict, at once
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lightning_avgpipe.utils.objects import is_open

__all__ = ["ALL", "Use", "uses"]

ALL: Any = object()
_KNOWN = (3, 11)
_LISTS, _DICTS = (list, deque), (dict, OrderedDict, defaultdict)
_COLLECTIONS = (*_LISTS, *_DICTS, set)
# Methods of these that tell nothing of what they hold.
_ONLY_WRITE = frozenset(("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "update"))
_PUSH = frozenset(("LOAD_CONST", "LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_GLOBAL", "PUSH_NULL"))
_NOTHING = frozenset(("NOP", "EXTENDED_ARG", "CACHE", "PRECALL", "KW_NAMES"))
_TAKE = {
    "BINARY_OP": 2, "COMPARE_OP": 2, "CONTAINS_OP": 2, "IS_OP": 2, "UNARY_NOT": 1, "UNARY_NEGATIVE": 1,
    "UNARY_POSITIVE": 1, "UNARY_INVERT": 1,
}  # fmt: skip
_BUILD = frozenset(("BUILD_LIST", "BUILD_TUPLE", "BUILD_SET", "BUILD_STRING"))


class Use(NamedTuple):
    """An instruction that depends on what an object holds.

    Attributes:
        offset: of the instruction in its code.
        held: the object.
        key: of the only item, or the name of the only attribute, that it depends on; ``ALL``: on everything that the
            object leads to.
    """

    offset: int
    held: Any
    key: Any


class _Slot(NamedTuple):
    """What is known of a place on the stack: which object is there, or whose method, or a constant.

    Attributes:
        owner: of the object, where it does not exist yet: a use of it is one of that.
    """

    held: Any
    method: str | None = None
    constant: bool = False
    owner: Any = None

    def use(self, offset: int, key: Any = ALL) -> Use:
        """A use of it."""
        return Use(offset, self.held, key) if self.owner is None else Use(offset, self.owner, ALL)


def uses(code: types.CodeType, last: int, held: Any) -> list[Use]:
    """What the code does, after the instruction that has loaded an object, with this object. It runs once, in order.

    Args:
        code: of the function.
        last: offset of the instruction, or of its cache.
        held: the object, on top of the stack.
    Returns:
        In order. What is not understood, jumps among it, counts as a use; so does all of it under versions of Python
        whose instructions are others.
    """
    if sys.version_info[:2] != _KNOWN:
        return [Use(last, held, ALL)]
    found: list[Use] = []
    stack: list[_Slot | None] = [_Slot(held)]

    def pop(number: int = 1) -> Sequence[_Slot | None]:
        stack[:0] = [None] * (number - len(stack))
        taken = stack[len(stack) - number :]
        del stack[len(stack) - number :]
        return taken

    def take(offset: int, slots: Sequence[_Slot | None]) -> None:
        found.extend(s.use(offset) for s in slots if s is not None and not s.constant)

    for instruction, following in itertools.pairwise(_after(code, last)):
        name, number, offset = instruction.opname, instruction.arg or 0, instruction.offset
        if name in _NOTHING:
            continue
        if name in _PUSH:
            stack += [None] * (name == "LOAD_GLOBAL" and number & 1)
            stack.append(_Slot(instruction.argval, constant=True) if name == "LOAD_CONST" else None)
        elif name == "COPY":
            stack.append(stack[-number] if number <= len(stack) else None)
        elif name == "SWAP":
            stack[:0] = [None] * (number - len(stack))
            stack[-1], stack[-number] = stack[-number], stack[-1]
        elif name == "POP_TOP":
            pop()
        elif name == "LOAD_METHOD" and stack and type(getattr(stack[-1], "held", None)) in _COLLECTIONS:
            stack += [pop()[0]._replace(method=instruction.argval), None]  # type: ignore[union-attr]
        elif name == "LOAD_METHOD":
            take(offset, pop())
            stack += [None, None]
        elif name == "LOAD_ATTR":
            stack.append(_part(offset, pop()[0], _attributes, instruction.argval, found))
        elif name == "STORE_ATTR":
            take(offset, pop(2)[:1])
        elif name == "BINARY_SUBSCR":
            container, key = pop(2)
            known = key is not None and key.constant
            take(offset, [key])
            stack.append(_part(offset, container, _items if known else _nothing, key and key.held, found))
        elif name == "STORE_SUBSCR":
            value, _, key = pop(3)
            take(offset, (value, key))
        elif name == "CALL":
            method, this, *given = pop(number + 2)
            take(offset, given)
            if method is None or method.method not in _ONLY_WRITE or following.opname != "POP_TOP":
                take(offset, (method, this))
            stack.append(None)
        elif name in _TAKE or name in _BUILD:
            take(offset, pop(_TAKE.get(name, number)))
            stack.append(None)
        else:
            take(offset, stack)
            break
        if not any(slot is not None and not slot.constant for slot in stack):
            break
    return found


def _part(
    offset: int, whole: _Slot | None, parts: Callable[[Any, Any], Any], key: Any, found: list[Use]
) -> _Slot | None:
    """What an object holds under a key; nothing that is followed if it may run code, or has no such key."""
    if whole is None or whole.constant:
        return None
    if parts is _items and type(whole.held) is defaultdict and key not in whole.held:
        made = getattr(whole.held, "default_factory", None)
        part: _Slot | None = _Slot(made(), owner=whole.held) if made in _COLLECTIONS else None
    else:
        try:
            part = _Slot(parts(whole.held, key)[key])
        except (LookupError, TypeError):
            part = None
    found.append(whole.use(offset, ALL if part is None else key))
    return part


def _items(held: Any, key: Any) -> Any:
    return held if type(held) in _LISTS or (type(held) in _DICTS and key in held) else ()


def _attributes(held: Any, name: str) -> Any:
    computed = hasattr(type(getattr(type(held), name, None)), "__set__")
    return {} if computed or not is_open(type(held)) else getattr(held, "__dict__", {})


def _nothing(held: Any, key: Any) -> Any:
    return {}


def _after(code: types.CodeType, last: int) -> Iterator[dis.Instruction]:
    """The instructions behind an offset, up to the end of the function; the last one twice."""
    instructions = _instructions(code)
    after = (instruction for instruction in instructions if instruction.offset > last)
    return itertools.chain(after, instructions[-1:])


@functools.lru_cache(maxsize=256)
def _instructions(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))
