"""Pipeline parallelism for any LightningModule: ``Trainer(strategy="avgpipe")``.

Importing this package registers the strategy.
"""

# ruff: noqa: E402
import importlib
import sys

from lightning_avgpipe.utils import packages
from lightning_avgpipe.utils.versions import check_versions


def _arrived() -> None:
    """The strategy is one of ``pytorch_lightning`` too."""
    strategies = importlib.import_module(f"{packages.OTHER}.strategies")
    strategies.ParallelStrategy.register(AvgPipeStrategy)
    AvgPipeStrategy.register_strategies(strategies.StrategyRegistry)


check_versions()  # before others are imported that would fail in their own words
packages.install(_arrived)

# isort: split
from lightning_avgpipe.utils import torch_compat

torch_compat.check()

# isort: split
from lightning_avgpipe.callbacks import AdaptiveFreezing, AvgPipeTuner, PipelineTimeline
from lightning_avgpipe.schedule.versions import PipeOptim
from lightning_avgpipe.strategy.strategy import AvgPipeStrategy

__all__ = ["AdaptiveFreezing", "AvgPipeStrategy", "AvgPipeTuner", "PipeOptim", "PipelineTimeline"]
__version__ = "0.1.0"

AvgPipeStrategy.register_strategies(importlib.import_module(f"{packages.FIRST}.strategies").StrategyRegistry)
if packages.FIRST != packages.OTHER and packages.OTHER in sys.modules:
    _arrived()
