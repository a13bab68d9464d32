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

ALL: Any = object()
_KNOWN = ((3, 11), (3, 12), (3, 13))
_MARKS_METHODS = sys.version_info >= (3, 12)  # an attribute that will be called is one bit of its instruction
_LISTS, _DICTS = (list, deque), (dict, OrderedDict, defaultdict)
_COLLECTIONS = (*_LISTS, *_DICTS, set)
# Methods of these that tell nothing of what they hold.
_ONLY_WRITE = frozenset(("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "update"))
_PUSH = (
    "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_GLOBAL", "PUSH_NULL",
)  # fmt: skip
_NOTHING = ("NOP", "EXTENDED_ARG", "CACHE", "PRECALL", "KW_NAMES")
_TAKE = {
    "BINARY_OP": 2, "COMPARE_OP": 2, "CONTAINS_OP": 2, "IS_OP": 2, "UNARY_NOT": 1, "UNARY_NEGATIVE": 1,
    "UNARY_POSITIVE": 1, "UNARY_INVERT": 1, "TO_BOOL": 1,
}  # fmt: skip
_BUILD = ("BUILD_LIST", "BUILD_TUPLE", "BUILD_SET", "BUILD_STRING")


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
    if sys.version_info[:2] not in _KNOWN:
        return [Use(last, held, ALL)]
    stack = _Stack(held)
    for instruction, following in itertools.pairwise(_after(code, last)):
        step = _STEPS.get(instruction.opname)
        if step is None:
            stack.use(instruction, stack.slots)
            break
        stack.drops_next = following.opname == "POP_TOP"
        step(stack, instruction)
        if not any(slot is not None and not slot.constant for slot in stack.slots):
            break
    return stack.found


class _Stack:
    """What is known of the stack while instructions are followed.

    Attributes:
        slots: its top is last; below lies what was there before, of which nothing is known.
        found: uses so far.
        drops_next: whether what the instruction puts on top is dropped at once.
    """

    def __init__(self, held: Any) -> None:
        self.slots: list[_Slot | None] = [_Slot(held)]
        self.found: list[Use] = []
        self.drops_next = False

    def reach(self, number: int) -> int:
        """So many slots are there, at least."""
        self.slots[:0] = [None] * (number - len(self.slots))
        return number

    def pop(self, number: int = 1) -> Sequence[_Slot | None]:
        """Take so many from the top."""
        self.reach(number)
        taken = self.slots[len(self.slots) - number :]
        del self.slots[len(self.slots) - number :]
        return taken

    def push(self, *slots: _Slot | None) -> None:
        """Put on top; None: something new."""
        self.slots += slots

    def use(self, at: dis.Instruction, slots: Sequence[_Slot | None]) -> None:
        """An instruction uses what was there."""
        self.found.extend(s.use(at.offset) for s in slots if s is not None and not s.constant)


# What instructions do to the stack; `at` is the instruction.


def _push(stack: _Stack, at: dis.Instruction) -> None:
    """Something new, two things in some instructions."""
    two = at.opname == "LOAD_FAST_LOAD_FAST" or (at.opname == "LOAD_GLOBAL" and (at.arg or 0) & 1)
    stack.push(*[None] * (2 if two else 1))


def _copy(stack: _Stack, at: dis.Instruction) -> None:
    stack.push(stack.slots[-stack.reach(at.arg or 0)])


def _swap(stack: _Stack, at: dis.Instruction) -> None:
    number, slots = stack.reach(at.arg or 0), stack.slots
    slots[-1], slots[-number] = slots[-number], slots[-1]


def _attribute(stack: _Stack, at: dis.Instruction) -> None:
    (whole,) = stack.pop()
    if not (at.opname == "LOAD_METHOD" or (_MARKS_METHODS and (at.arg or 0) & 1)):
        stack.push(_part(at.offset, whole, _attributes, at.argval, stack.found))
    elif whole is not None and type(whole.held) in _COLLECTIONS:
        stack.push(whole._replace(method=at.argval), None)
    else:
        stack.use(at, [whole])
        stack.push(None, None)


def _set_attribute(stack: _Stack, at: dis.Instruction) -> None:
    value, _ = stack.pop(2)
    stack.use(at, [value])


def _item(stack: _Stack, at: dis.Instruction) -> None:
    container, key = stack.pop(2)
    known = key is not None and key.constant
    stack.use(at, [key])
    stack.push(_part(at.offset, container, _items if known else _nothing, key and key.held, stack.found))


def _set_item(stack: _Stack, at: dis.Instruction) -> None:
    value, _, key = stack.pop(3)
    stack.use(at, (value, key))


def _call(stack: _Stack, at: dis.Instruction) -> None:
    if at.opname == "CALL_KW":
        stack.pop()  # names
    method, this, *given = stack.pop((at.arg or 0) + 2)
    stack.use(at, given)
    if method is None or method.method not in _ONLY_WRITE or not stack.drops_next:
        stack.use(at, (method, this))
    stack.push(None)


def _combine(stack: _Stack, at: dis.Instruction) -> None:
    stack.use(at, stack.pop(_TAKE.get(at.opname, at.arg or 0)))
    stack.push(None)


_STEPS: dict[str, Callable[[_Stack, dis.Instruction], object]] = {
    **dict.fromkeys(_NOTHING, lambda stack, at: None),
    **dict.fromkeys(_PUSH, _push),
    **dict.fromkeys((*_TAKE, *_BUILD), _combine),
    **dict.fromkeys(("LOAD_METHOD", "LOAD_ATTR"), _attribute),
    **dict.fromkeys(("CALL", "CALL_KW"), _call),
    "LOAD_CONST": lambda stack, at: stack.push(_Slot(at.argval, constant=True)),
    "COPY": _copy,
    "SWAP": _swap,
    "POP_TOP": lambda stack, at: stack.pop(),
    "STORE_ATTR": _set_attribute,
    "BINARY_SUBSCR": _item,
    "STORE_SUBSCR": _set_item,
}


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
