"""Snapshot: what can be reached from some roots is put back, whatever holds it."""

from __future__ import annotations

import ctypes
import functools
import tracemalloc
from argparse import Namespace
from array import array as numbers
from collections import OrderedDict, defaultdict, deque
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import lightning as L
import numpy as np
import pytest
import torch

from lightning_avgpipe.state.snapshot import Snapshot, leading
from lightning_avgpipe.state.untouched import attributes, untouched


class Slotted:
    __slots__ = ("one", "other")

    def __init__(self) -> None:
        self.one = 1


@dataclass(frozen=True)
class Frozen:
    items: list[int] = field(default_factory=list)


class Numbers(list[int]):
    note = ""


def counter() -> Any:
    count = 0

    def more() -> int:
        nonlocal count
        count += 1
        return count

    return more


HOLDERS = {
    "dict": ({"a": 1}, lambda o: o.update(b=2), dict),
    "ordered": (OrderedDict(a=1, b=2), lambda o: o.move_to_end("a"), list),
    "default": (defaultdict(list), lambda o: o["x"].append(1), dict),
    "list": ([1, 2], lambda o: o.insert(0, 3), list),
    "subclass": (Numbers(), lambda o: setattr(o, "note", "written"), lambda o: o.note),
    "set": ({1}, lambda o: o.add(2), set),
    "deque": (deque([1, 2], maxlen=2), lambda o: o.append(3), list),
    "namespace": (SimpleNamespace(a=1), lambda o: vars(o).update(b=1), lambda o: dict(vars(o))),
    "arguments": (Namespace(a=1), lambda o: setattr(o, "a", 2), lambda o: o.a),
    "context": (ContextVar("x", default=1), lambda o: o.set(2), lambda o: o.get()),
    "weak": (WeakKeyDictionary({Slotted: 1}), lambda o: o.update({Slotted: 2}), dict),
    "weak set": (WeakSet([Slotted]), lambda o: o.clear(), set),
    "slots": (Slotted(), lambda o: setattr(o, "other", 2), lambda o: hasattr(o, "other")),
    "inside": (([Frozen()],), lambda o: o[0][0].items.append(1), lambda o: list(o[0][0].items)),
    "method": (Frozen().items.append, lambda o: None, lambda o: None),
    "partial": (functools.partial(print, []), lambda o: o.args[0].append(1), lambda o: list(o.args[0])),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLDERS)
def test_what_an_object_holds_is_put_back(name: str) -> None:
    held, change, seen = HOLDERS[name]
    before = seen(held)
    with Snapshot([held]).restored():
        change(held)
        assert name == "method" or seen(held) != before
    assert seen(held) == before


def test_variables_of_closures_are_put_back() -> None:
    more = counter()
    assert more() == 1
    with Snapshot([more]).restored():
        assert [more(), more()] == [2, 3]
    assert more() == 2


def test_tensors_are_replaced_for_a_while_also_in_tuples() -> None:
    x = torch.ones(2)
    holder = SimpleNamespace(pair=(x, 1), again=[x])
    objects = Snapshot([holder])
    assert objects.tensors == [x]
    with objects.restored():
        objects.replace_tensors(lambda t: t + 1)
        assert holder.pair[0].tolist() == [2.0, 2.0] and holder.pair[1] == 1 and holder.again[0].tolist() == [2.0, 2.0]
    assert holder.pair[0] is x and holder.again[0] is x


def test_numbers_in_tensors_are_put_back_where_contents_are_kept() -> None:
    x = torch.ones(2)
    with Snapshot([{"x": x}], contents=True).restored():
        x.mul_(3)
    assert x.tolist() == [1.0, 1.0]


