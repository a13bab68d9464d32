"""The checks of a reconfiguration: which changes may be asked for while training runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy import checks
from lightning_avgpipe.strategy.configuration import Configuration

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.strategy import AvgPipeStrategy


def check_changes(changes: Mapping[str, Any], configuration: Configuration, strategy: AvgPipeStrategy) -> None:
    """Check that changes can be made.

    Args:
        changes: option -> value; None: the option stays as it is.
        configuration: the strategy's options as they are now.
        strategy: strategy that is asked.
    Raises:
        ConfigurationError: a change that cannot be made.
        PartitionError: a split point that is no submodule.
    """
    now, wanted, module = configuration.options, configuration.wanted(changes), strategy.lightning_module
    layout, num_stages = strategy.device_layout, strategy.num_stages
    if strategy.whole is not None:
        raise ConfigurationError(f"reconfigure: {type(module).__name__} {strategy.whole}; its steps run whole")
    if strategy.passthrough and module is not None:
        raise ConfigurationError(
            "reconfigure: with one device, one stage, one micro-batch and one pipeline this run began as with "
            "strategy='auto', and has no pipeline to change; begin with 2 or more of stages, micro-batches or pipelines"
        )
    moves = changes["num_stages"] is not None or changes["split_points"] is not None
    if moves and (now.shares_stages or now.shard):
        sharded = " with their parts of the optimizer states" * (now.shard is not None)
        raise ConfigurationError(
            f"reconfigure: replicas={now.replicas!r} stay where they are{sharded}, and so do their stages; begin with "
            "the stages that you want"
        )
    if module is not None:
        checks.trainer(module.trainer, module.trainer.world_size, wanted.num_pipelines)
        stages = num_stages if changes["num_stages"] is None else changes["num_stages"]
        rolling = wanted.rolling_as(configuration.can_roll) if wanted.averaging.rolling == "auto" else wanted
        checks.overlapping(module.trainer, rolling, stages, strategy.num_groups, strategy.replicas, tuned=False)
        checks.stages(stages, num_stages, layout)
        checks.schedule(now, stages, layout.group_size(stages))
        checks.split_points(module, wanted.split_points, stages)
