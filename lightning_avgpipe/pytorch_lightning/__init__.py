"""The strategy and the callbacks for ``pytorch_lightning``, where they are needed by name.

``pytorch_lightning.Trainer`` takes those of :mod:`lightning_avgpipe` as well. Derive classes for it from these. The
imports below are replaced when they are executed, see :mod:`lightning_avgpipe.utils.packages`.
"""

# ruff: noqa: E402
from lightning_avgpipe.utils.versions import check_second

check_second()

# isort: split
from lightning_avgpipe.callbacks import AdaptiveFreezing, AvgPipeTuner, PipelineTimeline
from lightning_avgpipe.strategy.strategy import AvgPipeStrategy

__all__ = ["AdaptiveFreezing", "AvgPipeStrategy", "AvgPipeTuner", "PipelineTimeline"]
