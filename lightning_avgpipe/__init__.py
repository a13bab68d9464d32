"""Pipeline parallelism for any LightningModule: ``Trainer(strategy="avgpipe")``.

Importing this package registers the strategy.
"""

# ruff: noqa: E402
import importlib

from lightning_avgpipe.utils.versions import OTHER, check_versions

check_versions()  # before imports that would fail with less helpful messages

# isort: split
from lightning_avgpipe.utils import torch_compat

torch_compat.check()

# isort: split
from lightning_avgpipe.averaging.options import Averaging
from lightning_avgpipe.callbacks import AdaptiveFreezing, AvgPipeTuner, PipelineTimeline
from lightning_avgpipe.comm.options import Links
from lightning_avgpipe.loading import from_pretrained
from lightning_avgpipe.schedule.versions import PipeOptim
from lightning_avgpipe.strategy.strategy import AvgPipeStrategy
from lightning_avgpipe.utils.lightning import pl
from lightning_avgpipe.utils.patching import after_import

__all__ = [
    "AdaptiveFreezing",
    "Averaging",
    "AvgPipeStrategy",
    "AvgPipeTuner",
    "Links",
    "PipeOptim",
    "PipelineTimeline",
    "from_pretrained",
]
__version__ = "0.2.0.dev0"


def _let_the_other_refuse() -> None:
    """Register the strategy with Lightning's other package too: it then refuses that Trainer and says what to do."""
    strategies = importlib.import_module(f"{OTHER}.strategies")
    strategies.ParallelStrategy.register(AvgPipeStrategy)
    AvgPipeStrategy.register_strategies(strategies.StrategyRegistry)


AvgPipeStrategy.register_strategies(pl.strategies.StrategyRegistry)
after_import(OTHER, _let_the_other_refuse)
