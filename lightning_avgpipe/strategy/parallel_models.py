"""The parallel models of a run: their gradients, their optimizers' steps, averaging, and which one the module shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.averaging.optimizers import StepCounter, parameters_in, unwrapped
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy import hooks
from lightning_avgpipe.strategy.context import RunContext
from lightning_avgpipe.strategy.gradient_check import GradientCheck
from lightning_avgpipe.strategy.iteration import IterationOrder
from lightning_avgpipe.strategy.log import StepLog
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.replicas import ReplicaSync
from lightning_avgpipe.training.stepping import NormsOverStages
from lightning_avgpipe.utils.lightning import is_overridden, rank_zero_info
from lightning_avgpipe.utils.tensors import is_strided
from lightning_avgpipe.utils.torch_compat import version_of


class ParallelModels:
    """The N parallel models of a group in one run of the trainer. With one model nothing is averaged.

    Args:
        context: trainer, connection and options of the run.
        deployment: deployment of the module on processes.
        step_log: log of the run.
        observers: observers of iterations.

    Attributes:
        check: check of the gradients before each optimizer step.
        norms: norms of gradients over all stages.
        replicas: synchronisation with the replicas of these models.
        step_log: log of the run.
        skipped: numbers of the pipelines whose last batch had no loss; the same on every rank.
        num_fed: number of pipelines that have had a batch since gradients were cleared.
    """

    def __init__(self, context: RunContext, deployment: Deployment, step_log: StepLog, observers: Observers) -> None:
        self.check = GradientCheck(context, self)
        self.norms = NormsOverStages(context.cluster)
        self.skipped: frozenset[int] = frozenset()
        self._trainer, self._cluster, self._configuration = context.trainer, context.cluster, context.configuration
        self._module, self._deployment = context.module, deployment
        self.step_log = step_log
        self._observers = observers
        self.num_fed = 0
        # with accumulation, gradients are summed after the last batch only, unless a hook sees them after each batch
        self._sums_each_batch = hooks.has_any(context.trainer, ["on_after_backward"])
        self._clears_by_hand = is_overridden("optimizer_zero_grad", context.module)
        self._are_summed = False  # whether gradients are summed that the next batch may add to
        # gradients when the closure of the module's optimizer_step ended, see _gradients; None: they are not checked
        self._before_step: dict[str, tuple[int, int]] | None = None
        has_replicas = context.configuration.options.has_replicas(context.cluster.stage_map.replicas)
        normalises = has_replicas and context.trainer.strategy._layer_sync is not None  # type: ignore[attr-defined]
        self.replicas = ReplicaSync(context.module, context.cluster, deployment.parallel, observers, normalises)

    @property
    def num_models(self) -> int:
        """The number of parallel models in all groups; groups of one team (replicas) train the same models."""
        others = self._deployment.parallel.averaging_group
        return self._configuration.num_pipelines * (1 if others is None else others.count)

    @property
    def num_stepping(self) -> int:
        """The number of models of this group that take part in the next step: those that had a batch, at least 1."""
        return max(1, self.num_fed)

    @property
    def ensemble(self) -> Ensemble | None:
        """The parallel models of this group; None if there is one model."""
        return self._deployment.parallel.ensemble

    # -- an iteration ------------------------------------------------------------------------------------------------

    def pipelines_for(self, step: str, count: int) -> list[Pipeline]:
        """Return the pipelines that run a step function, one for each of ``count`` batches. Every process calls it.

        In training the module then shows model 0, otherwise the reference. Stages must have been made for the step.
        """
        deployment = self._deployment
        if step != "training_step":
            deployment.parallel.show_reference(True)
            return [deployment.pipeline]
        self._finish_averaging()
        deployment.parallel.show_reference(False)
        if deployment.parallel.ensemble is not None:
            deployment.parallel.ensemble.checksums.check(deployment.parallel.ensemble.models.size - 1)
        saved = deployment.parallel.num_saved
        pipelines = deployment.parallel.train(self._configuration.num_pipelines)
        if saved is not None and (saved or 1) != self.num_models:
            self._tell_restart(saved)
        self.num_fed = max(self.num_fed, count)
        return pipelines[:count]

    def _tell_restart(self, saved: int) -> None:
        num_pipelines = self._configuration.num_pipelines
        num_teams = self.num_models // num_pipelines
        groups = f" in each of {num_teams} groups" if num_teams > 1 else ""
        what = "training goes on" if self.num_models == 1 else "all pipelines start"
        rank_zero_info(
            f"num_pipelines={num_pipelines}{groups}, but the checkpoint holds "
            f"{f'{saved} parallel models' if saved else 'one model'}: {what} from its weights and optimizer states"
        )

    def add_to_sums(self) -> None:
        """Prepare for a batch that adds to existing gradients. Every process calls it before each batch.

        If these were summed over tied copies and replicas, one process keeps the sum and the others drop it, so that
        the next sum counts it once.
        """
        self._before_step = None  # it is left over from a batch without an optimizer step
        if self._are_summed:
            self._are_summed = False
            self._deployment.parallel.count_copied_gradients_once()
            self.replicas.count_once(self._configuration.num_pipelines)

    def decide_to_sum(self, steps: bool) -> bool:
        """Return whether gradients are summed after this batch, and note it for :meth:`add_to_sums`.

        Args:
            steps: whether the optimizers step after this batch.
        """
        sums = steps or self._sums_each_batch
        rolls = self._configuration.rolls  # then the models that have stepped may have begun the next batch already
        self._are_summed = sums and (not steps or (not rolls and self._keeps_gradients()))
        return sums

    def _keeps_gradients(self) -> bool:
        """Return whether summed gradients may remain after a step: user code clears them, or they have no optimizer."""
        plan, stage_map = self._deployment.plan, self._cluster.stage_map
        if plan is None or not (plan.copied or stage_map.stage_replicas or self._cluster.replicas):
            return False  # nothing is summed
        if self._clears_by_hand:
            return True
        stepped = self._stepped()
        return any(p.grad is not None and id(p) not in stepped for p in self._module.parameters())

    def _stepped(self) -> set[int]:
        return {id(p) for optimizer in self._trainer.optimizers for p in parameters_in(unwrapped(optimizer))}

    def synchronise(self, count: int, sums: bool) -> int:
        """Agree with replicas which models had a batch and a loss, and sum gradients; see :meth:`ReplicaSync.agree`."""
        count, self.skipped = self.replicas.agree(count, self.skipped, self._configuration.num_pipelines, sums)
        self.num_fed = max(self.num_fed, count)
        return count

    def after_backward(self, number: int, loss: torch.Tensor) -> None:
        """Call the hooks after the backward of a pipeline. The module shows its model, whose gradients they may change.

        The hooks log for pipeline 0 only. They are not called for a skipped batch, which had no backward.
        """
        if number in self.skipped:
            return
        if not number:
            self._trainer.precision_plugin.post_backward(loss, self._module)
            if self.num_models > 1 and is_overridden("optimizer_step", self._module):
                self._before_step = self._gradients()
            return
        assert self.ensemble is not None
        with self.ensemble.placed(number), self.step_log.muted():
            self._trainer.precision_plugin.post_backward(loss, self._module)

    def clear_gradients(self, zero_grad: Callable[[], None]) -> None:
        """Clear the gradients of all models.

        Args:
            zero_grad: Lightning's function, which clears those of pipeline 0 and calls user code.
        Raises:
            ConfigurationError: user code has kept gradients of pipeline 0, to accumulate them by hand.
        """
        self.num_fed = 0
        others = [] if self.ensemble is None else self.ensemble.models.each[1:]
        for model in others:
            model.clear_gradients()
        zero_grad()
        if others and self._clears_by_hand:
            stepped, named = self._stepped(), self._module.named_parameters()
            left = {n: p.grad for n, p in named if id(p) in stepped and p.grad is not None and is_strided(p.grad)}
            if left and torch.stack([gradient.any() for gradient in left.values()]).any():  # one wait for the device
                name = next(name for name, gradient in left.items() if gradient.any())
                raise ConfigurationError(
                    f"{type(self._module).__name__}.optimizer_zero_grad keeps the gradient of '{name}', but it is "
                    "called for one of several parallel models only. Accumulate with "
                    "Trainer(accumulate_grad_batches=...), or train one model"
                )

    # -- the optimizers' step ----------------------------------------------------------------------------------------

    def optimizer_step(
        self,
        own: Callable[..., Any],
        order: IterationOrder,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the closure, step the optimizers of all pipelines, and average their models.

        Args:
            own: Lightning's method, which steps the optimizer of pipeline 0.
            order: order of the iterations, by which pipelines may end and step one after the other.
            optimizer: optimizer of pipeline 0.
            closure: runs an iteration.
            model: module that is trained.
            kwargs: further arguments of ``own``.
        """
        if self.num_models == 1:
            shards = self._deployment.holdings.shards
            with contextlib.nullcontext() if shards is None else shards.stepping(optimizer):
                return own(optimizer, self.check.wrap_closure(closure), model, **kwargs)
        self._check_gradients()
        results: list[Any] = []
        if not self._configuration.rolls:  # models that roll are checked one by one
            closure = self.check.wrap_closure(closure)
        with _counting_steps(optimizer) as steps:
            result = own(optimizer, self._once(optimizer, closure, results), model, **kwargs)
        ensemble = self.ensemble
        if ensemble is not None and self._configuration.rolls:  # the first iteration may have changed this
            order.step_in_turn(lambda n: self._step_other(ensemble, n, results, kwargs))
            ensemble.take_checksums(bool(self._trainer.is_last_batch))
        elif ensemble is not None:
            self._step_others(ensemble, results, steps.count > 0, kwargs)
        self._before_step = None
        return result

    def _gradients(self) -> dict[str, tuple[int, int]]:
        """Return the identity and version of each gradient of pipeline 0's model, by name; both show changes."""
        found = ((name, p.grad) for name, p in self._module.named_parameters())
        return {name: (id(gradient), version_of(gradient)) for name, gradient in found if gradient is not None}

    def _check_gradients(self) -> None:
        """Check that an overridden ``optimizer_step`` has changed no gradient between its closure and its step.

        Raises:
            ConfigurationError: it has changed one, which affects pipeline 0's model only.
        """
        before, self._before_step = self._before_step, None
        if before is None or (now := self._gradients()) == before:
            return
        name = min(dict(before.items() ^ now.items()))
        raise ConfigurationError(
            f"{type(self._module).__name__}.optimizer_step changes the gradient of '{name}' after its closure has run, "
            f"for one of {self.num_models} parallel models only. Change gradients in on_before_optimizer_step or "
            "configure_gradient_clipping, which are called for each model, or train one model"
        )

    def _once(self, optimizer: Optimizer, closure: Callable[[], Any], results: list[Any]) -> Callable[[], Any]:
        """Return a closure that appends its result to ``results``, and raises when it is called again.

        For a second evaluation the other pipelines have no batches, and their models do not follow the weights that
        the optimizer of pipeline 0 tries.
        """

        def run() -> Any:
            if results:
                raise ConfigurationError(
                    f"{type(unwrapped(optimizer)).__name__} evaluates its closure several times "
                    f"per step, but with {self.num_models} parallel models one evaluation serves the optimizers of "
                    "all; use an optimizer that evaluates it once, such as SGD or AdamW, or num_pipelines=1"
                )
            results.append(closure())
            if self._deployment.parallel.averaging_group is not None and self.skipped.issuperset(range(self.num_fed)):
                # every batch was skipped; for None the precision plugin would skip the loss scaler's vote, for which
                # other groups wait
                return torch.zeros((), device=self._cluster.device)
            return results[-1]

        return run

    def _step_others(self, ensemble: Ensemble, results: list[Any], stepped: bool, kwargs: dict[str, Any]) -> None:
        """Step the optimizers of pipelines 1.., and average all models if the optimizer of any has stepped."""
        with self._observers.activity("step"):
            others = [self._step_other(ensemble, n, results, kwargs) for n in range(1, self.num_fed)]
        if stepped or any(others):
            with self._observers.activity("averaging"):
                ensemble.averager.stepped(self.num_fed - len(self.check.left_out))
        if is_overridden("optimizer_step", self._module):  # user code after the step may look at the weights
            self._finish_averaging()
        ensemble.take_checksums(bool(self._trainer.is_last_batch))

    def _step_other(self, ensemble: Ensemble, number: int, results: list[Any], kwargs: dict[str, Any]) -> bool:
        """Step the optimizers of one of the pipelines 1.., with its model shown; return whether any has stepped."""
        precision = self._trainer.precision_plugin
        loss = next((result for result in results if result is not None), torch.zeros((), device=self._cluster.device))
        result = None if number in self.skipped or number in self.check.left_out else loss
        stepped = False
        with ensemble.placed(number), self.step_log.muted():
            for made in ensemble.optimizers.of(number):
                with _counting_steps(made) as steps:
                    precision.optimizer_step(made, model=self._module, closure=lambda: result, **kwargs)
                stepped |= steps.count > 0
        return stepped

    def finish_averaging(self) -> None:
        """End an averaging that waits for other groups. Without this call the next iteration ends it when it begins."""
        ensemble = self.ensemble
        if ensemble is not None and ensemble.averager.is_under_way:
            self._finish_averaging()
            ensemble.take_checksums(bool(self._trainer.is_last_batch))

    def _finish_averaging(self) -> None:
        ensemble = self.ensemble
        if ensemble is not None and ensemble.averager.is_under_way:
            with self._observers.activity("averaging"):
                ensemble.averager.finish()

    def optimizers_stepping_with(self, optimizer: Optimizer) -> list[Optimizer]:
        """Return the optimizers of other pipelines that step in the same iteration as this optimizer.

        The list is empty for an optimizer that is not one of this run.
        """
        ensemble = self.ensemble
        if ensemble is None:
            return []
        others = [made for n in range(1, self.num_fed) if n not in self.skipped for made in ensemble.optimizers.of(n)]
        if not any(optimizer is known for known in (*self._trainer.optimizers, *others)):
            return []
        return [other for other in others if other is not optimizer]

    # -- which model the module shows --------------------------------------------------------------------------------

    def showing(self, number: int | None) -> AbstractContextManager[None]:
        """Return a context within which the module shows the model of one pipeline; None: the reference.

        Raises:
            ConfigurationError: there is no pipeline with this number, or training has not begun.
        """
        ensemble = self.ensemble
        if number is not None:
            check_number(number, 1 if ensemble is None else ensemble.models.size)
        return contextlib.nullcontext() if ensemble is None else ensemble.lent(number)


def check_number(number: int, size: int) -> None:
    """Check that there is a parallel model with this number.

    Args:
        number: number of the model, 0-based.
        size: number of parallel models.
    Raises:
        ConfigurationError: there is none.
    """
    if not 0 <= number < size:
        raise ConfigurationError(
            f"parallel_model({number}): there are {size} parallel models here; they begin with the first batch of "
            "training and end with it"
        )


@contextlib.contextmanager
def _counting_steps(optimizer: Optimizer) -> Iterator[StepCounter]:
    """Count the steps of an optimizer within this context; a loss scaler may skip steps."""
    steps = StepCounter()
    hook = unwrapped(optimizer).register_step_post_hook(steps)
    try:
        yield steps
    finally:
        hook.remove()
