"""The strategy for Lightning: ``Trainer(strategy="avgpipe")``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.averaging.options import Averaging
from lightning_avgpipe.comm.alone import hides_rank
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.options import Links
from lightning_avgpipe.comm.topology import DeviceLayout
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.errors import ConfigurationError, PeerError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.state import outside
from lightning_avgpipe.strategy import checkpoint_files, checks, combinations, commands, connection, data, hooks, launch
from lightning_avgpipe.strategy.batches import bundling
from lightning_avgpipe.strategy.checkpoint_state import CheckpointState
from lightning_avgpipe.strategy.combinations import Facts
from lightning_avgpipe.strategy.context import RunContext
from lightning_avgpipe.strategy.options import (
    ALLOWED,
    FURTHER,
    Configuration,
    Options,
    PolicyChoice,
    ScheduleName,
    SplitBatch,
)
from lightning_avgpipe.strategy.pipeline_run import PipelineRun
from lightning_avgpipe.strategy.system import System
from lightning_avgpipe.strategy.whole_run import PassthroughRun, WholeRun, why_whole
from lightning_avgpipe.utils.allowed import Count, Duration, Natural, TensorName, duration, has_options
from lightning_avgpipe.utils.device import set_environment
from lightning_avgpipe.utils.lightning import (
    CheckpointIO,
    ClusterEnvironment,
    ParallelStrategy,
    Precision,
    TBroadcast,
    TrainerFn,
    pl,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
    refuse_other,
    reset_seed,
)
from lightning_avgpipe.utils.names import listed
from lightning_avgpipe.utils.patching import all_replaced
from lightning_avgpipe.weights.initialisation import on_meta
from lightning_avgpipe.weights.ownership import explain, to_host

# A run of the trainer, from its set-up until the next one begins. Methods of the strategy call the run's method of the
# same name. Lightning's own method is passed as ``own`` to those that may need it.
Run = PipelineRun | WholeRun | PassthroughRun

_DEFAULT_TIMEOUT = timedelta(minutes=30)


@has_options(ALLOWED, FURTHER, averaging=Averaging, links=Links)
class AvgPipeStrategy(ParallelStrategy):
    """Trains an unmodified LightningModule as a pipeline of stages.

    The step functions are captured on the first batch, divided into stages of about equal time, and replayed stage by
    stage on micro-batches. Training equals ordinary training that accumulates the same micro-batches in order.

    A module built under ``torch.device("meta")``, best in ``configure_model``, is never whole on any process: each
    process initialises its own stages (``reset_parameters()``, or ``_init_weights(module)`` of a module above), or
    reads them from ``ckpt_path``. The weights depend on the seed alone. After training each process keeps its own
    stages on the host: further ``fit``, ``validate``, ``test`` and ``predict`` use them, and
    ``trainer.save_checkpoint`` writes all stages.

    Args:
        num_stages: number of stages K. ``"auto"``: one per device of a replica. A multiple of the number of devices
            places several stages on each device. With fewer stages than devices there are replicas: ``devices=8``,
            ``num_stages=4`` are two pipelines of four stages that train one model, as in ddp; or two models, with
            ``averaging=Averaging(groups=2)``.
        num_microbatches: number M of micro-batches that a batch is split into, at most its size. ``"auto"``: four per
            stage, but at least two samples each if batches are normalised. With one stage it is 1: there is nothing to
            pipeline, and everything is as on one device. It is 1, with a warning, if the step cannot be captured on a
            part of its first batch, or keeps a hidden state from batch to batch. More micro-batches reduce the idle
            time at both ends of an iteration and the memory per micro-batch, but make each kernel smaller.
        num_pipelines: number N of parallel pipelines. Each pipeline trains a model of its own on a batch of its own,
            and uses the idle time of the others; elastic averaging holds the models together. An iteration reads N
            batches from the dataloader and counts as one batch in Lightning: 100 batches make 50 steps with N=2, and
            ``max_steps``, ``limit_train_batches``, ``accumulate_grad_batches``, schedulers "per step" and the progress
            bar count those 50, unless ``Averaging(split_batches=True)`` lets pipelines divide each batch. Evaluation,
            prediction and checkpoints use the reference model. Hooks of training see pipeline 0's model and batch;
            hooks that may change gradients are called for each model. A hook that changes the weights of one model
            alone is refused, and so is a step that reaches another model's tensors.
        replicas: synchronous copies of the pipelines, as ddp has copies of a model: ``devices=8``, ``replicas=2`` are
            two pipelines of four stages. ``"auto"``: as many as there are devices for ``num_stages``, or as
            the ``planner`` chooses. Each replica trains on its own part of the data, by a distributed
            sampler. Gradients are summed, stage by stage, before the optimizers step, so all replicas stay equal. The
            loss of a replica is weighted by its share of the samples, so the gradient is that of one batch with the
            samples of all replicas. Each replica normalises its own micro-batches, and buffers that steps change
            (running means) are those of the first replica, as with ddp. In evaluation every replica has all data. With
            ``Averaging(groups=...)`` each group has this number of replicas. A list replicates single stages, as
            ``[3, 1]`` on four devices: the replicas of a stage take its micro-batches in turns and sum their gradients,
            so only the rounding of that sum depends on them.
        schedule: ``"advance_forward"`` (1F1B with ``advance`` extra forwards in flight), ``"1f1b"``, ``"afab"`` (all
            forwards, then all backwards). With several stages on each process: ``"interleaved"`` (1F1B) or ``"bfs"``
            (breadth first), idle for half of 1F1B's time with two. ``"auto"``: the first iteration is 1F1B; then the
            fastest schedule by simulation with the plan's costs that fits ``memory_limit``. A function ``(num_stages,
            num_microbatches)`` that returns a row of actions for each stage, such as ``"F0 F1 B0 B1"``, is a schedule
            of your own; it is checked for deadlocks before training.
        advance: h of advance forward propagation: stage k starts ``(K-1-k) * (1+h)`` forwards ahead of its first
            backward. 0 is 1F1B; a larger value hides slow links at the price of memory. ``"auto"``: adapted while
            training runs. It starts with what measured costs ask for (with unequal stages, the number of extra forwards
            differs from hop to hop), goes up by one while iterations of the slowest process become faster and every
            stage fits ``memory_limit`` (without one: 90 % of the device's memory), and then stays until the batches or
            the times change. In one process there are no links to hide: with the default ``schedule``, or ``"auto"``,
            micro-batches go through all stages and back one after the other (depth first, which the plan prints), so
            that each stage keeps one micro-batch; with a number, or another schedule, in the order of that schedule.
        split_points: names of the units (submodules) at which the stages 1..K-1 begin, in order. None: balanced by
            ``costs``.
        memory_limit: memory that each stage may use, estimated from its weights, gradients, optimizer states, and what
            the micro-batches in flight keep for their backwards: bytes, a size such as ``"10GB"`` or ``"512MiB"``, or a
            fraction up to 1.0 of the device's memory for all of its stages together. None: no limit.
        recompute: trades time for memory. True: a stage keeps only the activations that it received for the
            micro-batches in flight, and repeats its forward before the backward, which takes a third more time; not
            where the backward follows at once, as on the last stage under 1F1B. A list names submodules as
            ``split_points`` does, or by patterns such as ``"blocks.*"``: each of these keeps its inputs, and repeats
            its forward within the backward. With True a stage has all activations of one micro-batch during its
            backward, so with few micro-batches in flight a list needs less. The results are the same; buffers,
            attributes and logs change once. With True, changes that a step makes outside of the module happen twice.
        compile: whether each unit of a stage (a submodule that no cut divides; the printed plan names them) runs
            compiled by ``torch.compile``, or a dict of its arguments: ``{"dynamic": False}``,
            ``{"backend": "aot_eager"}``. Code between units is not compiled. Results are then those of the
            compiler, and a unit draws all its random numbers (dropout) from one stream, which depends on which units
            there are. The first iteration waits for the compiler. Costs are measured without the compiler.
        static_step: whether your ``training_step`` does the same for each micro-batch, so that its Python code need not
            run for each. ``"auto"``: not run again for the micro-batches of a batch after the first one, where the step
            is found to have no side effects; ``True``: also from batch to batch, without this check; ``False``: always
            run.
        weight_policy: whether the pipeline drains before each update of the weights, or goes on to the next batch while
            its stages update their weights one after the other, each after its own backwards: then stages are hardly
            ever idle, and gradients belong to weights that are some updates old. ``"flush"`` drains. The other policies
            say which weights a micro-batch uses. All but ``"flush"`` need one pipeline in the order of 1F1B, with 32
            bits or bf16. Hooks, logs and checkpoints come in the usual order; the pipeline drains for a validation, a
            checkpoint every n steps and the end of an epoch. With one stage nothing changes.
        averaging: how parallel models are held together, and how they share devices: an :class:`Averaging`. With one
            model it changes nothing.
        system: a system that goes beyond one run of processes, such as a :class:`Survival`. None: no system.
        planner: planner of the stages. ``"balanced"`` makes stages of about equal time, one for each device of a
            replica. Others choose the number of stages, their cuts, and which devices share each, for the shortest
            iteration within ``memory_limit``; with ``replicas="auto"`` and a given ``num_microbatches``.
        costs: ``"measured"`` times each submodule's forward and backward on the device before training, which takes
            from an instant to half a minute, and the links between the processes. ``"flops"`` counts operations: the
            same plan on every machine.
        costs_cache: directory in which measured costs, and verdicts of verifications, are kept for the next run of the
            same model on the same device. ``"auto"``: ``lightning_avgpipe`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
            None: nothing is kept or read.
        links: what is known of the links between processes, and what is sent over them: a :class:`Links`.
        loss_reduction: how the loss depends on the batch: ``"mean"`` weights each micro-batch's loss by its share of
            the samples, ``"sum"`` adds them up.
        loss_weight: weight of a micro-batch in the mean over its batch, for losses that are means over something other
            than samples: a function of a micro-batch that returns a number (such as its number of targets), or the name
            of a tensor of the batch (``"labels"``, ``"1"`` for the second of a tuple), whose entries other than -100
            are counted. Loss, gradients and logged means are then those of the whole batch. A method
            ``loss_weight(self, batch)`` of the LightningModule does the same. None: the number of samples.
        split_batch: ``(batch, num_microbatches) -> list of micro-batches`` for batches that are not trees of tensors
            with a common first dimension. A method of this name on the LightningModule does the same.
        shard: ``"optimizer"``: each replica keeps the optimizer states of a part of the parameters only, steps these
            parameters, and sends them to the others (ZeRO-1). Results and checkpoints are the same.
        verify: whether to repeat the first 2 optimizer steps (or this many) without a pipeline, in a forked copy of
            rank 0 with the whole model, and to compare losses, gradients, weights, buffers, attributes and logged
            values by name. The first difference raises a ``VerificationError``. ``"auto"`` verifies while training
            runs: training waits at most two seconds, and goes on without a comparison where none is possible; with
            True, or a number, training waits.
        save_distributed_checkpoint: whether each process writes its own part of a checkpoint into a folder, all at the
            same time, with torch.distributed.checkpoint. Otherwise rank 0 gathers everything and writes one file.
        start_method: how the processes of one node start: ``"popen"`` runs the script again (as ddp does), ``"spawn"``
            and ``"fork"`` start this function only, and ``"fork"`` works in notebooks. The names ``avgpipe_spawn``,
            ``avgpipe_fork`` and ``avgpipe_notebook`` choose one.
        timeout: longest wait for another process, after which training ends with an error. None: 30 minutes.
        accelerator: accelerator, as in every Lightning strategy; the Trainer's ``accelerator`` sets it.
        parallel_devices: this node's devices, as in every Lightning strategy; the Trainer's ``devices`` sets them.
        cluster_environment: how processes find each other, as in every Lightning strategy; found by the Trainer.
        checkpoint_io: how checkpoint files are written and read; a plugin of the Trainer sets it.
        precision_plugin: precision, as in every Lightning strategy; the Trainer's ``precision`` sets it.

    Attributes:
        num_nodes: number of nodes; set by the Trainer.
        tuner: called with the first batch of training before the batch is used, and before each further batch until it
            returns True; may reconfigure. Must be set before the run is set up. None after each run.

    Raises:
        ConfigurationError: an option has an invalid value, or options exclude each other.

    Source: AvgPipe, Chen et al., PPoPP 2023.
    """

    strategy_name = "avgpipe"
    is_distributed = False  # read by Lightning, whose samplers and logs must not be distributed over all processes
    _distributor: data.Distributor  # of the current run
    _parallel_devices: list[torch.device] | None = None

    def __init__(
        self,
        num_stages: Count | Literal["auto"] = "auto",
        num_microbatches: Count | Literal["auto"] = "auto",
        num_pipelines: Count = 1,
        replicas: Count | list[Count] | Literal["auto"] = "auto",
        schedule: ScheduleName | Callable[[int, int], Any] = "advance_forward",
        advance: Natural | Literal["auto"] = "auto",
        split_points: list[str] | None = None,
        memory_limit: str | int | float | None = None,
        recompute: bool | list[str] = False,
        compile: bool | dict[str, Any] = False,
        static_step: bool | Literal["auto"] = "auto",
        weight_policy: PolicyChoice = "flush",
        averaging: Averaging = Averaging(),  # noqa: B008  # frozen
        system: System | None = None,
        planner: str = "balanced",
        costs: Literal["measured", "flops"] = "measured",
        costs_cache: str | Path | None = "auto",
        links: Links = Links(),  # noqa: B008
        loss_reduction: Literal["mean", "sum"] = "mean",
        loss_weight: TensorName | Callable[[Any], Any] | None = None,
        split_batch: SplitBatch | None = None,
        shard: Literal["optimizer"] | None = None,
        verify: bool | int | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = False,
        start_method: Literal["popen", "spawn", "fork"] = "popen",
        timeout: timedelta | float | Duration | None = _DEFAULT_TIMEOUT,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        given = dict(locals())
        self._system = system or System()
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io, precision_plugin=precision_plugin,
        )  # fmt: skip
        given["timeout"] = _DEFAULT_TIMEOUT if timeout is None else duration(timeout)
        options = Options(**{field.name: given[field.name] for field in fields(Options)})
        self.num_nodes = 1
        self.tuner: Callable[[Any], bool] | None = None
        self._configuration = Configuration(options)
        self._connection = connection.Connection(links.backend)
        self._peers: connection.Peers | None = None  # the data-parallel peers of this process, once it is connected
        self._run: Run | None = None  # the current or last run; None after connect()
        self._checkpoints: CheckpointState | None = None  # what checkpoints save and load; None before connect()
        self._begun = False
        self._undo = contextlib.ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        # torch.save must be able to save a trained module, which refers to its trainer and so to this strategy
        ended = dict.fromkeys(("_run", "_checkpoints", "_distributor", "_peers", "tuner"))
        return {**super().__getstate__(), **ended, "_undo": contextlib.ExitStack()}

    # -- processes -----------------------------------------------------------------------------------------------------

    @property
    def accelerator(self) -> pl.accelerators.Accelerator | None:
        """The accelerator. A Trainer sets it first; objects of Lightning's other package are refused then."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: pl.accelerators.Accelerator) -> None:
        refuse_other("The Trainer", accelerator)
        refuse_other("precision_plugin", self._precision_plugin)
        refuse_other("checkpoint_io", self._checkpoint_io)
        refuse_other("cluster_environment", self.cluster_environment)
        self._accelerator = accelerator

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this node; with several worlds, those of this process's world."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not self._parallel_devices:  # the Trainer may set what it has read here
            self._parallel_devices = self._system.devices(devices) if devices else devices

    @property
    def world_size(self) -> int:
        """The number of processes. Code of a step sees the number of groups, which read different data as in ddp."""
        return self.num_groups if hides_rank() else super().world_size

    @property
    def global_rank(self) -> int:
        """The rank of this process. Code of a step, which all stages run, sees the number of its group."""
        return self.group_number if hides_rank() else super().global_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this process logs and saves: rank 0, of the world that does so at present if there are several.

        Code of a step sees True on all stages of the first group.
        """
        return super().is_global_zero and (hides_rank() or not getattr(rank_zero_only, "rank", 0))

    @property
    def device_layout(self) -> DeviceLayout:
        """The layout of all processes on devices."""
        devices = len(self.parallel_devices) if self.parallel_devices is not None else 1
        # from the original options, since a reconfiguration moves stages and leaves processes in their groups
        given, averaging = self._configuration.given, self._configuration.given.averaging
        sharing, models = averaging.processes_per_device, averaging.num_groups
        replicas = given.replicas if isinstance(given.replicas, int) else 1
        if given.replicas == "auto" and isinstance(given.num_stages, int):  # as in ddp, for all devices
            replicas = max(1, devices * self.num_nodes * sharing // (given.num_stages * models))
        return DeviceLayout(devices, self.num_nodes, sharing, replicas, given.stage_replicas, models)

    @property
    def num_processes(self) -> int:
        """The number of processes of this node."""
        return self.device_layout.node_size

    @property
    def num_groups(self) -> int:
        """The number of groups in all worlds; each is a set of processes that hosts all K stages."""
        return self._groups_here * self._system.num_worlds

    @property
    def _groups_here(self) -> int:
        return len(self.device_layout.groups(self.num_stages))

    @property
    def group_number(self) -> int:
        """The number of this process's group, 0-based."""
        groups = enumerate(self.device_layout.groups(self.num_stages))
        here = next(number for number, ranks in groups if super(AvgPipeStrategy, self).global_rank in ranks)
        return self._groups_here * self._system.world_number + here

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.device_layout.device_of(self.local_rank)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of a distributed sampler: each group reads a part of the data."""
        return {"num_replicas": self.num_groups, "rank": self.group_number}

    @property
    def cluster(self) -> Cluster:
        """The connected processes and their channels, from the set-up of the environment on."""
        assert self._connection.cluster is not None
        return self._connection.cluster

    @property
    def observers(self) -> Observers:
        """The observers of this process's iterations. Only a run as a pipeline has them."""
        assert isinstance(self._run, PipelineRun)
        return self._run.loop.schedule_control.observers

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        checks.processes(self.num_stages, self.device_layout)
        # before anything runs on the device; the processes to start inherit the variables
        several = self.device_layout.world_size > 1
        late = [] if self.passthrough else set_environment(self.root_device, os.environ, several)
        if late and several:
            rank_zero_warn(
                f"{self.root_device} was in use before the Trainer was made, too early for what devices read at their "
                f"start ({listed(late)}): messages and the work of stages may wait for each other. Make the Trainer "
                "before anything uses a device, or set these variables in the environment of the script"
            )
        self._launcher = self._system.launcher(self) or launch.launcher(self, self.options.start_method)
        if self.passthrough and self._undivided:
            rank_zero_info(
                "AvgPipeStrategy: with one device, one stage and one micro-batch there is nothing to pipeline; "
                "everything is as with strategy='auto'. More devices, or num_stages=2 on this one, make a pipeline"
            )

    def set_world_ranks(self) -> None:
        """Tell the cluster environment the rank of this process and the number of processes."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        first = self._system.world_number == 0
        rank_zero_only.rank = self.global_rank if first else self.global_rank + 1  # type: ignore[attr-defined]

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        self._connection.barrier(name)

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Return the source's object on every rank."""
        return self._connection.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the data-parallel peers of this process; see :class:`Peers`."""
        return tensor if self._peers is None else self._peers.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of the data-parallel peers of this process; see :class:`Peers`."""
        return tensor if self._peers is None else self._peers.all_gather(tensor, group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or with ``all=False`` any rank, decided True."""
        return self._connection.decide(decision, unanimously=all)

    # -- options -------------------------------------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """The current options; ``reconfigure`` may change some."""
        return self._configuration.options

    @property
    def num_stages(self) -> int:
        """K, the number of stages."""
        wanted = self.options.num_stages
        automatic = len(self.options.stage_replicas) or self.device_layout.devices_of_replica
        return automatic if wanted == "auto" else wanted

    @property
    def num_pipelines(self) -> int:
        """N, the number of parallel pipelines, which ``reconfigure`` may change."""
        return self.options.num_pipelines

    @property
    def rolls(self) -> bool:
        """Whether pipelines of this run roll: they go on to the next batch without waiting for each other.

        With ``Averaging(rolling="auto")`` a callback may set this before the first batch.
        """
        return self._configuration.rolls

    @rolls.setter
    def rolls(self, preferred: bool) -> None:
        if isinstance(self._run, PipelineRun) and self._run.deployment.parallel.has_trained:
            raise ConfigurationError("strategy.rolls is set when training runs; set it before the first batch")
        self._configuration.prefers_rolling = preferred

    @property
    def num_models(self) -> int:
        """The number of parallel models in all groups; replicas train the same models."""
        return self.num_pipelines * self.num_teams

    @property
    def num_teams(self) -> int:
        """The number of groups of processes that train models of their own; replicas count as one."""
        return self.num_groups // self.replicas

    @property
    def replicas(self) -> int:
        """The number of groups that train the same models, each on its share of the data."""
        return self.device_layout.replicas

    @property
    def save_distributed_checkpoint(self) -> bool:
        """Whether each process writes its own part of a checkpoint."""
        return self.options.save_distributed_checkpoint

    @property
    def facts(self) -> Facts:
        """The facts about this run that decide which options have an effect."""
        tuned = self.tuner is not None
        return Facts(self.num_models, self.num_stages, self.world_size, self.num_groups, self.replicas, tuned)

    @property
    def passthrough(self) -> bool:
        """Whether there is nothing to pipeline: one process, with nothing to divide or with steps that run whole.

        Then nothing is captured, split, replaced or refused: everything is as with Lightning's strategy for one device.
        """
        one_model = self.device_layout.world_size == self.num_pipelines == self._system.num_worlds == 1
        return one_model and (self._undivided or self.whole is not None)

    @property
    def _undivided(self) -> bool:
        # there is one stage and one micro-batch, and no option needs a pipeline
        return self.num_stages == 1 and not (self.options.splits or self.options.recompute or self.options.compile)

    @property
    def whole(self) -> str | None:
        """The reason why the module's steps run whole; None if they do not."""
        return None if self._lightning_module is None else why_whole(self._lightning_module)

    # -- a run: set-up and teardown ------------------------------------------------------------------------------------

    def connect(self, model: pl.LightningModule) -> None:
        """Connect a module to the strategy, with which a new run begins."""
        checks.no_run_in_progress(self._connection.cluster, model)
        super().connect(model)
        self._run, self._begun = None, False
        self._configuration.can_roll, self._configuration.prefers_rolling = False, True
        self._checkpoints = CheckpointState(model, self._connection, self._configuration)
        if not self.passthrough and model._trainer is not None:  # without a trainer, the module will only be saved
            refusing = connection.refusing_bad_checkpoints(model.trainer, self._connection, lambda: self._begun)
            self._undo.enter_context(all_replaced([refusing]))

    def setup_environment(self) -> None:
        """Connect the processes; called before the module's own set-up hooks."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        commands.begin_script(trainer)
        in_shards = self.save_distributed_checkpoint
        self.checkpoint_io: CheckpointIO = checkpoint_files.choose_files(self._checkpoint_io, in_shards)
        if not self.passthrough:  # by now all callbacks are known
            keeping = connection.keeping_last_checkpoint(trainer, self._connection, lambda: self._begun)
            self._undo.enter_context(all_replaced(keeping))
        super().setup_environment()
        if not self.passthrough:
            reset_seed()  # as in ddp; also with one process, so that its random numbers are those of several
        self.set_world_ranks()
        fits = trainer.state.fn == TrainerFn.FITTING
        if self.world_size > 1 or (fits and not self.passthrough):
            self._undo.enter_context(connection.handling_signals_together(trainer, self._connection))
        if self.world_size > 1:
            self._undo.enter_context(connection.ending_together(trainer, self._connection))
        self._connect()

    def _connect(self) -> None:
        """Connect the processes in groups that each host all stages, and divide the data among the groups."""
        assert self.cluster_environment is not None and self.lightning_module is not None
        layout, options, trainer = self.device_layout, self.options, self.lightning_module.trainer
        cluster = self._connection.arrange(self.num_stages, self.global_rank, self.root_device, layout, options)
        self._connection.open(self.cluster_environment, options)
        self._peers = connection.Peers(trainer, cluster)
        self._distributor = data.Distributor(trainer, cluster)
        if trainer.state.fn == TrainerFn.FITTING and not self.passthrough and self.whole is None:
            self._divide_data(trainer, cluster)

    def _divide_data(self, trainer: pl.Trainer, cluster: Cluster) -> None:
        """Let each group read its part of the training data, in bundles of as many batches as a step takes.

        Called before ``setup`` or ``configure_optimizers`` of the module, which may ask for the number of iterations.
        """
        # functions are partial, so that a trainer can be pickled; data of unknown length ends in all groups at once
        any_ends = partial(self._connection.decide, unanimously=False) if cluster.stage_map.num_groups > 1 else None
        count, look = partial(getattr, self._configuration, "batches_per_step"), partial(getattr, self, "tuner")
        self._undo.enter_context(bundling(trainer, count, any_ends, look))
        self._undo.enter_context(data.sampling_over_groups(trainer, self.num_groups))

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepare a run of the trainer; the plan is made with the first batch."""
        self._run = self._make_run(trainer)
        super().setup(trainer)
        self._run.setup()

    def _make_run(self, trainer: pl.Trainer) -> Run:
        module, options, fitting = self.lightning_module, self.options, trainer.state.fn == TrainerFn.FITTING
        assert module is not None
        why = self.whole
        if why is not None:
            checks.whole(module, why, options, self.num_groups)
            if not self._undivided:
                rank_zero_info(f"{type(module).__name__} {why}: its steps run whole, not in micro-batches")
        if fitting and self.tuner is None:  # a tuner would change which options have an effect
            combinations.without_effect(options, self.facts)
        context = RunContext(trainer, self._connection, self._configuration, self._state, self._distributor)
        if self.passthrough:
            if fitting:
                commands.nothing_to_verify(options.verify)
            return PassthroughRun(context)
        checks.trainer(trainer, self.world_size, self.num_pipelines, self.num_teams)
        given = str(trainer.ckpt_path or ""), options.shared, hooks.user_hook_names(trainer)
        checks.same_on_all_ranks(self.cluster.world.gather_objects(given))
        checks.contents(module)
        if why is None:
            if fitting:
                checks.synchronised(trainer, options, self.cluster.stage_map)
                self._configuration.can_roll = checks.can_roll(trainer, options, self.cluster, self.facts)
                checks.sharding(options, self.facts)
            return PipelineRun(context)
        commands.refuse_to_verify(options.verify, f"the steps of {type(module).__name__} run whole: it {why}")
        return WholeRun(context)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Build the optimizers over all parameters; states of other stages are dropped when the plan is made."""
        super().setup_optimizers(trainer)
        if not self.passthrough and self.lightning_module is not None:
            sharded, divided = self.options.shard is not None, self.cluster.group.world_size > 1
            gathered = self.world_size > 1 or self.options.num_pipelines > 1
            checks.optimizers(self.lightning_module, self.optimizers, sharded, divided, gathered)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build modules on the host within this context, or with ``empty_init`` on the meta device.

        The device gets only the stages of its process, once there is a plan.
        """
        if self.passthrough:
            with super().tensor_init_context(empty_init):
                yield
            return
        place = torch.device("meta") if empty_init else contextlib.nullcontext()
        with place, self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self) -> None:
        """Move the module to the device, if this process has the whole module."""
        assert self.model is not None
        self._running.model_to_device(partial(self.model.to, self.root_device))

    def on_train_start(self) -> None:
        """Note that training begins, so that the state of a resumed run has been loaded."""
        super().on_train_start()
        self._begun = True

    def on_train_end(self) -> None:
        """Finish the verification."""
        if isinstance(self._run, PipelineRun):
            self._run.end_training()
        super().on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        """Report the exception to the other processes, unless all have agreed to end here."""
        explain(exception, self._lightning_module)
        self._connection.fail(exception)
        if isinstance(exception, PeerError):  # another process has failed; the traceback of this one's wait is no help
            exception.__traceback__ = exception.__cause__ = exception.__context__ = None

    def teardown(self) -> None:
        """Give the whole module back to every process, and stop the channels."""
        try:
            if self._run is not None:
                self._run.teardown()
        except BaseException:
            self._connection.failed = True  # the other processes are at another point of the program
            raise
        finally:
            self._undo.callback(self._connection.close)
            self._undo.close()
            self.tuner = None
            outside.forget()
        module = self._lightning_module
        if module is not None and on_meta(module):
            # parameters that are on meta here (after a failure, or by choice) cannot be moved, but the others can
            to_host(module)
            self._lightning_module = None
        super().teardown()
        self._lightning_module = module
        if isinstance(self._run, PipelineRun):
            self._run.end_script()

    # -- batches and steps ---------------------------------------------------------------------------------------------

    @property
    def _running(self) -> Run:
        assert self._run is not None
        return self._run

    def process_dataloader(self, dataloader: object) -> object:
        """Return a dataloader that reads in one process of each group, and sends to the others."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        readers = self.num_groups if trainer.training else 1
        data.check_sampler(dataloader, readers, self.cluster.world.world_size)
        mirrored = data.shared_dataloader(dataloader, trainer, self.cluster, partial(getattr, self, "_distributor"))
        data.check_equal_lengths(mirrored, self.cluster, self.num_pipelines)
        return mirrored

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device; if Lightning's loop calls this, also send it to the other ranks of the group.

        Lightning sets ``_current_fx_name`` while it calls a hook, which shows whether user code calls this in another
        hook. Then the batch is only moved.
        """
        own, module = partial(super().batch_to_device, batch, device, dataloader_idx), self._lightning_module
        if self._run is None or module is None or module._current_fx_name != "batch_to_device":
            return own()
        return self._run.batch_to_device(own, batch, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forwards and backwards of a batch; return what the step would return for it, detached."""
        return self._running.step("training_step", super().training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run validation_step; return the merged result on rank 0, and on other ranks if callbacks read it there."""
        return self._running.step("validation_step", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run test_step; return the merged result on rank 0, and on other ranks if callbacks read it there."""
        return self._running.step("test_step", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run predict_step; return the merged result on rank 0, and on other ranks if it is needed there."""
        return self._running.step("predict_step", super().predict_step, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, step the optimizers, and average parallel models."""
        return self._running.optimizer_step(super().optimizer_step, optimizer, closure, model, **kwargs)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def _state(self) -> CheckpointState:
        if self._checkpoints is None:
            raise ConfigurationError(
                "there is nothing to save in this process: no training has begun here. With start_method='fork' or "
                "'spawn' the processes that train end with fit(); save before it ends (ModelCheckpoint, or "
                "trainer.save_checkpoint() in a hook), or leave start_method as it is"
            )
        return self._checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return, on rank 0, the weights of all stages; for a distributed checkpoint those of this process.

        Every rank calls it.
        """
        return self._state.weights()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return, on rank 0, an ordinary optimizer state; for a distributed checkpoint that of this process.

        Every rank calls it.
        """
        return self._state.optimizer(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint: a file, or a folder of shards. Every rank calls it."""
        self._state.complete(checkpoint)
        if not self.save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            checkpoint_files.save_shards(checkpoint, filepath, self._connection.cluster, storage_options)

    def save_pretrained(self, model: Any, folder: str | Path, **options: Any) -> None:
        """Write a model of transformers or peft; see :func:`lightning_avgpipe.save_pretrained`. Every rank calls it."""
        # hooks redirect new tensors from the meta device, where the stand-ins of all weights must be made
        run = self._run
        with run.absent_weights.suspended() if isinstance(run, PipelineRun | WholeRun) else contextlib.nullcontext():
            self._state.save_pretrained(model, folder, **options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint: a file, or a folder of shards."""
        if checkpoint_files.is_sharded(checkpoint_path):
            assert self.lightning_module is not None
            fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
            return checkpoint_files.load_shards(checkpoint_path, optimizers=fitting, weights_only=weights_only)
        asked = {} if weights_only is None else {"weights_only": weights_only}
        return self.checkpoint_io.load_checkpoint(checkpoint_path, **asked)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights; those of parameters on meta are kept until the plan says which process needs which."""
        self._state.load_weights(super().load_model_state_dict, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states, which stay on the host until the plan says which process needs which."""
        self._state.load_optimizers(self.optimizers, checkpoint)

    # -- for callbacks -------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The stages with their units, parameters and boundary values; None before the first batch."""
        return None if self._run is None else self._run.plan

    @property
    def run(self) -> Run | None:
        """The current or last run of the trainer; None if none has been set up."""
        return self._run

    @property
    def skipped_models(self) -> int:
        """The number of times that a model of this group was left out of a step, due to an infinite or NaN gradient."""
        return self._running.check.skipped_models

    @property
    def peak_memory_bytes(self) -> dict[int, int]:
        """The peak memory of each stage in bytes, measured in the first iteration of each shape and advance.

        On CUDA this is the allocator's count. Elsewhere it is the sum of weights, gradients, optimizer states, the
        batch, and what is kept for backwards; with several pipelines, of all models and their reference. Empty before
        training, and on a CPU with ``costs="flops"``.
        """
        return dict(self._run.loop.schedule_control.peaks) if isinstance(self._run, PipelineRun) else {}

    def reconfigure(
        self,
        num_pipelines: Count | None = None,
        num_microbatches: Count | Literal["auto"] | None = None,
        advance: Natural | None = None,
        num_stages: Count | None = None,
        split_points: list[str] | None = None,
    ) -> None:
        """Change how training runs, from the next iteration on. Every rank calls it, in a hook of a callback.

        Within an iteration, from ``on_train_batch_start`` to the optimizer's step, nothing changes; changes are made
        when the iteration has ended. New parallel models start from the reference. If there are to be fewer models, the
        ones with the highest numbers are dropped, and the reference stays; with ``num_pipelines=1`` the reference
        becomes the model.

        Args:
            num_pipelines: N; None: no change.
            num_microbatches: M, or ``"auto"``; None: no change.
            advance: h, which no longer adapts; None: no change.
            num_stages: K, a multiple of the number of processes of each group; None: no change. Weights, optimizer
                states and parallel models move between the processes, and training goes on with the same bits (but
                with ``num_microbatches="auto"`` M changes with K). The change is made in the first step that begins
                with cleared gradients and whose batch was sent to all processes as a whole: two iterations later if a
                batch is on its way already.
            split_points: names of the units at which stages 1..K-1 begin; weights move as for ``num_stages``. None: no
                change.
        Raises:
            ConfigurationError: a number is invalid, or a callback supports one model only; also, at the end of the
                iteration, if not all processes have requested the same changes.
            PartitionError: a split point is not a submodule.
        """
        changes = {name: value for name, value in locals().items() if name != "self"}
        checks.check_changes(changes, self._configuration, self)
        self._configuration.request(changes)
        if self._configuration.in_iteration:
            return
        if isinstance(self._run, PipelineRun):
            self._run.loop.end_iteration()
        else:
            self._configuration.apply_requests(self._connection.cluster)

    def reference(self) -> AbstractContextManager[nn.Module]:
        """Return a context within which the module is the reference model, for hooks that use or change it.

        Hooks of training see the model of pipeline 0, as on rank 0 of ddp they see the model of that process;
        evaluation, prediction and checkpoints use the reference. With one pipeline both are the same model.
        """
        return self._showing("reference()", None)

    def parallel_model(self, number: int) -> AbstractContextManager[nn.Module]:
        """Return a context within which the module is the model of one pipeline.

        Args:
            number: number n of the pipeline in this process's group, 0-based.
        Raises:
            ConfigurationError: there is no pipeline with this number, or training has not begun.
        """
        asked = f"parallel_model({number!r})"
        if not isinstance(number, int):
            raise ConfigurationError(f"{asked}: must be the number of a pipeline, from 0")
        return self._showing(asked, number)

    @contextlib.contextmanager
    def _showing(self, asked: str, number: int | None) -> Iterator[nn.Module]:
        if self.lightning_module is None:
            raise ConfigurationError(
                f"{asked}: there is no model before trainer.fit(model); call it in a hook of training"
            )
        with contextlib.nullcontext() if self._run is None else self._run.showing(number):
            yield self.lightning_module

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name of ``Trainer(strategy="avgpipe")``, and the names for other start methods."""
        launch.register(strategy_registry, cls)
