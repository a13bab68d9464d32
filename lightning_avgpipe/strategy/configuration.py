"""The configuration: a strategy's options as they are now, and what is asked of the next iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.strategy.options import Options


class Configuration:
    """Options that may change between two iterations of training.

    Attributes:
        options: as they are now.
        in_iteration: whether an iteration goes on, from its batch to the optimizer's step. Meanwhile nothing changes.
        can_roll: whether parallel pipelines can roll in this run, and were not asked not to.
        prefers_rolling: whether they do, where that was left open.
        seed: of the random numbers that are drawn in units; a resumed run goes on with that of the first one.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.in_iteration = False
        self.can_roll = False
        self.prefers_rolling = True
        self.seed = 0
        self._asked: dict[str, Any] = {}

    @property
    def num_pipelines(self) -> int:
        """N, as it is now."""
        return self.options.num_pipelines

    @property
    def rolls(self) -> bool:
        """Whether pipelines go on without waiting for each other, where there are several."""
        return self.can_roll and (self.prefers_rolling or self.options.rolling is True)

    @property
    def is_open(self) -> bool:
        """Whether they do, but need not."""
        return self.rolls and self.options.rolling == "auto"

    @property
    def asked(self) -> bool:
        """Whether somebody has asked for changes."""
        return bool(self._asked)

    def wanted(self, changes: Mapping[str, Any]) -> Options:
        """What the options would be with these changes, and those asked for before; None changes nothing.

        Raises:
            ConfigurationError: an option that cannot work.
        """
        return replace(self.options, **self._with(changes))

    def ask(self, changes: Mapping[str, Any]) -> None:
        """Note changes; they come with :meth:`take_over`."""
        self._asked = self._with(changes)

    def take_over(self, cluster: Cluster | None) -> dict[str, Any]:
        """The iteration has ended: what was asked for comes now. Every process calls it.

        Args:
            cluster: of the processes, which must have asked for the same; None before they are connected.
        Returns:
            Options that are others now, with their values.
        Raises:
            ConfigurationError: not all have.
        """
        self.in_iteration = False
        asked, self._asked = self._asked, {}
        if asked and cluster is not None:
            call = f"reconfigure({', '.join(f'{name}={value!r}' for name, value in asked.items())})"
            cluster.channels.confirm(
                call, "in a hook of a callback, such as on_train_batch_end, and not only if is_global_zero"
            )
        changed = {name: value for name, value in asked.items() if getattr(self.options, name) != value}
        if changed:  # options are checked when they are made, which takes a while
            self.options = replace(self.options, **changed)
        return changed

    def _with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._asked, **{name: value for name, value in changes.items() if value is not None}}
