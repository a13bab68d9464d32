"""Survivors: what the groups that are left do at the end of the iteration in which others have left."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.strategy.bundles import BundledLoader
from lightning_avgpipe.strategy.dealing import Dealing
from lightning_avgpipe.strategy.succession import Succession
from lightning_avgpipe.utils import parent


class Survivors:
    """Of a run of the trainer.

    Args:
        trainer: of the run.
        cluster: of the processes.

    Attributes:
        dealing: of the training data.
        succession: of the process that logs and saves.
    """

    def __init__(self, trainer: pl.Trainer, cluster: Cluster) -> None:
        self._trainer = trainer
        self._cluster = cluster
        self.dealing = Dealing(trainer, cluster)
        assert cluster.meetings is not None
        self._meetings = cluster.meetings
        self._left = cluster.meetings.groups  # by their numbers at the start
        self._averaged = 0, 0  # iterations of an epoch whose updates counted
        self.succession = Succession(trainer, cluster)

    @property
    def first(self) -> int:
        """The group that leads, by its number at the start."""
        return self._meetings.groups[0]

    def begin(self) -> None:
        """Training is about to begin. Every process calls it."""
        self.succession.begin()

    def end_iteration(self, num_pipelines: int, averaged: bool) -> None:
        """An iteration has ended; if groups have left, this is where the others go on. Every process calls it.

        Args:
            num_pipelines: N.
            averaged: whether no update waits to be averaged.
        """
        trainer, left = self._trainer, self._meetings.groups
        epoch = trainer.current_epoch
        if self._averaged[0] != epoch:
            self._averaged = epoch, 0
        if (returns := self._cluster.channels.returns) is not None and returns.missing and self._cluster.leads:
            returns.beat()
        if left != self._left:
            before, self._left = self._left, left
            gone = [n for n, group in enumerate(before) if group not in left]
            dealt = self.dealing.again(gone, len(before), self._averaged[1], num_pipelines)
            self._tell([before[n] for n in gone], num_pipelines, dealt)
            self.succession.show()
        loader = trainer.fit_loop._combined_loader
        if averaged and isinstance(loader, BundledLoader):
            self._averaged = epoch, loader.iterations

    def count_in(self, group: int, num_pipelines: int) -> None:
        """A group has come back; an epoch is about to begin. Every process calls it, those of the group too.

        Args:
            group: its number at the start.
            num_pipelines: N.
        """
        self._left = self._meetings.groups
        self.dealing.among_all()
        if not self._cluster.leads:
            return
        trainer, models = self._trainer, num_pipelines * len(self._left)
        ranks = ", ".join(map(str, self._meetings.membership.layout[group]))
        back = "has come back" if group in self._left else "has come back, and left at once"
        rank_zero_warn(
            f"group {group} {back}: ranks {ranks} were started anew. Training goes on at step {trainer.global_step} "
            f"with {len(self._left)} group{'s' * (len(self._left) > 1)} of processes, {models} "
            f"model{'s' * (models > 1)}, of which new ones start from the reference; all data are divided among them"
        )
        self._log()

    def _log(self) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics({"avgpipe/groups": len(self._left)}, step=self._trainer.global_step)

    def _tell(self, gone: list[int], num_pipelines: int, dealt: str) -> None:
        cluster, trainer = self._cluster, self._trainer
        if not cluster.leads:
            return
        membership = self._meetings.membership
        ranks = [rank for group in gone for rank in membership.layout[group]]
        parent.end_at_exit(ranks)
        why = {c.group: c.why.split("\n")[0] for c in membership.changes if not c.enters}
        models = num_pipelines * len(self._left)
        leads = f"rank {trainer.global_rank} logs and saves now; " if 0 in gone else ""
        rank_zero_warn(
            f"{'; '.join(f'group {group} has left: {why[group]}' for group in gone)}. Training goes on at step "
            f"{trainer.global_step} with {len(self._left)} group{'s' * (len(self._left) > 1)} of processes, {models} "
            f"model{'s' * (models > 1)}, whose mean is the reference now; {leads}{dealt}"
        )
        self._log()
