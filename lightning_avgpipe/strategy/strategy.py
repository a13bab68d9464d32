"""The strategy: ``Trainer(strategy="avgpipe")``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torchmetrics import Metric

from lightning_avgpipe.elastic.averaging import OuterOptimizer
from lightning_avgpipe.planning.memory_limit import MemoryLimit, limit_of
from lightning_avgpipe.planning.model_memory import memory_of, state_copies
from lightning_avgpipe.planning.planner import Planner
from lightning_avgpipe.planning.recompute_policy import chosen
from lightning_avgpipe.schedule import build
from lightning_avgpipe.strategy import checks, launch
from lightning_avgpipe.strategy.bundles import bundling
from lightning_avgpipe.strategy.data import Distributor, batches_wanted, has_transfer_hooks, mirror
from lightning_avgpipe.strategy.data_sharding import check_alike, sharing
from lightning_avgpipe.strategy.lightning_changes import adapted, adapted_to_whole_steps
from lightning_avgpipe.strategy.log import StepLog
from lightning_avgpipe.strategy.options import ALLOWED, Options, SplitBatch
from lightning_avgpipe.strategy.schedule_control import ScheduleControl
from lightning_avgpipe.strategy.stepping import SteppingStrategy
from lightning_avgpipe.strategy.whole import WholeSteps
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.utils.allowed import documented
from lightning_avgpipe.utils.durations import duration
from lightning_avgpipe.utils.option_types import Count, Duration, Natural
from lightning_avgpipe.verify import request
from lightning_avgpipe.weights.by_size import divide_by_size
from lightning_avgpipe.weights.initialisation import on_meta
from lightning_avgpipe.weights.ownership import to_host

__all__ = ["AvgPipeStrategy"]

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_LOOKED_AT = 8  # batches of training in which ignored targets are looked for
_MOST = 0.9  # of a device's memory, where nobody says what an advance may use

_STEPS = {
    RunningStage.TRAINING: "training_step",
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}


@documented(ALLOWED)
class AvgPipeStrategy(SteppingStrategy):
    """Trains an unmodified LightningModule as a pipeline of stages.

    The step functions are captured on the first batch, divided into stages of about equal time, and replayed stage by
    stage on micro-batches. Training equals ordinary training that accumulates the same micro-batches in order.

    A module built under ``torch.device("meta")``, best in ``configure_model``, is never whole anywhere: each process
    initialises its own stages (``reset_parameters()``, or ``_init_weights(module)`` of a module above), or reads them
    from ``ckpt_path``. The weights depend on the seed alone. After training each process keeps its own part, on the
    host: ``fit``, ``validate``, ``test``, ``predict`` go on with it, and ``trainer.save_checkpoint`` writes all of it.

    Args:
        num_stages: number of stages K. ``"auto"``: one per device. A multiple of the number of devices places several
            stages on each. A divisor makes groups of K devices: ``devices=8``, ``num_stages=4`` are two groups, each
            with pipelines of its own, which elastic averaging holds together. Each group trains on its own part of the
            data, by a distributed sampler as with ddp, and evaluates on all of it; rank 0 is in group 0. In what
            follows N counts the pipelines of all groups where models are averaged.
        num_pipelines: number N of parallel pipelines, in each group. Each trains a model of its own, on a batch of its
            own, and fills the others' idle time; elastic averaging holds the models together. An iteration reads N
            batches from the dataloader and counts as one of Lightning's: 100 batches make 50 steps with N=2, and
            ``max_steps``, ``limit_train_batches``, ``accumulate_grad_batches``, schedulers "per step" and the progress
            bar count those 50. Evaluation, prediction and checkpoints use the reference model. Hooks of training see
            pipeline 0's model and batch; those that may change gradients are called for each model. A hook that changes
            the weights of one model alone is refused, and so is a step that reaches another model's tensors.
        processes_per_device: groups that share the same devices, each with processes of its own: ``devices=2``,
            ``processes_per_device=2`` are four processes, two groups of two stages. They train what as many pipelines
            of one process do, with the same numbers, as the AvgPipe paper arranges it. It is for kernels too small for
            one process to keep a device busy; on CUDA start NVIDIA's MPS, or kernels of several processes take turns.
            Each process has a context on the device, and the reference is averaged over the host, since NCCL connects
            no device with itself. What starts processes itself (torchrun, SLURM) must start so many for each device.
        num_microbatches: number M of micro-batches that a batch is split into, at most its size. ``"auto"``: four per
            stage, with two samples each where batches are normalised; or 1 for one stage: then there is nothing to
            pipeline, and everything is as on one device. More of them shrink the idle time at both ends of an
            iteration and the memory per micro-batch, but make each kernel smaller.
        schedule: ``"advance_forward"`` (1F1B with ``advance`` extra forwards in flight), ``"1f1b"`` or ``"afab"`` (all
            forwards, then all backwards).
        advance: h of advance forward propagation: stage k starts ``(K-1-k) * (1+h)`` forwards ahead of its first
            backward. 0 is 1F1B; a larger value hides slow links at the price of memory. ``"auto"``: adapted while
            training runs. It starts with what measured costs ask for (with unequal stages, each stage ahead of the
            next by as much as this hop needs), goes up by one while iterations of the slowest process become faster
            and every stage fits ``memory_limit`` (without one: 90 % of the device's memory), and then stays, until
            the batches or the times change. In one process there is nothing to hide: 0.
        split_points: names of the units (submodules) at which the stages 1..K-1 begin, in order. None: balanced by
            ``costs``.
        costs: ``"measured"`` times each submodule's forward and backward on the device before training, which takes
            from an instant to half a minute, and the links between the processes. ``"flops"`` counts operations: the
            same plan on every machine.
        costs_cache: directory in which measured costs are kept for the next run of the same model on the same device.
            ``"auto"``: ``lightning_avgpipe`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. None: nothing is kept or read.
        memory_limit: what each stage may use, estimated from its weights, gradients, optimizer states, and what the
            micro-batches in flight keep for their backwards: bytes, a size such as ``"10GB"`` or ``"512MiB"``, or a
            fraction up to 1.0 of the device's memory for all of its stages together. None: no limit.
        recompute: trades time for memory. True: a stage keeps only what it received for the micro-batches in flight
            and repeats its forward before the backward, a third more time; not where the backward follows
            at once, as on the last stage under 1F1B. A list names submodules as ``split_points`` does, or by patterns
            such as ``"blocks.*"``: each of these keeps its inputs, and repeats itself within the backward. True brings
            back what a whole stage keeps for the micro-batch at hand, so with few micro-batches in flight a list
            needs less. The results are the same; buffers, attributes and logs change once. With True what a step
            prints, or changes outside of the module, happens again.
        loss_reduction: how the loss depends on the batch: ``"mean"`` weights each micro-batch's loss by its share of
            the samples, ``"sum"`` adds them up.
        loss_weight: what a micro-batch counts in the mean over its batch, for losses that are means of something else
            than samples: a function of a micro-batch that returns a number (say, of its targets), or the name of a
            tensor of the batch (``"labels"``, ``"1"`` for the second of a tuple), whose entries other than -100 are
            counted. Loss, gradients and logged means are then those of the whole batch. A method ``loss_weight(self,
            batch)`` of the LightningModule does the same. None: the number of samples.
        split_batch: ``(batch, num_microbatches) -> list of micro-batches`` for batches that are no trees of tensors
            with a common first dimension. A method of this name on the LightningModule does the same.
        reader: which stage's process reads the data: ``"last"`` (global rank 0, where the loss is) or ``"first"``, so
            that large inputs need not travel and only labels do. Rank 0's hooks and callbacks then see less of a batch.
        send_batch: which tensors of a batch a process gets: ``"needed"`` by its stages (others are placeholders with a
            shape), or ``"all"``, for hooks and callbacks that look at batches on every rank.
        verify_copies: after every optimizer step check that the copies of parameters which several stages use (tied
            embeddings) are equal bit for bit. For debugging: it reads all of them.
        verify: run each batch of the first 2 optimizer steps (or of this many) also as plain accumulation of the same
            micro-batches, with the whole model on rank 0, and compare losses, gradients, weights, buffers, attributes
            and logged values by name. The first difference is a ``VerificationError``. It leaves no trace in training,
            and takes time and memory in these iterations only.
        alpha: how far a parallel model goes to their mean at each averaging, from 0 (not at all) to 1 (they become
            equal). None: 1/N.
        outer_lr: how far the reference goes at each averaging, as a multiple of the mean of the models' updates.
            ``"auto"``: the square root of N, for learning rates that suit a single model. With 1, the mean, N models
            learn from N batches about as much as one from a single batch of N times the size. With N, the sum, they
            may learn as much as one from N batches one after the other, but only where a single model would bear a
            higher learning rate too. See ``benchmarks/statistical_efficiency.py``.
        outer_optimizer: makes the optimizer of the reference model, whose gradient is the mean update with the other
            sign, from its parameters: ``partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``. In the place
            of ``outer_lr``.
        average_every: optimizer steps from one averaging to the next. In between the reference stays where it is, and
            evaluation and checkpoints use it as it is; training ends with an averaging, so that the module holds all of
            it. A resume goes on as if training had not ended.
        save_replicas: whether checkpoints hold the parallel models and their optimizers, so that training goes on with
            the same bits; else, or with another N, they start from the reference.
        save_distributed_checkpoint: whether each process writes its own part of a checkpoint, all at once into a
            folder, with torch.distributed.checkpoint. Otherwise rank 0 gathers everything and writes one file.
        on_nonfinite: what to do before a step in which a model's gradient is infinite or no number (NaN): ``"raise"``
            ends training with the name of the tensor; ``"skip"`` leaves that model out of the step and of the
            averaging, and begins it again at the reference, which ``avgpipe/skipped_models`` counts; None looks at
            nothing. ``"auto"``: ``"raise"`` for parallel models, whose reference would be lost with one of them, and
            None for a single one, as with any strategy. A loss scaler (``precision="16-mixed"``) skips such steps
            by itself, of all models.
        start_method: how the processes of one node start: ``"popen"`` runs the script again (as ddp does), ``"spawn"``
            and ``"fork"`` start this function only, and ``"fork"`` works in notebooks. The names ``avgpipe_spawn``,
            ``avgpipe_fork`` and ``avgpipe_notebook`` choose one.
        process_group_backend: of torch.distributed. Default: gloo for CPU, NCCL for CUDA.
        timeout: longest wait for another process, after which training ends with an error. None: 30 minutes.
        accelerator: what computes, as in every Lightning strategy; the Trainer's ``accelerator`` sets it.
        parallel_devices: this node's devices, as in every Lightning strategy; the Trainer's ``devices`` sets them.
        cluster_environment: how processes find each other, as in every Lightning strategy; found by the Trainer.
        checkpoint_io: how checkpoint files are written and read; a plugin of the Trainer sets it.
        precision_plugin: as in every Lightning strategy; the Trainer's ``precision`` sets it.

    Attributes:
        plan: the stages with their units, parameters and boundary values, known from the first batch on.

    Raises:
        ConfigurationError: an option that cannot work.

    Source: AvgPipe, Chen et al., PPoPP 2023.
    """

    strategy_name = "avgpipe"

    def __init__(
        self,
        num_stages: Count | Literal["auto"] = "auto",
        num_pipelines: Count = 1,
        processes_per_device: Count = 1,
        num_microbatches: Count | Literal["auto"] = "auto",
        schedule: Literal["advance_forward", "1f1b", "afab"] = "advance_forward",
        advance: Natural | Literal["auto"] = "auto",
        split_points: list[str] | None = None,
        costs: Literal["measured", "flops"] = "measured",
        costs_cache: str | Path | None = "auto",
        memory_limit: str | int | float | None = None,
        recompute: bool | list[str] = False,
        loss_reduction: Literal["mean", "sum"] = "mean",
        loss_weight: Callable[[Any], Any] | str | None = None,
        split_batch: SplitBatch | None = None,
        reader: Literal["last", "first"] = "last",
        send_batch: Literal["needed", "all"] = "needed",
        verify_copies: bool = False,
        verify: bool | int = False,
        alpha: float | None = None,
        outer_lr: float | Literal["auto"] = "auto",
        outer_optimizer: OuterOptimizer | None = None,
        average_every: Count = 1,
        save_replicas: bool = True,
        save_distributed_checkpoint: bool = False,
        on_nonfinite: Literal["auto", "raise", "skip"] | None = "auto",
        start_method: Literal["popen", "spawn", "fork"] = "popen",
        process_group_backend: str | None = None,
        timeout: timedelta | float | Duration | None = _DEFAULT_TIMEOUT,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            Options(
                num_stages=num_stages, num_pipelines=num_pipelines, processes_per_device=processes_per_device,
                num_microbatches=num_microbatches, schedule=schedule, advance=advance, split_points=split_points,
                costs=costs, costs_cache=costs_cache, memory_limit=memory_limit, recompute=recompute,
                loss_reduction=loss_reduction, loss_weight=loss_weight, split_batch=split_batch, reader=reader,
                send_batch=send_batch, verify_copies=verify_copies, verify=verify, alpha=alpha, outer_lr=outer_lr,
                outer_optimizer=outer_optimizer,
                average_every=average_every, save_replicas=save_replicas,
                save_distributed_checkpoint=save_distributed_checkpoint, on_nonfinite=on_nonfinite,
                start_method=start_method,
                process_group_backend=process_group_backend,
                timeout=_DEFAULT_TIMEOUT if timeout is None else duration(timeout),
            ),
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io, precision_plugin=precision_plugin,
        )  # fmt: skip
        self._forget()

    def _forget(self) -> None:
        """Set everything that belongs to one run of the trainer."""
        self.plan = None
        self._deployment: Deployment | None = None
        self.failed = False
        self._log: StepLog | None = None
        self.whole_steps = None
        self.verifier = None
        self._seen, self._warned, self._unweighted = {}, set(), _LOOKED_AT
        self.forget_models()
        self._asked = {}

    # -- set-up and teardown -----------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepare one run of the trainer; the plan is made when the first batch is there."""
        module = self.lightning_module
        assert module is not None
        self._forget()
        why = self.whole
        if why is not None:
            checks.whole(module, why, self._options, self.num_groups)
            if not self.undivided:
                rank_zero_info(f"{type(module).__name__} {why}: its steps run whole, not in micro-batches")
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self.num_models == 1 and self.tuner is None:
            checks.without_effect(self._options)
        if self.plain:
            if trainer.state.fn == TrainerFn.FITTING:
                request.nothing_to_verify(self._options.verify)
            super().setup(trainer)
            return
        assert trainer.state.fn is not None
        checks.trainer(trainer, self.world_size, self.num_pipelines)
        everywhere = self.mesh.world.gather_objects((str(trainer.ckpt_path or ""), self._options.shared))
        checks.same_checkpoint([path for path, _ in everywhere])
        checks.same_options([options for _, options in everywhere])
        if fitting and why is None:
            self.verifier = request.verifier(self, self._options.verify)
            self._share_data(trainer)
        checks.contents(module)
        super().setup(trainer)
        self.choose_seed(self.mesh)
        self._deployment = self._divided(module)
        sends = self.mesh.reads and self.mesh.world_size > 1
        early = not has_transfer_hooks(trainer)
        self._distributor = Distributor(
            self.mesh.batch_stream, self._needs, sends, early, partial(batches_wanted, trainer)
        )
        if why is not None:
            request.refuse(self._options.verify, f"the steps of {type(module).__name__} run whole: it {why}")
            self.whole_steps = WholeSteps(trainer, module, self, partial(self._settled, module))
            self._undo.enter_context(adapted_to_whole_steps(trainer, module, self, self.whole_steps))
            return
        self._log = StepLog(module, self.mesh.hosts_last, self.mesh.leaders)
        options = self._options
        self.schedule_control = ScheduleControl(
            options.schedule, options.advance, self.mesh, self.memory_per_stage(), module, lambda: self.optimizers
        )
        self._undo.enter_context(adapted(trainer, module, self, self._log, fitting))

    def _settled(self, module: pl.LightningModule) -> dict[str, int]:
        """Divide a module whose steps run whole, by the size of its parts; returns who owns what."""
        assert self._deployment is not None
        held = memory_of(module, build("afab", 1, 1), state_copies(self.optimizers), 0).held
        limit = limit_of(self._options.memory_limit, self.root_device, self._sharing())
        metrics = [m for m in module.modules() if isinstance(m, Metric)]
        plan = divide_by_size(module, self.num_stages, held, self._options.split_points, limit, metrics)
        owner = self._deployment.place_parameters(plan)
        self.plan = plan
        self._announce(plan)
        return owner

    def _share_data(self, trainer: pl.Trainer) -> None:
        """Before the optimizers are made, for which the number of iterations may be asked."""
        ends = self.ends if self.num_groups > 1 else None
        count = partial(getattr, self, "num_pipelines")  # which can be pickled, as a trainer can
        self._undo.enter_context(bundling(trainer, count, ends, self.tuner))
        self._undo.enter_context(sharing(trainer, self.mesh))

    def _divided(self, module: pl.LightningModule) -> Deployment:
        options, observers = self._options, [m for m in module.modules() if isinstance(m, Metric)]
        planner = Planner(
            module,
            self.num_stages,
            options.split_points,
            self.root_device,
            observers,
            "flops" if on_meta(module) else options.costs,  # what has no contents cannot be timed
            options.cache,
            limit_of(options.memory_limit, self.root_device, self._sharing()),
            chosen(module, options.recompute),
        )
        origin = self.take_origin(module)
        return Deployment(module, self.mesh, planner, lambda: self.optimizers, origin, options.elasticity, observers)

    def replan(self) -> None:
        """With the next batch of training divide the module for what is configured by then, where that is possible.

        Every rank calls it, before training has begun.
        """
        if self._deployment is not None:
            self._deployment.replan()

    def memory_per_stage(self, limit: MemoryLimit = None) -> float:
        """Bytes that each stage may use: by this limit, or else ``memory_limit``, or else 90 % of the device."""
        given = self._options.memory_limit if limit is None else limit
        return limit_of(_MOST if given is None else given, self.root_device, self._sharing())

    def _sharing(self) -> int:
        """Stages that share a device's memory; on the CPU all stages of this node."""
        on_cpu = self.root_device.type == "cpu"
        return len(self.mesh.stages) * (self.num_processes if on_cpu else self.processes_per_device)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Build the optimizer, over all parameters: what it holds of other stages goes when the plan is made."""
        if self.plain:
            super().setup_optimizers(trainer)
            return
        assert self.lightning_module is not None
        super().setup_optimizers(trainer)
        checks.optimizers(self.lightning_module, self.optimizers)

    def model_to_device(self) -> None:
        """Nothing moves before it is known which stage needs what, unless there is one only."""
        if self.plain:
            assert self.lightning_module is not None and self.model is not None
            self.fill(self.lightning_module, self.mesh)
            self.model.to(self.root_device)

    def teardown(self) -> None:
        """Give every process the whole module back, and stop the channels."""
        try:
            if self._deployment is not None and not self.failed:
                self._deployment.restore()
            elif self._deployment is not None:
                self._deployment.abandon()
            if self._mesh is not None:
                self._mesh.close(self.failed)
        finally:
            self._undo.close()
            self._deployment = None
            if self.failed:
                self._mesh = None  # its connections are closed for good
        module = self._lightning_module
        if module is not None and on_meta(module):
            # what is without contents here (after a failure, or by choice) cannot be moved, but the rest can
            to_host(module)
            self._lightning_module = None
        super().teardown()
        self._lightning_module = module
        request.end_of_run(self.verifier)

    # -- batches and steps -------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """In each group one process reads, the others follow."""
        mirrored = mirror(dataloader, self.mesh, lambda: self._distributor)
        check_alike(mirrored, self.mesh, self.num_pipelines)
        return mirrored

    @property
    def ships_early(self) -> bool:
        """Whether batches travel when they are read; else after the user's transfer hooks."""
        return self._distributor.early

    def _needs(self, batch: Any, rank: int) -> frozenset[str] | None:
        """The tensors of a batch for a process; None is all of them."""
        assert self.lightning_module is not None
        if self._options.send_batch == "all" or self._splitter is not None:
            return None
        if self.whole_steps is not None or self._deployment is None:
            return None
        stage = self.lightning_module.trainer.state.stage
        if self.loss_weight is not None and rank == self.mesh.rank_of(self.num_stages - 1):
            return None  # which weighs micro-batches
        return None if stage is None else self._deployment.pipeline.leaves(_STEPS[stage], rank, batch)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the closure and step."""
        if self.whole_steps is not None:
            return self.whole_steps.optimizer_step(super().optimizer_step, *args, **kwargs)
        with contextlib.nullcontext() if self.verifier is None else self.verifier.stepping():
            result = super().optimizer_step(*args, **kwargs)
        if self._options.verify_copies and self._deployment is not None:
            self._deployment.verify_copies()
        return result

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make ``Trainer(strategy="avgpipe")`` known, and the names for other start methods."""
        launch.register(strategy_registry, cls)

    def __getstate__(self) -> dict[str, Any]:
        # a module that was trained knows its trainer, and must be one that torch.save can save
        names = (
            "_mesh", "_deployment", "_log", "_distributor", "schedule_control", "tuner", "whole_steps", "verifier",
        )  # fmt: skip
        of_a_run = dict.fromkeys(names)
        return {**super().__getstate__(), **of_a_run, "_undo": contextlib.ExitStack()}
