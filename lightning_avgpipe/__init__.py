"""Pipeline parallelism for any LightningModule: ``Trainer(strategy="avgpipe")``.

Importing this package registers the strategy.
"""

# ruff: noqa: E402
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_avgpipe.utils.versions import OTHER, check_versions

check_versions()  # before imports that would fail with less helpful messages

if (Path(__file__).parent / "systems").is_dir():  # before options are defined by what there is
    importlib.import_module("lightning_avgpipe.systems")

# isort: split
from lightning_avgpipe.averaging.options import Averaging
from lightning_avgpipe.callbacks import AvgPipeTuner, PipelineTimeline
from lightning_avgpipe.comm.options import Links
from lightning_avgpipe.loading import from_pretrained
from lightning_avgpipe.strategy.pretrained import save_pretrained
from lightning_avgpipe.strategy.strategy import AvgPipeStrategy
from lightning_avgpipe.utils.lightning import pl
from lightning_avgpipe.utils.patching import after_import

if TYPE_CHECKING:
    from lightning_avgpipe.systems.asynchronous import PipeOptim
    from lightning_avgpipe.systems.broadcast import Broadcast

if TYPE_CHECKING:
    from lightning_avgpipe.systems.freezing.callback import AdaptiveFreezing
    from lightning_avgpipe.systems.survival import Survival

__all__ = [
    "AdaptiveFreezing",
    "Averaging",
    "AvgPipeStrategy",
    "AvgPipeTuner",
    "Broadcast",
    "Links",
    "PipeOptim",
    "PipelineTimeline",
    "Survival",
    "from_pretrained",
    "save_pretrained",
]
__version__ = "0.2.0.dev0"
# Public names that systems define.
_LATER = {
    "AdaptiveFreezing": "lightning_avgpipe.systems.freezing.callback",
    "Broadcast": "lightning_avgpipe.systems.broadcast",
    "PipeOptim": "lightning_avgpipe.systems.asynchronous",
    "Survival": "lightning_avgpipe.systems.survival",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _let_the_other_refuse() -> None:
    """Register the strategy with Lightning's other package too: it then refuses that Trainer and says what to do."""
    strategies = importlib.import_module(f"{OTHER}.strategies")
    strategies.ParallelStrategy.register(AvgPipeStrategy)
    AvgPipeStrategy.register_strategies(strategies.StrategyRegistry)


AvgPipeStrategy.register_strategies(pl.strategies.StrategyRegistry)
after_import(OTHER, _let_the_other_refuse)
