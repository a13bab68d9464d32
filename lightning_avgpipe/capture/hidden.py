"""Find tensors that are made inside a unit and reach other code without being returned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor, nn

from lightning_avgpipe.capture.draft import ANYWHERE, Draft, Pin
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.own_tensors import OwnTensors, TensorRead
from lightning_avgpipe.capture.unit_operations import Provenance
from lightning_avgpipe.utils.source import source_line


class HiddenTensors:
    """A record of tensors that units leave behind, say in a global variable, or write into besides their arguments.

    Args:
        module: module whose submodules are units.
        draft: call graph under construction.
        is_buffer: return whether a tensor is a buffer, whose changes are known by name.
        draws_on_host: return whether a unit draws from the generators of Python or NumPy.
        exports: units in whose attributes other code is known to find tensors.

    Attributes:
        exports: these units, and those that were found since.
        leaking: units that have left a tensor outside of their results and attributes.
        provenance: record of the node in which each tensor was made.
        own: tensors that units keep in attributes for later calls of their own.
    """

    def __init__(
        self,
        module: nn.Module,
        draft: Draft,
        is_buffer: Callable[[Tensor], bool],
        draws_on_host: Callable[[str], bool],
        exports: Collection[str],
    ) -> None:
        self.exports = set(exports)
        self.leaking: set[str] = set()
        self._draft = draft
        self.provenance = Provenance()
        self.own = OwnTensors(module, self.provenance)
        self._is_buffer = is_buffer
        self._draws_on_host = draws_on_host
        self._written: dict[int, tuple[Tensor, Node]] = {}  # written to without being arguments, and the writer

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
            everywhere: whether each stage that gets that far executes it.
            unit: path of the unit, if it is one.
        """
        nodes = self._draft.nodes
        end = ANYWHERE if everywhere else len(nodes)
        pins: list[Pin] = []
        for tensor in tensors:
            birth = self.provenance.birth(tensor)
            held, writer = self._written.get(id(tensor), (None, None))
            # a unit's changes of its own buffers are known by name
            if held is tensor and writer is not None and (writer.name != unit or not self._is_buffer(tensor)):
                reason = f"{name} at {source_line()} reads a tensor that {writer} writes into"
                pins.append((writer.index + 1, end, reason))
            if birth is None or birth >= len(nodes) or self._draft.values_of([tensor]):
                continue
            maker = nodes[birth]
            if maker.kind == "call" and maker.name == unit:
                if self._draws_on_host(unit) or not self.provenance.makes_again(tensor):
                    reason = f"{name} at {source_line()} reads an attribute of its own that {maker} has made"
                    read = TensorRead(birth, len(nodes), tuple(tensor.shape), str(tensor.dtype))
                    self.own.add(unit, read, (birth + 1, end, reason))
                continue
            if maker.kind == "call":
                self.exports.add(maker.name)
                self.leaking.add(maker.name)
            reason = f"{name} at {source_line()} reads a tensor that {maker} left where it cannot be followed"
            pins.append((birth + 1, end, reason))
        self.own.look(unit, tensors)
        return pins

    def settle(self, again: HiddenTensors | None) -> list[Pin]:
        """Return where the step cannot be cut because of tensors that units keep for calls of their own.

        A tensor that a unit makes anew in every step, and reads in that step only, is sent between stages. (Mean and
        deviation of a reversible normalisation.)

        Args:
            again: record of the same step when it ran once more; None if that run failed.
        """
        anew = set() if again is None else self.own.made_anew(again.own)
        self.exports |= anew
        return self.own.pins(anew)
