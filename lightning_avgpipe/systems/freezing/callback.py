"""A callback that freezes a model from its first layer on, while it is fine-tuned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from lightning_avgpipe.callbacks.timeline import PipelineTimeline
from lightning_avgpipe.callbacks.tuner import AvgPipeTuner
from lightning_avgpipe.comm.topology import StageMap
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.memory import limit_of
from lightning_avgpipe.strategy.combinations import refuse
from lightning_avgpipe.strategy.options import MEMORY, Options
from lightning_avgpipe.strategy.pipeline_run import PipelineRun
from lightning_avgpipe.strategy.strategy import AvgPipeStrategy
from lightning_avgpipe.systems.freezing.halving import Halving, check_sharing
from lightning_avgpipe.systems.freezing.kept_outputs import KeptOutputs, KeptOutputsSource
from lightning_avgpipe.systems.freezing.order import FreezingOrder, by_gradient_norms, by_schedule, mean_squares
from lightning_avgpipe.utils.allowed import Count, check, choice, flag, has_options, names, number, optional, whole
from lightning_avgpipe.utils.lightning import Callback, SingleDeviceStrategy, pl, rank_zero_info, refuse_other

_ALLOWED = {
    "alpha": number(0, 1, 0.33),
    "mode": choice("schedule", "gradient_norm"),
    "layers": optional(names("names of submodules, or patterns of such", "['encoder.layer.*']"), "the repeated blocks"),
    "before": optional(
        names("names of submodules and parameters, or patterns of such", "['embeddings']"),
        "the submodules that are registered before the layers",
    ),
    "every_n_epochs": whole(1, 1_000_000, 1),
    "replan": flag(),
    "cache": optional(MEMORY, "no cache"),
    "freed": optional(choice("replicas"), "every device keeps a stage of its own"),
}


@has_options(_ALLOWED)
class AdaptiveFreezing(Callback):
    """Freezes the first layers of a model, more of them from epoch to epoch, while the others are fine-tuned.

    A layer is frozen together with all layers before it, at the beginning of an epoch. From then on its normalisation
    and dropout are in eval mode. Optimizers, their parameter groups and schedulers stay as they are: a frozen parameter
    has no gradient, so no optimizer steps it. With ``strategy="avgpipe"`` stages of which everything is frozen run
    forwards only. A checkpoint remembers what is frozen, and a run that resumes goes on with the same bits.

    Args:
        alpha: share of the layers that are still trained; each step of freezing freezes this share of them.
        mode: how many layers a step freezes. ``"schedule"``: after T steps ``ceil(L (1 - (1 - alpha)^T))`` of L layers
            are frozen. ``"gradient_norm"``: as many as alpha allows, but none after the layer whose gradient norm was
            the smallest in the last batch of the epoch before. With parallel models this norm is the root of the mean
            of their squared norms.
        layers: names of submodules, or patterns of such names, in the order in which the step calls them. None: the row
            of neighbouring submodules of one type that has the most parameters.
        before: names of submodules and parameters that the step uses before the layers; they are frozen with the first
            layer. Parameters that are tied to trained ones stay trained. None: the submodules that are registered
            before the layers.
        every_n_epochs: number of epochs before the first step of freezing, and from one step to the next.
        replan: whether ``strategy="avgpipe"`` plans the stages again, with measured costs, when more is frozen.
            Weights and optimizer states move, and no number changes.
        cache: bytes of host memory, such as ``"4GB"``, or a fraction of it, in which ``strategy="avgpipe"`` keeps the
            outputs of the frozen layers for each sample. From the second epoch after a step of freezing until the next
            step, the frozen layers are not computed for these samples, unless computing them is faster. Samples are
            told apart by their content, so they need no numbers. When this memory is full, further samples are
            computed. The stages are planned again, as with ``replan``; one model without replicas is needed. None:
            nothing is kept.
        freed: what becomes of the devices of ``strategy="avgpipe"`` when fewer stages would do. ``"replicas"``: when
            more is frozen, the stages are planned again (as with ``replan``), with K, K/2, .. or any other number of
            stages that divides the devices evenly. Of the plans that fit ``memory_limit`` (without one: 90 % of the
            device's memory) the one with the shortest expected iteration is taken; this time includes the all-reduce of
            gradients. The devices of a stage take its micro-batches in turns, so weights are the same up to the
            rounding of that sum. None: each device keeps a stage of its own.

    Attributes:
        num_frozen: number of layers that are frozen.

    Raises:
        ConfigurationError: an argument that cannot work, no layers, nothing that would stay trained, or a strategy for
            which this is not known to work.

    Source: PipeTransformer, He et al., ICML 2021, section 3.1.
    """

    def __init__(
        self,
        alpha: float = 0.33,
        mode: Literal["schedule", "gradient_norm"] = "schedule",
        layers: list[str] | None = None,
        before: list[str] | None = None,
        every_n_epochs: Count = 1,
        replan: bool = False,
        cache: str | float | None = None,
        freed: Literal["replicas"] | None = None,
    ) -> None:
        self.alpha = alpha
        self.mode = mode
        self.layers = layers
        self.before = before
        self.every_n_epochs = every_n_epochs
        self.replan = replan
        self.cache = cache
        self.freed = freed
        check(_ALLOWED, {name: getattr(self, name) for name in _ALLOWED}, "AdaptiveFreezing")
        self._order = FreezingOrder()
        self.num_frozen = 0
        self._norms: list[float] = []  # of the layers' gradients, in the last batch of an epoch
        self._epoch = 0  # the last epoch at whose beginning more layers were frozen
        self._squares: dict[str, list[float]] = {}  # by parameter: squared gradient norms, one for each local model

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all layers; empty before training begins."""
        return self._order.layers

    @property
    def _replans(self) -> bool:
        """Whether the stages are planned again when more is frozen."""
        return self.replan or self.cache is not None or self.freed is not None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse, before training starts, what cannot work."""
        refuse_other("The Trainer", trainer)
        if stage != "fit":
            return
        strategy = trainer.strategy
        if not isinstance(strategy, (AvgPipeStrategy, SingleDeviceStrategy)):
            raise ConfigurationError(
                f"AdaptiveFreezing freezes while training runs, and {type(strategy).__name__} is not known to follow; "
                "use Trainer(strategy='avgpipe'), or one device"
            )
        if isinstance(strategy, AvgPipeStrategy) and strategy.whole is not None:
            raise ConfigurationError(
                f"AdaptiveFreezing: {type(pl_module).__name__} {strategy.whole}, so its steps run whole, and no stage "
                "has less to do; remove the callback"
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the layers, now that the module is built, and check the options that plan the stages again."""
        self._order = FreezingOrder.of(pl_module, self.layers, self.before)
        run = _run(trainer)
        if self._replans and run is not None:
            self._check_replanning(run)
            if self.cache is not None:
                limit = limit_of(self.cache, torch.device("cpu"), 1)
                run.deployment.pipeline.shortcut = partial(KeptOutputs, limit)
                run.deployment.plan_by(KeptOutputsSource())
            if self.freed is not None:
                self._check_freed(trainer, run)

    def _check_freed(self, trainer: pl.Trainer, run: PipelineRun) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, (AvgPipeTuner, PipelineTimeline)):
                raise ConfigurationError(
                    f"AdaptiveFreezing(freed={self.freed!r}) with {type(callback).__name__}, which knows one "
                    "process of each stage; remove one of the two"
                )
        if run.cluster.world.world_size > 1:  # one process frees nothing
            check_sharing_later(run.configuration.options, run.cluster.stage_map)

    def _check_replanning(self, run: PipelineRun) -> None:
        options, stage_map = run.configuration.options, run.cluster.stage_map
        asked = {"cache": self.cache, "freed": self.freed, "replan": self.replan}
        name, value = next((name, value) for name, value in asked.items() if value)
        against = {
            "stages will begin elsewhere": {f"split_points={options.split_points}": options.split_points is not None},
            "stages move, but optimizer states stay": {f"shard={options.shard!r}": options.shard is not None},
        }
        if self.cache is not None:
            against["kept outputs are those of one model, and the first trained stage begins with them"] = {
                f"num_pipelines={options.num_pipelines}": options.num_pipelines > 1,
                f"{stage_map.num_teams} groups": stage_map.num_teams > 1,
                "replicas": options.has_replicas(stage_map.replicas),
                f"freed={self.freed!r}": self.freed is not None,
                "Averaging(rolling=True)": options.averaging.rolling is True,
                f"weight_policy={options.weight_policy!r}": not options.policy.drains,
                "recompute=True": options.recompute is True,
            }
        for why, refused in against.items():
            for what, found in refused.items():
                if found:
                    raise ConfigurationError(
                        f"AdaptiveFreezing({name}={value!r}) with {what}: {why}; remove one of the two"
                    )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Freeze the layers that were frozen according to the checkpoint."""
        self._order.freeze(pl_module, self.num_frozen)
        if self.num_frozen:
            self._share(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Freeze more layers, if it is time; keep frozen layers in eval mode."""
        epoch, before = trainer.current_epoch, self.num_frozen
        every, alpha = self.every_n_epochs, self.alpha
        if epoch > self._epoch and epoch % every == 0:
            self._epoch = epoch
            if self.mode == "schedule":
                self.num_frozen = max(before, by_schedule(len(self.paths), alpha, epoch // every))
            elif self._norms:
                self.num_frozen = by_gradient_norms(before, alpha, self._norms)
        self._order.freeze(pl_module, self.num_frozen)
        if self.num_frozen > before:
            rank_zero_info(
                f"AdaptiveFreezing: from epoch {epoch} on {self.num_frozen} of {len(self.paths)} layers are frozen, up "
                f"to {self.paths[self.num_frozen - 1]!r}"
            )
        run = _run(trainer)
        if self._replans and run is not None and self.num_frozen > before:
            self._share(trainer)
            run.deployment.replan()

    def _share(self, trainer: pl.Trainer) -> None:
        run = _run(trainer)
        if self.freed and run is not None:
            size, limit = run.cluster.group.world_size, run.context.memory_per_stage()
            run.deployment.plan_by(Halving(size, limit, partial(check_sharing, run)))

    # -- gradients of the last batch of an epoch ---------------------------------------------------------------------

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Note the squared gradient norms of the last batch of an epoch; called once for each parallel model."""
        if self.mode != "gradient_norm" or not trainer.is_last_batch:
            return
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.detach()
                gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
                wide = torch.promote_types(gradient.dtype, torch.float32)
                square = float(torch.linalg.vector_norm(gradient, dtype=wide)) ** 2
                self._squares.setdefault(name, []).append(square)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Share the gradient norms with all processes, before a checkpoint is written."""
        if self.mode != "gradient_norm" or not trainer.is_last_batch:
            return
        squares, self._squares = self._squares, {}
        run = _run(trainer)
        parts = [squares] if run is None else run.cluster.world.exchange_objects(squares)
        self._norms = self._order.norms(pl_module, mean_squares(parts))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the number of frozen layers, the epoch of the last step of freezing and the last gradient norms."""
        return {"num_frozen": self.num_frozen, "epoch": self._epoch, "norms": list(self._norms)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` has returned."""
        self.num_frozen, self._epoch = state_dict["num_frozen"], state_dict["epoch"]
        self._norms = list(state_dict["norms"])


def _run(trainer: pl.Trainer) -> PipelineRun | None:
    """Return the run of a pipeline; None if the strategy is another, or runs steps whole."""
    run = trainer.strategy.run if isinstance(trainer.strategy, AvgPipeStrategy) else None
    return run if isinstance(run, PipelineRun) else None


def check_sharing_later(given: Options, stage_map: StageMap) -> None:
    """Check options for training that begins with one stage per process, and later makes replicas of fewer stages."""
    group_size, count = stage_map.group_size, stage_map.num_stages
    refused = {
        "num_stages": (count != group_size, f"one stage on each of {group_size} devices; use num_stages={group_size}"),
        "replicas": (given.asks_for_replicas, "none at first, since it makes them of what is freed"),
        "num_pipelines": (given.num_pipelines > 1, "one model; use num_pipelines=1"),
        "verify": (given.verifies, "no verification, since a replica has only a share of a batch"),
    }
    if stage_map.num_groups > 1:
        refused["num_stages"] = True, f"all devices in one group; use num_stages={stage_map.world_size}"
    asked = "AdaptiveFreezing(freed='replicas')"
    refuse(given, refused, lambda option, needed: f"{asked} with {option} needs {needed}, or leave freed=None")
    try:
        replace(given, replicas=[1] * count)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{asked} makes replicas of single stages later: {error}; or leave freed=None"
        ) from error
