"""The ensemble: the parallel models of a module, as far as this process holds them, and their reference model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.elastic.averager import Averager
from lightning_avgpipe.elastic.averaging import Elasticity
from lightning_avgpipe.elastic.checksum import Checksums
from lightning_avgpipe.elastic.finite import has_nonfinite
from lightning_avgpipe.elastic.model_optimizers import ModelOptimizers
from lightning_avgpipe.elastic.model_tensors import ModelTensors
from lightning_avgpipe.elastic.models import Models
from lightning_avgpipe.elastic.replica import Placement
from lightning_avgpipe.weights.belongings import Belongings, OptimizerStates


class Ensemble:
    """Parallel models and what they need: replicas, the reference, and the optimizers of pipelines 1..N-1.

    The module itself is replica 0, so the optimizer that everybody knows is that of pipeline 0. The reference has
    tensors of its own; to show it, its contents change places with those of the module's parameters.

    Args:
        module: settled on its device; parameters of other processes are on meta.
        optimizers: those of pipeline 0, as of when it is called.
        elasticity: how the models are held together.
        observers: modules that only look at values (metrics).
        replica_group: processes that hold the parallel models of other groups; None if there are none.
        changing: parameters that a step changes itself.
        written: other tensors that it writes into.

    Attributes:
        models: their tensors.
        averager: holds them together.
        optimizers: of each.
        checksums: of pipeline 0's weights between steps.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Callable[[], Sequence[Optimizer]],
        elasticity: Elasticity,
        observers: Collection[nn.Module] = (),
        replica_group: ReplicaGroup | None = None,
        changing: Collection[str] = (),
        written: Sequence[Tensor] = (),
    ) -> None:
        self._module = module
        self._placement = Placement(module, (), observers, changing, written)
        self.models = Models(self._placement, replica_group)
        self.averager = Averager(self.models, elasticity, replica_group)
        self.optimizers = ModelOptimizers(optimizers, self.models, replica_group)
        self.checksums = Checksums(self._placement.own.parameters)
        self._follow()

    # -- which models there are --------------------------------------------------------------------------------------

    def follow(self, size: int) -> bool:
        """Have so many parallel models, and what has begun to train in the module in each; tells of any change.

        New ones start from the reference, with the optimizer state of group 0's pipeline 0. Those with the highest
        numbers go, and the others move alike, so that the reference stays where it is and is their mean.

        Raises:
            ConfigurationError: an optimizer trains something that is no parameter of the module.
        """
        changed, before = self._follow(), self.models.size
        if size == before:
            return changed
        self.averager.turns.stop()
        self.checksums.forget()
        if self.averager.steps:
            self.averager.begin()
            self.averager.finish()
        self.models.resize(size)
        self.optimizers.resize()
        if size < before:
            self.averager.recentre()
        return True

    def _follow(self) -> bool:
        self.show_reference(False)
        own = self._placement.own.parameters
        known = self.models.reference
        new = {n: p for n, p in self._module.named_parameters() if p.requires_grad and n not in known}
        for replica in self.models.replicas[1:]:
            for name, copy in replica.parameters.items():
                if copy.requires_grad != own[name].requires_grad:
                    copy.requires_grad_(own[name].requires_grad)
        if not new:
            return False
        self.averager.turns.stop()
        self.optimizers.check(self._module)
        self.models.train(new)
        self.averager.follow(new)
        return True

    def dissolve(self, average: bool = True) -> None:
        """Leave the reference in the module, and keep nothing else.

        Args:
            average: whether what was trained since the last averaging goes into the reference before.
        """
        if average and self.averager.steps:
            self.show_reference(False)
            self.averager.begin()
        self.show_reference(True)
        shown, own = self.models.shown, self._placement.own
        assert shown is not None
        with torch.no_grad():
            for name, buffer in own.buffers.items():
                if shown.buffers[name] is not buffer:
                    buffer.copy_(shown.buffers[name])
        self._placement.put(own)

    # -- where they are ----------------------------------------------------------------------------------------------

    def begin_relocation(self) -> None:
        """Parameters are about to move between processes: show pipeline 0's model, and let nothing be under way."""
        self.averager.turns.stop()
        self.show_reference(False)
        self.checksums.check(self.models.size - 1)

    @property
    def belongings(self) -> list[Belongings]:
        """All that moves with a parameter or buffer, beside the module's own tensors and their optimizers' states."""
        states = self.optimizers.states()
        if (outer := self.averager.outer) is not None:
            states.append(OptimizerStates([outer], lambda: self.models.reference))
        return [ModelTensors(self.models), *states]

    # -- which model the module shows --------------------------------------------------------------------------------

    def place(self, number: int) -> None:
        """Put a parallel model into the module; in the place of number 0 the reference, if that is shown."""
        self.averager.finish()
        replica = self.models.replicas[number]
        self._placement.put(replica if number else self.models.shown or replica)

    @contextlib.contextmanager
    def placed(self, number: int) -> Iterator[None]:
        """Within this context the module is this parallel model."""
        with self.showing_reference(False):
            self.place(number)
            try:
                yield
            finally:
                self.place(0)

    def show_reference(self, reference: bool) -> None:
        """From now on the module has the weights of the reference, or those of pipeline 0."""
        self.averager.finish()
        if reference == (self.models.shown is not None):
            return
        if reference:
            self.averager.turns.catch_up()
        self.models.show(reference)

    @contextlib.contextmanager
    def showing_reference(self, reference: bool) -> Iterator[None]:
        """The same within this context."""
        before = self.models.shown is not None
        self.show_reference(reference)
        try:
            yield
        finally:
            self.show_reference(before)

    # -- steps -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def restart(self, number: int, alike: int | None) -> None:
        """A parallel model begins again at the reference, and does not take part in the step that comes.

        The reference is not shown. Once it has been averaged with the others, it is where they are.

        Args:
            number: n of the model, whose gradients go.
            alike: n of one whose buffers are sound; None if there is none.
        """
        self.averager.finish()
        self.checksums.forget()
        self.averager.turns.stop()
        self._placement.read_back()
        replica = self.models.replicas[number]
        for name, parameter in replica.parameters.items():
            parameter.copy_(self.models.reference[name])
            parameter.grad = None
        if alike is not None:
            for name, buffer in replica.buffers.items():
                buffer.copy_(self.models.replicas[alike].buffers[name])
        for optimizer in self.optimizers.of(number):
            for state in [optimizer.state[p] for p in replica.parameters.values() if p in optimizer.state]:
                if has_nonfinite(value for value in state.values() if isinstance(value, Tensor)):
                    state.clear()  # of a step that went before

    def mark(self, last: bool) -> None:
        """Hooks come next; ``last`` as for :meth:`Checksums.set`. Where there is one model, they see all there are."""
        if self.models.size > 1 and not self.averager.is_under_way:
            self.checksums.set(last)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self, number: int) -> dict[str, Tensor]:
        """A parallel model's own tensors by name; what other processes hold is on meta. The reference is not shown."""
        self.averager.finish()
        self._placement.read_back()
        replica = self.models.replicas[number]
        parameters = {name: replica.parameters.get(name, meta) for name, meta in self.models.reference.items()}
        return {name: tensor.detach() for name, tensor in (*parameters.items(), *replica.buffers.items())}

    @torch.no_grad()
    def load(self, number: int, saved: Mapping[str, Tensor]) -> None:
        """Fill a parallel model's own tensors; those that are not saved stay as they are."""
        self.checksums.forget()
        self.averager.turns.stop()
        for name, tensor in self.tensors(number).items():
            if name in saved and not tensor.is_meta:
                tensor.copy_(saved[name])
