"""Pipeline parallelism for any LightningModule: ``Trainer(strategy="avgpipe")``.

Importing this package registers the strategy.
"""

# ruff: noqa: E402
from lightning_avgpipe.versions import check_versions  # isort: skip

check_versions()  # before others are imported that would fail in their own words

# isort: split
from lightning.pytorch.strategies import StrategyRegistry

from lightning_avgpipe.callbacks import AvgPipeTuner, PipelineTimeline
from lightning_avgpipe.launch import register_explanation
from lightning_avgpipe.strategy import AvgPipeStrategy

__all__ = ["AvgPipeStrategy", "AvgPipeTuner", "PipelineTimeline"]
__version__ = "0.1.0"

if AvgPipeStrategy.strategy_name not in StrategyRegistry:
    AvgPipeStrategy.register_strategies(StrategyRegistry)
register_explanation(AvgPipeStrategy.strategy_name)
