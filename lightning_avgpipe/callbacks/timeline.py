"""A callback that records one iteration of the pipeline and draws its timeline."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lightning_avgpipe.callbacks.common import pipeline_strategy, publish, write
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.probe import offset_in
from lightning_avgpipe.engine.recording import Recorder, assemble
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.schedule import StageCosts, Timeline, picture, simulate
from lightning_avgpipe.schedule.picture import chrome_trace
from lightning_avgpipe.strategy.strategy import AvgPipeStrategy
from lightning_avgpipe.utils.allowed import Count, check, directory, has_options, optional, whole
from lightning_avgpipe.utils.lightning import Callback, get_filesystem, pl, rank_zero_info, rank_zero_warn

_ALLOWED = {
    "every_n_steps": whole(1, 1_000_000_000, 100),
    "dirpath": optional(directory(), "'timelines' in the trainer's default_root_dir"),
}


@has_options(_ALLOWED)
class PipelineTimeline(Callback):
    """Records one iteration in ``every_n_steps``: every action, message and wait on every rank, on one clock.

    For the iteration that ended with optimizer step 10, rank 0 writes ``trace_step=000010.json`` for
    https://ui.perfetto.dev (or chrome://tracing) and ``trace_step=000010.png``: one row per device with its forwards,
    backwards and idle time, and under it the messages that it sends. Loggers for TensorBoard and Weights & Biases get
    the picture as ``avgpipe/timeline``. Two metrics are logged. ``avgpipe/bubble_fraction`` is the share of the
    devices' time without an action. ``avgpipe/bubble_fraction_simulated`` is the same share in a simulation with the
    measured times of actions and messages, and with a device for each stage: the part that is due to the schedule.
    Parallel pipelines share the rows, each in its own shade.

    Recording hardly slows an iteration down. On CUDA it waits for the device at the beginning and the end.

    Args:
        every_n_steps: number of optimizer steps from one recording to the next.
        dirpath: folder of the files, or a URL such as ``s3://bucket/run``; default: ``timelines`` in the trainer's
            ``default_root_dir``.

    Raises:
        ConfigurationError: an argument is invalid, matplotlib is missing, or the strategy cannot be recorded.
    """

    def __init__(self, every_n_steps: Count = 100, dirpath: str | Path | None = None) -> None:
        check(_ALLOWED, {"every_n_steps": every_n_steps, "dirpath": dirpath}, "PipelineTimeline")
        self._every_n_steps = every_n_steps
        self._dirpath = dirpath
        self._recorder: Recorder | None = None
        self._steps_before = 0
        self._undo = contextlib.ExitStack()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the run can be recorded, before training starts."""
        strategy = pipeline_strategy(trainer, "PipelineTimeline records the stages of")
        options = strategy.options
        if not options.policy.drains:
            raise ConfigurationError(
                f"PipelineTimeline with weight_policy={options.weight_policy!r}: batches overlap on the stages, so "
                "none can be drawn alone; remove the callback, and draw with python -m lightning_avgpipe schedule 1f1b "
                "--policy"
            )
        picture.require_matplotlib()
        if strategy.whole is not None:
            rank_zero_warn(f"PipelineTimeline writes nothing: {type(pl_module).__name__} {strategy.whole}")
        elif strategy.passthrough:
            rank_zero_warn(
                "PipelineTimeline writes nothing: one device, one stage and one micro-batch are not a pipeline"
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start recording if the optimizer step that may follow this batch is one to record."""
        strategy: AvgPipeStrategy = trainer.strategy  # type: ignore[assignment]
        if (trainer.global_step + 1) % self._every_n_steps == 0 and not strategy.passthrough and strategy.whole is None:
            cluster = _cluster(trainer)
            self._recorder = Recorder(cluster.rank, cluster.device)
            self._undo.enter_context(strategy.observers.with_added(self._recorder))
            self._steps_before = trainer.global_step

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Record the optimizer's step, which begins after the backwards."""
        if self._recorder is not None:
            step = contextlib.ExitStack()
            step.enter_context(self._recorder.activity("step"))
            self._undo.callback(optimizer.register_step_post_hook(lambda *_: step.close()).remove)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Gather the recordings of all ranks and publish them, unless the batch ends without an optimizer step."""
        recorder = self._recorder
        if recorder is None:
            return
        self._stop()
        if trainer.global_step == self._steps_before:
            return  # gradients accumulate; the step comes with a later batch, which is recorded too
        cluster = _cluster(trainer)
        recordings = cluster.group.gather_objects(recorder.finish(offset_in(cluster.group), cluster.waits.timeout_s))
        if cluster.world.rank == 0:
            timeline = assemble(recordings, [cluster.stage_map.ranks(k) for k in range(cluster.stage_map.num_stages)])
            self._publish(trainer, timeline, max(recording.clock.error_s for recording in recordings))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Stop recording."""
        self._stop()

    def _stop(self) -> None:
        self._undo.close()
        self._recorder = None

    def _publish(self, trainer: pl.Trainer, timeline: Timeline, clock_error_s: float) -> None:
        simulated, step = _simulated(timeline), trainer.global_step
        measured = {
            "avgpipe/bubble_fraction": timeline.bubble_fraction,
            "avgpipe/bubble_fraction_simulated": simulated.bubble_fraction,
        }
        figure = picture.draw(timeline, _title(step, timeline, simulated))
        own = f"{trainer.default_root_dir.rstrip('/')}/timelines"
        folder = own if self._dirpath is None else os.fspath(self._dirpath)
        if not get_filesystem(folder).exists(folder):
            rank_zero_info(f"timelines are written to {folder}")
        trace = chrome_trace(timeline, step=step, clock_error_us=clock_error_s * 1e6, **measured)
        write(folder, f"trace_step={step:06d}.json", json.dumps(trace))
        publish(trainer, folder, f"trace_step={step:06d}.png", figure, "avgpipe/timeline")
        for logger in trainer.loggers:
            logger.log_metrics(measured, step=step)


def _cluster(trainer: pl.Trainer) -> Cluster:
    assert isinstance(trainer.strategy, AvgPipeStrategy)
    return trainer.strategy.cluster


def _simulated(timeline: Timeline) -> Timeline:
    """Return a simulated timeline with the measured times, in which each stage (or replica) has its own device."""
    replicas = timeline.replicas if len(timeline.rows) > timeline.num_stages else ()
    return simulate([timeline.schedule()] * timeline.num_pipelines, StageCosts.measured(timeline), replicas=replicas)


def _title(step: int, timeline: Timeline, simulated: Timeline) -> str:
    where = "" if len(timeline.rows) >= timeline.num_stages else ", on a device per stage"
    return (
        f"step {step}: {timeline.iteration_s * 1e3:.4g} ms, idle {timeline.bubble_fraction:.1%} (simulated: "
        f"{simulated.iteration_s * 1e3:.4g} ms, {simulated.bubble_fraction:.1%}{where})"
    )
