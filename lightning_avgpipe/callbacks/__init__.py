"""Lightning callbacks."""

from lightning_avgpipe.callbacks.timeline import PipelineTimeline

__all__ = ["PipelineTimeline"]