ARRAYS = {
    "numbers": np.arange(6.0),
    "odd": np.arange(7, dtype=np.int8),
    "not a number": np.array([np.nan, -0.0]),
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "every second": np.arange(6.0)[::2],
    "one": np.array(3.0),
    "masked": np.ma.masked_array([1.0, 2.0], [False, True]),
    "objects": np.array(["a", ("b",)], dtype=object),
    "records": np.zeros(2, dtype=[("name", "U3"), ("number", "i4")]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_is_seen_to_be_changed_and_put_back_whatever_it_holds(name: str) -> None:
    array = ARRAYS[name]
    objects = Snapshot([array])
    assert not objects.changed()
    objects, before, last = Snapshot([array], opaque=True), array.tobytes(), (-1,) * array.ndim
    assert not objects.changed()
    array[last] = ("c", 3) if name == "records" else 9
    assert len(objects.changed()) == 1
    objects.restore()
    assert array.tobytes() == before and not objects.changed()


BYTES = {
    "bytes": (bytearray(b"abc"), lambda o: o.append(1), bytes),
    "array": (numbers("d", [1.0, float("nan")]), lambda o: o.append(2.0), bytes),
    "number of C": (ctypes.c_double(1.0), lambda o: setattr(o, "value", 2.0), bytes),
    "numbers of C": ((ctypes.c_int * 3)(1, 2, 3), lambda o: o.__setitem__(0, 2), bytes),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_and_data_of_c_are_put_back(name: str) -> None:
    held, change, seen = BYTES[name]
    snapshot, before = Snapshot([{"a": held}], opaque=True), seen(held)
    assert not snapshot.changed()
    change(held)
    assert len(snapshot.changed()) == 1 and seen(held) != before
    snapshot.restore()
    assert seen(held) == before


def test_a_zero_with_another_sign_is_a_change() -> None:
    array = np.zeros(2)
    objects = Snapshot([array], opaque=True)
    array[0] = -0.0
    assert len(objects.changed()) == 1


def test_an_array_is_copied_anew_only_when_it_has_changed() -> None:
    array = np.zeros(2**20)
    first = Snapshot([array], opaque=True)
    tracemalloc.start()
    try:
        again = Snapshot([array], opaque=True, like=first)
        assert tracemalloc.get_traced_memory()[0] < array.nbytes / 2
    finally:
        tracemalloc.stop()
    array[1] = 1
    changed = Snapshot([array], opaque=True, like=again)
    again.restore(changed)
    assert not array.any()
    changed.restore(again)
    assert array[1] == 1


def test_modules_and_trainers_are_not_entered() -> None:
    module = torch.nn.Linear(1, 1)
    module.note = []
    with Snapshot([module, L.Trainer(logger=False, accelerator="cpu")]).restored():
        module.note.append(1)
    assert module.note == [1]


def test_what_leads_back_into_itself_ends() -> None:
    holder = SimpleNamespace()
    holder.me = [holder]
    with Snapshot([holder]).restored():
        holder.me.append(1)
    assert holder.me == [holder]


def test_members_of_types_written_in_c_are_left_alone() -> None:
    class Encoder:
        def __init__(self) -> None:
            self.kind = np.dtype("U300")  # its size is a new number each time that it is read, and nobody can set it
            self.seen = 0

    encoder = Encoder()
    with Snapshot((encoder,)).restored():
        encoder.seen = 1
    assert encoder.seen == 0
    assert not Snapshot((encoder.kind,)).changed()


def test_what_a_subclass_puts_in_the_place_of_a_slot_is_left_alone() -> None:
    class Constant(Slotted):
        other = property(lambda self: (self.one,))  # a new one each time, and nobody can set it

    constant = Constant()
    with Snapshot((constant,)).restored():
        constant.one = 2
    assert constant.one == 1
    assert not Snapshot((constant,)).changed()


class Counting(torch.nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.lists, self.note = [[1]], "as made"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        type(self).added = 1
        self.mean = self.mean + 1
        self.lists[0].append(2)
        self.note, self.new = "changed", 1
        self.register_forward_hook(lambda *_: None)
        return x


def test_a_call_is_untouched_in_attributes_buffers_classes_and_hooks() -> None:
    module = Counting()
    mean = module.mean
    with untouched(module):
        module(torch.ones(1))
        assert Counting.calls == 1 and module.lists == [[1, 2]] and module._forward_hooks
    assert Counting.calls == 0 and not hasattr(Counting, "added")
    assert module.mean is mean and not mean.any()
    assert (module.lists, module.note, hasattr(module, "new"), len(module._forward_hooks)) == (
        [[1]],
        "as made",
        False,
        0,
    )


def test_only_what_has_changed_is_kept() -> None:
    module = Counting()
    snapshot = attributes([module])
    module(torch.ones(1))
    snapshot.keep_changed()
    module.new, module.later = 2, 3
    snapshot.restore()
    assert (module.lists, module.note, module.new, module.later) == ([[1]], "as made", 2, 3)
    assert module.mean.any()  # buffers that are known to change are copied elsewhere


def test_what_leads_to_something_is_found_by_its_key() -> None:
    inner = [1]
    held = {"a": {"x": (inner,)}, "b": [inner, 2], "c": [3]}
    assert leading(held, {id(inner)}) == ("a", "b") and leading(held, ()) == ()
