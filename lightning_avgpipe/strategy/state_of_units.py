"""State that submodules change on their own process is brought to the others before user code between steps reads it.

::

    rank 1 (stage 0)   encoder: running_mean, self.calls    --+
    rank 0 (stage 1)   head: running_mean                   --+--> equal on both when hooks run
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_avgpipe.capture.reads import Key
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.state.parcel import Packer
from lightning_avgpipe.strategy.rank_zero_hooks import LARGEST, accept, packed, unpacked
from lightning_avgpipe.training.deployment import Deployment, hosts_of
from lightning_avgpipe.utils.elsewhere import Elsewhere
from lightning_avgpipe.utils.names import joined


class StateOfUnits:
    """Buffers and attributes that submodules change in steps, of which each process has those of its own stages.

    Args:
        module: the divided module.
        cluster: the connected processes.
        deployment: deployment of the module on processes.
    """

    def __init__(self, module: nn.Module, cluster: Cluster, deployment: Deployment) -> None:
        self._module, self._cluster, self._deployment = module, cluster, deployment

    def bring(self, step: str) -> None:
        """Bring what a step has changed to all processes of the group. Each of them calls it.

        A step that has no stages any more, since there is a new plan, has them again when it runs next.
        """
        divided = self._cluster.group.world_size > 1 and step in self._deployment.pipeline.steps
        owners = dict(self._owned(step)) if divided else {}
        if not owners:
            return
        packer = Packer(self._module)
        mine = {key: self._packed(packer, key) for key, rank in owners.items() if rank == self._cluster.rank}
        for rank, found in enumerate(self._cluster.group.exchange_objects(mine, "what submodules have changed")):
            for (path, name), value in found.items() if rank != self._cluster.rank else ():
                if isinstance(value, tuple):
                    value = unpacked(packer, value, self._cluster.device)
                accept(self._module.get_submodule(path), name, value)

    def _owned(self, step: str) -> Iterator[tuple[Key, int]]:
        """Yield the buffers and attributes that submodules change in a step, with the rank that has them."""
        graph, plan, answers = (
            self._deployment.pipeline.graph(step),
            self._deployment.plan,
            self._deployment.holdings.answers,
        )
        buffers = dict(self._module.named_buffers())
        for name in sorted(graph.changed):
            if name in buffers and name in answers:
                path, _, leaf = name.rpartition(".")
                yield (path, leaf), answers[name]
        for path, name in graph.changed_by_units:
            hosts = hosts_of(plan, path, self._cluster.stage_map) if path and plan is not None else set()
            if len(hosts) == 1:
                yield (path, name), hosts.pop()

    def _packed(self, packer: Packer, key: Key) -> Any:
        path, name = key
        module = self._module.get_submodule(path)
        try:
            return packed(packer, module._buffers[name] if name in module._buffers else vars(module).get(name), LARGEST)
        except Exception as error:  # pickling runs code of the objects, which may raise any error
            return Elsewhere(
                joined(path, name),
                f"which the submodule changes on rank {self._cluster.rank}, and which cannot be sent: {error}. Keep "
                "what hooks read in a buffer or a number, or return it from the submodule",
            )
