"""The ensemble: the parallel models of a module, as far as this process holds them, and their reference model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.comm.replica_group import ReplicaGroup
from lightning_avgpipe.elastic.averaging import Averaging, Elasticity
from lightning_avgpipe.elastic.checksum import Checksums
from lightning_avgpipe.elastic.finite import has_nonfinite
from lightning_avgpipe.elastic.model_tensors import ModelTensors
from lightning_avgpipe.elastic.optimizer_clone import clone_optimizer, follow
from lightning_avgpipe.elastic.optimizer_start import load_states, states_of_group_0
from lightning_avgpipe.elastic.replica import Placement, Replica, alike, leaf_like
from lightning_avgpipe.elastic.shared_buffers import SharedBuffers, deviation
from lightning_avgpipe.elastic.staggered import DEFAULT, StaggeredAveraging
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.patching import nothing
from lightning_avgpipe.utils.torch_compat import GRADIENT_HOOKS
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
        steps: averaged or not, since the last averaging.
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
        self._elasticity = elasticity
        self._placement = Placement(module, (), observers, changing, written)
        self._replicas: list[Replica] = [self._placement.own]
        self._clones: list[list[Optimizer]] = [[]]
        # of all parameters that are trained anywhere; what other processes hold is on meta
        self._reference: dict[str, Tensor] = {}
        self._outer: Optimizer | None = None
        self._shown: Replica | None = None
        self.steps = 0
        self.checksums = Checksums()
        self._active = 0
        self._begun: tuple[Averaging, Callable[[], None]] | None = None  # an averaging
        self._turns: StaggeredAveraging | None = None
        self._shared = None if replica_group is None else SharedBuffers(self._placement.own.buffers, replica_group)
        self.follow()

    @property
    def size(self) -> int:
        """N: the models of this group."""
        return len(self._replicas)

    @property
    def total(self) -> int:
        """The models of all groups."""
        return self.size * (1 if self._replica_group is None else self._replica_group.count)

    @property
    def first(self) -> int:
        """The number that this group's model 0 has among the models of all groups."""
        return 0 if self._replica_group is None else self.size * self._replica_group.number

    # -- which models there are --------------------------------------------------------------------------------------

    def resize(self, size: int) -> bool:
        """Have so many parallel models; tells whether that is a change.

        New ones start from the reference, with the optimizer state of group 0's pipeline 0. Those with the highest
        numbers go, and the others move alike, so that the reference stays where it is and is their mean.
        """
        if size == self.size:
            return False
        self._turns = None
        self.show_reference(False)
        self.checksums.forget()
        if self.steps:
            self._begin()
            self.finish_averaging()
        if size < self.size:
            del self._replicas[size:], self._clones[size:]
            Averaging(self._models(), self._centres(), size, self._replica_group).end(alpha=0.0, outer_lr=0.0)
        if size > self.size:
            self._grow(size)
        return True

    def _grow(self, size: int) -> None:
        buffers, optimizers = self._mean_buffers(), self._optimizers()
        states = None if self._replica_group is None else states_of_group_0(optimizers, self._replica_group)
        while self.size < size:
            self._replicas.append(self._from_reference(self.size, buffers))
            own = self._own(self._replicas[-1])
            self._clones.append([clone_optimizer(optimizer, own) for optimizer in optimizers])
            for made, state in zip(self._clones[-1], states or (), strict=False):
                load_states(made, state)

    def _from_reference(self, number: int, buffers: Mapping[str, Tensor]) -> Replica:
        replica = Replica(number)
        replica.buffers = {name: alike(buffer, buffer.clone()) for name, buffer in buffers.items()}
        replica.memory = [tensor.detach().clone() for tensor in self._placement.written]
        for name in self._mine:
            replica.parameters[name] = self._leaf(name)
        return replica

    def _leaf(self, name: str) -> nn.Parameter:
        leaf, own = leaf_like(self._reference[name]), self._placement.own.parameters[name]
        leaf.requires_grad_(own.requires_grad)
        for hooks in GRADIENT_HOOKS:  # they act on every model's
            if getattr(own, hooks, None):
                setattr(leaf, hooks, getattr(own, hooks))
        return leaf

    def follow(self) -> bool:
        """Follow the module: what has begun to train gets copies. Tells whether something has.

        Raises:
            ConfigurationError: an optimizer trains something that is no parameter of the module.
        """
        self.show_reference(False)
        own = self._placement.own.parameters
        new = [n for n, p in self._module.named_parameters() if p.requires_grad and n not in self._reference]
        for replica in self._replicas[1:]:
            for name, copy in replica.parameters.items():
                if copy.requires_grad != own[name].requires_grad:
                    copy.requires_grad_(own[name].requires_grad)
        if not new:
            return False
        self._turns = None
        self._check_optimizers()
        parameters = dict(self._module.named_parameters())
        here = [name for name in new if not parameters[name].is_meta]
        self._placement.drop(new)
        self._placement.add(here)
        for name in new:
            data = parameters[name].detach()
            self._reference[name] = data.clone() if name in own else torch.empty_like(data, device="meta")
        for replica in self._replicas[1:]:
            for name in here:
                replica.parameters[name] = self._leaf(name)
                replica.buffers.pop(name, None)
        if self._elasticity.outer_optimizer is not None:
            if self._outer is None:
                self._outer = self._elasticity.outer_optimizer(list(self._reference.values()))
            else:
                self._outer.param_groups[0]["params"] += [self._reference[name] for name in new]
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
        if average and self.steps:
            self.show_reference(False)
            self._begin()
        self.show_reference(True)
        shown, own = self._shown, self._placement.own
        assert shown is not None
        with torch.no_grad():
            for name, buffer in own.buffers.items():
                if shown.buffers[name] is not buffer:
                    buffer.copy_(shown.buffers[name])
        self._placement.put(own)
        self._replicas, self._clones, self._shown, self._reference = [own], [[]], None, {}

    # -- where they are ----------------------------------------------------------------------------------------------

    def begin_relocation(self) -> None:
        """Parameters are about to move between processes: show pipeline 0's model, and let nothing be under way."""
        self._turns = None
        self.show_reference(False)
        self.check_checksums()

    @property
    def belongings(self) -> list[Belongings]:
        """All that moves with a parameter or buffer, beside the module's own tensors and their optimizers' states."""
        shared = {} if self._shared is None else self._shared.buffers
        states = [
            OptimizerStates(made, partial(getattr, replica, "parameters"))
            for replica, made in zip(self._replicas, self._clones, strict=True)
        ]
        if self._outer is not None:
            states.append(OptimizerStates([self._outer], lambda: self._reference))
        return [ModelTensors(self._placement, self._replicas, self._reference, self._leaf, shared), *states]

    # -- which model the module shows --------------------------------------------------------------------------------

    def place(self, number: int) -> None:
        """Put a parallel model into the module; in the place of number 0 the reference, if that is shown."""
        self.finish_averaging()
        self._placement.put(self._shown if number == 0 and self._shown is not None else self._replicas[number])

    @contextlib.contextmanager
    def placed(self, number: int) -> Iterator[None]:
        """Within this context the module is this parallel model."""
        with self.showing_reference(False):
            self.place(number)
            try:
                yield
            finally:
                self.place(0)

    def foreign_tensors(self, number: int, buffers: Collection[str]) -> dict[str, list[Tensor]]:
        """Which tensors are those of other models, by name, while a parallel model is in the module.

        Args:
            number: n of that model.
            buffers: names; other buffers may be the same ones for all models.
        """
        self._placement.read_back()
        others = [replica for replica in self._replicas if replica.number != number]
        own = self._placement.own
        found: dict[str, list[Tensor]] = {name: [r.parameters[name] for r in others] for name in own.parameters}
        found |= {name: [r.buffers[name] for r in others] for name in buffers if name in own.buffers}
        return found

    def show_reference(self, reference: bool) -> None:
        """From now on the module has the weights of the reference, or those of pipeline 0."""
        self.finish_averaging()
        if reference == (self._shown is not None):
            return
        own = self._placement.own
        if reference:
            self._shown = Replica(0)
            self._shown.parameters = own.parameters
            self._shown.buffers = self._mean_buffers()
            self._shown.memory = own.memory
            self._placement.put(self._shown)
        else:
            self._placement.put(own)
            self._shown = None
        for name, parameter in own.parameters.items():
            centre = self._reference[name]
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

    def _mean_buffers(self) -> dict[str, Tensor]:
        """Means of what is no integer, and the other buffers of pipeline 0; over groups as of the last averaging."""
        if self._shared is not None:
            return {name: alike(buffer, buffer.clone()) for name, buffer in self._shared.buffers.items()}
        self._placement.read_back()
        found = dict(self._placement.own.buffers)
        for name, first in found.items():
            others = [replica.buffers[name] for replica in self._replicas[1:]]
            if (first.is_floating_point() or first.is_complex()) and all(b.shape == first.shape for b in others):
                wide = first.detach().to(torch.promote_types(first.dtype, torch.float32))
                total = sum((deviation(b, wide) for b in others), torch.zeros_like(wide))
                found[name] = alike(first, (wide + total / self.size).to(first.dtype))
        return found

    # -- steps -------------------------------------------------------------------------------------------------------

    def optimizers(self, number: int) -> list[Optimizer]:
        """Those of pipeline n; of pipeline 0 those that everybody knows."""
        return self._clones[number] if number else list(self._optimizers())

    def follow_optimizers(self, only: Optimizer | None = None) -> None:
        """Pipelines 1..N-1 will step with the hyper-parameters that pipeline 0 has now; or ``only`` one optimizer."""
        for replica, clones in zip(self._replicas[1:], self._clones[1:], strict=True):
            if only is None or any(made is only for made in clones):
                own = self._own(replica)
                for made, optimizer in zip(clones, self._optimizers(), strict=True):
                    follow(made, optimizer, own)

    def clear_gradients(self, number: int | None = None) -> None:
        """Of pipeline n, or of pipelines 1..N-1; those of pipeline 0 are the module's."""
        for replica in self._replicas[1:] if number is None else (self._replicas[number],):
            for parameter in replica.parameters.values():
                parameter.grad = None

    def parameters(self, number: int) -> dict[str, nn.Parameter]:
        """Those that pipeline n trains, as far as they are here, in the same order on processes with these stages."""
        return {name: self._replicas[number].parameters[name] for name in self._mine}

    def gradients(self, number: int) -> dict[str, Tensor]:
        """Of pipeline n, as far as they are here, by the names of the parameters."""
        return {name: p.grad for name, p in self.parameters(number).items() if p.grad is not None}

    @torch.no_grad()
    def restart(self, number: int, alike: int | None) -> None:
        """A parallel model begins again at the reference, and does not take part in the step that comes.

        The reference is not shown. Once it has been averaged with the others, it is where they are.

        Args:
            number: n of the model, whose gradients go.
            alike: n of one whose buffers are sound; None if there is none.
        """
        self.finish_averaging()
        self.checksums.forget()
        self._turns = None
        self._placement.read_back()
        replica = self._replicas[number]
        for name, parameter in replica.parameters.items():
            parameter.copy_(self._reference[name])
            parameter.grad = None
        if alike is not None:
            for name, buffer in replica.buffers.items():
                buffer.copy_(self._replicas[alike].buffers[name])
        for optimizer in self.optimizers(number):
            for state in [optimizer.state[p] for p in replica.parameters.values() if p in optimizer.state]:
                if has_nonfinite(value for value in state.values() if isinstance(value, Tensor)):
                    state.clear()  # of a step that went before

    def stepped(self, active: int) -> None:
        """The optimizers have stepped: average, if it is time.

        Args:
            active: pipelines that had a batch, counted from 0.
        """
        self._turns = None
        self.steps += 1
        self._active = max(self._active, active)
        if self.steps >= self._elasticity.average_every:
            self._begin()

    def _begin(self) -> None:
        self._begun = self._meeting(self._active)
        self.steps = self._active = 0
        if self._replica_group is None:
            self.finish_averaging()

    def _meeting(self, active: int) -> tuple[Averaging, Callable[[], None]]:
        averaging = Averaging(self._models(), self._centres(), active, self._replica_group)
        if self._shared is None:
            return averaging, nothing
        self._placement.read_back()
        return averaging, self._shared.begin([replica.buffers for replica in self._replicas])

    def begin_turns(self) -> None:
        """The models are about to step, one after the other, and each meets the reference alone. All have stepped as
        often; the reference is not shown.
        """
        if self._turns is None and self._mine:  # a process may have frozen stages only
            rate, alpha = self._elasticity.rate(self.total), self._elasticity.dilution(self.total)
            self._turns = StaggeredAveraging(DEFAULT, self._models(), self._centres(), alpha, rate)

    def end_turn(self, number: int) -> None:
        """The optimizers of model n have stepped: it meets the reference, and may begin its next iteration."""
        if self._turns is not None:
            self._turns.end(number)

    def buffers(self, number: int, names: Collection[str]) -> dict[str, Tensor]:
        """Of model n those of these names that are here, and under names of their own other tensors that steps write
        into. Pipeline 0's model is in the module, and shown.
        """
        self._placement.read_back()
        replica = self._replicas[number]
        found = {name: buffer for name, buffer in replica.buffers.items() if name in names}
        memory = [tensor.detach() for tensor in self._placement.written] if number == 0 else replica.memory
        return found | {f"written {i}": tensor for i, tensor in enumerate(memory)}

    def mark(self, last: bool) -> None:
        """Hooks come next; ``last`` as for :meth:`Checksums.set`. Where there is one model, they see all there are."""
        if self.size > 1 and not self.averages:
            self.checksums.set(self._placement.own.parameters, last)

    def check_checksums(self) -> None:
        """Hooks have been; the reference is not shown.

        Raises:
            ConfigurationError: they have changed pipeline 0's model alone.
        """
        self.checksums.check(self._placement.own.parameters, self.size - 1)

    @property
    def averages(self) -> bool:
        """Whether an averaging has begun and not ended."""
        return self._begun is not None

    def finish_averaging(self) -> None:
        """End the averaging that has begun, if one has. Whatever here shows or changes a model does so first."""
        if self._begun is None:
            return
        (averaging, end_buffers), self._begun = self._begun, None
        whole = True
        while self._replica_group is not None and not self._replica_group.settle():
            # groups have left: the reference becomes the mean of the models that there still are
            whole = False
            averaging, end_buffers = self._meeting(self.size)
        alpha = self._elasticity.dilution(self.total)
        if self._outer is not None and whole:
            averaging.end_with(self._outer, alpha)
        else:
            averaging.end(alpha, self._elasticity.rate(self.total) if whole else 1.0)
        end_buffers()

    def abandon(self) -> None:
        """Do not wait for other groups any more: they have failed."""
        self._begun = None

    def _models(self) -> list[list[Tensor]]:
        return [[replica.parameters[name].detach() for name in self._mine] for replica in self._replicas]

    @property
    def _mine(self) -> list[str]:
        """Parameters of which there is something here, in the same order on processes with the same stages."""
        return [name for name in self._reference if name in self._placement.own.parameters]

    def _centres(self) -> list[Tensor]:
        return [self._reference[name] for name in self._mine]

    def _own(self, replica: Replica) -> dict[int, Tensor]:
        return {id(p): replica.parameters[name] for name, p in self._placement.own.parameters.items()}

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def outer(self) -> Optimizer | None:
        """The optimizer of the reference, over ``names``; None if it has none."""
        self.finish_averaging()
        return self._outer

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters of which each model has its own, also those that other processes hold."""
        return tuple(self._reference)

    @property
    def active(self) -> int:
        """Pipelines that had a batch since the last averaging."""
        return self._active

    def tensors(self, number: int) -> dict[str, Tensor]:
        """A parallel model's own tensors by name; what other processes hold is on meta. The reference is not shown."""
        self.finish_averaging()
        self._placement.read_back()
        replica = self._replicas[number]
        parameters = {name: replica.parameters.get(name, meta) for name, meta in self._reference.items()}
        return {name: tensor.detach() for name, tensor in (*parameters.items(), *replica.buffers.items())}

    @torch.no_grad()
    def load(self, number: int, saved: Mapping[str, Tensor]) -> None:
        """Fill a parallel model's own tensors; those that are not saved stay as they are."""
        self.checksums.forget()
        self._turns = None
        for name, tensor in self.tensors(number).items():
            if name in saved and not tensor.is_meta:
                tensor.copy_(saved[name])

    def load_progress(self, steps: int, active: int) -> None:
        """Go on in the midst of an interval between averagings."""
        self.steps, self._active = steps, active
