"""The ensemble: the parallel models of a module, as far as this process holds them, and their reference model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.elastic.averager import Averager
from lightning_avgpipe.elastic.averaging import Elasticity
from lightning_avgpipe.elastic.checksum import Checksums
from lightning_avgpipe.elastic.finite import has_nonfinite
from lightning_avgpipe.elastic.model_tensors import ModelTensors
from lightning_avgpipe.elastic.models import Models
from lightning_avgpipe.elastic.optimizer_clone import clone_optimizer, follow
from lightning_avgpipe.elastic.optimizer_start import load_states, states_of_group_0
from lightning_avgpipe.elastic.replica import Placement, Replica
from lightning_avgpipe.errors import ConfigurationError
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
        self._replica_group = replica_group
        self._optimizers = optimizers
        self._placement = Placement(module, (), observers, changing, written)
        self.models = Models(self._placement, replica_group)
        self.averager = Averager(self.models, elasticity, replica_group)
        self._clones: list[list[Optimizer]] = [[]]
        self._shown: Replica | None = None
        self.checksums = Checksums()
        self.follow()

    # -- which models there are --------------------------------------------------------------------------------------

    def resize(self, size: int) -> bool:
        """Have so many parallel models; tells whether that is a change.

        New ones start from the reference, with the optimizer state of group 0's pipeline 0. Those with the highest
        numbers go, and the others move alike, so that the reference stays where it is and is their mean.
        """
        if size == self.models.size:
            return False
        self.averager.turns.stop()
        self.show_reference(False)
        self.checksums.forget()
        if self.averager.steps:
            self.averager.begin()
            self.averager.finish()
        if size < self.models.size:
            self.models.drop(size)
            del self._clones[size:]
            self.averager.recentre()
        if size > self.models.size:
            self._grow(size)
        return True

    def _grow(self, size: int) -> None:
        buffers, optimizers = self.models.mean_buffers(), self._optimizers()
        states = None if self._replica_group is None else states_of_group_0(optimizers, self._replica_group)
        while self.models.size < size:
            own = self.models.counterparts(self.models.add(buffers))
            self._clones.append([clone_optimizer(optimizer, own) for optimizer in optimizers])
            for made, state in zip(self._clones[-1], states or (), strict=False):
                load_states(made, state)

    def follow(self) -> bool:
        """Follow the module: what has begun to train gets copies. Tells whether something has.

        Raises:
            ConfigurationError: an optimizer trains something that is no parameter of the module.
        """
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
        self._check_optimizers()
        self.models.train(new)
        self.averager.follow(new)
        return True

    def _check_optimizers(self) -> None:
        known = {id(parameter) for parameter in self._module.parameters()}
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in known and parameter.requires_grad:
                        raise ConfigurationError(
                            f"{type(optimizer).__name__} trains a tensor of shape {tuple(parameter.shape)} that is no "
                            "parameter of the LightningModule, so parallel models cannot have their own; make it a "
                            "parameter of a submodule, or use num_pipelines=1"
                        )

    def dissolve(self, average: bool = True) -> None:
        """Leave the reference in the module, and keep nothing else.

        Args:
            average: whether what was trained since the last averaging goes into the reference before.
        """
        if average and self.averager.steps:
            self.show_reference(False)
            self.averager.begin()
        self.show_reference(True)
        shown, own = self._shown, self._placement.own
        assert shown is not None
        with torch.no_grad():
            for name, buffer in own.buffers.items():
                if shown.buffers[name] is not buffer:
                    buffer.copy_(shown.buffers[name])
        self._placement.put(own)
        self.models.clear()
        self._clones, self._shown = [[]], None

    # -- where they are ----------------------------------------------------------------------------------------------

    def begin_relocation(self) -> None:
        """Parameters are about to move between processes: show pipeline 0's model, and let nothing be under way."""
        self.averager.turns.stop()
        self.show_reference(False)
        self.check_checksums()

    @property
    def belongings(self) -> list[Belongings]:
        """All that moves with a parameter or buffer, beside the module's own tensors and their optimizers' states."""
        shared = {} if self.models.shared is None else self.models.shared.buffers
        states = [
            OptimizerStates(made, partial(getattr, replica, "parameters"))
            for replica, made in zip(self.models.replicas, self._clones, strict=True)
        ]
        if self.averager.outer is not None:
            states.append(OptimizerStates([self.averager.outer], lambda: self.models.reference))
        return [
            ModelTensors(self._placement, self.models.replicas, self.models.reference, self.models.leaf, shared),
            *states,
        ]

    # -- which model the module shows --------------------------------------------------------------------------------

    def place(self, number: int) -> None:
        """Put a parallel model into the module; in the place of number 0 the reference, if that is shown."""
        self.averager.finish()
        self._placement.put(self._shown if number == 0 and self._shown is not None else self.models.replicas[number])

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
        if reference == (self._shown is not None):
            return
        own = self._placement.own
        if reference:
            self.averager.turns.catch_up()
            self._shown = Replica(0)
            self._shown.parameters = own.parameters
            self._shown.buffers = self.models.mean_buffers()
            self._shown.memory = own.memory
            self._placement.put(self._shown)
        else:
            self._placement.put(own)
            self._shown = None
        for name, parameter in own.parameters.items():
            centre = self.models.reference[name]
            parameter.data, centre.data = centre.data, parameter.data

    @contextlib.contextmanager
    def showing_reference(self, reference: bool) -> Iterator[None]:
        """The same within this context."""
        before = self._shown is not None
        self.show_reference(reference)
        try:
            yield
        finally:
            self.show_reference(before)

    # -- steps -------------------------------------------------------------------------------------------------------

    def optimizers(self, number: int) -> list[Optimizer]:
        """Those of pipeline n; of pipeline 0 those that everybody knows."""
        return self._clones[number] if number else list(self._optimizers())

    def follow_optimizers(self, only: Optimizer | None = None) -> None:
        """Pipelines 1..N-1 will step with the hyper-parameters that pipeline 0 has now; or ``only`` one optimizer."""
        for replica, clones in zip(self.models.replicas[1:], self._clones[1:], strict=True):
            if only is None or any(made is only for made in clones):
                own = self.models.counterparts(replica)
                for made, optimizer in zip(clones, self._optimizers(), strict=True):
                    follow(made, optimizer, own)

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
        for optimizer in self.optimizers(number):
            for state in [optimizer.state[p] for p in replica.parameters.values() if p in optimizer.state]:
                if has_nonfinite(value for value in state.values() if isinstance(value, Tensor)):
                    state.clear()  # of a step that went before

    def settle(self) -> None:
        """What groups have told each other arrives, and nothing is late after that. All of them call it."""
        if self._shown is None:  # else it has arrived, and the reference is in the place of a model
            self.averager.turns.settle()

    def mark(self, last: bool) -> None:
        """Hooks come next; ``last`` as for :meth:`Checksums.set`. Where there is one model, they see all there are."""
        if self.models.size > 1 and not self.averager.is_under_way:
            self.checksums.set(self._placement.own.parameters, last)

    def check_checksums(self) -> None:
        """Hooks have been; the reference is not shown.

        Raises:
            ConfigurationError: they have changed pipeline 0's model alone.
        """
        self.checksums.check(self._placement.own.parameters, self.models.size - 1)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def outer(self) -> Optimizer | None:
        """The optimizer of the reference, over ``names``; None if it has none."""
        self.averager.finish()
        return self.averager.outer

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters of which each model has its own, also those that other processes hold."""
        return tuple(self.models.reference)

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
