"""The strategy: ``Trainer(strategy="avgpipe")``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_avgpipe import checks, tree
from lightning_avgpipe.adaptation import adapted, quiet_hooks
from lightning_avgpipe.checkpoint import full_optimizer_state
from lightning_avgpipe.data import mirror
from lightning_avgpipe.division import Division
from lightning_avgpipe.metrics import StepLog
from lightning_avgpipe.partition import Plan
from lightning_avgpipe.runtime.mesh import Mesh
from lightning_avgpipe.runtime.microbatch import MicroBatch, merge, split, split_with
from lightning_avgpipe.runtime.planner import Planner
from lightning_avgpipe.runtime.randomness import RandomKey
from lightning_avgpipe.runtime.stage import Task
from lightning_avgpipe.schedule import Schedule, build

__all__ = ["AvgPipeStrategy"]

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_MICROBATCHES_PER_STAGE = 4

SplitBatch = Callable[[Any, int], Sequence[Any]]


class AvgPipeStrategy(ParallelStrategy):
    """Trains an unmodified LightningModule as a pipeline of stages.

    The step functions are captured on the first batch, divided into stages of about equal time, and replayed stage by
    stage on micro-batches. Training equals ordinary training that accumulates the same micro-batches in order.

    Args:
        num_stages: number of stages K. ``"auto"``: one per device. A multiple of the number of devices places several
            stages on each.
        num_pipelines: number N of parallel pipelines. Only 1 for now.
        num_microbatches: number M of micro-batches that a batch is split into, at most its size. ``"auto"``: four per
            stage. More of them shrink the idle time at both ends of an iteration and the memory per micro-batch, but
            make each kernel smaller.
        schedule: ``"advance_forward"`` (1F1B with ``advance`` extra forwards in flight), ``"1f1b"`` or ``"afab"`` (all
            forwards, then all backwards).
        advance: h of advance forward propagation: stage k starts ``(K-1-k) * (1+h)`` forwards ahead of its first
            backward. 0 is 1F1B; a larger value hides slow links at the price of memory.
        split_points: names of the units (submodules) at which the stages 1..K-1 begin, in order. None: balanced by
            counted operations.
        loss_reduction: how the loss depends on the batch: ``"mean"`` weights each micro-batch's loss by its share of
            the samples, ``"sum"`` adds them up.
        split_batch: ``(batch, num_microbatches) -> list of micro-batches`` for batches that are no trees of tensors
            with a common first dimension. A method of this name on the LightningModule does the same.
        verify_copies: after every optimizer step check that the copies of parameters which several stages use (tied
            embeddings) are equal bit for bit. For debugging: it reads all of them.
        start_method: how the processes of one node start: ``"popen"`` runs the script again (as ddp does),
            ``"spawn"`` and ``"fork"`` work in notebooks and tests.
        process_group_backend: of torch.distributed. Default: gloo for CPU, NCCL for CUDA.
        timeout: longest wait for another process, after which training ends with an error.
        accelerator: as in every Lightning strategy.
        parallel_devices: as in every Lightning strategy.
        cluster_environment: as in every Lightning strategy.
        checkpoint_io: as in every Lightning strategy.
        precision_plugin: as in every Lightning strategy.

    Attributes:
        plan: the stages with their units, parameters and boundary values, known from the first batch on.

    Raises:
        ConfigurationError: an option that cannot work.

    Source: AvgPipe, Chen et al., PPoPP 2023.
    """

    strategy_name = "avgpipe"

    def __init__(
        self,
        num_stages: int | Literal["auto"] = "auto",
        num_pipelines: int = 1,
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: Literal["advance_forward", "1f1b", "afab"] = "advance_forward",
        advance: int = 0,
        split_points: list[str] | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        split_batch: SplitBatch | None = None,
        verify_copies: bool = False,
        start_method: Literal["popen", "spawn", "fork"] = "popen",
        process_group_backend: str | None = None,
        timeout: timedelta | None = _DEFAULT_TIMEOUT,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        checks.options(
            num_stages, num_pipelines, num_microbatches, schedule, advance, split_points, loss_reduction, start_method
        )
        self.num_nodes = 1
        self._wanted_stages = num_stages
        self._num_microbatches = num_microbatches
        self._schedule_name = schedule
        self._advance = advance
        self._split_points = split_points
        self._loss_reduction = loss_reduction
        self._split_batch = split_batch
        self._verify_copies = verify_copies
        self._start_method = start_method
        self._process_group_backend = process_group_backend
        self._timeout = timeout or _DEFAULT_TIMEOUT
        self._mesh: Mesh | None = None
        self._forget()

    def _forget(self) -> None:
        """Set everything that belongs to one run of the trainer."""
        self.plan: Plan | None = None
        self.sigterm_agreed = False
        self._division: Division | None = None
        self._failed = False
        self._log: StepLog | None = None
        self._undo = contextlib.ExitStack()

    # -- processes ---------------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Processes of this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 1

    @property
    def num_stages(self) -> int:
        """K."""
        return self.num_processes * self.num_nodes if self._wanted_stages == "auto" else self._wanted_stages

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def mesh(self) -> Mesh:
        """Processes and channels, from the set-up of the environment on."""
        assert self._mesh is not None
        return self._mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """One process reads all data."""
        return {"num_replicas": 1, "rank": 0}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        checks.processes(self.num_stages, self.num_processes * self.num_nodes)
        if self.num_processes * self.num_nodes == 1:
            return
        if self._start_method == "popen":
            # also where processes exist already (torchrun, SLURM): it starts none then, but limits their threads
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @property
    def process_group_backend(self) -> str | None:
        """Backend of torch.distributed."""
        return self._process_group_backend

    def setup_environment(self) -> None:
        """Connect the processes; called before the module's own set-up hooks."""
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        if self.world_size == 1:
            self._mesh = self._mesh or Mesh(self.num_stages, 0, 1, self.root_device, self._timeout)
            self._mesh.open()
            return
        assert self.cluster_environment is not None
        default = _get_default_process_group_backend_for_device(self.root_device)
        backend = self._process_group_backend = self._process_group_backend or default
        if not _distributed_is_initialized():
            # control messages travel on the host, whatever connects the devices
            both = f"cpu:gloo,cuda:{backend}" if backend == "nccl" else backend
            _init_dist_connection(self.cluster_environment, both, timeout=self._timeout)
        if self._mesh is None:
            between_devices = backend if self.root_device.type == "cuda" else None
            self._mesh = Mesh(
                self.num_stages, self.global_rank, self.world_size, self.root_device, self._timeout, between_devices
            )
        self._mesh.open()

    # -- set-up and teardown -----------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepare one run of the trainer; the plan is made when the first batch is there."""
        assert self.lightning_module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        checks.trainer(trainer, self.world_size)
        if fitting:
            checks.module(self.lightning_module)
        self._forget()
        super().setup(trainer)
        module = self.lightning_module
        observers = [m for m in module.modules() if isinstance(m, Metric)]
        planner = Planner(module, self.num_stages, self._split_points, self.root_device, observers)
        self._division = Division(module, self.mesh, planner, lambda: self.optimizers)
        self._seed = self.mesh.broadcast(torch.initial_seed())
        self._log = StepLog(module, self.mesh.hosts_last)
        self._undo.enter_context(adapted(trainer, module, self, self._log, fitting))

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Build the optimizer, over all parameters: what it holds of other stages goes when the plan is made."""
        assert self.lightning_module is not None
        with checks.explained_optimizers(self.lightning_module):
            super().setup_optimizers(trainer)
        checks.optimizers(self.lightning_module, self.optimizers)

    def model_to_device(self) -> None:
        """Nothing moves before it is known which stage needs what."""

    def teardown(self) -> None:
        """Give every process the whole module back, and stop the channels."""
        try:
            if self._division is not None and not self._failed:
                self._division.restore()
            if self._mesh is not None:
                self._mesh.close(self._failed)
        finally:
            self._undo.close()
            self._division = None
        module = self._lightning_module
        if module is not None and any(p.is_meta for p in module.parameters()):
            # after a failure the other stages' parameters are gone, and what is gone cannot be moved
            self._lightning_module = None
        super().teardown()
        self._lightning_module = module

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes."""
        self._failed = True
        if self._mesh is not None:
            self.mesh.report(exception)

    # -- steps -------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run all forwards and backwards of a batch; returns what the step would have returned for it, detached."""
        assert self.lightning_module is not None
        assert self._division is not None
        module, precision = self.lightning_module, self.precision_plugin
        parts = self._split(args[0])
        accumulate = module.trainer.accumulate_grad_batches

        def finish(i: int, result: Any) -> Tensor:
            loss = checks.loss(result)
            if accumulate > 1:
                loss = loss / accumulate
            # a batch deserves its hooks once: with the first micro-batch's loss, before anything else is known
            with contextlib.nullcontext() if i == 0 else quiet_hooks(module.trainer, "on_before_backward"):
                loss = precision.pre_backward(loss, module)
            return loss * parts[i].weight if self._loss_reduction == "mean" and len(parts) > 1 else loss

        # Lightning's weight averaging passes over the data once more without training
        trains = not module.trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward
        outputs = self._run("training_step", precision.train_step_context, parts, args[1:], finish if trains else None)
        result: Any = {"loss": torch.zeros((), device=self.root_device)}
        if outputs is not None:
            result = self._merge_training(outputs, parts)
        if trains:
            if not module.trainer.fit_loop._should_accumulate():
                self._division.sum_copied_gradients()
            precision.post_backward(checks.loss(result), module)
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run validation_step; on the last stage's rank the merged result, None elsewhere."""
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run test_step; on the last stage's rank the merged result, None elsewhere."""
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run predict_step; on the last stage's rank the merged result, None elsewhere."""
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, args)

    def _evaluate(self, step: str, context: Callable[[], Any], args: Sequence[Any]) -> Any:
        parts = self._split(args[0])
        outputs = self._run(step, context, parts, args[1:], None)
        return None if outputs is None else merge(outputs, [part.size for part in parts])

    def _run(
        self,
        step: str,
        context: Callable[[], Any],
        parts: Sequence[MicroBatch],
        rest: Sequence[Any],
        finish: Callable[[int, Any], Tensor] | None,
    ) -> list[Any] | None:
        module, division, step_log = self.lightning_module, self._division, self._log
        assert module is not None and division is not None and step_log is not None

        def run(i: int, *args: Any) -> Any:
            with context(), step_log.micro_batch(parts[i].size):
                return getattr(module, step)(*args)

        decides = step == "training_step" or module.trainer.state.fn != TrainerFn.FITTING
        if division.prepare(step, partial(run, 0), (parts[0].data, *rest), decides):
            rank_zero_info(f"\n{self.num_stages} stages on {self.world_size} processes:\n{division.plan}")
        self.plan = division.plan
        step_log.begin(len(parts))
        schedule = self._schedule(len(parts), training=finish is not None)
        task = Task(run, [(part.data, *rest) for part in parts], finish, RandomKey(self._seed, self._iteration(step)))
        outputs = division.pipeline.run(step, schedule, task)
        with context():  # which may decide what a number is
            step_log.issue()
        return outputs

    def _split(self, batch: Any) -> list[MicroBatch]:
        wanted = self._num_microbatches
        count = _MICROBATCHES_PER_STAGE * self.num_stages if wanted == "auto" else wanted
        splitter = getattr(self.lightning_module, "split_batch", None) or self._split_batch
        return split(batch, count) if splitter is None else split_with(splitter, batch, count)

    def _schedule(self, num_microbatches: int, training: bool) -> Schedule:
        if not training:
            return build("forward", self.num_stages, num_microbatches)
        return build(self._schedule_name, self.num_stages, num_microbatches, self._advance)

    def _merge_training(self, outputs: list[Any], parts: Sequence[MicroBatch]) -> Any:
        detached = [tree.map_tensors(Tensor.detach, output) for output in outputs]
        merged = merge(detached, [part.size for part in parts])
        if self._loss_reduction == "sum":
            total = torch.stack([checks.loss(output) for output in detached]).sum()
            merged = {**merged, "loss": total} if isinstance(merged, dict) else total
        return merged

    def _iteration(self, step: str) -> int:
        """A number that no other batch of this step function has, and the same after a resume."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if step == "training_step":
            return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        return int(trainer._active_loop.batch_progress.total.ready)  # type: ignore[union-attr]

    # -- state -------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """On rank 0 the weights of all stages. Every rank calls it."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict() if self._division is None else self._division.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank 0 an ordinary optimizer state. Every rank calls it."""
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._mesh is None or self.world_size == 1:
            return inner.state_dict()
        return full_optimizer_state(inner, self.mesh)

    # -- what Lightning asks of processes ----------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Rank 0 reads, the others follow."""
        return mirror(dataloader, self.mesh)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Rank 0's batch, after its transfer hooks, on every rank's device."""
        if self.is_global_zero:
            batch = super().batch_to_device(batch, device, dataloader_idx)
        return self.mesh.publish(batch)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        if self._mesh is not None:
            self.mesh.barrier(f"the barrier '{name}'" if name else "a barrier")

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Every rank gets the source's object."""
        return self.mesh.broadcast(obj, src) if self._mesh is not None else obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Values live on one rank only: nothing to reduce."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The stages work on the same batch, so there is nothing to gather; as with one device."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, decided so."""
        if self._mesh is None or self.world_size == 1:
            return decision
        votes = int(self.mesh.sum(torch.tensor(int(decision))))
        return votes == self.world_size if all else votes > 0

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the closure and step."""
        result = super().optimizer_step(*args, **kwargs)
        if self._verify_copies and self._division is not None:
            self._division.verify_copies()
        return result

    def sigterm_received(self, trainer: pl.Trainer) -> bool:
        """Whether this process was asked to end."""
        return bool(getattr(trainer, "received_sigterm", False))

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make ``Trainer(strategy="avgpipe")`` known."""
        strategy_registry.register(
            cls.strategy_name, cls, description="Pipeline parallelism for any LightningModule (AvgPipe)"
        )
