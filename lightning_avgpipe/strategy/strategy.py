"""The strategy: ``Trainer(strategy="avgpipe")``."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.device_layout import DeviceLayout
from lightning_avgpipe.comm.stage_map import StageMap
from lightning_avgpipe.elastic.averaging import OuterOptimizer
from lightning_avgpipe.engine.observer import Observers
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.schedule.versions import PipeOptim
from lightning_avgpipe.strategy import checks, combinations, compat, launch, regrouping, rolling_choice
from lightning_avgpipe.strategy.abreast_run import AbreastRun
from lightning_avgpipe.strategy.bundles import bundling
from lightning_avgpipe.strategy.checkpoint_files import choose_files, is_sharded, load_shards, save_shards
from lightning_avgpipe.strategy.checkpoint_state import State, WholeState
from lightning_avgpipe.strategy.configuration import Configuration
from lightning_avgpipe.strategy.connection import Connection
from lightning_avgpipe.strategy.data import Distributor, batches_wanted, has_transfer_hooks, mirror
from lightning_avgpipe.strategy.data_sharding import check_alike, place, sharing
from lightning_avgpipe.strategy.options import ALLOWED, Options, PolicyName, ScheduleName, SplitBatch
from lightning_avgpipe.strategy.pipeline_run import PipelineRun
from lightning_avgpipe.strategy.reconfiguration import check_changes
from lightning_avgpipe.strategy.run import PassthroughRun, Run
from lightning_avgpipe.strategy.signals import ending_together, saving_what_is_whole
from lightning_avgpipe.strategy.surroundings import Surroundings
from lightning_avgpipe.strategy.whole import optimizes_manually, why_whole
from lightning_avgpipe.strategy.whole_run import WholeRun
from lightning_avgpipe.utils import packages
from lightning_avgpipe.utils.allowed import documented
from lightning_avgpipe.utils.durations import duration
from lightning_avgpipe.utils.option_types import Count, Duration, Natural, TensorName
from lightning_avgpipe.utils.patching import nothing
from lightning_avgpipe.verify import request
from lightning_avgpipe.weights.absence import explain
from lightning_avgpipe.weights.initialisation import on_meta
from lightning_avgpipe.weights.ownership import to_host

_DEFAULT_TIMEOUT = timedelta(minutes=30)


@documented(ALLOWED)
class AvgPipeStrategy(ParallelStrategy):
    """Trains an unmodified LightningModule as a pipeline of stages.

    The step functions are captured on the first batch, divided into stages of about equal time, and replayed stage by
    stage on micro-batches. Training equals ordinary training that accumulates the same micro-batches in order.

    A module built under ``torch.device("meta")``, best in ``configure_model``, is never whole anywhere: each process
    initialises its own stages (``reset_parameters()``, or ``_init_weights(module)`` of a module above), or reads them
    from ``ckpt_path``. The weights depend on the seed alone. After training each process keeps its own part, on the
    host: ``fit``, ``validate``, ``test``, ``predict`` go on with it, and ``trainer.save_checkpoint`` writes all of it.

    Args:
        num_stages: number of stages K. ``"auto"``: one per device of a replica. A multiple of the number of devices
            places several stages on each. A divisor makes groups of K devices: ``devices=8``, ``num_stages=4`` are two
            groups, each with pipelines of its own, which elastic averaging holds together. Each group trains on its own
            part of the data, by a distributed sampler as with ddp, and evaluates on all of it; rank 0 is in group 0. In
            what follows N counts the pipelines of all groups where models are averaged. With ``replicas`` groups train
            the same models instead.
        num_pipelines: number N of parallel pipelines, in each group. Each trains a model of its own, on a batch of its
            own, and fills the others' idle time; elastic averaging holds the models together. An iteration reads N
            batches from the dataloader and counts as one of Lightning's: 100 batches make 50 steps with N=2, and
            ``max_steps``, ``limit_train_batches``, ``accumulate_grad_batches``, schedulers "per step" and the progress
            bar count those 50. Evaluation, prediction and checkpoints use the reference model. Hooks of training see
            pipeline 0's model and batch; those that may change gradients are called for each model. A hook that changes
            the weights of one model alone is refused, and so is a step that reaches another model's tensors.
        replicas: synchronous copies of the pipelines, as ddp has copies of a model: ``devices=8``, ``replicas=2`` are
            two pipelines of four stages. Each trains on its own part of the data, by a distributed sampler; gradients
            are summed, stage by stage, before the optimizers step, so all stay equal. Losses count by their share of
            the batches of all, so the gradient is that of these as one batch. Each copy normalises its own
            micro-batches, and what steps change (running means) is that of the first copy, as with ddp. In evaluation
            every copy has all data. If there are more groups, ``replicas`` of them train the same models, and the next
            ones others. A list replicates single stages, as ``[3, 1]`` on four devices: the replicas of a stage take
            its micro-batches in turns and sum their gradients, so nothing but the rounding of that sum depends on them.
            ``"auto"``: chosen by ``planner="spp"``.
        planner: ``"balanced"`` makes stages of about equal time, one for each device of a replica. ``"spp"`` chooses
            the number of stages, their cuts, and which devices share each, by times measured on every device and the
            bandwidth between every two, for the shortest iteration within ``memory_limit`` (Luo et al., INFOCOM 2022);
            with ``replicas="auto"`` and a given ``num_microbatches``.
        bandwidth: of the links, for ``planner="spp"``: ``"measured"`` before the first plan, each two processes at a
            time, or bytes per second from each process (row) to each other one.
        shard_optimizer_states: each replica keeps the optimizer states of a part of the parameters only, steps these,
            and sends them to the others (ZeRO-1). Numbers are the same, and so are checkpoints.
        processes_per_device: groups that share the same devices, each with processes of its own: ``devices=2``,
            ``processes_per_device=2`` are four processes, two groups of two stages. They train what as many pipelines
            of one process do, with the same numbers, as the AvgPipe paper arranges it. It is for kernels too small for
            one process to keep a device busy; on CUDA start NVIDIA's MPS, or kernels of several processes take turns.
            Each process has a context on the device, and the reference is averaged over the host, since NCCL connects
            no device with itself. What starts processes itself (torchrun, SLURM) must start so many for each device.
        min_groups: how many groups must be left when others die: then these go on, with a warning, from the mean of
            their models, and what the others had not trained on yet is dealt to them. The first of them logs and saves.
            The store through which all find each other is kept by a further process, on the machine of rank 0. The
            processes must be started by what does not end all when one dies: by this strategy
            (``start_method="popen"``), or by SLURM with ``srun --kill-on-bad-exit=0``, but not by torchrun. A group
            whose processes are started anew, in the same way, comes back when an epoch begins. None: all must be left.
        num_microbatches: number M of micro-batches that a batch is split into, at most its size. ``"auto"``: four per
            stage, with two samples each where batches are normalised; or 1 for one stage: then there is nothing to
            pipeline, and everything is as on one device; or 1, with a warning, for a step that cannot be followed on a
            part of its first batch, or keeps a hidden state from batch to batch. More of them shrink the idle time at
            both ends of an iteration and the memory per micro-batch, but make each kernel smaller.
        schedule: ``"advance_forward"`` (1F1B with ``advance`` extra forwards in flight), ``"1f1b"``, ``"afab"`` (all
            forwards, then all backwards), or one that fills idle time with weight gradients: ``"zb_h1"`` (idle for a
            third of 1F1B's time, where both halves of a backward take as long as a forward) or ``"zb_h2"`` (hardly
            idle, with twice the micro-batches in flight). Weights are the same bit for bit. A stage that cannot split
            its backwards (``recompute``, checkpoints, compiled modules) runs them whole, and says so. With several
            stages on each process: ``"interleaved"`` (1F1B) or ``"bfs"`` (breadth first), idle for half of 1F1B's time
            with two; with exactly two, of which the second ones are placed in reverse: ``"zbv"``, hardly idle with
            1F1B's memory, or ``"dualpipev"``. For slow links: ``"broadcast"``, or ``Broadcast(segments=8)`` of
            ``lightning_avgpipe.schedule``: values pass every other stage unread, to one that has its weights as well;
            1F1B where it would lose by simulation with measured costs, which is logged. ``"auto"``: the first iteration
            is 1F1B; then the fastest by simulation with the plan's costs, of all but ``"broadcast"``, that fits
            ``memory_limit``. A function ``(num_stages, num_microbatches)`` that returns a row of actions for each
            stage, such as ``"F0 F1 B0 B1"``, is a schedule of your own; it is checked for deadlocks before training.
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
        compile: whether each unit of a stage (a submodule that no cut divides; the printed plan names them) runs
            compiled by ``torch.compile``, or the arguments of that: ``{"dynamic": False}``,
            ``{"backend": "aot_eager"}``. What lies between units runs as it is. Numbers are then those of the compiler,
            and what a unit draws (dropout) comes from one stream for all of it, which depends on which units there are.
            The first iteration waits for the compiler. Costs are measured without it.
        pipeline_streams: whether each of several pipelines puts its work on a stream of its own, so that kernels of
            several share an accelerator; else they take turns. Not from the first batch on, in which a step may make
            what it keeps for later; and not where it changes attributes, which pipelines share. Each stream has memory
            of its own that others do not get back. The host has no streams: there it changes nothing.
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
        rolling: whether a pipeline begins its next batch as soon as its own model has stepped, while others are still
            at the batch before. The pipelines then never drain together, and two fill each other's idle time almost
            wholly. Each model meets the reference alone, after its own step, in a fixed order, so results do not
            depend on the timing; they are others than without rolling. The batches of one iteration are read ahead.
            Hooks, logs, schedulers and checkpoints come as without; a validation, a checkpoint every n steps and the
            end of an epoch let the pipelines drain. What a step reads must not be changed by a hook between two
            batches. With one pipeline nothing changes. ``"auto"``: where nothing that it refuses is found by the first
            batch, else not, with a line in the log that says why; what turns up later is an error. With
            :class:`AvgPipeTuner` also only where less time to a goal is predicted with it.
        weight_policy: whether the pipeline drains before each update of the weights, or goes on to the next batch while
            its stages update them one after the other, each after its own backwards: then hardly a stage is idle, and
            gradients are of weights that are some updates old. ``"flush"`` drains. The others say which weights a
            micro-batch uses. ``"stash"`` (PipeDream): those that its forward meets, for its backward as well.
            ``"2bw"``: those before the last update, on every stage, with as many micro-batches as stages.
            ``"spectrain"`` and ``"pipeoptim"`` predict the weights that a backward will meet by where the optimizer
            goes, and repeat forwards with those that it meets; a :class:`PipeOptim` says more. ``"spectrain_stashed"``
            repeats nothing. ``"none"`` is naive, for comparison. One pipeline in the order of 1F1B, with 32 bits or
            bf16. Hooks, logs and checkpoints come as without; a validation, a checkpoint every n steps and the end of
            an epoch let the pipeline drain. With one stage nothing changes.
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
        num_nodes: set by the Trainer.
        tuner: is shown the first batch of training before it is used, and may reconfigure; called once more before each
            further batch until it returns True. Set before the run is set up.

    Raises:
        ConfigurationError: an option that cannot work.

    Source: AvgPipe, Chen et al., PPoPP 2023.
    """

    strategy_name = "avgpipe"
    _distributor: Distributor  # of the run that goes on

    def __init__(
        self,
        num_stages: Count | Literal["auto"] = "auto",
        num_pipelines: Count = 1,
        replicas: Count | list[Count] | Literal["auto"] = 1,
        planner: Literal["balanced", "spp"] = "balanced",
        bandwidth: list[list[float]] | Literal["measured"] = "measured",
        shard_optimizer_states: bool = False,
        processes_per_device: Count = 1,
        min_groups: Count | None = None,
        num_microbatches: Count | Literal["auto"] = "auto",
        schedule: ScheduleName | Callable[[int, int], Any] = "advance_forward",
        advance: Natural | Literal["auto"] = "auto",
        split_points: list[str] | None = None,
        costs: Literal["measured", "flops"] = "measured",
        costs_cache: str | Path | None = "auto",
        memory_limit: str | int | float | None = None,
        recompute: bool | list[str] = False,
        compile: bool | dict[str, Any] = False,
        pipeline_streams: bool = False,
        loss_reduction: Literal["mean", "sum"] = "mean",
        loss_weight: TensorName | Callable[[Any], Any] | None = None,
        split_batch: SplitBatch | None = None,
        reader: Literal["last", "first"] = "last",
        send_batch: Literal["needed", "all"] = "needed",
        verify_copies: bool = False,
        verify: bool | int = False,
        alpha: float | None = None,
        outer_lr: float | Literal["auto"] = "auto",
        outer_optimizer: OuterOptimizer | None = None,
        average_every: Count = 1,
        rolling: bool | Literal["auto"] = False,
        weight_policy: PolicyName | PipeOptim = "flush",
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
        given = dict(locals())
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io, precision_plugin=precision_plugin,
        )  # fmt: skip
        given["timeout"] = _DEFAULT_TIMEOUT if timeout is None else duration(timeout)
        options = Options(**{field.name: given[field.name] for field in fields(Options)})
        self.num_nodes = 1
        self.tuner: Callable[[Any], bool] | None = None
        self._configuration = Configuration(options)
        self._connection = Connection(options.process_group_backend)
        self._run: Run | None = None  # the last one; none since a module was connected
        self._before: WholeState | None = None  # the state before it
        self._begun = False
        self._undo = contextlib.ExitStack()
        self._data_undo = contextlib.ExitStack()  # what the data are divided by

    def __getstate__(self) -> dict[str, Any]:
        # a module that was trained knows its trainer, and must be one that torch.save can save
        ended = dict.fromkeys(("_run", "_before", "_distributor", "tuner"))
        undone = {name: contextlib.ExitStack() for name in ("_undo", "_data_undo")}
        return {**super().__getstate__(), **ended, **undone}

    # -- processes -----------------------------------------------------------------------------------------------------

    @property
    def accelerator(self) -> pl.accelerators.Accelerator | None:
        """What computes; a trainer sets it first, and makes the strategy one of its own package of Lightning."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: pl.accelerators.Accelerator) -> None:
        packages.adopt(self, accelerator)
        plugins = {
            "precision_plugin": self._precision_plugin, "checkpoint_io": self._checkpoint_io,
            "cluster_environment": self.cluster_environment,
        }  # fmt: skip
        packages.check_plugins(type(self).__name__, accelerator, plugins)
        self._accelerator = accelerator

    @property
    def device_layout(self) -> DeviceLayout:
        """Of all processes on devices."""
        devices = len(self.parallel_devices) if self.parallel_devices is not None else 1
        replicas, of_stages = self.options.replicas, self.options.stage_replicas
        replicas = replicas if isinstance(replicas, int) else 1
        return DeviceLayout(devices, self.num_nodes, self.options.processes_per_device, replicas, of_stages)

    @property
    def num_processes(self) -> int:
        """Processes of this node."""
        return self.device_layout.node_size

    @property
    def num_groups(self) -> int:
        """Groups of processes that host all K stages, without those that have left."""
        if self._connection.cluster is not None:
            return place(self._connection.cluster)[1]
        return len(self.device_layout.groups(self.num_stages))

    @property
    def group_number(self) -> int:
        """Which group this process is in, 0-based."""
        if self._connection.cluster is not None:
            return place(self._connection.cluster)[0]
        groups = enumerate(self.device_layout.groups(self.num_stages))
        return next(number for number, ranks in groups if self.global_rank in ranks)

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.device_layout.device_of(self.local_rank)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """In each group one process reads the data of the group."""
        return {"num_replicas": self.num_groups, "rank": self.group_number}

    @property
    def process_group_backend(self) -> str | None:
        """Backend of torch.distributed."""
        return self._connection.backend

    @property
    def cluster(self) -> Cluster:
        """Processes and channels, from the set-up of the environment on."""
        assert self._connection.cluster is not None
        return self._connection.cluster

    @property
    def observers(self) -> Observers:
        """What sees the iterations of this process in the run as a pipeline."""
        assert isinstance(self._run, PipelineRun)
        return self._run.iterations.schedule_control.observers

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        checks.processes(self.num_stages, self.device_layout)
        StageMap.on(self.device_layout, self.num_stages)
        self._launcher = launch.launcher(self, self.options.start_method)
        if self.passthrough and self._undivided:
            rank_zero_info(
                "AvgPipeStrategy: with one device, one stage and one micro-batch there is nothing to pipeline; "
                "everything is as with strategy='auto'. More devices, or num_stages=2 on this one, make a pipeline"
            )

    @property
    def is_global_zero(self) -> bool:
        """Whether this process logs and saves: rank 0, or the first one of the groups that have not left."""
        cluster = self._connection.cluster
        return super().is_global_zero if cluster is None or not cluster.survives else cluster.leads

    def set_world_ranks(self) -> None:
        """Tell the cluster environment who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        self._connection.barrier(name)

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Every rank gets the source's object."""
        return self._connection.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Values live on one rank only: nothing to reduce."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The stages work on the same batch, so there is nothing to gather; as with one device."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, decided so."""
        return self._connection.decide(decision, unanimously=all)

    # -- what was asked for --------------------------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """All of them; ``reconfigure`` may change some."""
        return self._configuration.options

    @property
    def num_stages(self) -> int:
        """K."""
        wanted = self.options.num_stages
        automatic = len(self.options.stage_replicas) or self.device_layout.devices_of_replica
        return automatic if wanted == "auto" else wanted

    @property
    def num_pipelines(self) -> int:
        """N, which ``reconfigure`` may change."""
        return self.options.num_pipelines

    @property
    def rolls(self) -> bool:
        """Whether pipelines of this run go on without waiting for each other; a callback may say so before the first
        batch, where ``rolling="auto"`` leaves it open.
        """
        return self._configuration.rolls

    @rolls.setter
    def rolls(self, preferred: bool) -> None:
        if isinstance(self._run, PipelineRun) and self._run.deployment.models.has_trained:
            raise ConfigurationError("strategy.rolls is set when training runs; set it before the first batch")
        self._configuration.prefers_rolling = preferred

    @property
    def num_models(self) -> int:
        """Parallel models of all groups; replicas train the same ones."""
        return self.num_pipelines * self.num_groups // self.replicas

    @property
    def replicas(self) -> int:
        """Groups that train the same models, each on its share of the data."""
        return self.device_layout.replicas

    @property
    def save_distributed_checkpoint(self) -> bool:
        """Whether each process writes its own part of a checkpoint."""
        return self.options.save_distributed_checkpoint

    @property
    def passthrough(self) -> bool:
        """Whether there is nothing to pipeline: one process, with nothing to divide, or whose steps run whole.

        Then nothing is captured, split, replaced or refused: all is as with Lightning's strategy for one device.
        """
        one_model = self.device_layout.world_size == self.num_pipelines == 1
        return one_model and (self._undivided or (self.whole is not None and not self.options.splits))

    @property
    def _undivided(self) -> bool:
        # one stage and one micro-batch are all there is
        return self.num_stages == 1 and not (self.options.splits or self.options.recompute or self.options.compile)

    @property
    def whole(self) -> str | None:
        """Why the module's steps run whole; None if they do not."""
        return None if self._lightning_module is None else why_whole(self._lightning_module)

    # -- a run: set-up and teardown ------------------------------------------------------------------------------------

    def connect(self, model: pl.LightningModule) -> None:
        """Begin a run with a module, which knows its trainer."""
        super().connect(model)
        self._run, self._begun = None, False
        self._configuration.can_roll, self._configuration.prefers_rolling = False, True
        self._before = WholeState(
            model, self._connection, self.save_distributed_checkpoint, self.options.shard_optimizer_states
        )
        if not self.passthrough and model._trainer is not None:  # a run; a strategy may also be given a module to save
            saving = saving_what_is_whole(model.trainer, self._connection, lambda: self._begun)
            self._undo.enter_context(saving)

    def setup_environment(self) -> None:
        """Connect the processes; called before the module's own set-up hooks."""
        compat.check()
        self.checkpoint_io: CheckpointIO = choose_files(
            self._checkpoint_io, self.save_distributed_checkpoint, self._connection.stay
        )
        super().setup_environment()
        if not self.passthrough:
            reset_seed()  # as ddp; in one process too, so that it draws what several draw
        self.set_world_ranks()
        assert self.lightning_module is not None
        if self.world_size > 1:
            self._undo.enter_context(ending_together(self.lightning_module.trainer, self._connection))
        self._undo.callback(self._data_undo.close)
        self._connect()

    def _connect(self) -> None:
        """Connect the processes in groups of as many stages as there are now, and divide the data."""
        assert self.cluster_environment is not None and self.lightning_module is not None
        layout, options, trainer = self.device_layout, self.options, self.lightning_module.trainer
        cluster = self._connection.arrange(self.num_stages, self.global_rank, self.root_device, layout, options)
        self._connection.open(self.cluster_environment, options)
        if cluster.apart:
            checks.comeback(trainer, self.passthrough or self.whole is not None)
        sends, early = cluster.reads and cluster.group.world_size > 1, not has_transfer_hooks(trainer)
        wanted = partial(batches_wanted, trainer)
        self._distributor = Distributor(cluster.channels.batches, self._needs, sends, early, wanted)
        if trainer.state.fn == TrainerFn.FITTING and not self.passthrough and self.whole is None:
            self._divide_data(trainer, cluster)

    def _divide_data(self, trainer: pl.Trainer, cluster: Cluster) -> None:
        """Before anybody asks for the number of iterations, in ``setup`` or ``configure_optimizers`` of the module."""
        # partial functions of what can be pickled, as a trainer can; data of unknown length ends everywhere at once
        any_ends = partial(self._connection.decide, unanimously=False) if place(cluster)[1] > 1 else None
        count, look = partial(getattr, self._configuration, "num_pipelines"), partial(getattr, self, "tuner")
        self._data_undo.enter_context(bundling(trainer, count, any_ends, look))
        self._data_undo.enter_context(sharing(trainer, cluster))

    def _needs(self, batch: Any, rank: int) -> frozenset[str] | None:
        return None if self._run is None else self._run.needs(batch, rank)

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepare one run of the trainer; the plan is made when the first batch is there."""
        self._run = self._make_run(trainer)
        self._run.setup(super().setup)

    def _make_run(self, trainer: pl.Trainer) -> Run:
        module, options, fitting = self.lightning_module, self.options, trainer.state.fn == TrainerFn.FITTING
        assert module is not None and self._before is not None
        why = self.whole
        if why is not None:
            abreast = optimizes_manually(module) and self.world_size == 1
            checks.whole(module, why, options, self.num_groups, abreast)
            if not self._undivided:
                how = "its training_step runs on micro-batches, which step optimizers together"
                whole = "its steps run whole, not in micro-batches"
                rank_zero_info(f"{type(module).__name__} {why}: {how if options.splits else whole}")
        if fitting and self.num_models == 1 and self.tuner is None:
            combinations.without_effect(options)
        around = Surroundings(trainer, self._connection, self._configuration, self._before, self._distributor)
        if self.passthrough:
            if fitting:
                request.nothing_to_verify(options.verify)
            return PassthroughRun(around)
        checks.trainer(trainer, self.world_size, self.num_pipelines)
        everywhere = self.cluster.world.gather_objects((str(trainer.ckpt_path or ""), options.shared))
        checks.same_checkpoint([path for path, _ in everywhere])
        checks.same_options([shared for _, shared in everywhere])
        checks.contents(module)
        if why is None:
            if fitting:
                checks.synchronised(trainer, options, self.cluster.stage_map)
                ways = self.num_stages, self.num_groups, self.tuner is not None
                self._configuration.can_roll = rolling_choice.can_roll(trainer, options, self.cluster, *ways)
                checks.sharding(options, self.num_models, tuned=self.tuner is not None)
                checks.survival(options, tuned=self.tuner is not None)
            return PipelineRun(around)
        request.refuse(options.verify, f"the steps of {type(module).__name__} run whole: it {why}")
        return AbreastRun(around) if options.splits else WholeRun(around)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Build the optimizers, over all parameters: what they hold of other stages goes when the plan is made."""
        super().setup_optimizers(trainer)
        if not self.passthrough and self.lightning_module is not None:
            checks.optimizers(self.lightning_module, self.optimizers, self.options.shard_optimizer_states)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules are built on the host, or with ``empty_init`` on meta: the device gets its own stages only."""
        if self.passthrough:
            with super().tensor_init_context(empty_init):
                yield
            return
        place = torch.device("meta") if empty_init else contextlib.nullcontext()
        with place, self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self) -> None:
        """Move the module to the device, if this process has all of it."""
        assert self.model is not None
        self._running.model_to_device(partial(self.model.to, self.root_device))

    def on_train_start(self) -> None:
        """What the run goes on with is loaded."""
        super().on_train_start()
        self._begun = True

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes, unless all have agreed to end here."""
        explain(exception, self._lightning_module)
        self._connection.fail(exception)

    def teardown(self) -> None:
        """Give every process the whole module back, and stop the channels."""
        try:
            if self._run is not None:
                self._run.teardown()
        except BaseException:
            self._connection.failed = True  # the others are not where this one is
            raise
        finally:
            self._undo.callback(self._connection.close)
            self._undo.close()
        module = self._lightning_module
        if module is not None and on_meta(module):
            # what is without contents here (after a failure, or by choice) cannot be moved, but the rest can
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
        """In each group one process reads, the others follow."""
        mirrored = mirror(dataloader, self.cluster, lambda: self._distributor)
        check_alike(mirrored, self.cluster, self.num_pipelines)
        return mirrored

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """The reader's batch, after its transfer hooks, on every rank's device."""
        return self._running.batch_to_device(super().batch_to_device, batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forwards and backwards of a batch; returns what the step would return for it, detached."""
        return self._running.step("training_step", super().training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run validation_step; on the last stage's rank the merged result, None elsewhere."""
        return self._running.step("validation_step", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run test_step; on the last stage's rank the merged result, None elsewhere."""
        return self._running.step("test_step", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run predict_step; on the last stage's rank the merged result, None elsewhere."""
        return self._running.step("predict_step", super().predict_step, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure and step, and average parallel models."""
        return self._running.optimizer_step(super().optimizer_step, optimizer, closure, model, **kwargs)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def _state(self) -> State:
        """Of the last run, or if none has been set up since the module was connected, of the module."""
        state = self._before if self._run is None else self._run.state
        assert state is not None
        return state

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """On rank 0 the weights of all stages; for a distributed checkpoint one's own. Every rank calls it."""
        return self._state.weights()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """On rank 0 an ordinary optimizer state; for a distributed checkpoint one's own. Every rank calls it."""
        return self._state.optimizer(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint: a file, or a folder of shards. Every rank calls it."""
        self._state.complete(checkpoint)
        if not self.save_distributed_checkpoint:
            self._connection.write(partial(super().save_checkpoint, checkpoint, filepath, storage_options))
        else:
            save_shards(checkpoint, filepath, self._connection.cluster, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of either kind."""
        if is_sharded(checkpoint_path):
            assert self.lightning_module is not None
            fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
            return load_shards(checkpoint_path, optimizers=fitting, weights_only=weights_only)
        asked = {} if weights_only is None else {"weights_only": weights_only}
        return self.checkpoint_io.load_checkpoint(checkpoint_path, **asked)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights; those for parameters on meta are kept in mind until it is known who needs them."""
        self._state.load_weights(super().load_model_state_dict, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Hand out optimizer states. They stay on the host until it is known which process needs which."""
        self._state.load_optimizers(self.optimizers, checkpoint)

    # -- for callbacks -------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The stages with their units, parameters and boundary values, known from the first batch on."""
        return None if self._run is None else self._run.plan

    @property
    def run(self) -> Run | None:
        """What the strategy does in the run of the trainer that goes on, or went last."""
        return self._run

    @property
    def skipped_models(self) -> int:
        """How often a model of this group was left out of a step, for a gradient that is no number."""
        return self._running.check.skipped_models

    @property
    def peak_memory_bytes(self) -> dict[int, int]:
        """Stage -> bytes at its peak, measured in the first iteration with a kind of batches and an advance.

        On CUDA as the allocator counts; elsewhere weights, gradients, optimizer states, the batch, and what backwards
        wait for; of several pipelines all that they have, and their reference. Empty before training, and on a CPU with
        ``costs="flops"``.
        """
        return dict(self._run.iterations.schedule_control.peaks) if isinstance(self._run, PipelineRun) else {}

    def reconfigure(
        self,
        num_pipelines: Count | None = None,
        num_microbatches: Count | Literal["auto"] | None = None,
        advance: Natural | None = None,
        num_stages: Count | None = None,
        split_points: list[str] | None = None,
    ) -> None:
        """Change how training runs, from the next iteration on. Every rank calls it, in a hook of a callback.

        Within an iteration, from ``on_train_batch_start`` to the optimizer's step, everything stays as it is; what was
        asked for comes when it has ended. New parallel models start from the reference. Those with the highest numbers
        go when there are to be fewer, and the reference stays; with ``num_pipelines=1`` it is the model.

        Args:
            num_pipelines: N; None leaves it.
            num_microbatches: M, or ``"auto"``; None leaves it.
            advance: h, which adapts no more; None leaves it.
            num_stages: K, a multiple of the processes of each group; None leaves it. Weights, optimizer states and
                parallel models move between the processes, and training goes on with the same bits (with
                ``num_microbatches="auto"`` there are others with another K). It comes with the first step that begins
                with cleared gradients, and whose batch has gone to all processes as a whole: two iterations later if
                one batch is under way already.
            split_points: names of the units at which stages 1..K-1 begin, which moves the same; None leaves them.
        Raises:
            ConfigurationError: a number that cannot work, or a callback that knows one model only; on several processes
                also when, at the end of the iteration, it turns out that not all have asked for the same.
            PartitionError: a split point that is no submodule.
        """
        changes = {name: value for name, value in locals().items() if name != "self"}
        check_changes(changes, self._configuration, self)
        self._configuration.ask(changes)
        if self._configuration.in_iteration:
            return
        if self._run is None:
            self._configuration.take_over(self._connection.cluster)
        else:
            self._run.end_iteration()

    def regroup(self, num_stages: int) -> None:
        """From now on the processes are groups of K, each process with a stage. Every rank calls it, in a hook.

        Either in ``on_train_epoch_start``: the module, its optimizers and the seed go on, and the epoch begins with
        dataloaders made anew. Or before the set-up of the run, such as in ``on_load_checkpoint``.

        Args:
            num_stages: K, a divisor of the number of devices.
        Raises:
            ConfigurationError: another hook of a run, not all have asked for it, or options that do not go with so many
                stages or groups.
        """
        self._connected_module(f"regroup({num_stages})")
        assert self.lightning_module is not None
        trainer, hook = self.lightning_module.trainer, self.lightning_module._current_fx_name
        if self._run is not None and hook != "on_train_epoch_start":
            raise ConfigurationError(
                f"regroup({num_stages}) in {hook}: groups read other data, so they begin with an "
                "epoch; call it in on_train_epoch_start of a callback"
            )
        self.cluster.channels.confirm(
            f"regroup({num_stages})", "in a hook of a callback, and not only if is_global_zero"
        )
        kept = None if self._run is None else regrouping.leave(self._run.state, self.optimizers, self.cluster)
        if self._run is not None:
            self._run.teardown()
        self._data_undo.close()
        self._connection.close()
        self._configuration.options = replace(self.options, num_stages=num_stages)
        self._connect()
        if kept is not None:
            self._run = self._make_run(trainer)
            self._run.setup(nothing)
            self._run.state.load_optimizers(self.optimizers, kept)
            regrouping.begin_epoch(trainer)
        gc.collect()  # the groups before are a cycle, and hold their connections until then

    def reference(self) -> AbstractContextManager[nn.Module]:
        """Within this context the module is the reference model, for code in hooks that wants to use or change it.

        Hooks of training see the model of pipeline 0, as on rank 0 of ddp they see its process; evaluation, prediction
        and checkpoints use the reference. With one pipeline they are the same.
        """
        return self._showing("reference()", None)

    def parallel_model(self, number: int) -> AbstractContextManager[nn.Module]:
        """Within this context the module is the model of one pipeline.

        Args:
            number: n, 0-based, of this process's group.
        Raises:
            ConfigurationError: there are not so many, or nothing is trained yet.
        """
        asked = f"parallel_model({number!r})"
        if not isinstance(number, int):
            raise ConfigurationError(f"{asked}: must be the number of a pipeline, from 0")
        return self._showing(asked, number)

    @contextlib.contextmanager
    def _showing(self, asked: str, number: int | None) -> Iterator[nn.Module]:
        module = self._connected_module(asked)
        with contextlib.nullcontext() if self._run is None else self._run.showing(number):
            yield module

    def _connected_module(self, asked: str) -> nn.Module:
        if self.lightning_module is None:
            raise ConfigurationError(
                f"{asked}: there is no model before trainer.fit(model); call it in a hook of training"
            )
        return self.lightning_module

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make ``Trainer(strategy="avgpipe")`` known, and the names for other start methods."""
        launch.register(strategy_registry, cls)
