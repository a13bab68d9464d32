"""State that user code can reach: seen to change, and put back, whatever holds it."""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
import tracemalloc
from argparse import Namespace
from array import array as numbers
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.state.outside import outside_variables
from lightning_avgpipe.state.snapshot import Snapshot, keys_leading_to
from lightning_avgpipe.state.untouched import attributes, untouched
from lightning_avgpipe.state.writes import Writes


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


class Encoder:
    """Holds an object of C, whose size is a new number each time that it is read, and nobody can set it."""

    def __init__(self) -> None:
        self.kind = np.dtype("U300")
        self.seen = 0


class Constant(Slotted):
    """Has something in the place of a slot: a new one each time, which nobody can set."""

    other = property(lambda self: (self.one,))  # type: ignore[assignment]


def looped() -> list[Any]:
    """Leads back into itself."""
    held: list[Any] = []
    held.append(held)
    return held


def of_array(array: Any, value: Any = 9) -> Any:
    """An array, what changes its last number, and its bytes."""
    return array, lambda o: o.__setitem__((-1,) * o.ndim, value), lambda o: o.tobytes()


# what holds something, how it is changed, and what is seen of it
HOLDERS = {
    "dict": ({"a": 1}, lambda o: o.update(b=2), dict),
    "ordered": (OrderedDict(a=1, b=2), lambda o: o.move_to_end("a"), list),
    "default": (defaultdict(list), lambda o: o["x"].append(1), dict),
    "list": ([1, 2], lambda o: o.insert(0, 3), list),
    "list in itself": (looped(), lambda o: o.append(1), len),
    "subclass": (Numbers(), lambda o: setattr(o, "note", "written"), lambda o: o.note),
    "set": ({1}, lambda o: o.add(2), set),
    "deque": (deque([1, 2], maxlen=2), lambda o: o.append(3), list),
    "object of a thread": (threading.local(), lambda o: setattr(o, "seen", 1), lambda o: getattr(o, "seen", 0)),
    "namespace": (SimpleNamespace(a=1), lambda o: vars(o).update(b=1), lambda o: dict(vars(o))),
    "arguments": (Namespace(a=1), lambda o: setattr(o, "a", 2), lambda o: o.a),
    "context": (ContextVar("x", default=1), lambda o: o.set(2), lambda o: o.get()),
    "weak": (WeakKeyDictionary({Slotted: 1}), lambda o: o.update({Slotted: 2}), dict),
    "weak set": (WeakSet([Slotted]), lambda o: o.clear(), set),
    "slots": (Slotted(), lambda o: setattr(o, "other", 2), lambda o: hasattr(o, "other")),
    "property in the place of a slot": (Constant(), lambda o: setattr(o, "one", 2), lambda o: o.one),
    "inside": (([Frozen()], [].append), lambda o: o[0][0].items.append(1), lambda o: list(o[0][0].items)),
    "partial": (functools.partial(print, []), lambda o: o.args[0].append(1), lambda o: list(o.args[0])),
    "closure": (counter(), lambda o: o(), lambda o: o.__closure__[0].cell_contents),
    "beside an object of C": (Encoder(), lambda o: setattr(o, "seen", 1), lambda o: o.seen),
    "bytes": (bytearray(b"abc"), lambda o: o.append(1), bytes),
    "array": (numbers("d", [1.0, float("nan")]), lambda o: o.append(2.0), bytes),
    "number of C": (ctypes.c_double(1.0), lambda o: setattr(o, "value", 2.0), bytes),
    "numbers of C": ((ctypes.c_int * 3)(1, 2, 3), lambda o: o.__setitem__(0, 2), bytes),
    "numbers": of_array(np.arange(6.0)),
    "odd number of bytes": of_array(np.arange(7, dtype=np.int8)),
    "not a number": of_array(np.array([np.nan, -0.0])),
    "zero with another sign": of_array(np.zeros(2), -0.0),
    "columns": of_array(np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    "every second": of_array(np.arange(6.0)[::2]),
    "one number": of_array(np.array(3.0)),
    "masked": of_array(np.ma.masked_array([1.0, 2.0], [False, True])),
    "objects": of_array(np.array(["a", ("b",)], dtype=object)),
    "records": of_array(np.zeros(2, dtype=[("name", "U3"), ("number", "i4")]), ("c", 3)),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_an_object_holds_is_seen_to_change_and_put_back(name: str) -> None:
    held, change, seen = HOLDERS[name]
    snapshot, before = Snapshot([{"held": held}], opaque=True), seen(held)
    assert not snapshot.changed()
    change(held)
    assert len(snapshot.changed()) == 1 and seen(held) != before
    snapshot.restore()
    assert seen(held) == before and not snapshot.changed()


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


def test_an_array_is_copied_anew_only_when_it_has_changed() -> None:
    array = np.zeros(2**20)
    first = Snapshot([array], opaque=True)
    tracemalloc.start()
    try:
        again = Snapshot([array], opaque=True, reuse=first)
        assert tracemalloc.get_traced_memory()[0] < array.nbytes / 2
    finally:
        tracemalloc.stop()
    array[1] = 1
    changed = Snapshot([array], opaque=True, reuse=again)
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


class Counting(torch.nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.lists, self.note = [[1]], "as made"
        self.inner = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        type(self).added = 1
        self.mean = self.mean + 1
        self.lists[0].append(2)
        self.note, self.new, self.inner = "changed", 1, torch.nn.Dropout()
        self.register_forward_hook(lambda *_: None)
        return x


def test_a_call_is_untouched_in_attributes_buffers_classes_hooks_and_submodules() -> None:
    module = Counting()
    mean, inner = module.mean, module.inner
    with untouched(module):
        module(torch.ones(1))
        assert Counting.calls == 1 and module.lists == [[1, 2]] and module._forward_hooks
    assert Counting.calls == 0 and not hasattr(Counting, "added")
    assert module.mean is mean and not mean.any() and module.inner is inner
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
    snapshot.drop_unchanged()
    module.new, module.later = 2, 3
    snapshot.restore()
    assert (module.lists, module.note, module.new, module.later) == ([[1]], "as made", 2, 3)
    assert module.mean.any()  # buffers that are known to change are copied elsewhere


def test_what_leads_to_something_is_found_by_its_key() -> None:
    inner = [1]
    held = {"a": {"x": (inner,)}, "b": [inner, 2], "c": [3]}
    assert keys_leading_to(held, {id(inner)}) == ("a", "b") and keys_leading_to(held, ()) == ()


# -- variables outside of modules that the user's code names ---------------------------------------------------------


class Missing:
    """Stands for a package that is not installed, and says so to whoever asks it for anything."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"{name} of a package that is not installed")


OPTIONAL, CALLS = Missing(), {"steps": 0}


@functools.lru_cache
def counted() -> int:
    CALLS["steps"] += 1
    return CALLS["steps"]


class Net(nn.Module):
    other = Missing()

    def forward(self, x: Tensor) -> Tensor:
        return x * counted() if self.training else OPTIONAL.fast(x)


def test_objects_that_answer_no_question_are_variables_like_others() -> None:
    found = {name.removeprefix(f"global {__name__}.") for name in outside_variables(Net())}
    assert {"OPTIONAL", "CALLS"} <= found


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "mine"])
def test_packages_are_installed_wherever_their_folder_is(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"strange_{folder.replace('-', '_')}"
    place = tmp_path / "lib" / folder
    place.mkdir(parents=True)
    (place / f"{name}.py").write_text("CALLS = []\n\n\ndef note(x):\n    CALLS.append(1)\n    return x\n")
    monkeypatch.syspath_prepend(place)
    note = importlib.import_module(name).note

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return note(x)

    assert (f"global {name}.CALLS" in outside_variables(Noting())) == (folder == "mine")


def counting(function: Any) -> Any:
    """A decorator with two counters."""
    number = 0

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        nonlocal number
        number += 1
        wrapper.calls += 1
        return function(*args) * number

    wrapper.calls = 0
    return wrapper


class Numbered:
    """A decorator that is an object, with a counter."""

    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)
        self.function, self.calls = function, 0

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return functools.partial(self, obj)

    def __call__(self, *args: Any) -> Any:
        self.calls += CALLS["steps"]
        return self.function(*args)


def ticked(x: Tensor) -> Tensor:
    ticked.calls = getattr(ticked, "calls", 0) + 1  # type: ignore[attr-defined]
    return x


class Decorated(nn.Module):
    @counting
    def forward(self, x: Tensor) -> Tensor:
        return ticked(self.scaled(x))

    @Numbered
    def scaled(self, x: Tensor) -> Tensor:
        return x

    @torch.no_grad()
    def other(self, x: Tensor) -> Tensor:
        return x


def test_what_decorators_and_functions_count_is_a_variable() -> None:
    found = {name.replace(f" {__name__}.", " ") for name in outside_variables(Decorated())}
    assert found == {
        "enclosed Decorated.forward.number",
        "function Decorated.forward.calls",
        "function ticked.calls",
        "class Decorated.scaled",
        "global CALLS",
    }


# -- whatever a hook writes into a parameter or buffer is seen, in place or not --------------------------------------


def assign(layer: nn.Module) -> None:
    for tensor in (layer.weight, layer.running_mean):
        tensor.data = tensor.data.clamp(-0.1, 0.1)


@torch.no_grad()
def set_(layer: nn.Module) -> None:
    for tensor in (layer.weight, layer.running_mean):
        tensor.set_(torch.empty_like(tensor))


def swap(layer: nn.Module) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.empty_like(layer.weight)))
    torch.utils.swap_tensors(layer.running_mean, torch.empty_like(layer.running_mean))


def in_place(layer: nn.Module) -> None:
    for tensor in (layer.weight, layer.running_mean):
        tensor.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("write", [in_place, assign, set_, swap])
def test_each_form_of_a_write_is_seen(write: Callable[[nn.Module], None], device: str) -> None:
    layer = nn.BatchNorm1d(4, device=device)
    layer.running_mean.fill_(1.0)
    with Writes(layer) as writes:
        write(layer)
    assert writes.written == {"weight", "running_mean"}


def test_a_move_to_other_memory_is_no_write() -> None:
    layer = nn.BatchNorm1d(4)
    with Writes(layer) as writes:
        for tensor in (layer.weight, layer.running_mean):
            tensor.data = tensor.data.clone()
    assert not writes.written


def test_what_is_only_read_or_put_back_is_no_write() -> None:
    layer = nn.BatchNorm1d(4)
    layer.register_buffer("adjacency", torch.eye(2).to_sparse())
    with Writes(layer) as writes:
        home, layer.weight.data = layer.weight.data, layer.weight.data.clone()
        layer.weight.data = home
        float(layer.running_mean.sum() + layer.adjacency.to_dense().sum())
    assert not writes.written
