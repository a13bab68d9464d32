"""The ensemble: this process's part of the parallel models of a module, and of their reference model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.averaging.averager import Averager
from lightning_avgpipe.averaging.averaging_step import AveragingStep
from lightning_avgpipe.averaging.integrity import Checksums, digests, first_nonfinite
from lightning_avgpipe.averaging.models import Models, ModelTensors
from lightning_avgpipe.averaging.optimizers import ModelOptimizers
from lightning_avgpipe.averaging.options import Averaging
from lightning_avgpipe.comm.collectives import TensorCollectives
from lightning_avgpipe.state.writes import put_back
from lightning_avgpipe.utils.torch_compat import address, share_gradient_hooks
from lightning_avgpipe.weights.relocation import MovableData, OptimizerStates


class Ensemble:
    """The parallel models of a module, their reference, and the optimizers of pipelines 1..N-1.

    The module itself is model 0, so the trainer's optimizer is that of pipeline 0. The reference has tensors of its
    own. To show the reference, their contents are exchanged with those of the module's parameters.

    Args:
        module: module on its device; parameters of other processes are on meta.
        optimizers: returns the current optimizers of pipeline 0.
        averaging: options of the averaging.
        observers: modules that only read values (metrics).
        averaging_group: processes of all groups that hold the same stages; None if there is one group.
        changing: names of parameters and buffers that a step itself changes.
        written: other tensors into which a step writes.

    Attributes:
        models: tensors of the models.
        averager: averager of the models.
        optimizers: optimizers of each model.
        checksums: checksums of pipeline 0's weights between steps.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Callable[[], Sequence[Optimizer]],
        averaging: Averaging,
        observers: Collection[nn.Module] = (),
        averaging_group: TensorCollectives | None = None,
        changing: Collection[str] = (),
        written: Sequence[Tensor] = (),
    ) -> None:
        self._module, self._averaging_group = module, averaging_group
        self.models = Models(module, observers, changing, written, averaging_group)
        self.averager = Averager(self.models, averaging, averaging_group)
        self.optimizers = ModelOptimizers(optimizers, self.models, averaging_group)
        self.checksums = Checksums(self.models.own.parameters)
        self._memory: list[tuple[nn.Parameter, Tensor]] = []  # of the reference, while it is shown
        self._watched: Mapping[str, Tensor] = {}  # weights of the reference, if an averaging counts from them
        self._before = digests(self._watched)  # their checksums when the reference was shown
        self._follow()

    # -- which models there are --------------------------------------------------------------------------------------

    def follow(self, size: int) -> bool:
        """Change the number of parallel models, and give each a copy of parameters that were not trained before.

        New models start from the reference, with the optimizer state of group 0's pipeline 0. If there are too many,
        those with the highest numbers are dropped, and the others shift equally, so that the unchanged reference is
        their mean.

        Args:
            size: number of parallel models of this group.

        Returns:
            Whether anything has changed.

        Raises:
            ConfigurationError: an optimizer trains something that is not a parameter of the module.
        """
        changed, before = self._follow(), self.models.size
        self.optimizers.follow()  # before a loss scaler unscales the gradients of what they train
        if size == before:
            return changed
        self.checksums.forget()
        self.averager.average_all_now()
        self.models.resize(size)
        self.optimizers.resize()
        if size < before:  # the others move by the same difference, so that the unchanged reference is their mean
            centring = AveragingStep(*self.models.tensors(), size, self._averaging_group)
            centring.end(alpha=0.0, outer_lr=0.0)
        return True

    def _follow(self) -> bool:
        self.show_reference(False)
        own = self.models.own.parameters
        known = self.models.reference
        new = {n: p for n, p in self._module.named_parameters() if p.requires_grad and n not in known}
        for model in self.models.each[1:]:
            for name, copy in model.parameters.items():
                if copy.requires_grad != own[name].requires_grad:
                    copy.requires_grad_(own[name].requires_grad)
                share_gradient_hooks(own[name], copy)
        if not new:
            return False
        self.averager.end_staggered()
        self.optimizers.check(self._module)
        self.models.train(new)
        self.averager.follow(new)
        return True

    def dissolve(self, average: bool = True) -> None:
        """Leave the reference in the module, and drop the parallel models.

        Args:
            average: whether training since the last averaging is averaged into the reference first.
        """
        if average:
            self.show_reference(False)
            self.averager.average_all_now()
        self.show_reference(True)
        shown, own = self.models.shown, self.models.own
        assert shown is not None
        with torch.no_grad():
            for name, buffer in own.buffers.items():
                if shown.buffers[name] is not buffer:
                    buffer.copy_(shown.buffers[name])
        self.models.put(own)

    # -- relocation --------------------------------------------------------------------------------------------------

    def begin_relocation(self) -> None:
        """Prepare for a move of parameters between processes: show pipeline 0's model, and wait for all sums."""
        self.show_reference(False)
        self.averager.end_staggered()
        self.averager.arrive()
        self.checksums.check(self.models.size - 1)

    @property
    def tensors_of_models(self) -> MovableData:
        """The tensors of models 1..N-1 and of the reference, which move with the module's."""
        return ModelTensors(self.models)

    @property
    def movable_data(self) -> list[MovableData]:
        """The data that moves with a parameter, in addition to the module's tensors and their optimizers' states."""
        states = self.optimizers.states()
        if (outer := self.averager.outer) is not None:
            states.append(OptimizerStates([outer], lambda: self.models.reference))
        return [self.tensors_of_models, *states]

    # -- which model the module shows --------------------------------------------------------------------------------

    def place(self, number: int) -> None:
        """Put a parallel model into the module. For number 0 this is the reference, if it is shown."""
        self.averager.finish()
        model = self.models.each[number]
        self.models.put(model if number else self.models.shown or model)

    @contextlib.contextmanager
    def placed(self, number: int) -> Iterator[None]:
        """Put a parallel model into the module within this context."""
        with self.showing_reference(False):
            self.place(number)
            try:
                yield
            finally:
                self.place(0)

    def show_reference(self, reference: bool) -> None:
        """Give the module the weights of the reference, or those of pipeline 0, until the next call.

        Args:
            reference: whether to show the reference.

        Raises:
            ConfigurationError: user code has changed the reference while a late averaging is in flight.
        """
        self.averager.finish()
        if reference == (self.models.shown is not None):
            return
        if reference:
            self.averager.add_pending_sums()
            self.models.show(True)
            self._memory = _memory(self.models.parameters(0))
            self._watched = self.models.parameters(0) if self.averager.has_begun else {}
            self._before = digests(self._watched)
        else:
            memory, self._memory = self._memory, []
            _return_to(memory)
            changed = (digests(self._watched) != self._before).nonzero().flatten().tolist()
            self.models.show(False)
            if changed:
                self.averager.take_over(changed)

    @contextlib.contextmanager
    def showing_reference(self, reference: bool) -> Iterator[None]:
        """Give the module the weights of the reference, or those of pipeline 0, within this context.

        Afterwards the module shows the same model as before.
        """
        before, placed = self.models.shown is not None, self.models.placed
        self.show_reference(reference)
        try:
            yield
        finally:
            self.show_reference(before)
            if placed.number:
                self.models.put(placed)

    @contextlib.contextmanager
    def lent(self, number: int | None) -> Iterator[None]:
        """Give the module the weights of a parallel model (None: the reference) within this context, for user code.

        Raises:
            ConfigurationError: it has changed the reference while a late averaging is in flight.
        """
        if number is None:
            with self.showing_reference(True):
                yield
            return
        self.checksums.forget()
        with self.placed(number):
            memory = _memory(self.models.parameters(number))
            yield
            _return_to(memory)
            self.averager.take_over(())

    def settle(self) -> None:
        """Let the reference follow what user code has written into models alone, if they are averaged one by one.

        Otherwise it follows with the next averaging, from the models as they are.
        """
        staggered = self.averager.staggered
        if staggered is not None and staggered.was_shown:
            with self.showing_reference(False):
                staggered.settle()

    # -- steps -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def restart(self, number: int, source: int | None) -> None:
        """Reset a parallel model, which is left out of the next step, to the reference, which must not be shown.

        Args:
            number: number n of the model, whose gradients are dropped.
            source: number of a model from which to copy the buffers; None if no model has finite ones.
        """
        self.averager.finish()
        self.checksums.forget()
        self.averager.end_staggered()
        self.models.read_back()
        model = self.models.each[number]
        for name, parameter in model.parameters.items():
            parameter.copy_(self.models.reference[name])
            parameter.grad = None
        if source is not None:
            for name, buffer in model.buffers.items():
                buffer.copy_(self.models.each[source].buffers[name])
        for optimizer in self.optimizers.of(number):
            for state in [optimizer.state[p] for p in model.parameters.values() if p in optimizer.state]:
                if first_nonfinite({k: value for k, value in state.items() if isinstance(value, Tensor)}):
                    state.clear()  # an earlier step has made it infinite or NaN

    def take_checksums(self, last: bool) -> None:
        """Take checksums before hooks run; not for a single model, since hooks see all of it.

        Args:
            last: as for :meth:`Checksums.set`.
        """
        if self.models.size > 1 and not self.averager.is_under_way:
            self.checksums.set(last)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self, number: int) -> dict[str, Tensor]:
        """Return a parallel model's own tensors by name; those of other processes are on meta.

        The reference must not be shown.
        """
        self.averager.finish()
        self.models.read_back()
        model = self.models.each[number]
        parameters = {name: model.parameters.get(name, meta) for name, meta in self.models.reference.items()}
        return {name: tensor.detach() for name, tensor in (*parameters.items(), *model.buffers.items())}

    @torch.no_grad()
    def load(self, number: int, saved: Mapping[str, Tensor]) -> None:
        """Load a parallel model's own tensors; those that were not saved stay as they are."""
        self.checksums.forget()
        self.averager.end_staggered()
        for name, tensor in self.tensors(number).items():
            if name in saved and not tensor.is_meta:
                tensor.copy_(saved[name])


def _memory(parameters: Mapping[str, nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Return parameters with the memory that they have now."""
    return [(parameter, parameter.detach()) for parameter in parameters.values()]


def _return_to(memory: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Copy what user code has assigned (``p.data = ...``) into the model's own memory, which models may not share."""
    for parameter, own in memory:
        if address(parameter) != address(own):
            put_back(parameter, own, parameter.detach())
