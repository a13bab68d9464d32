"""Trees come apart and together again, whatever batches and outputs are made of."""

import dataclasses
import functools
import gc
import pickle
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_avgpipe.utils import tree

Pair = namedtuple("Pair", ["value", "mask"])


class NamedPair(Pair):
    """A subclass of a namedtuple, as PackedSequence is one."""


@dataclass
class Sample:
    x: Tensor
    names: list[str] = field(default_factory=list)
    scale: float = 1.0
    squared: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.squared = self.x**2
        self.note = "made in __post_init__"

    @functools.cached_property
    def total(self) -> Tensor:
        return self.x.sum()


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    kind: str = "frozen"


@dataclass
class Unseen:
    x: Tensor


@dataclass
class Linked:
    other: Any = None


class Encoding(UserDict):
    """As transformers' BatchEncoding: another signature, more attributes, and items as attributes."""

    def __init__(self, data: dict, encodings: list | None = None, n_sequences: int | None = None) -> None:
        super().__init__(data)
        self._encodings = encodings
        self._n_sequences = n_sequences

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class AttrDict(dict):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


@dataclass
class Output(OrderedDict):
    """As transformers' ModelOutput: an OrderedDict whose items are its fields."""

    loss: Tensor | None = None
    logits: Tensor | None = None

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if getattr(self, f.name) is not None:
                OrderedDict.__setitem__(self, f.name, getattr(self, f.name))


class RegisteredOutput(Output):
    """An Output that registers itself, without a function for the names."""


def _make_output(values: list, keys: list) -> RegisteredOutput:
    return RegisteredOutput(**dict(zip(keys, values, strict=True)))


pytree.register_pytree_node(RegisteredOutput, lambda o: (list(o.values()), list(o)), _make_output)


class Lookup(Mapping):
    """A mapping that is nothing but its items."""

    def __init__(self, items: dict) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def t(*values: float) -> Tensor:
    return torch.tensor(values)


def names(obj: Any, root: str = "") -> list[str]:
    return [root + name for name, _ in tree.flatten_with_names(obj)[0]]


def test_containers_come_back_with_their_types_and_the_same_leaves():
    obj = {"a": [t(1), (t(2), None)], "b": Pair(t(3), "text"), "c": defaultdict(list, k=t(4))}
    copy = tree.unflatten(*tree.flatten(obj))
    assert copy is not obj and copy["a"] is not obj["a"]
    assert type(copy["b"]) is Pair and copy["c"].default_factory is list
    assert all(a is b for a, b in zip(tree.flatten(obj)[0], tree.flatten(copy)[0], strict=True))


# an object, and what is seen of it after one was added to each of its tensors
OBJECTS = {
    "a dataclass, without running its constructor": (
        Sample(t(1, 2), ["a", "b"]),
        # __post_init__ would have made 4, 9 of the squares
        lambda o: (o.x.tolist(), o.squared.tolist(), o.names, o.scale, o.note),
        ([2, 3], [2, 5], ["a", "b"], 1.0, "made in __post_init__"),
    ),
    "a frozen dataclass with slots": (Frozen(t(1)), lambda o: (o.x.tolist(), o.kind), ([2], "frozen")),
    "a UserDict with attributes": (
        Encoding({"input_ids": t(1), "mask": t(2)}, encodings=["e"], n_sequences=2),
        lambda o: ([*o], o.input_ids.tolist(), o._encodings, o._n_sequences),
        (["input_ids", "mask"], [2], ["e"], 2),
    ),
    "a dict that is its own attributes": (AttrDict(x=t(1)), lambda o: (o.x is o["x"], vars(o) is o), (True, True)),
    "a dataclass that is an OrderedDict": (
        Output(loss=t(1), logits=t(2)),
        lambda o: ([*o], len(tree.tensors(o)), o.loss is o["loss"], o.logits.tolist()),
        (["loss", "logits"], 2, True, [3]),
    ),
    "a mapping": (Lookup({"x": t(1)}), lambda o: o["x"].tolist(), [2]),
    "a list": ([t(1)], lambda o: o[0].tolist(), [2]),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_is_rebuilt_with_other_tensors_also_from_a_pickled_spec(name):
    obj, seen, expected = OBJECTS[name]
    mapped = tree.map_tensors(lambda x: x + 1, obj)
    leaves, spec = tree.flatten(mapped)
    assert mapped is not obj and type(mapped) is type(obj) and seen(mapped) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        received = pickle.loads(pickle.dumps(spec))
    assert received == spec
    again = tree.unflatten(leaves, received)
    assert type(again) is type(obj) and seen(again) == expected


def test_a_proxy_of_a_dict_is_rebuilt():
    mapped = tree.map_tensors(lambda x: x + 1, MappingProxyType({"x": t(1)}))
    assert type(mapped) is MappingProxyType and torch.equal(mapped["x"], t(2))


def test_an_object_that_leads_back_into_itself_is_a_clear_error():
    first = Linked()
    first.other = Linked([first])
    gc.collect()  # what others have left must not be finalised in the depth of the recursion
    with pytest.raises(RecursionError, match="a dict leads back into itself"):
        tree.flatten({"link": first})


def test_names_read_as_the_code_that_reaches_a_leaf():
    batch = {"labels": t(1), "pair": [Pair(t(1), t(2))], 3: Sample(t(1))}
    assert names(batch, "batch") == [
        "batch['labels']",
        "batch['pair'][0].value",
        "batch['pair'][0].mask",
        "batch[3].x",
        "batch[3].scale",
        "batch[3].squared",
        "batch[3].note",
    ]
    assert names([Pair(1, 2)]) == ["[0].value", "[0].mask"]
    assert names(Encoding({"labels": t(1)}), "batch")[0] == "batch['labels']"
    assert names(t(1), "batch") == ["batch"]


def test_specs_are_equal_for_equal_structures_only():
    def spec(obj: Any) -> tree.TreeSpec:
        return tree.flatten(obj)[1]

    assert spec({"a": Sample(t(1))}) == spec({"a": Sample(t(2, 3))})
    assert spec(Encoding({"a": 1})) != spec(Encoding({"b": 1}))
    assert spec(Pair(1, 2)) != spec(NamedPair(1, 2)) != spec((1, 2))


def test_a_spec_within_a_tree_is_a_leaf(recwarn):
    inner = tree.flatten([t(1), 2])[1]
    leaves, spec = tree.flatten({"spec": inner})
    assert leaves == [inner]
    assert tree.unflatten(leaves, spec) == {"spec": inner}
    assert not recwarn.list  # torch warns where a spec of a leaf is made


@pytest.mark.skipif(not hasattr(pytree, "_deregister_pytree_node"), reason="this version of torch cannot forget a type")
def test_a_received_spec_registers_its_types():
    """In the receiving process no object of the type was ever seen."""
    leaves, spec = tree.flatten(Unseen(t(1)))
    pickled = pickle.dumps(spec)
    pytree._deregister_pytree_node(Unseen)
    assert type(tree.unflatten(leaves, pickle.loads(pickled))) is Unseen
