"""A run of the trainer whose steps run whole, on several processes that each hold a part of the module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.memory_limit import limit_of
from lightning_avgpipe.planning.model_memory import memory_of, state_copies
from lightning_avgpipe.schedule import build
from lightning_avgpipe.strategy import lightning_changes as changes
from lightning_avgpipe.strategy.batches import Batches
from lightning_avgpipe.strategy.checkpoint_state import DividedState, WholeState
from lightning_avgpipe.strategy.configuration import Configuration
from lightning_avgpipe.strategy.connection import Connection
from lightning_avgpipe.strategy.data import Distributor
from lightning_avgpipe.strategy.deploying import announce, deploy, give_back, sharing_stages
from lightning_avgpipe.strategy.gradient_check import GradientCheck, OneModel
from lightning_avgpipe.strategy.parallel_models import check_number
from lightning_avgpipe.strategy.run import Own
from lightning_avgpipe.strategy.whole import WholeSteps
from lightning_avgpipe.weights.by_size import divide_by_size


class WholeRun:
    """A run of the trainer that all processes go through in lockstep.

    Args:
        trainer: of the run.
        connection: of the processes.
        configuration: of the strategy.
        before: the state before the run.
        distributor: of batches.

    Attributes:
        state: what checkpoints save and load, from set-up on.
        plan: who owns what; None before the first step.
        check: of gradients before a step.
    """

    plan: Plan | None = None
    state: DividedState

    def __init__(
        self,
        trainer: pl.Trainer,
        connection: Connection,
        configuration: Configuration,
        before: WholeState,
        distributor: Distributor,
    ) -> None:
        assert connection.cluster is not None
        self._cluster = connection.cluster
        wanted = configuration.options.on_nonfinite
        self.check = GradientCheck(trainer, self._cluster, wanted, OneModel(trainer.lightning_module))
        self._trainer = trainer
        self._connection = connection
        self._configuration = configuration
        self._before = before
        self._batches = Batches(trainer, self._cluster, distributor)
        self._steps = WholeSteps(trainer, self._cluster, self._divide)
        self._undo = contextlib.ExitStack()

    def setup(self, own: Own) -> None:
        """The module is divided with the first step."""
        trainer, cluster, enter = self._trainer, self._cluster, self._undo.enter_context
        own(trainer)
        self._deployment, seed = deploy(trainer, self._connection, self._configuration.options, self._before)
        self.state = DividedState(self._before, self._configuration, self._deployment, None, seed)
        enter(self._steps.adapted())
        enter(changes.scaling(trainer, cluster, lambda optimizer: []))
        enter(changes.several_processes(trainer, cluster, self._deployment, self._batches.distributor.early))
        enter(changes.known_at_epoch_end(trainer))
        self._undo.callback(give_back, self._deployment, self._connection, self.state)

    def _divide(self) -> dict[str, int]:
        """Divide the module by the size of its parts; returns who owns what."""
        trainer, options, cluster = self._trainer, self._configuration.options, self._cluster
        module = trainer.lightning_module
        held = memory_of(module, build("afab", 1, 1), state_copies(trainer.optimizers), 0).held
        limit = limit_of(options.memory_limit, cluster.device, sharing_stages(self._connection, options))
        metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self.plan = divide_by_size(module, cluster.stage_map.num_stages, held, options.split_points, limit, metrics)
        owner = self._deployment.place_parameters(self.plan)
        announce(self.plan, cluster)
        return owner

    def teardown(self) -> None:
        """Give every process the whole module back."""
        self._undo.close()

    def model_to_device(self, own: Own) -> None:
        """Nothing moves before it is known which process needs what."""

    def batch_to_device(self, own: Own, batch: Any, device: torch.device | None, dataloader_idx: int) -> Any:
        """The reader's batch, after its transfer hooks, on every rank's device."""
        return self._batches.to_device(batch, device, dataloader_idx)

    def needs(self, batch: Any, rank: int) -> frozenset[str] | None:
        """All tensors of a batch."""
        return None

    def step(self, name: str, own: Own, *args: Any, **kwargs: Any) -> Any:
        """A step in lockstep; in training the whole optimization of a batch is."""
        return own(*args, **kwargs) if name == "training_step" else self._steps.run(name, own, *args)

    def optimizer_step(
        self, own: Own, optimizer: Optimizer, closure: Callable[[], Any], model: Any, **kwargs: Any
    ) -> Any:
        """Every process steps its own parameters; the closure is run by all together."""

        def checked(optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
            return own(optimizer, self.check.after(closure), *args, **kwargs)

        return self._steps.optimizer_step(checked, optimizer, closure, model, **kwargs)

    def end_iteration(self) -> None:
        """What was asked for comes now."""
        self._configuration.take_over(self._cluster)

    def showing(self, number: int | None) -> AbstractContextManager[None]:
        """Within this context the module is the model of one pipeline; None: the reference. There is one model."""
        check_number(number or 0, 1)
        return contextlib.nullcontext()
