"""Callbacks for Lightning: adaptive freezing, the timeline of an iteration, and the tuner."""

from lightning_avgpipe.callbacks.freezing import AdaptiveFreezing
from lightning_avgpipe.callbacks.timeline import PipelineTimeline
from lightning_avgpipe.callbacks.tuner import AvgPipeTuner

__all__ = ["AdaptiveFreezing", "AvgPipeTuner", "PipelineTimeline"]
