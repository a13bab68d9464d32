"""Track parameters and buffers by name while a step is followed: which nodes use and change them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.draft import END_OF_STEP
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.state.writes import Changes
from lightning_avgpipe.utils.device import visiting
from lightning_avgpipe.utils.names import is_within, joined
from lightning_avgpipe.utils.tensors import same_contents
from lightning_avgpipe.utils.torch_compat import address, untraced

# Full name, tensor, and a copy (of a parameter: an alias) that shows whether it has changed.
StateCopies = list[tuple[str, Tensor, Tensor]]


def trained_parameters(module: nn.Module) -> frozenset[str]:
    """Return the full names of the parameters that require a gradient, including all names of a shared one."""
    return frozenset(name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad)


class NamedState:
    """The parameters and buffers of a module while a step runs.

    Args:
        module: module whose state is tracked.
        owned: ``id -> full name`` of the tensors whose use makes a node.
        by_glue: names of buffers that glue is known to change.
        batch: tensors that the step is given, which it may change.
        device: device on which the step computes; None: where its parameters are.

    Attributes:
        buffers: buffers by full name, as registered when the step began.
        changes: context in which writes are noted.
        rewritten: names of tensors that were written to, or whose memory was replaced.
        by_glue: the given names, and those that were found since.
    """

    def __init__(
        self, module: nn.Module, owned: Mapping[int, str], by_glue: Iterable[str], batch: Sequence[Tensor],
        device: torch.device | None,
    ) -> None:  # fmt: skip
        self.buffers = dict(module.named_buffers())
        self.changes = Changes(module, batch)
        self.rewritten: set[str] = set()
        self.by_glue = set(by_glue)
        self._seen: set[str] = set()  # names of the state that glue was given
        self._in_units: set[str] = set()  # names of the state that units change
        self._module = module
        self._device = device
        self._parameters = {name for name, _ in module.named_parameters()}
        self._owned = owned
        self._names = {id(b): name for name, b in self.buffers.items()}
        self._made_by_units: dict[int, tuple[str, Tensor]] = {}  # by their ids, buffers that units have replaced

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the full name of a parameter or a buffer; None for any other tensor."""
        name = self._owned.get(id(tensor))
        return self._names.get(id(tensor)) if name is None else name

    def is_buffer(self, tensor: Tensor) -> bool:
        """Return whether a tensor was a registered buffer when the step began."""
        return id(tensor) in self._names

    def is_lasting(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter or a buffer, or one by which a unit has replaced a buffer."""
        return self.name_of(tensor) is not None or id(tensor) in self._made_by_units

    def buffer(self, name: str) -> Tensor | None:
        """Return the buffer of this name, as registered now."""
        path, _, leaf = name.rpartition(".")
        return self._module.get_submodule(path)._buffers.get(leaf)

    def of(self, path: str) -> StateCopies:
        """Return the present state of a submodule's parameters and buffers, for a later comparison."""
        module = self._module.get_submodule(path)
        with untraced():  # reading the data must not fetch absent weights
            state = [(self._owned[id(p)], p, p.detach()) for p in module.parameters() if id(p) in self._owned]
        return state + [(joined(path, name), b, b.detach().clone()) for name, b in module.named_buffers()]

    def visiting(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Move these tensors to the device within this context, without counting this as a change."""
        return self.changes.visiting(visiting(tensors, self._device), [(self.name_of(t) or "", t) for t in tensors])

    def of_tensors(self, tensors: Mapping[str, Tensor]) -> StateCopies:
        """Return the present state of these tensors, by full name, for a later comparison."""
        return [(n, t, t.detach() if n in self._parameters else t.detach().clone()) for n, t in tensors.items()]

    def changed(self, state: StateCopies) -> list[str]:
        """Return the names of the tensors that have changed since ``state`` was taken."""
        moved = {name for name, p, before in state if name in self._parameters and address(p) != address(before)}
        self.changes.keep((name, before) for name, _, before in state if name in moved)
        self.rewritten |= self.changes.written | moved
        # Buffers are compared by value, since batch normalisation does not declare its writes, and may be replaced.
        buffers = ((name, b, self.buffer(name), before) for name, b, before in state if name not in self._parameters)
        other = {name for name, b, now, before in buffers if now is not b or not same_contents(b, before)}
        found = self.changes.written | moved | other
        order = dict.fromkeys(name for name, _, _ in state)
        return [*(name for name in order if name in found), *sorted(found - order.keys())]

    # -- uses by nodes -------------------------------------------------------------------------------------------------

    def parameters(self, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """Return the names of the parameters among tensors."""
        names = dict.fromkeys(self._owned[id(t)] for t in tensors if id(t) in self._owned)
        return tuple(name for name in names if name not in self.buffers)

    def states(self, used: Sequence[Tensor], changed: Sequence[str], in_unit: bool) -> tuple[str, ...]:
        """Return the names of the state that a node changes, or that it uses and that is in :attr:`by_glue`."""
        if in_unit:
            self._in_units.update(changed)
            replaced = ((name, now) for name in changed if (now := self.buffer(name)) is not self.buffers.get(name))
            self._made_by_units |= {id(now): (name, now) for name, now in replaced if now is not None}
        names = (self._owned.get(id(tensor)) for tensor in used)
        return tuple(dict.fromkeys((*changed, *(name for name in names if name in self.by_glue))))  # type: ignore[arg-type]

    def seen(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the parameters and buffers among the arguments of glue, by name, and remember that glue uses them."""
        found = {name: t for t in tensors if (name := self.name_of(t)) is not None}
        found |= {self._made_by_units[id(t)][0]: t for t in tensors if id(t) in self._made_by_units}
        self._seen.update(found)
        return found

    def reassigned(self, nodes: Sequence[Node]) -> Iterator[tuple[int, int, str]]:
        """Yield where no cut may lie, so that the last stage alone replaces a buffer that glue assigns anew."""
        for name, buffer in self.buffers.items():
            if name not in self._in_units and self.buffer(name) is not buffer:
                self.by_glue.add(name)
                first = next((node.index for node in nodes if name in node.states), 0)
                what = f"the step assigns a new tensor to the buffer '{name}', which the last stage alone can do"
                yield first + 1, END_OF_STEP, f"{what}; write into it instead (copy_)"

    def find_shared(self, nodes: Sequence[Node]) -> None:
        """Add to :attr:`by_glue` the state that a unit changes and that glue, or another call of a unit, uses too."""
        users = Counter(name for node in nodes for name in node.parameters)
        calls = Counter(node.name for node in nodes if node.kind == "call")
        changes = Counter((node.name, name) for node in nodes for name in node.changes)
        reads = {name for (unit, name), count in changes.items() if is_within(name, unit) and count < calls[unit]}
        self.by_glue |= {name for name in self._in_units if users[name] > 1 or name in self._seen or name in reads}
