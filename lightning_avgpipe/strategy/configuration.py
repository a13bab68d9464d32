"""The configuration: the strategy's options as they are now, and the changes asked for the next iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.strategy.options import Options


class Configuration:
    """Options that may change between two iterations of training.

    Attributes:
        given: options of the strategy, before anything was reconfigured.
        options: options as they are now.
        in_iteration: whether an iteration runs, from its batch to the optimizer's step; no option changes meanwhile.
        can_roll: whether parallel pipelines can roll in this run, and ``rolling`` is not False.
        prefers_rolling: whether they roll with ``rolling="auto"``.
        seed: seed of the random numbers that are drawn in units; a resumed run keeps the seed of the first run.
    """

    def __init__(self, options: Options) -> None:
        self.given = self.options = options
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
        """Whether parallel pipelines go on without waiting for each other."""
        return self.can_roll and (self.prefers_rolling or self.options.averaging.rolling is True)

    @property
    def is_open(self) -> bool:
        """Whether pipelines roll because of ``rolling="auto"``, so that they may also stop rolling."""
        return self.rolls and self.options.averaging.rolling == "auto"

    @property
    def asked(self) -> bool:
        """Whether changes have been asked for."""
        return bool(self._asked)

    def wanted(self, changes: Mapping[str, Any]) -> Options:
        """Return the options with these changes, and those asked for before; None changes nothing.

        Raises:
            ConfigurationError: an option that cannot work.
        """
        return replace(self.options, **self._with(changes))

    def ask(self, changes: Mapping[str, Any]) -> None:
        """Note changes, which take effect with :meth:`take_over`."""
        self._asked = self._with(changes)

    def take_over(self, cluster: Cluster | None) -> dict[str, Any]:
        """Apply the changes that were asked for, at the end of an iteration. Every process calls it.

        Args:
            cluster: the connected processes, which must have asked for the same; None before they are connected.
        Returns:
            The options that have changed, with their values.
        Raises:
            ConfigurationError: the processes have asked for different changes.
        """
        self.in_iteration = False
        asked, self._asked = self._asked, {}
        if asked and cluster is not None:
            call = f"reconfigure({', '.join(f'{name}={value!r}' for name, value in asked.items())})"
            cluster.confirm(call, "in a hook of a callback, such as on_train_batch_end, and not only if is_global_zero")
        changed = {name: value for name, value in asked.items() if getattr(self.options, name) != value}
        if changed:  # making options also checks them, which takes a while
            self.options = replace(self.options, **changed)
        return changed

    def _with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._asked, **{name: value for name, value in changes.items() if value is not None}}
