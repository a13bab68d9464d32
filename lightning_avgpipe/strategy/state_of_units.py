"""Send state that submodules change on their own process to the others, before user code between steps reads it.

::

    rank 1 (stage 0)   encoder: running_mean, self.calls    --+
    rank 0 (stage 1)   head: running_mean                   --+--> equal on both when hooks run
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.capture.reads import Key
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.state.outside import variable
from lightning_avgpipe.state.parcel import Packer
from lightning_avgpipe.strategy.iteration import STEP
from lightning_avgpipe.strategy.rank_zero_hooks import LARGEST, accept, packed, unpacked
from lightning_avgpipe.training.deployment import Deployment, hosts_of
from lightning_avgpipe.utils.elsewhere import Elsewhere
from lightning_avgpipe.utils.names import joined


class StateOfUnits:
    """Sends buffers, attributes and variables that submodules change in steps, each from the process of its stage."""

    def __init__(self, module: nn.Module, cluster: Cluster, deployment: Deployment) -> None:
        self._module, self._cluster, self._deployment = module, cluster, deployment

    def owners(self, step: str, changed: bool = True, made: bool = False) -> dict[Key, int]:
        """Return what submodules change in a step, with the rank that has it. All processes return the same.

        The result is empty for a step without stages: after a new plan it gets them when it runs next.

        Args:
            step: name of the step function.
            changed: whether to include what submodules change in every run.
            made: whether to include what they make in the first run only.
        """
        divided = self._cluster.group.world_size > 1 and step in self._deployment.pipeline.steps
        return dict(self._owned(step, changed, made)) if divided else {}

    def send_changes(self, step: str, owners: Mapping[Key, int], lenient: bool = False) -> None:
        """Send what submodules have changed to all processes of the group. Each of them calls it.

        For the training step, the buffers of all parallel models are sent; otherwise those that the module has now.

        Args:
            step: name of the step function.
            owners: what to send, as :meth:`owners` returns it.
            lenient: whether a value that cannot be sent is left as it is elsewhere; otherwise using it there raises.
        """
        parallel, trains = self._deployment.parallel, step == STEP
        with parallel.showing_reference(False) if trains else contextlib.nullcontext():
            self._exchange(owners, parallel.ensemble if trains else None, lenient)

    def _exchange(self, owners: Mapping[Key, int], ensemble: Ensemble | None, lenient: bool) -> None:
        """Send what this process owns to the others, and accept what they own.

        Args:
            owners: attribute, buffer or variable -> rank that has it.
            ensemble: parallel models with buffers of their own; None: only the model that the module shows.
            lenient: as for :meth:`send_changes`.
        """
        packer, size = Packer(self._module), 1 if ensemble is None else ensemble.models.size
        buffers = {(path, name) for path, module in self._module.named_modules() for name in module._buffers}

        def shown(n: int) -> AbstractContextManager[None]:
            return contextlib.nullcontext() if ensemble is None else ensemble.placed(n)

        mine: list[dict[Key, Any]] = []
        for n in range(size):
            keys = [k for k, rank in owners.items() if rank == self._cluster.rank and (n == 0 or k in buffers)]
            with shown(n):
                mine.append({key: self._packed(packer, key) for key in keys})
        shared = None if ensemble is None else ensemble.models.shared
        if shared is not None:  # the reference's buffers, which rolling groups have averaged before
            keys = [k for k in buffers if owners.get(k) == self._cluster.rank and joined(*k) in shared.buffers]
            mine.append({key: self._packed(packer, key, shared.buffers[joined(*key)]) for key in keys})
        found = self._cluster.group.exchange_objects(mine, "what submodules have changed")
        others = [models for rank, models in enumerate(found) if rank != self._cluster.rank]
        for n in range(size):
            with shown(n):
                for key, value in (item for models in others for item in models[n].items()):
                    if isinstance(value, tuple):
                        value = unpacked(packer, value, self._cluster.device)
                    elif lenient:
                        continue
                    accept(self._module, key, value)
        if shared is not None:
            for key, value in (item for models in others for item in models[size].items()):
                if isinstance(value, tuple):
                    shared.buffers[joined(*key)] = unpacked(packer, value, self._cluster.device)

    def _owned(self, step: str, changed: bool, made: bool) -> Iterator[tuple[Key, int]]:
        """Yield the buffers, attributes and variables that submodules change or make, with the rank that has them."""
        loaded, plan = self._deployment.pipeline.steps[step], self._deployment.plan
        graph, owner_of, stage_map = loaded.graph, self._deployment.holdings.owner_of, self._cluster.stage_map
        buffers = dict(self._module.named_buffers())
        for name in sorted(graph.changed) if changed else ():
            if name in buffers and name in owner_of:
                path, _, leaf = name.rpartition(".")
                yield (path, leaf), owner_of[name]
        of_units = (graph.made_by_units if made else {}, graph.changed_by_units if changed else {})
        for (path, name), node in itertools.chain(*(one.items() for one in of_units)):
            hosts = hosts_of(plan, path, stage_map) if path and plan is not None else set()
            # the node decides, since another submodule may have changed it, or code between its own submodules
            if node >= 0 and len(hosts) <= 1:
                yield (path, name), stage_map.owner(bisect.bisect_right(loaded.cuts, node))
            elif len(hosts) == 1:
                yield (path, name), hosts.pop()

    def _packed(self, packer: Packer, key: Key, held: Any = None) -> Any:
        """Return a value in a form that can be sent, or an :class:`Elsewhere` if it cannot.

        Args:
            packer: pickles the value.
            key: path of a module, and name of the attribute.
            held: the value; None: what the module has under the key.
        """
        path, name = key
        buffers = self._module.get_submodule(path)._buffers
        try:
            if held is None:
                held = buffers[name] if name in buffers else variable(self._module, path, name).state().get("value")
            return packed(packer, held, LARGEST)
        except Exception as error:  # pickling runs code of the objects, which may raise any error
            return Elsewhere(
                joined(*key),
                f"which the submodule changes on rank {self._cluster.rank}, and which cannot be sent: {error}. Keep "
                "what hooks read in a buffer or a number, or return it from the submodule",
            )
