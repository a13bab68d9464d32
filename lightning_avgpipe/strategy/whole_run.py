"""A run of the trainer whose steps run whole, on several processes that each hold a part of the module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_avgpipe.planning.memory import limit_of, memory_of, state_copies
from lightning_avgpipe.schedule import build
from lightning_avgpipe.strategy import lightning_changes as changes
from lightning_avgpipe.strategy.batches import Batches
from lightning_avgpipe.strategy.checkpoint_state import DividedState
from lightning_avgpipe.strategy.deploying import announce, deploy, give_back
from lightning_avgpipe.strategy.run import Own, PassthroughRun
from lightning_avgpipe.strategy.surroundings import Surroundings
from lightning_avgpipe.strategy.whole import WholeSteps
from lightning_avgpipe.weights.by_size import divide_by_size


class WholeRun(PassthroughRun):
    """A run of the trainer in which all processes run whole steps in lockstep; its plan tells who owns what."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._batches = Batches(around.trainer, around.cluster, around.distributor)
        self._steps = WholeSteps(around.trainer, around.cluster, self._divide)
        self._undo = contextlib.ExitStack()

    def setup(self, own: Own) -> None:
        """Prepare the run; the module is divided with the first step."""
        around, enter = self._around, self._undo.enter_context
        trainer, cluster = around.trainer, around.cluster
        own(trainer)
        deployment = self._deployment = deploy(around)
        state = self.state = DividedState(around.before, around.configuration, deployment, None)
        enter(self._steps.adapted())
        enter(changes.scaling(trainer, cluster, lambda optimizer: []))
        enter(changes.several_processes(trainer, cluster, deployment, around.distributor.early))
        enter(changes.known_at_epoch_end(trainer))
        self._undo.callback(give_back, deployment, around.connection, state)

    def _divide(self) -> dict[str, int]:
        """Divide the module by the size of its parts; return parameter or buffer -> rank of its owner."""
        trainer, options, cluster = self._around.trainer, self._around.configuration.options, self._around.cluster
        module = trainer.lightning_module
        held = memory_of(module, build("afab", 1, 1), state_copies(trainer.optimizers), 0).held
        limit = limit_of(options.memory_limit, cluster.device, self._around.sharing_stages)
        metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self.plan = divide_by_size(module, cluster.stage_map.num_stages, held, options.split_points, limit, metrics)
        owner = self._deployment.place_parameters(self.plan)
        announce(self.plan, cluster)
        return owner

    def teardown(self) -> None:
        """Give every process the whole module back."""
        self._undo.close()

    def model_to_device(self, own: Own) -> None:
        """Do nothing: it is not known yet which process needs what."""

    def batch_to_device(self, own: Own, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        """Return the reader's batch on every rank's device, after its transfer hooks."""
        return self._batches.to_device(batch, device, dataloader_idx)

    def step(self, name: str, own: Own, *args: Any, **kwargs: Any) -> Any:
        """Run a step in lockstep; in training the whole optimization of a batch already is."""
        return own(*args, **kwargs) if name == "training_step" else self._steps.run(name, own, *args)

    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Callable[[], Any], model: Any, **kwargs: Any
    ) -> Any:
        """Step this process's parameters; the closure runs on all processes in lockstep."""

        def checked(optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
            return own(optimizer, self.check.after(closure), *args, **kwargs)

        return self._steps.optimizer_step(checked, optimizer, closure, model, **kwargs)
