"""A callback that chooses the numbers of pipelines and micro-batches, and the advance, by measuring."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning_avgpipe.callbacks.common import pipeline_strategy, publish, write
from lightning_avgpipe.engine.microbatch import fewest_samples
from lightning_avgpipe.errors import ConfigurationError, TuningError
from lightning_avgpipe.schedule import picture
from lightning_avgpipe.state.untouched import random_state
from lightning_avgpipe.strategy import checks
from lightning_avgpipe.strategy.options import ALLOWED, MEMORY
from lightning_avgpipe.strategy.pipeline_run import PipelineRun
from lightning_avgpipe.strategy.profiler import Profiler
from lightning_avgpipe.strategy.rehearsal import rehearsing
from lightning_avgpipe.strategy.rolling import RollingOrder
from lightning_avgpipe.strategy.strategy import AvgPipeStrategy
from lightning_avgpipe.tuning.picture import draw
from lightning_avgpipe.tuning.profile import TUNED, Setting, from_json, to_json, trial_sizes
from lightning_avgpipe.tuning.search import Result, candidates, microbatch_counts, search
from lightning_avgpipe.utils.allowed import (
    Allowed,
    Count,
    check,
    directory,
    has_options,
    number,
    optional,
    whole,
)
from lightning_avgpipe.utils.lightning import (
    BaseFinetuning,
    Callback,
    ModelCheckpoint,
    pl,
    rank_zero_info,
    rank_zero_warn,
)

_FEWEST_BATCHES = 4
_NAME = "avgpipe_tuning"
_COUNT = ALLOWED["num_microbatches"]
_FACTOR = number(0.01, 100, 1.2, least=True)


def _are_counts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(m != "auto" and _COUNT.accepts(m) for m in value)


def _are_factors(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(_COUNT.accepts(n) and n != "auto" and _FACTOR.accepts(f) for n, f in value.items())
    return _FACTOR.accepts(value)


_ALLOWED = {
    "max_num_pipelines": whole(1, 64, 2),
    "microbatch_candidates": optional(
        Allowed("a list of numbers of micro-batches of at least 1", "[4, 8, 16]", _are_counts),
        "the divisors of the batch size",
    ),
    "memory_limit": MEMORY,
    "profile_batches": whole(_FEWEST_BATCHES, 10_000, 20),
    "samples_factor": optional(
        Allowed("a number from 0.01 to 100, or such numbers by number of pipelines", "{2: 1.2, 4: 1.7}", _are_factors),
        "what was measured",
    ),
    "dirpath": optional(directory(), "that of the checkpoints"),
}


@has_options(_ALLOWED)
class AvgPipeTuner(Callback):
    """Chooses ``num_pipelines``, ``num_microbatches`` and ``advance`` of ``strategy="avgpipe"`` by measuring.

    When the first training batch has been read, about twenty iterations run on copies of it with one pipeline, some
    with many micro-batches and some with fewer, in turns. From the time and memory that they take on each stage, the
    time and memory of every other setting are predicted by simulation. The fastest setting that fits the memory on
    every stage is chosen. Then training begins with the same batch, as if the setting had been given by hand: weights,
    optimizer, random numbers, logs and progress are what they would have been.

    The profile, all candidates and the choice are written to ``avgpipe_tuning.json`` next to the checkpoints and, with
    matplotlib, to a picture, which loggers for TensorBoard and Weights & Biases get too. Checkpoints contain the
    choice: a run that resumes from one keeps it, and so does another ``fit`` with this callback. With ``fast_dev_run``
    nothing is tuned.

    Args:
        max_num_pipelines: largest number of parallel pipelines to consider. Each has a model of its own, so a number
            above 1 may change the training: N models read N batches in a step, and make an Nth of the steps, unless
            they divide each batch (``Averaging(split_batches=True)``).
        microbatch_candidates: numbers of micro-batches to consider. None: the divisors of the batch size, or powers of
            two.
        memory_limit: memory that each stage may use, in the format of the strategy's option of this name, which is the
            default. Without either: 90 % of the device's memory.
        profile_batches: largest number of iterations to profile with, at least 4. After two minutes no further round
            begins.
        samples_factor: number of samples that N models need to reach a goal, as a multiple of the number that one model
            needs: one factor for all N above 1, or factors by N. The setting with the least product of time per batch
            and factor is chosen. None: as measured on small trainings, 1.2 for two and 1.7 for four models, for four 14
            % more if they roll (docs/parallel_pipelines.md); 1: the fastest setting, whatever its models learn from a
            batch.
        dirpath: folder of the files, or a URL; default: that of the checkpoints, or the trainer's
            ``default_root_dir``.

    Attributes:
        result: profile, candidates and choice; None before the first batch.

    Raises:
        ConfigurationError: an argument is invalid, the strategy is another one, was given a value that the tuner
            chooses, or has nothing to pipeline.
        TuningError: nothing fits the memory; the message names the stage, what it lacks, and what would help.

    Source: AvgPipe, Chen et al., PPoPP 2023, section 5.
    """

    def __init__(
        self,
        max_num_pipelines: Count = 1,
        microbatch_candidates: list[Count] | None = None,
        memory_limit: str | int | float | None = None,
        profile_batches: Count = 20,
        samples_factor: float | dict[int, float] | None = None,
        dirpath: str | Path | None = None,
    ) -> None:
        self.max_num_pipelines = max_num_pipelines
        self.microbatch_candidates = microbatch_candidates
        self.memory_limit = memory_limit
        self.profile_batches = profile_batches
        self.samples_factor = samples_factor
        self.dirpath = dirpath
        check(_ALLOWED, {name: getattr(self, name) for name in _ALLOWED}, "AvgPipeTuner")
        self.result: Result | None = None
        self._strategy: AvgPipeStrategy | None = None  # that of a training run whose setting is not known yet
        self._begun = False
        self._counted = False  # whether user code, such as configure_optimizers, has read the number of iterations

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the run can be tuned, before training starts, and arrange to be given its first batch."""
        self._strategy, strategy = None, pipeline_strategy(trainer, "AvgPipeTuner tunes")
        if strategy.options.shares_stages:
            raise ConfigurationError(
                "AvgPipeTuner measures one process for each stage, but with a list of replicas a stage has several; "
                "remove the callback"
            )
        if stage != "fit":
            return
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_info("AvgPipeTuner: with fast_dev_run nothing is tuned")
            return
        _check_tunable(strategy, pl_module)
        if self._reusable(strategy):
            self._apply(strategy)
            return
        self._check_open(strategy)
        checks.trainer(trainer, strategy.world_size, self.max_num_pipelines, strategy.num_teams)
        self._strategy, self._begun = strategy, False
        strategy.tuner = partial(self._see, trainer, strategy)

    def _check_open(self, strategy: AvgPipeStrategy) -> None:
        """Check that the strategy was not given values for options that the tuner chooses."""
        if strategy.options.overrides:
            given = ", ".join(f"{name}={value!r}" for name, value in strategy.options.overrides.items())
            raise ConfigurationError(
                "AvgPipeTuner chooses num_pipelines, num_microbatches and advance, but the strategy was given "
                f"{given}; remove that, or the callback"
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note whether anything, such as ``configure_optimizers``, has read the number of iterations."""
        self._counted = trainer.fit_loop._combined_loader is not None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note that all hooks that prepare training have run, so that the next batch can be used for tuning."""
        self._begun = True

    def state_dict(self) -> dict[str, Any]:
        """Return the profile, the candidates and the choice, once there are any."""
        return {} if self.result is None else {"result": to_json(self.result)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the choice of a saved run, and apply it if this run has the same number of stages."""
        if "result" not in state_dict:
            return
        try:
            self.result = from_json(Result, state_dict["result"])
        except TuningError as error:
            rank_zero_warn(f"AvgPipeTuner chooses anew, since the checkpoint's choice cannot be read: {error}")
            return
        if self._strategy is not None and self._reusable(self._strategy):
            self._apply(self._strategy)

    # -- the first batch ---------------------------------------------------------------------------------------------

    def _see(self, trainer: pl.Trainer, strategy: AvgPipeStrategy, batch: Any) -> bool:
        """Tune with the first batch after training has started; return whether tuning is done."""
        if not self._begun:  # the batch was prefetched before the hooks that prepare training
            return False
        if not self._reusable(strategy):
            planned = self._tune(trainer, strategy, batch)
            self._apply(strategy)
            if self.result is not None and self.result.choice.setting != planned:
                _run(strategy).deployment.replan(rolling=strategy.rolls)
            if strategy.num_pipelines > 1 and not strategy.options.averaging.split_batches:
                self._recount(trainer, strategy)
        return True

    def _recount(self, trainer: pl.Trainer, strategy: AvgPipeStrategy) -> None:
        """Update the progress bar, and construct optimizers and schedulers again, for the new number of iterations."""
        bar = trainer.progress_bar_callback  # type: ignore[attr-defined]
        if bar is not None:
            bar.on_train_epoch_start(trainer, trainer.lightning_module)
        if not self._counted or trainer.ckpt_path is not None:  # a resumed scheduler keeps its number
            return
        if any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            rank_zero_warn(
                f"AvgPipeTuner chose num_pipelines={strategy.num_pipelines}, so an epoch has fewer iterations than "
                "configure_optimizers was told; a callback has changed the optimizer since, so it is not made again. "
                "Give num_pipelines by hand if a learning rate depends on the number of iterations"
            )
            return
        with random_state():
            strategy.setup_optimizers(trainer)

    def _tune(self, trainer: pl.Trainer, strategy: AvgPipeStrategy, batch: Any) -> Setting:
        """Choose the setting; return the setting for which the stages were planned."""
        run, found = _run(strategy), ""
        cluster, schedule = run.cluster, str(run.configuration.options.schedule)  # setup() has refused others
        shows = trainer.progress_bar_callback is not None  # type: ignore[attr-defined]
        module = trainer.lightning_module

        def first(batch_size: int) -> int:
            return trial_sizes(self._counts(module, batch_size), strategy.num_stages)[0]

        with rehearsing(trainer, run, batch, first) as rehearsal:
            profiler = Profiler(rehearsal, self.profile_batches, schedule, shows)
            counts = self._counts(module, rehearsal.batch_size)
            profile, rolling = profiler.profile(counts), _rolling(run)
            if profile is not None:
                split, most = strategy.options.averaging.split_batches, self.max_num_pipelines
                considered = candidates(profile, most, counts, schedule=schedule, rolling=rolling, split=split)
                settings = [setting for setting in considered if setting.parts > profiler.largest_not_fitting]
                limit = run.context.memory_per_stage(self.memory_limit)
                found = to_json(search(profile, settings, limit, self.samples_factor))
            result = from_json(Result, cluster.world.broadcast(found))
        self.result = result
        if cluster.world.rank == 0:
            self._publish(trainer, result)
        return Setting(rehearsal.planned_microbatches, schedule=schedule)

    def _counts(self, module: pl.LightningModule, batch_size: int) -> list[int]:
        """Return the numbers of micro-batches to consider."""
        counts = microbatch_counts(batch_size, self.microbatch_candidates)
        if self.microbatch_candidates is None:
            return [m for m in counts if fewest_samples(module) * m <= batch_size] or counts
        return counts

    def _reusable(self, strategy: AvgPipeStrategy) -> bool:
        return self.result is not None and self.result.profile.num_stages == strategy.num_stages

    def _apply(self, strategy: AvgPipeStrategy) -> None:
        assert self.result is not None
        setting = self.result.choice.setting
        strategy.rolls = setting.rolling or setting.num_pipelines == 1
        strategy.reconfigure(setting.num_pipelines, setting.num_microbatches, setting.advance)

    # -- files and pictures -------------------------------------------------------------------------------------------

    def _publish(self, trainer: pl.Trainer, result: Result) -> None:
        folder = self._folder(trainer)
        path = write(folder, f"{_NAME}.json", to_json(result))
        rank_zero_info(f"\n{result}\nsaved in {path}")
        strategy = trainer.strategy
        assert isinstance(strategy, AvgPipeStrategy)
        models = result.choice.setting.num_pipelines * strategy.num_teams
        batches = result.choice.setting.batches * strategy.num_teams
        if batches > 1:
            rank_zero_info(
                f"AvgPipeTuner: {models} models, each step reads {batches} batches: 1/{batches} of the steps"
            )
        elif models > 1:
            rank_zero_info(f"AvgPipeTuner: {models} models, which divide each batch among them")
        if picture.is_available():
            publish(trainer, folder, f"{_NAME}.png", draw(result), "avgpipe/tuning")

    def _folder(self, trainer: pl.Trainer) -> str | os.PathLike[str]:
        if self.dirpath is not None:
            return self.dirpath
        saving = trainer.checkpoint_callback  # type: ignore[attr-defined]
        if isinstance(saving, ModelCheckpoint) and saving.dirpath is not None:
            return saving.dirpath
        return trainer.default_root_dir


def _run(strategy: AvgPipeStrategy) -> PipelineRun:
    assert isinstance(strategy.run, PipelineRun)  # setup() has refused others
    return strategy.run


def _rolling(run: PipelineRun) -> bool | Literal["auto"]:
    """Return whether several pipelines roll, which the captured step decides. Every process calls it."""
    order = run.loop.order
    if not isinstance(order, RollingOrder) or not run.configuration.rolls or order.stop_if_refused():
        return False
    return run.configuration.options.averaging.rolling


def _check_tunable(strategy: AvgPipeStrategy, module: pl.LightningModule) -> None:
    """Check that there are pipelines to tune, with a schedule whose times can be predicted."""
    if strategy.whole is not None:
        raise ConfigurationError(
            f"AvgPipeTuner: {type(module).__name__} {strategy.whole}, so its steps run whole, with one model "
            "and without micro-batches, and there is nothing to tune; remove the callback"
        )
    if strategy.passthrough:
        raise ConfigurationError(
            "AvgPipeTuner: with one device and one stage there is nothing to pipeline, and everything is as with "
            "strategy='auto'; use more devices, or AvgPipeStrategy(num_stages=2) on one, or remove the callback"
        )
    if strategy.options.schedule not in TUNED:
        raise ConfigurationError(
            f"AvgPipeTuner predicts {', '.join(map(repr, TUNED))}, but the strategy has schedule="
            f"{strategy.options.schedule!r}; use one of these, or remove the callback"
        )
