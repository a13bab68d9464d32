"""The strategy's part in parallel models: their batches, their optimizers, averaging, and what the module shows."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_avgpipe.elastic.finite import first_nonfinite, has_nonfinite, may_have_nonfinite
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.errors import ConfigurationError, NonFiniteError
from lightning_avgpipe.strategy.bundles import BundledLoader
from lightning_avgpipe.strategy.data import Distributor
from lightning_avgpipe.strategy.log import StepLog
from lightning_avgpipe.strategy.stateful import StatefulStrategy
from lightning_avgpipe.utils.patching import replaced

__all__ = ["ParallelModelsStrategy"]


class ParallelModelsStrategy(StatefulStrategy):
    """A strategy that trains parallel models, N in each group. With one of them nothing here does anything.

    Attributes:
        observed: whether user code may look at the weights between steps.
        dataloader_idx: of the batch that is worked on.
        skipped: pipelines whose last batch had no loss, the same on every rank.
        skipped_models: how often a model of this group was left out of a step, for a gradient that is no number.
        in_iteration: whether one goes on: from its batch to the optimizer's step.
    """

    _log: StepLog | None
    _distributor: Distributor

    def forget_models(self) -> None:
        """Begin a run of the trainer."""
        self._beside: list[Any] = []  # batches of pipelines 1.. of this iteration
        self._fed = 0  # pipelines that had a batch since gradients were cleared
        self.skipped: frozenset[int] = frozenset()
        self.dataloader_idx = 0
        self.observed = True
        self.in_iteration = False
        self.skipped_models = 0
        self._left_out: list[int] = []  # pipelines of this step with gradients that are no numbers

    @property
    def num_pipelines(self) -> int:
        """N, which ``reconfigure`` may change."""
        return self._options.num_pipelines

    @property
    def num_models(self) -> int:
        """Parallel models of all groups."""
        return self.num_pipelines * (1 if self._mesh is None else self._mesh.num_groups)

    # -- batches -----------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """The reader's batch, after its transfer hooks, on every rank's device; the other pipelines' with it."""
        module = self.lightning_module
        assert module is not None
        self.dataloader_idx = dataloader_idx
        if self._mesh is None or self._deployment is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        if module.trainer.training:
            self.end_iteration()  # of a batch that a hook has skipped
            self.in_iteration = True
        batch = self._to_device(batch, device, dataloader_idx, 0)
        loader = module.trainer.fit_loop._combined_loader
        if module.trainer.training and isinstance(loader, BundledLoader):
            self._beside = [
                self._to_device(self._converted(other), device, dataloader_idx, n)
                for n, other in enumerate(loader.take(), 1)
            ]
        return batch

    def end_iteration(self) -> None:
        """Its batches are used up."""
        self.in_iteration = False

    def ends(self, here: bool) -> bool:
        """Whether data of unknown length has ended in any group, for it ends in all of them then. All processes ask."""
        return bool(self.mesh.world.sum(torch.tensor(int(here))))

    def _converted(self, batch: Any) -> Any:
        """What Lightning's loop does to pipeline 0's batch before it asks for its transfer."""
        assert self.lightning_module is not None
        batch = self.precision_plugin.convert_input(batch)
        return self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)

    def _to_device(self, batch: Any, device: torch.device | None, dataloader_idx: int, pipeline: int) -> Any:
        assert self._mesh is not None
        if self._mesh.reads:
            batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._mesh.world_size > 1 and not self._distributor.early:
            batch = self._distributor.pass_on(batch)
        batch = batch if self._mesh.reads else move_data_to_device(batch, self.root_device)
        return self._distributor.seal(batch, pipeline)

    def hand_out(self, batches: Sequence[Any]) -> Any:
        """The next training step has these batches, which are on the device, one for each pipeline.

        Returns:
            That of pipeline 0, which the step takes as its argument.
        """
        sealed = [self._distributor.seal(batch, n) for n, batch in enumerate(batches)]
        self._beside = sealed[1:]
        return sealed[0]

    def take_beside(self) -> list[Any]:
        """The batches of pipelines 1.. for this iteration; those of a ragged end are fewer."""
        beside, self._beside = self._beside, []
        return beside

    def pipelines_for(self, step: str, count: int) -> list[Pipeline]:
        """Those that run a step function, which is prepared, on so many batches. Every process calls it."""
        deployment = self._deployment
        assert deployment is not None
        if step != "training_step":
            deployment.show_reference(True)
            return [deployment.pipeline]
        self._finish_averaging()
        deployment.show_reference(False)
        if deployment.ensemble is not None:
            deployment.ensemble.check_checksums()
        saved = deployment.saved_models
        pipelines = deployment.parallel(self.num_pipelines)
        if saved is not None and (saved or 1) != self.num_models:
            several = self.num_models > self.num_pipelines
            groups = f" in each of {self.num_models // self.num_pipelines} groups" if several else ""
            rank_zero_info(
                f"num_pipelines={self.num_pipelines}{groups}, but the checkpoint holds "
                f"{f'{saved} parallel models' if saved else 'one model'}: all pipelines start from its weights"
            )
        deployment.show_reference(False)
        self._fed = max(self._fed, count)
        return pipelines[:count]

    def tensors_beside(self) -> list[torch.Tensor]:
        """What parallel models have of their own that are not in the module."""
        ensemble = None if self._deployment is None else self._deployment.ensemble
        return [] if ensemble is None else [t for n in range(1, ensemble.size) for t in ensemble.tensors(n).values()]

    # -- steps -------------------------------------------------------------------------------------------------------

    def after_backwards(self, loss: torch.Tensor, count: int) -> None:
        """What follows a backward, for each of so many pipelines: hooks may change the gradients of the model they see.

        They log for pipeline 0. A batch that was skipped had no backward.
        """
        module, deployment, step_log = self.lightning_module, self._deployment, self._log
        assert module is not None and deployment is not None and step_log is not None
        if 0 not in self.skipped:
            self.precision_plugin.post_backward(loss, module)
        for n in range(1, count):
            if n in self.skipped:
                continue
            assert deployment.ensemble is not None
            with deployment.ensemble.placed(n), step_log.muted():
                self.precision_plugin.post_backward(loss, module)

    def clear_gradients(self) -> None:
        """Lightning clears the gradients of pipeline 0; here go those of the others."""
        self._fed = 0
        if self._deployment is not None and self._deployment.ensemble is not None:
            self._deployment.ensemble.clear_gradients()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, step, let the other pipelines' optimizers step, and average."""
        if self.num_models == 1:
            return super().optimizer_step(optimizer, self._checked(closure), model, **kwargs)
        results: list[Any] = []

        def run() -> Any:
            if results:  # the batches of other pipelines are used up, and their models are not where this one is
                raise ConfigurationError(
                    f"{_plain_name(optimizer)} evaluates its closure several times per step, but with "
                    f"{self.num_models} parallel models one evaluation serves the optimizers of all; use an optimizer "
                    "that evaluates it once, such as SGD or AdamW, or num_pipelines=1"
                )
            results.append(self._checked(closure)())
            return results[-1]

        with _noticing(optimizer) as steps:
            result = super().optimizer_step(optimizer, run, model, **kwargs)
        if self._deployment is not None and self._deployment.ensemble is not None:
            with self._recorded("step"):
                others = self._step_others(results, kwargs)
            if steps or others:
                with self._recorded("averaging"):
                    self._deployment.ensemble.stepped(self._fed - len(self._left_out))
            if is_overridden("optimizer_step", self.lightning_module):  # whose code after the step may look
                self._finish_averaging()
            self._deployment.ensemble.mark(self._ends_epoch)
        return result

    def _checked(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, after which no gradient is other than a finite number, if that is wanted."""
        wanted = self._options.on_nonfinite
        if wanted == "auto":
            wanted = None if self.num_models == 1 else "raise"
        scaled = any(isinstance(v, GradScaler) and v.is_enabled() for v in vars(self.precision_plugin).values())
        self._left_out = []
        if wanted is None or scaled:
            return closure

        def run() -> Any:
            result = closure()
            self._check_gradients(skip=wanted == "skip")
            return None if 0 in self._left_out else result

        return run

    def _gradients(self, number: int) -> dict[str, torch.Tensor]:
        ensemble = None if self._deployment is None else self._deployment.ensemble
        if ensemble is not None:
            return ensemble.gradients(number)
        assert self.lightning_module is not None
        return {name: p.grad for name, p in self.lightning_module.named_parameters() if p.grad is not None}

    def _check_gradients(self, skip: bool) -> None:
        """Once gradients are complete, and before anything is clipped or steps. All processes of a group call it.

        Raises:
            NonFiniteError: a gradient is infinite or no number, and the model is not to be skipped.
        """
        mesh, device = self.mesh, self.root_device
        gradients = [self._gradients(n) for n in range(max(1, self._fed))]
        found = torch.stack([may_have_nonfinite(named.values(), device) for named in gradients]).cpu()
        for n in found.nonzero().flatten().tolist():
            found[n] = has_nonfinite(gradients[n].values())
        bad = [n for n, count in enumerate(mesh.sum(found).tolist()) if count]
        if not bad:
            return
        if not skip:
            name = first_nonfinite(gradients[bad[0]])
            self._refuse(bad[0], mesh.exchange_objects(name))
        self._left_out = bad
        self._restart(bad, next((n for n in range(len(gradients)) if n not in bad), None))

    def _refuse(self, number: int, names: Sequence[str | None]) -> None:
        """End with the first tensor by stages.

        Args:
            number: n of the pipeline.
            names: by rank, the first of its tensors; rank 0 has the last stage.
        """
        assert self.lightning_module is not None
        batch_idx = self.lightning_module.trainer.fit_loop.epoch_loop.batch_idx
        name = next(name for name in reversed(names) if name is not None)
        group = f" of group {self.mesh.group_number}" if self.mesh.num_groups > 1 else ""
        which = f"pipeline {number}{group}, " if self.num_models > 1 else ""
        spared = "the reference model" if self.num_models > 1 else "the model"
        skips = "leaves such a model out of the step" if self.num_models > 1 else "leaves out such a step"
        raise NonFiniteError(
            f"{which}batch_idx {batch_idx}: the gradient of '{name}' is infinite or no number (NaN). "
            f"No optimizer has stepped, so {spared} is as it was. Look at this batch and the loss, lower the learning "
            f"rate, or clip gradients; on_nonfinite='skip' {skips}, None looks at nothing"
        )

    def _restart(self, bad: Sequence[int], alike: int | None) -> None:
        assert self.lightning_module is not None and self._deployment is not None
        ensemble, trainer = self._deployment.ensemble, self.lightning_module.trainer
        for n in bad:
            if ensemble is not None:
                ensemble.restart(n, alike)
        if ensemble is None:
            for parameter in self.lightning_module.parameters():
                parameter.grad = None
        self.skipped_models += len(bad)
        if self.mesh.leads:
            _warn_skipped(trainer.fit_loop.epoch_loop.batch_idx, bad)
            for logger in trainer.loggers:
                logger.log_metrics({"avgpipe/skipped_models": self.skipped_models}, step=trainer.global_step)

    @property
    def _ends_epoch(self) -> bool:
        assert self.lightning_module is not None
        return bool(self.lightning_module.trainer.is_last_batch)

    def finish_averaging_if_observed(self) -> None:
        """Wait for the models of other groups, if a hook may look at them; else the next step does, when it begins."""
        ensemble = None if self._deployment is None else self._deployment.ensemble
        if self.observed and ensemble is not None and ensemble.averages:
            self._finish_averaging()
            ensemble.mark(self._ends_epoch)

    def _finish_averaging(self) -> None:
        ensemble = None if self._deployment is None else self._deployment.ensemble
        if ensemble is not None and ensemble.averages:
            with self._recorded("averaging"):
                ensemble.finish_averaging()

    def _recorded(self, kind: Literal["step", "averaging"]) -> AbstractContextManager[None]:
        recorder = None if self._mesh is None else self._mesh.recorder
        return contextlib.nullcontext() if recorder is None else recorder.activity(kind)

    def _step_others(self, results: list[Any], kwargs: dict[str, Any]) -> bool:
        """Step the optimizers of pipelines 1..; tells whether one has."""
        module, deployment, step_log = self.lightning_module, self._deployment, self._log
        assert module is not None and deployment is not None and step_log is not None
        ensemble = deployment.ensemble
        assert ensemble is not None
        loss = next((result for result in results if result is not None), torch.zeros((), device=self.root_device))
        stepped = False
        for n in range(1, self._fed):
            closure = functools.partial(_given, None if n in self.skipped or n in self._left_out else loss)
            with ensemble.placed(n), step_log.muted():
                for made in ensemble.optimizers(n):
                    with _noticing(made) as steps:
                        self.precision_plugin.optimizer_step(made, model=module, closure=closure, **kwargs)
                    stepped |= bool(steps)
        return stepped

    def together_with(self, optimizer: Optimizer) -> list[Optimizer]:
        """The optimizers of other pipelines that step in this iteration, if this is that of pipeline 0."""
        deployment = self._deployment
        if (
            deployment is None
            or deployment.ensemble is None
            or not any(optimizer is known for known in self.optimizers)
        ):
            return []
        stepping = (n for n in range(1, self._fed) if n not in self.skipped)
        return [made for n in stepping for made in deployment.ensemble.optimizers(n)]

    def follow_optimizers(self, optimizer: Optimizer) -> None:
        """The other pipelines' optimizers take over the hyper-parameters of pipeline 0's, before any of them steps.

        Args:
            optimizer: that is about to step: pipeline 0's, which all follow, or one whose hooks may have changed it.
        """
        if self._deployment is not None and self._deployment.ensemble is not None:
            known = any(optimizer is first for first in self.optimizers)
            self._deployment.ensemble.follow_optimizers(None if known else optimizer)

    @contextlib.contextmanager
    def trying(self, batch: Any) -> Iterator[Any]:
        """Within this context steps are on trial; after it the strategy knows nothing of them but their stages.

        Every process calls it. What steps change in module, trainer and plugins is left to the caller.

        Args:
            batch: of training, as read from the dataloader; it is not touched.
        Returns:
            A copy on the device, after its transfer hooks.
        """
        deployment, step_log = self._deployment, self._log
        assert deployment is not None and step_log is not None
        beside, fed = self._beside, self._fed
        with step_log.unheard(), deployment.trying():
            try:
                yield self._to_device(self._converted(copy.deepcopy(batch)), None, 0, 0)
            finally:
                self._beside, self._fed = beside, fed

    # -- which model the module shows --------------------------------------------------------------------------------

    def show_reference(self, reference: bool) -> None:
        """From now on the module has the weights of the reference, or those of pipeline 0."""
        if self._deployment is not None:
            self._deployment.show_reference(reference)

    @contextlib.contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """Within this context the module is the reference model, for code in hooks that wants to use or change it.

        Hooks of training see the model of pipeline 0, as on rank 0 of ddp they see its process; evaluation, prediction
        and checkpoints use the reference. With one pipeline they are the same.
        """
        module = self._connected_module("reference()")
        with contextlib.nullcontext() if self._deployment is None else self._deployment.showing_reference():
            yield module

    @contextlib.contextmanager
    def parallel_model(self, number: int) -> Iterator[nn.Module]:
        """Within this context the module is the model of one pipeline.

        Args:
            number: n, 0-based, of this process's group.
        Raises:
            ConfigurationError: there are not so many, or nothing is trained yet.
        """
        module = self._connected_module(f"parallel_model({number!r})")
        if not isinstance(number, int):
            raise ConfigurationError(f"parallel_model({number!r}): must be the number of a pipeline, from 0")
        ensemble = None if self._deployment is None else self._deployment.ensemble
        size = 1 if ensemble is None else ensemble.size
        if not 0 <= number < size:
            raise ConfigurationError(
                f"parallel_model({number}): there are {size} parallel models here; they begin with the first batch of "
                "training and end with it"
            )
        if ensemble is not None:
            ensemble.checksums.forget()
        with contextlib.nullcontext() if ensemble is None else ensemble.placed(number):
            yield module

    def _connected_module(self, asked: str) -> nn.Module:
        if self.lightning_module is None:
            raise ConfigurationError(
                f"{asked}: there is no model before trainer.fit(model); call it in a hook of training"
            )
        return self.lightning_module


def _given(result: Any) -> Any:
    """A closure whose work is done."""
    return result


def _warn_skipped(batch_idx: int, pipelines: Sequence[int]) -> None:
    which = " and ".join(map(str, pipelines))
    rank_zero_warn(
        f"batch_idx {batch_idx}: pipeline {which} had a gradient that is infinite or no number, and was left out of "
        "the step; avgpipe/skipped_models counts this"
    )


def _plain_name(optimizer: Optimizer) -> str:
    return type(getattr(optimizer, "_optimizer", optimizer)).__name__


@contextlib.contextmanager
def _noticing(optimizer: Optimizer) -> Iterator[list[None]]:
    """Within this context an entry for each step; a scaler that finds an infinite gradient skips them."""
    steps: list[None] = []
    step = optimizer.step

    @functools.wraps(step)
    def noticed(*args: Any, **kwargs: Any) -> Any:
        steps.append(None)
        return step(*args, **kwargs)

    with replaced(optimizer, "step", noticed):
        yield steps
