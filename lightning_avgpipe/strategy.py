"""The strategy: ``Trainer(strategy="avgpipe")``."""

from __future__ import annotations

import contextlib
import pickle
import warnings
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
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_avgpipe import checks, loop, tree
from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.checkpoint import (
    drop_foreign_state,
    full_optimizer_state,
    full_state_dict,
    move_state,
    owners,
    spread_parameters,
)
from lightning_avgpipe.data import mirror
from lightning_avgpipe.metrics import StepLog, SyncedLoggerConnector, local_metrics
from lightning_avgpipe.partition import Plan, cut_like
from lightning_avgpipe.runtime.clipping import clip_by_global_norm
from lightning_avgpipe.runtime.mesh import Mesh
from lightning_avgpipe.runtime.microbatch import MicroBatch, merge, split, split_with
from lightning_avgpipe.runtime.ownership import give_up, take_back
from lightning_avgpipe.runtime.pipeline import Pipeline
from lightning_avgpipe.runtime.planner import Planner
from lightning_avgpipe.runtime.randomness import RandomKey
from lightning_avgpipe.runtime.stage import Task
from lightning_avgpipe.schedule import Schedule, build

__all__ = ["AvgPipeStrategy"]

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_MICROBATCHES_PER_STAGE = 4
# Hooks of the LightningModule that look at what a step returned or collected, which only the last stage has.
_LAST_STAGE_HOOKS = tuple(
    f"on_{stage}_{when}_end" for stage in ("train", "validation", "test", "predict") for when in ("batch", "epoch")
)

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
        self._start_method = start_method
        self._process_group_backend = process_group_backend
        self._timeout = timeout or _DEFAULT_TIMEOUT
        self.sigterm_agreed = False
        self.plan: Plan | None = None
        self._mesh: Mesh | None = None
        self._forget()

    def _forget(self) -> None:
        """Set everything that belongs to one run of the trainer."""
        self._pipeline: Pipeline | None = None
        self._plan_is_final = False
        self._owner: dict[str, int] = {}
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
        self.plan = None
        super().setup(trainer)
        self._pipeline = Pipeline(self.mesh, self.lightning_module)
        self._seed = self.mesh.broadcast(torch.initial_seed())
        self._adapt(trainer, self.lightning_module, fitting)

    def _adapt(self, trainer: pl.Trainer, module: pl.LightningModule, fitting: bool) -> None:
        """Change what Lightning does with this trainer and module, until teardown."""
        undo = self._undo
        undo.enter_context(intercepting())
        self._log = StepLog(module, self.mesh.hosts_last)
        undo.enter_context(_replaced(module, "log", self._log))
        metrics = [m for m in module.modules() if isinstance(m, Metric)]
        undo.enter_context(local_metrics(metrics))
        if fitting:
            optimization = loop.install(trainer, self)
            epoch_loop = trainer.fit_loop.epoch_loop
            undo.callback(lambda: setattr(epoch_loop, "automatic_optimization", optimization.detach()))
        if self.world_size == 1:
            return
        connector = SyncedLoggerConnector(trainer._logger_connector, self.mesh)
        trainer._logger_connector = connector
        undo.callback(lambda: setattr(trainer, "_logger_connector", connector.detach()))
        undo.enter_context(_replaced(self.precision_plugin, "clip_grad_by_norm", self._clip_grad_by_norm))
        undo.enter_context(_replaced(trainer._signal_connector, "_sigterm_notifier_fn", partial(_on_sigterm, trainer)))
        if hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
            check = partial(self._raise_agreed_sigterm, trainer)
            undo.enter_context(_replaced(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", check))
        if not self.mesh.hosts_last:
            for hook in _LAST_STAGE_HOOKS:
                undo.enter_context(_replaced(module, hook, _nothing))
            undo.enter_context(_replaced(module, "_on_before_batch_transfer", _pass_on))
        # Only rank 0 logs, so there is nothing to synchronise.
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(", category=UserWarning)
        # Callbacks that monitor a metric run after this hook, and all ranks must see what it logs.
        epoch_end = module.on_train_epoch_end

        def on_train_epoch_end() -> None:
            epoch_end()
            connector.sync()

        undo.enter_context(_replaced(module, "on_train_epoch_end", on_train_epoch_end))

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
            if self._mesh is not None and self._pipeline is not None:
                self._pipeline.unload()
                if not self._failed:
                    self._take_back()
                self.mesh.close(self._failed)
        finally:
            self._undo.close()
            self._pipeline = None
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
        module, precision = self.lightning_module, self.precision_plugin
        parts = self._split(args[0])
        accumulate = module.trainer.accumulate_grad_batches

        def finish(i: int, result: Any) -> Tensor:
            loss = checks.loss(result)
            if self._loss_reduction == "mean" and len(parts) > 1:
                loss = loss * parts[i].weight
            if accumulate > 1:
                loss = loss / accumulate
            # the plain pre_backward only calls hooks, which a batch deserves once
            if i == 0 or type(precision).pre_backward is not Precision.pre_backward:
                loss = precision.pre_backward(loss, module)
            return loss

        # Lightning's weight averaging passes over the data once more without training
        trains = not module.trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward
        outputs = self._run("training_step", precision.train_step_context, parts, args[1:], finish if trains else None)
        result: Any = {"loss": torch.zeros((), device=self.root_device)}
        if outputs is not None:
            result = self._merge_training(outputs, parts)
        if trains:
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
        module, pipeline, step_log = self.lightning_module, self._pipeline, self._log
        assert module is not None and pipeline is not None and step_log is not None

        def run(i: int, *args: Any) -> Any:
            with context(), step_log.micro_batch(parts[i].size):
                return getattr(module, step)(*args)

        self._prepare(step, partial(run, 0), (parts[0].data, *rest))
        step_log.discard()
        schedule = self._schedule(len(parts), training=finish is not None)
        task = Task(run, [(part.data, *rest) for part in parts], finish, RandomKey(self._seed, self._iteration(step)))
        outputs = pipeline.run(step, schedule, task)
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

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _prepare(self, step: str, run: Callable[..., Any], args: Sequence[Any]) -> None:
        """Capture a step function when it is run for the first time, and divide the module when that is decided.

        In training ``training_step`` decides. A validation that comes before it (Lightning's sanity check) runs on a
        provisional plan, for which no process gives anything up.
        """
        pipeline, module = self._pipeline, self.lightning_module
        assert pipeline is not None and module is not None
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        decides = step == "training_step" or not fitting
        if step in pipeline.steps and (self._plan_is_final or not decides):
            return
        planner = Planner(
            module,
            self.num_stages,
            self._split_points,
            self.root_device,
            [m for m in module.modules() if isinstance(m, Metric)],
        )
        if self.plan is None or (decides and not self._plan_is_final):
            units = self.plan.graph.units if self.plan is not None else ()
            plan: Plan = self._on_rank_zero(lambda: planner.plan(step, run, args, units))
            others = [pipeline.graph(name) for name in pipeline.steps]
            pipeline.unload()
            pipeline.load(plan.graph, plan.cuts)
            for graph in others:
                if graph.step != step and graph.units == plan.graph.units:
                    pipeline.load(graph, cut_like(graph, plan.stage_of, self.num_stages))
            self.plan, self._plan_is_final = plan, decides
            self._owner = owners(module, self.mesh, plan.stage_of)
            self._settle()
        else:
            with self._whole_module_on_rank_zero():
                graph = self._on_rank_zero(lambda: planner.capture(step, run, args, self.plan.graph.units))  # type: ignore[union-attr]
            pipeline.load(graph, cut_like(graph, self.plan.stage_of, self.num_stages))

    def _on_rank_zero(self, make: Callable[[], Any]) -> Any:
        """Every rank gets what rank 0 makes."""
        made = pickle.dumps(make()) if self.is_global_zero else None
        return pickle.loads(self.mesh.publish(made))

    def _settle(self) -> None:
        """Bring the own stages to the device; once the plan is final, give up the parameters of the others."""
        module, device = self.lightning_module, self.root_device
        assert module is not None and self.plan is not None
        foreign = self._foreign()
        for name, parameter in module.named_parameters():
            if name not in foreign and parameter.device != device:
                parameter.data = parameter.data.to(device)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(device)
        if self._plan_is_final:
            self._give_up()
            rank_zero_info(f"{self.num_stages} stages on {self.world_size} processes:\n{self.plan}")
        for optimizer in self.optimizers:
            move_state(optimizer, device)

    def _foreign(self) -> set[str]:
        assert self.lightning_module is not None
        names = (name for name, _ in self.lightning_module.named_parameters())
        # what no stage uses is kept by all: nobody else would have it
        return {n for n in names if self._stage_of(n) is not None and self._owner[n] != self.global_rank}

    def _stage_of(self, name: str) -> int | None:
        assert self.plan is not None
        return self.plan.stage_of.get(name)

    def _give_up(self) -> None:
        module = self.lightning_module
        assert module is not None
        foreign = self._foreign()
        ids = {id(p) for name, p in module.named_parameters() if name in foreign}
        for optimizer in self.optimizers:
            drop_foreign_state(optimizer, ids)
        give_up(module, foreign)

    def _take_back(self) -> None:
        """Every process holds the whole module again."""
        module = self.lightning_module
        if module is None or self.world_size == 1 or not self._owner:
            return
        spread = spread_parameters(module, self.mesh, self._owner)
        take_back(module, {name: t for name, t in spread.items() if name in dict(module.named_parameters())})
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if self._owner[name] != self.global_rank:
                    buffer.copy_(spread[name])

    @contextlib.contextmanager
    def _whole_module_on_rank_zero(self) -> Any:
        """Rank 0 borrows the parameters of the other stages, to follow a step function through all of them."""
        module = self.lightning_module
        assert module is not None
        if not self._plan_is_final or self.world_size == 1:
            yield
            return
        borrowed = self.mesh.collect({n: p.detach() for n, p in module.named_parameters()}, lambda n: self._owner[n])
        if self.is_global_zero:
            take_back(module, borrowed)
        yield
        give_up(module, self._foreign())

    # -- state -------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """On rank 0 the weights of all stages. Every rank calls it."""
        assert self.lightning_module is not None
        if self.world_size == 1 or self._pipeline is None or not self._owner:
            return self.lightning_module.state_dict()
        return full_state_dict(self.lightning_module, self.mesh, self._owner)

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

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if clip_val > 0:
            clip_by_global_norm(list(self.precision_plugin.main_params(optimizer)), float(clip_val), self.mesh)

    def sigterm_received(self, trainer: pl.Trainer) -> bool:
        """Whether this process was asked to end."""
        return bool(getattr(trainer, "received_sigterm", False))

    def _raise_agreed_sigterm(self, trainer: pl.Trainer) -> None:
        """All ranks leave at the same batch, so that none waits for another."""
        if self.sigterm_agreed:
            raise SIGTERMException

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make ``Trainer(strategy="avgpipe")`` known."""
        strategy_registry.register(
            cls.strategy_name, cls, description="Pipeline parallelism for any LightningModule (AvgPipe)"
        )


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Any:
    """An attribute of this one object is something else within the context."""
    attributes = vars(owner)
    had, before = name in attributes, attributes.get(name)
    attributes[name] = replacement
    try:
        yield
    finally:
        if had:
            attributes[name] = before
        else:
            attributes.pop(name, None)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A hook that looks at what only the last stage has."""


def _pass_on(batch: Any, dataloader_idx: int = 0) -> Any:
    return batch


def _on_sigterm(trainer: pl.Trainer, signum: Any, frame: Any) -> None:
    launcher = trainer.strategy.launcher
    if launcher is not None and not trainer.received_sigterm:
        launcher.kill(signum)
    trainer._signal_connector.received_sigterm = True
