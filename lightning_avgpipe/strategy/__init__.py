"""The strategy for Lightning, and its changes in a Trainer while a pipeline runs."""

from lightning_avgpipe.strategy.strategy import AvgPipeStrategy

__all__ = ["AvgPipeStrategy"]
