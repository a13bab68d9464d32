"""Follow tensors that are made inside a unit and reach other code without being returned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_avgpipe.capture.calls import Calls
from lightning_avgpipe.capture.draft import END_OF_STEP, Draft, Pin
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.named_state import NamedState
from lightning_avgpipe.capture.tracer import LIKE, function_name
from lightning_avgpipe.state.objects import ATOMS
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import is_within
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.tensors import KnownTensors, is_lent, tensor_arguments
from lightning_avgpipe.utils.torch_compat import address, is_mutable, targets, version_of

# Operations whose results depend only on shape, dtype and device of their arguments.
_LIKE = frozenset(getattr(torch.ops.aten, function_name(function)) for function in LIKE)


class _Again(torch.autograd.Function):
    """An identity whose result is another tensor object with the same memory, but no view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _again(tensor: Tensor) -> Tensor:
    if tensor.grad_fn is None:
        return tensor.detach().requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        again: Tensor = _Again.apply(tensor)
    return again


class Provenance(TorchDispatchMode):
    """A dispatch mode that watches the operations inside of units, where torch functions are not followed."""

    def __init__(self) -> None:
        super().__init__()
        self._made = KnownTensors[tuple[int, bool]]()  # node that made it; whether it is a constant
        self._mixed: set[int] = set()  # memory of constants into which something else was written
        self._read_numbers = False  # whether Python code of the node has read numbers that are not constant
        self._node = 0
        self._descriptions: dict[int, tuple[Any, ...]] = {}  # of the arguments, by node
        self._used: dict[int, tuple[Tensor, int]] = {}

    def at(self, node: int, args: Any, kwargs: Any) -> Provenance:
        """Return the context in which a node runs with these arguments."""
        self._node = node
        self._descriptions[node] = _description(args, kwargs)
        self._used = {}
        self._read_numbers = False
        return self

    @property
    def used(self) -> list[Tensor]:
        """The tensors that the running or last node took and did not make itself."""
        return [tensor for tensor, _ in self._used.values()]

    def written(self) -> list[Tensor]:
        """Return the tensors in :attr:`used` that the node changed in place."""
        return [tensor for tensor, version in self._used.values() if version_of(tensor) != version]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensor_arguments(args, kwargs)
        for tensor in tensors:
            if self.birth(tensor) != self._node and not is_lent(tensor):
                self._used.setdefault(id(tensor), (tensor, version_of(tensor)))
        known = func.overloadpacket in _LIKE or all(map(self.is_constant, tensors))
        constant = known and not self._read_numbers and torch.Tag.nondeterministic_seeded not in func.tags
        if is_mutable(func) and not constant:
            self._mixed.update(map(address, targets(func, args, kwargs)))
        result = func(*args, **kwargs)
        found = tensor_arguments(result)
        self._read_numbers |= not (found or known)
        before = set(map(address, tensors))
        for tensor in found:
            if id(tensor) not in self._used:
                self._made.learn(tensor, (self._node, constant))
            if constant and address(tensor) not in before:  # new memory at the address of an earlier tensor
                self._mixed.discard(address(tensor))
        return result

    def is_constant(self, tensor: Tensor) -> bool:
        """Return whether a node made a tensor without parameters, the batch or random numbers."""
        made = self._made.value_of(tensor)
        return made is not None and made[1] and address(tensor) not in self._mixed

    def makes_again(self, tensor: Tensor) -> bool:
        """Return whether the running or last node, given equal arguments, would make this same tensor again."""
        birth = self.birth(tensor)
        alike = birth is not None and self._descriptions[birth] == self._descriptions[self._node]
        return alike and self.is_constant(tensor)

    def followed(self, result: Any, arguments: Any, modules: Iterable[nn.Module]) -> Any:
        """Return the result of the last node, with new tensor objects in place of those that the node made.

        The step, and the objects that the node was given, get the new ones. So code that uses one of the original
        objects must have found it in another place where the node left it.
        """
        others: dict[int, Tensor] = {}

        def other(tensor: Tensor) -> Tensor:
            made = self._made.own_value_of(tensor)
            if made is None or made[0] != self._node:
                return tensor
            if id(tensor) not in others:
                others[id(tensor)] = again = _again(tensor)
                vars(again).update(vars(tensor))
            return others[id(tensor)]

        holder = [result]
        Snapshot((arguments, holder), modules).replace_tensors(other)
        return holder[0]

    def birth(self, tensor: Tensor) -> int | None:
        """Return the node that made this tensor object, or its base; None if no node did."""
        made = self._made.value_of(tensor)
        return None if made is None else made[0]

    def forget(self) -> None:
        """Forget the tensors that the last unit made: it was not a node, so they are free."""
        self._made.forget(lambda made: made[0] == self._node)


