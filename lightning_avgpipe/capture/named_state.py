"""Track parameters and buffers by name while a step is followed: which nodes use and change them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.draft import END_OF_STEP
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.state.writes import Writes, put_back
from lightning_avgpipe.utils.device import visiting
from lightning_avgpipe.utils.names import is_within, joined
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.tensors import same_contents, tensor_arguments
from lightning_avgpipe.utils.torch_compat import address, untraced

_LIFT = torch.ops.aten.lift_fresh.default  # returns the tensor that torch.tensor() has made

# Full name, tensor, and a copy (of a parameter: an alias) that shows whether it has changed.
StateCopies = list[tuple[str, Tensor, Tensor]]


def trained_parameters(module: nn.Module) -> frozenset[str]:
    """Return the full names of the parameters that require a gradient, including all names of a shared one."""
    return frozenset(name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad)


class NamedState(Writes):
    """The parameters and buffers of a module while a step runs within this context, which restores the parameters.

    Args:
        module: module whose state is tracked.
        owned: ``id -> full name`` of the tensors whose use makes a node.
        by_glue: names of buffers that glue is known to change.
        batch: tensors that the step is given, which it may change.
        device: device on which the step computes; None: where its parameters are.

    Attributes:
        buffers: buffers by full name, as registered when the step began.
        rewritten: names of tensors that were written to, or whose memory was replaced.
        by_glue: the given names, and those that were found since.
        wrote_unknown: whether, since :meth:`begin`, the step has written into a tensor without a name that it did not
            make.
        unnamed: memory addresses of all tensors without a name that were written to, also through views.
        unnamed_views: those of ``unnamed`` that were written to through a view since :meth:`begin`.
    """

    def __init__(
        self, module: nn.Module, owned: Mapping[int, str], by_glue: Iterable[str], batch: Sequence[Tensor],
        device: torch.device | None,
    ) -> None:  # fmt: skip
        super().__init__(module)
        self.buffers = dict(module.named_buffers())
        self.rewritten: set[str] = set()
        self.by_glue = set(by_glue)
        self.wrote_unknown = False
        self.unnamed: set[int] = set()
        self.unnamed_views: set[int] = set()
        self._seen: set[str] = set()  # names of the state that glue was given
        self._in_units: set[str] = set()  # names of the state that units change
        self._device = device
        self._parameters = dict(module.named_parameters())
        self._contents: dict[str, Tensor] = {}  # former contents, by name of a parameter that was written to
        self._owned = owned
        self._buffer_names = {id(b): name for name, b in self.buffers.items()}
        self._made_by_units: dict[int, tuple[str, Tensor]] = {}  # by their ids, buffers that units have replaced
        self._made = set(map(address, batch))  # memory of tensors that the step has made, or may write into
        self._found: set[int] = set()  # addresses of what operations have used and none has made
        self._paused = False

    # -- writes --------------------------------------------------------------------------------------------------------

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for name, parameter in self._parameters.items():
            put_back(parameter, self._memory[name], self._contents.get(name))

    def begin(self) -> None:
        """Forget all writes so far."""
        self.written, self.wrote_unknown, self.unnamed_views = set(), False, set()

    @contextlib.contextmanager
    def visiting(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Move these tensors to the device within this context, and record writes into them there, not the moves."""
        visit, named = visiting(tensors, self._device), [(self.name_of(t) or "", t) for t in tensors]
        with replaced(self, "_paused", True):
            visit.__enter__()
        places: list[int] = []
        try:
            places = self._locate(named)
            yield
        finally:
            for (name, _), place in zip(named, places, strict=False):  # none if they could not be located
                self._names[place].remove(name)
                if not self._names[place]:
                    del self._names[place]
            with replaced(self, "_paused", True):
                visit.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        given = set(map(address, tensor_arguments(args, kwargs or {})))
        if func is not _LIFT:
            self._found |= given.difference(self._made, self._names)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        places = set(map(address, tensor_arguments(result)))
        self._made |= places.difference(self._names)
        self._found -= places - given  # new memory at the address of an earlier tensor
        return result

    def _wrote(self, tensor: Tensor, names: Sequence[str]) -> None:
        super()._wrote(tensor, names)
        place = address(tensor)
        if not names and (place in self._found or place not in self._made):
            self.unnamed.add(place)
            if place in self._made:  # a view counts as made
                self.unnamed_views.add(place)
            else:
                self.wrote_unknown = True
        for name in names:
            if name in self._parameters and name not in self._contents:
                self._contents[name] = self._parameters[name].detach().clone()

    # -- the present state, by name ------------------------------------------------------------------------------------

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the full name of a parameter or a buffer; None for any other tensor."""
        name = self._owned.get(id(tensor))
        return self._buffer_names.get(id(tensor)) if name is None else name

    def is_buffer(self, tensor: Tensor) -> bool:
        """Return whether a tensor was a registered buffer when the step began."""
        return id(tensor) in self._buffer_names

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
        parameters = {self._owned[id(p)]: p for p in module.parameters() if id(p) in self._owned}
        return self.of_tensors(parameters | {joined(path, name): b for name, b in module.named_buffers()})

    def of_tensors(self, tensors: Mapping[str, Tensor]) -> StateCopies:
        """Return the present state of these tensors, by full name, for a later comparison."""
        with untraced():  # reading the data must not fetch absent weights
            return [(n, t, t.detach() if n in self._parameters else t.detach().clone()) for n, t in tensors.items()]

    def changed(self, state: StateCopies) -> list[str]:
        """Return the names of the tensors that have changed since ``state`` was taken."""
        moved = {name for name, p, before in state if name in self._parameters and address(p) != address(before)}
        for name, _, before in state:
            if name in moved and name not in self._contents:
                self._contents[name] = before.clone()
        self.rewritten |= self.written | moved
        # Buffers are compared by value, since batch normalisation does not declare its writes, and may be replaced.
        buffers = ((name, b, self.buffer(name), before) for name, b, before in state if name not in self._parameters)
        other = {name for name, b, now, before in buffers if now is not b or not same_contents(b, before)}
        found = self.written | moved | other
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
