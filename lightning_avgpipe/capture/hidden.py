"""Hidden tensors: made inside a unit, and found by other code where no value leads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor, nn

from lightning_avgpipe.capture.draft import ANYWHERE, Draft, Pin
from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.own_tensors import OwnTensors, Read
from lightning_avgpipe.capture.provenance import Provenance
from lightning_avgpipe.utils.source import source_line


class HiddenTensors:
    """Tensors that units leave behind, say in a global variable, or write into besides their arguments.

    Args:
        module: whose submodules are units.
        draft: of the graph.
        is_buffer: whether changes of a tensor are known by name.
        draws_on_host: whether a unit draws numbers on the host.
        exports: units in whose attributes others find tensors.

    Attributes:
        exports: the same, and what is found out.
        leaving: units that have left a tensor behind.
        provenance: of tensors that units make.
        own: what units keep for calls of their own.
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
        self.leaving: set[str] = set()
        self._draft = draft
        self.provenance = Provenance()
        self.own = OwnTensors(module, self.provenance)
        self._is_buffer = is_buffer
        self._draws_on_host = draws_on_host
        self._written: dict[int, tuple[Tensor, Node]] = {}  # tensors that are nobody's arguments, and who writes

    def wrote(self, node: Node, buffers: Sequence[Tensor | None], followed: Collection[int]) -> None:
        """What a unit writes into besides its arguments is not sent to other stages.

        Args:
            node: of the unit.
            buffers: that it changed.
            followed: ids of what it changed of its arguments.
        """
        for tensor in (*self.provenance.written(), *(b for b in buffers if b is not None)):
            if id(tensor) not in followed:
                self._written.setdefault(id(tensor), (tensor, node))

    def find(self, tensors: Sequence[Tensor], name: str, everywhere: bool, unit: str = "") -> list[Pin]:
        """Where the step cannot be cut because of hidden tensors among these.

        Args:
            tensors: that something takes.
            name: of that.
            everywhere: whether each stage behind the unit executes it.
            unit: path, if it is a unit.
        """
        nodes = self._draft.nodes
        end = ANYWHERE if everywhere else len(nodes)
        pins: list[Pin] = []
        for tensor in tensors:
            birth = self.provenance.birth(tensor)
            held, writer = self._written.get(id(tensor), (None, None))
            # changes of a unit's own buffers are known
            if held is tensor and writer is not None and (writer.name != unit or not self._is_buffer(tensor)):
                reason = f"{name} at {source_line()} reads a tensor that {writer} writes into"
                pins.append((writer.index + 1, end, reason))
            if birth is None or birth >= len(nodes) or self._draft.values.of([tensor]):
                continue
            maker = nodes[birth]
            if maker.kind == "call" and maker.name == unit:
                if self._draws_on_host(unit) or not self.provenance.makes_again(tensor):
                    reason = f"{name} at {source_line()} reads an attribute of its own that {maker} has made"
                    read = Read(birth, len(nodes), tuple(tensor.shape), str(tensor.dtype))
                    self.own.add(unit, read, (birth + 1, end, reason))
                continue
            if maker.kind == "call":
                self.exports.add(maker.name)
                self.leaving.add(maker.name)
            reason = f"{name} at {source_line()} reads a tensor that {maker} left where it cannot be followed"
            pins.append((birth + 1, end, reason))
        self.own.look(unit, tensors)
        return pins

    def settle(self, again: HiddenTensors | None) -> list[Pin]:
        """Where the step cannot be cut because of what units keep for calls of their own.

        What a unit makes anew in every step, and reads in none but that, travels. (Mean and deviation of a reversible
        normalisation.)

        Args:
            again: of the same step when it ran once more; None if it could not.
        """
        anew = set() if again is None else self.own.made_anew(again.own)
        self.exports |= anew
        return self.own.pins(anew)
