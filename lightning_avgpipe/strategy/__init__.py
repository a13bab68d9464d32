"""Lightning's side: the strategy, and what it changes in a Trainer."""

from lightning_avgpipe.strategy.strategy import AvgPipeStrategy

__all__ = ["AvgPipeStrategy"]
