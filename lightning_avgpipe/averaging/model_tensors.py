"""The parallel models' own tensors under the name of a parameter or buffer, as they move between processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from lightning_avgpipe.averaging.models import Models
from lightning_avgpipe.averaging.replica import alike
from lightning_avgpipe.weights.ownership import fill, vacate


class ModelTensors:
    """The tensors of models 1..N-1, of the reference, and of its buffers over groups; model 0 is the module itself.

    Args:
        models: parallel models; the module shows model 0.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._placement = models.placement
        self._others = models.replicas[1:]
        self._reference = models.reference
        self._shared = {} if models.shared is None else models.shared.buffers

    def held(self, name: str) -> dict[str, Any]:
        """Return the tensors under a name, those of models with their gradients."""
        self._placement.read_back()
        found = [r.parameters.get(name, r.buffers.get(name)) for r in self._others]
        return {
            "models": [None if t is None else (t.detach(), t.grad) for t in found],
            "reference": self._reference.get(name),
            "shared": self._shared.get(name),
        }

    @torch.no_grad()
    def put(self, name: str, item: Mapping[str, Any]) -> None:
        """Store what another process held. The module's own tensor must be there already."""
        self._placement.read_back()
        if name in self._reference:
            fill(self._reference[name], item["reference"])
            self._placement.add([name])
        for replica, model in zip(self._others, item["models"], strict=True):
            if name in self._reference:
                replica.parameters[name] = self._models.leaf(name)
                replica.parameters[name].data, replica.parameters[name].grad = model
            elif name in replica.buffers:
                replica.buffers[name] = alike(replica.buffers[name], model[0])
        if name in self._shared:
            self._shared[name] = alike(self._shared[name], item["shared"])

    def drop(self, names: Collection[str]) -> None:
        """Give up the parameters of these names."""
        for name in names:
            if name in self._reference:
                vacate(self._reference[name])
                self._placement.remove(name)
            for replica in self._others:
                replica.parameters.pop(name, None)
                if isinstance(replica.buffers.get(name), nn.Parameter):
                    vacate(replica.buffers[name])