def _description(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the arguments of a node with shapes and dtypes in place of tensors."""
    leaves = tree.flatten((args, kwargs))[0]
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x if type(x) in ATOMS else type(x) for x in leaves)


class HiddenTensors:
    """A record of tensors that units leave behind, say in a global variable, or write into though not given them.

    Args:
        module: module whose submodules are units.
        draft: call graph under construction.
        state: parameters and buffers, whose changes are known by name.
        calls: watcher of module calls, which knows the units that draw from the generators of Python or NumPy.
        exports: units in whose attributes other code finds tensors, as far as an earlier recording has found.

    Attributes:
        exports: these units, and those that were found since.
        leaking: units that have left a tensor outside of their results and attributes.
        provenance: record of the node in which each tensor was made.
        own: unit -> its reads of tensors that it keeps in attributes for later calls of its own (the node that made the
            tensor, the one that reads it, shape and dtype), each with the cuts that it forbids.
    """

    def __init__(
        self, module: nn.Module, draft: Draft, state: NamedState, calls: Calls, exports: Collection[str]
    ) -> None:
        self.exports = set(exports)
        self.leaking: set[str] = set()
        self._draft = draft
        self.provenance = Provenance()
        self._module = module
        self._state = state
        self._calls = calls
        self._written: dict[int, tuple[Tensor, Node]] = {}  # written to without being arguments, and the writer
        self.own: dict[str, list[tuple[tuple[Any, ...], Pin]]] = defaultdict(list)
        self._carried: set[str] = set()  # units that read tensors of the previous run
        self._earlier: Provenance | None = None
        self._before: dict[str, dict[tuple[str, str], Any]] = {}  # numbers in units' attributes after the previous run

    def follow(self, before: HiddenTensors) -> None:
        """Take over the tensors of the previous run of the same step."""
        self._earlier = before.provenance
        self._before = {unit: self._numbers(unit) for unit in before.own}

    def wrote(self, node: Node, buffers: Sequence[Tensor | None], followed: Collection[int]) -> None:
        """Note tensors that a unit writes into besides its arguments; they are not sent to other stages.

        Args:
            node: node of the unit.
            buffers: buffers that it changed.
            followed: ids of the changed tensors among its arguments.
        """
        for tensor in (*self.provenance.written(), *(b for b in buffers if b is not None)):
            if id(tensor) not in followed:
                self._written.setdefault(id(tensor), (tensor, node))

    def find(self, tensors: Sequence[Tensor], name: str, everywhere: bool, unit: str = "") -> list[Pin]:
        """Return where the step cannot be cut because of hidden tensors among these.

        Args:
            tensors: tensors that an operation takes.
            name: name of the operation, for messages.
            everywhere: whether each stage that gets that far executes the operation.
            unit: path of the unit, if the operation is the call of one.
        """
        nodes = self._draft.nodes
        end = END_OF_STEP if everywhere else len(nodes)
        pins: list[Pin] = []
        for tensor in tensors:
            birth = self.provenance.birth(tensor)
            held, writer = self._written.get(id(tensor), (None, None))
            # a unit's changes of its own buffers are known by name
            if held is tensor and writer is not None and (writer.name != unit or not self._state.is_buffer(tensor)):
                reason = f"{name} at {source_line()} reads a tensor that {writer} writes into"
                pins.append((writer.index + 1, end, reason))
            if birth is None or birth >= len(nodes) or self._draft.values_of([tensor]):
                continue
            maker = nodes[birth]
            if maker.kind == "call" and maker.name == unit:
                draws = any(is_within(path, unit) for path in self._calls.host_drawing)
                if draws or not self.provenance.makes_again(tensor):
                    reason = f"{name} at {source_line()} reads an attribute of its own that {maker} has made"
                    read = birth, len(nodes), tensor.shape, tensor.dtype
                    self.own[unit].append((read, (birth + 1, end, reason)))
                continue
            if maker.kind == "call":
                self.exports.add(maker.name)
                self.leaking.add(maker.name)
            reason = f"{name} at {source_line()} reads a tensor that {maker} left where it cannot be followed"
            pins.append((birth + 1, end, reason))
        if self._earlier is not None and any(self._earlier.birth(tensor) is not None for tensor in tensors):
            self._carried.add(unit)
        return pins

    def compare_with_repeat(self, again: HiddenTensors | None) -> list[Pin]:
        """Return where the step cannot be cut because of tensors that units keep for calls of their own.

        A tensor that a unit makes anew in every step, and reads in that step only, is sent between stages. An example
        are the mean and deviation of a reversible normalisation.

        Args:
            again: record of the repeated run of the same step; None if that run failed.
        """
        anew = set() if again is None else self._made_anew(again)
        self.exports |= anew
        return [pin for unit, reads in self.own.items() if unit not in anew for _, pin in reads]

    def _made_anew(self, again: HiddenTensors) -> set[str]:
        """Return the units that, in a repeated step, made their tensors again and read none from the first run."""
        reads = {unit: [read for read, _ in found] for unit, found in self.own.items()}
        alike = {unit for unit in reads if reads[unit] == [read for read, _ in again.own.get(unit, ())]}
        return {unit for unit in alike - again._carried if again._before[unit] == again._numbers(unit)}

    def _numbers(self, unit: str) -> dict[tuple[str, str], Any]:
        """Return the numbers in attributes of a unit, such as a counter that decides when a tensor is made anew."""
        modules = self._module.get_submodule(unit).named_modules()
        return {(path, n): held for path, m in modules for n, held in vars(m).items() if isinstance(held, (int, float))}
