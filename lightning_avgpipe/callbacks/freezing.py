"""A callback that freezes a model from its first layer on, while it is fine-tuned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_avgpipe.callbacks.freezing_order import FreezingOrder, by_gradient_norms, by_schedule
from lightning_avgpipe.callbacks.timeline import PipelineTimeline
from lightning_avgpipe.callbacks.tuner import AvgPipeTuner
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.memory_limit import limit_of
from lightning_avgpipe.strategy import checks, combinations, regrouping
from lightning_avgpipe.strategy.options import MEMORY
from lightning_avgpipe.strategy.pipeline_run import PipelineRun
from lightning_avgpipe.strategy.strategy import AvgPipeStrategy
from lightning_avgpipe.utils.allowed import check, choice, directory, documented, flag, names, number, optional, whole
from lightning_avgpipe.utils.option_types import Count
from lightning_avgpipe.utils.packages import adopted

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
    "cache_folder": optional(directory(), "the folder of temporary files"),
    "freed": optional(choice("replicas", "groups"), "every device keeps a stage of its own"),
}


@dataclass(frozen=True)
class FreezingOptions:
    """What :class:`AdaptiveFreezing` was given."""

    alpha: float
    mode: str
    layers: list[str] | None
    before: list[str] | None
    every_n_epochs: int
    replan: bool
    cache: str | float | None
    cache_folder: str | None
    freed: str | None

    @property
    def replans(self) -> bool:
        """Whether the stages are planned again when more is frozen."""
        return self.replan or self.cache is not None or self.freed is not None


@documented(_ALLOWED)
class AdaptiveFreezing(Callback):
    """Freezes the first layers of a model, more of them from epoch to epoch, while the others are fine-tuned.

    A layer is frozen with all before it, at the begin of an epoch. Its normalisation and dropout are in eval mode from
    then on. Optimizers, their groups and schedulers stay as they are: what is frozen has no gradient, and is not
    stepped. With ``strategy="avgpipe"`` stages of which everything is frozen run forwards only. A checkpoint remembers
    what is frozen, and a run that resumes goes on with the same bits.

    Args:
        alpha: share of the layers that are still trained which is frozen at each step.
        mode: ``"schedule"``: after T steps ``ceil(L (1 - (1 - alpha)^T))`` of L layers are frozen.
            ``"gradient_norm"``: as many as alpha allows, but none behind that with the smallest gradient in the last
            batch of the epoch before.
        layers: names of submodules, or patterns of such, in the order of the step; None: the longest row of
            neighbouring submodules of one type, by parameters.
        before: what the step uses before the layers, and is frozen with the first of them; parameters that are tied to
            others, which are trained, stay trained. None: submodules that are registered before the layers.
        every_n_epochs: epochs from one step to the next; the first comes after so many.
        replan: whether ``strategy="avgpipe"`` plans the stages again, with measured costs, when more is frozen.
            Weights and optimizer states move, and no number changes.
        cache: bytes on the host in which ``strategy="avgpipe"`` keeps what the frozen layers give for each sample, such
            as ``"4GB"``, or a fraction of its memory: from the second epoch on they are not computed where that is
            slower, and when more is frozen, only what is new. Samples are told apart by their content, so nothing needs
            to number them. It plans again as ``replan`` does. None: nothing is kept.
        cache_folder: where the cache goes on in files when this memory is full.
        freed: what becomes of the devices of ``strategy="avgpipe"`` when fewer stages would do. ``"replicas"``: when
            more is frozen, the stages are planned again (as with ``replan``), and as K, K/2, .. or any number of them
            that divides the devices evenly. Of those that fit ``memory_limit`` (without one: 90 % of the device's
            memory) the one with the shortest expected iteration is taken, with the sum of gradients. The devices of a
            stage take its micro-batches in turns, so weights are the same up to the rounding of that sum.
            ``"groups"``: each group of K devices becomes groups of fewer, with a model each that elastic averaging
            holds together, at the begin of the epoch after that in which a plan has found that they train more batches
            in the same time. Learning goes on as with ``num_stages`` of fewer devices: an epoch has fewer steps, each
            of a batch for every group. None: each device keeps a stage of its own.

    Attributes:
        num_frozen: layers that are frozen.

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
        cache_folder: str | None = None,
        freed: Literal["replicas", "groups"] | None = None,
    ) -> None:
        self._options = FreezingOptions(alpha, mode, layers, before, every_n_epochs, replan, cache, cache_folder, freed)
        check(_ALLOWED, vars(self._options), "AdaptiveFreezing")
        self._order = FreezingOrder()
        self._num_stages: int | None = None  # of the groups that were made
        self._advised: int | None = None  # of those that come with the next epoch
        self.num_frozen = 0
        self._norms: list[float] = []  # of the layers, in the last batch of an epoch
        self._epoch = 0  # in which a step was made last
        self._squares: dict[str, float] = {}

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all layers, once training begins."""
        return self._order.layers

    @adopted
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse what cannot work before training starts."""
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
        """The module is built by now."""
        self._order = FreezingOrder.of(pl_module, self._options.layers, self._options.before)
        run = _run(trainer)
        if self._options.replans and run is not None:
            self._check_replanning(run)
            if self._options.cache is not None:
                limit = limit_of(self._options.cache, torch.device("cpu"), 1)
                run.deployment.keep_frozen(limit, self._options.cache_folder)
            if self._options.freed is not None:
                self._check_freed(trainer, run)

    def _check_freed(self, trainer: pl.Trainer, run: PipelineRun) -> None:
        what, groups = f"AdaptiveFreezing(freed={self._options.freed!r})", self._options.freed == "groups"
        averages = (StochasticWeightAveraging, *checks.weight_averaging()) if groups else ()
        refused = {
            (AvgPipeTuner, PipelineTimeline): "which knows one process of each stage",
            averages: "which averages the weights of one model",
        }
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for kinds, why in refused.items():
                if isinstance(callback, kinds):
                    raise ConfigurationError(f"{what} with {type(callback).__name__}, {why}; remove one of the two")
        if run.cluster.world.world_size == 1:  # one process frees nothing
            return
        check_options = combinations.grouping_later if groups else combinations.sharing_later
        check_options(run.configuration.options, run.cluster.stage_map)
        if groups and any(parameter.is_meta for parameter in trainer.lightning_module.parameters()):
            raise ConfigurationError(
                f"{what} needs a module that fits each host, since each gets all of it when groups are made, but "
                f"{type(trainer.lightning_module).__name__} was built on meta; leave freed=None"
            )

    def _check_replanning(self, run: PipelineRun) -> None:
        options = run.configuration.options
        if options.split_points is not None:
            raise ConfigurationError(
                f"AdaptiveFreezing(replan=True) plans the stages again, but split_points={list(options.split_points)} "
                "say where they begin; remove one of the two"
            )
        if options.shard_optimizer_states:
            raise ConfigurationError(
                "AdaptiveFreezing(replan=True) moves stages, but shard_optimizer_states=True keeps optimizer states "
                "where they are; remove one of the two"
            )
        against = {
            f"num_pipelines={options.num_pipelines}, whose models differ": options.num_pipelines > 1,
            f"{run.cluster.stage_map.num_teams} groups, whose models differ": run.cluster.stage_map.num_teams > 1,
            "freed='groups', whose models differ": self._options.freed == "groups",
            "planner='spp', which does not plan for them": options.planner == "spp",
            "rolling=True": options.rolling is True,
            f"weight_policy={options.weight_policy!r}": not options.policy.drains,
            "recompute=True, which keeps inputs of stages to begin with them once more": options.recompute is True,
        }
        for what, found in against.items():
            if self._options.cache is not None and found:
                raise ConfigurationError(
                    f"AdaptiveFreezing(cache={self._options.cache!r}) with {what}: kept outputs are those of one "
                    "model, and the first trained stage begins with them; remove one of the two"
                )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What a checkpoint says is frozen is so again."""
        self._order.freeze(pl_module, self.num_frozen)
        if self.num_frozen:
            self._share(trainer)
        if self._options.freed == "groups" and isinstance(trainer.strategy, AvgPipeStrategy) and trainer.world_size > 1:
            regrouping.check_divisible(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Freeze more, if it is time; what is frozen stays in eval mode."""
        epoch, before = trainer.current_epoch, self.num_frozen
        every, alpha = self._options.every_n_epochs, self._options.alpha
        if epoch > self._epoch and epoch % every == 0:
            self._epoch = epoch
            if self._options.mode == "schedule":
                self.num_frozen = max(before, by_schedule(len(self.paths), alpha, epoch // every))
            elif self._norms:
                self.num_frozen = by_gradient_norms(before, alpha, self._norms)
        self._order.freeze(pl_module, self.num_frozen)
        if self.num_frozen > before:
            rank_zero_info(
                f"AdaptiveFreezing: from epoch {epoch} on {self.num_frozen} of {len(self.paths)} layers are frozen, up "
                f"to {self.paths[self.num_frozen - 1]!r}"
            )
        strategy, run = trainer.strategy, _run(trainer)
        if not self._options.replans or run is None:
            return
        if self._advised is not None:
            assert isinstance(strategy, AvgPipeStrategy)
            self._num_stages, self._advised = self._advised, None
            strategy.regroup(self._num_stages)
            self._share(trainer)
        elif self.num_frozen > before:
            self._share(trainer)
            run.deployment.replan()

    def _share(self, trainer: pl.Trainer) -> None:
        run = _run(trainer)
        if self._options.freed and run is not None:
            run.halve(as_groups=self._options.freed == "groups")

    # -- gradients of the last batch of an epoch ---------------------------------------------------------------------

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Of parallel models each calls it."""
        if self._options.mode != "gradient_norm" or not trainer.is_last_batch:
            return
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                wide = torch.promote_types(parameter.grad.dtype, torch.float32)
                square = float(torch.linalg.vector_norm(parameter.grad.detach(), dtype=wide)) ** 2
                self._squares[name] = self._squares.get(name, 0.0) + square

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """All processes get to know the norms, and what was planned, before a checkpoint is written."""
        if self._options.freed == "groups" and isinstance(trainer.strategy, AvgPipeStrategy):
            plan = trainer.strategy.plan
            self._advised = None if plan is None else plan.advised
        if self._options.mode != "gradient_norm" or not trainer.is_last_batch:
            return
        squares, self._squares = self._squares, {}
        run = _run(trainer)
        parts = [squares] if run is None else run.cluster.world.exchange_objects(squares)
        # a copy of a tied parameter has the gradient of all, and counts once
        squared = {name: max(part.get(name, 0.0) for part in parts) for name, _ in pl_module.named_parameters()}
        self._norms = self._order.norms(pl_module, squared)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint remembers."""
        state = {"num_frozen": self.num_frozen, "epoch": self._epoch, "norms": list(self._norms)}
        groups = {"num_stages": self._num_stages, "advised": self._advised}
        return state | {name: value for name, value in groups.items() if value is not None}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """The groups are those of the run that was saved, as far as the devices allow."""
        wanted = checkpoint.get("callbacks", {}).get(self.state_key, {}).get("num_stages")
        strategy, grouped = trainer.strategy, self._options.freed == "groups" and wanted is not None
        if not grouped or trainer.state.fn != TrainerFn.FITTING or not isinstance(strategy, AvgPipeStrategy):
            return
        size = strategy.cluster.stage_map.group_size
        if strategy.run is None and wanted < strategy.num_stages == size and size % wanted == 0:
            self._num_stages = wanted
            strategy.regroup(wanted)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a run was saved."""
        self.num_frozen, self._epoch = state_dict["num_frozen"], state_dict["epoch"]
        self._norms = list(state_dict["norms"])
        self._advised = state_dict.get("advised")


def _run(trainer: pl.Trainer) -> PipelineRun | None:
    """What divides the module; None where nothing does."""
    run = trainer.strategy.run if isinstance(trainer.strategy, AvgPipeStrategy) else None
    return run if isinstance(run, PipelineRun) else None
