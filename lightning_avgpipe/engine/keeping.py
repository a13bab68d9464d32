"""Keeping: on which processes the outputs of frozen layers are kept, and which micro-batches begin behind them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.forward_only import Freezing
from lightning_avgpipe.engine.frozen_outputs import FrozenOutputs, digests
from lightning_avgpipe.schedule import Schedule, num_forward_only
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.placeholder import Absent

Samples = Sequence[tuple[Any, int]]


@dataclass
class Keeping:
    """Where outputs of frozen layers are kept.

    Attributes:
        kept: the outputs that this process has.
        cluster: of the process.
        graph: of the step.
        freezing: which of its parameters are trained by now.
        stage: the first that trains.
        frozen: nodes, from the first.
        owners: ranks of the processes with the stage.
        shares: whether some replica will have news after this iteration.
    """

    kept: FrozenOutputs
    cluster: Cluster
    graph: CallGraph
    freezing: Freezing
    stage: int
    frozen: int
    owners: tuple[int, ...]
    shares: bool = False

    @property
    def tellers(self) -> tuple[int, ...]:
        """Ranks, among all processes, of those that tell this one what they keep, and of this one."""
        stage_map, replicas = self.cluster.stage_map, self.cluster.replicas
        shared = len(self.owners) > 1 or stage_map.replicas > 1
        return tuple(replicas.members.ranks) if shared and replicas is not None else (self.cluster.world.rank,)

    @property
    def leaves(self) -> frozenset[str]:
        """Names of the tensors of a batch that the frozen layers read."""
        return frozenset(leaf.name for leaf in self.graph.needed_leaves(0, self.frozen))

    def known(self, samples: Samples, schedule: Schedule) -> frozenset[int]:
        """The micro-batches of an iteration for which outputs are kept. Every process calls it.

        Args:
            samples: data and number of samples, by micro-batch.
            schedule: of the iteration.
        """
        found: frozenset[int] = frozenset()
        # something may have been frozen or unfrozen since the plan was made
        holds = self.freezing.trained <= self.graph.trained
        applies = holds and num_forward_only(schedule) == self.stage  # it is still the first that trains
        if self.cluster.rank in self.owners:
            if not holds:  # what is kept may not be true any more
                self.kept.forget()
            first, every = self.cluster.stage_map.share(self.stage, self.cluster.rank)
            mine = {i: samples[i] for i in range(first, len(samples), every)}
            there = applies and not schedule.turns and not _lacks(list(mine.values()), self.leaves)
            found = self.kept.look_up({i: digests(*sample, self.leaves) for i, sample in mine.items()} if there else {})
        if not applies:
            return found
        if len(self.owners) == 1:
            self.shares = len(self.tellers) > 1  # replicas of the whole pipeline find samples of their own
            return self.cluster.group.broadcast(found, self.owners[0])
        told = self.cluster.group.exchange_objects((found, self.cluster.rank in self.owners and self.kept.has_news))
        found = frozenset().union(*(there for there, _ in told))
        self.shares = any(has_news for _, has_news in told)
        # replicas of stages before would not know whose turn it is
        return found if self.stage == 0 or len(found) == len(samples) else frozenset()

    def share(self) -> None:
        """After an iteration replicas tell each other what they keep now. Every process calls it."""
        replicas = self.cluster.replicas
        if replicas is not None and self.shares and self.cluster.rank in self.owners:
            for number, news in enumerate(replicas.members.exchange_objects(self.kept.fresh())):
                if number != replicas.number:
                    self.kept.accept(news)


def _lacks(samples: Samples, names: Collection[str]) -> bool:
    """Whether tensors of these names have not come to this process."""
    leaves = (pair for data, _ in samples for pair in tree.flatten_with_names(data)[0])
    return any(isinstance(leaf, Absent) and name in names for name, leaf in leaves)
