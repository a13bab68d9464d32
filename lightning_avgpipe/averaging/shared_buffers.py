"""Shared buffers: the buffers of the reference if the parallel models are in several groups.

One group averages its buffers when the reference is shown. That may happen in a single process, so several groups
average buffers together with parameters, in which all of them take part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_avgpipe.averaging.averaging_step import wide
from lightning_avgpipe.averaging.replica import alike
from lightning_avgpipe.comm.collectives import ReplicaGroup
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.tensors import is_strided


class SharedBuffers:
    """The buffers of the reference, as of the last averaging.

    Args:
        buffers: buffers of the module, equal in all groups at the beginning.
        replica_group: processes in other groups.

    Attributes:
        buffers: by name: the mean of floating-point and complex buffers, group 0's pipeline 0 for others; sparse ones
            are this group's.
    """

    def __init__(self, buffers: Mapping[str, Tensor], replica_group: ReplicaGroup) -> None:
        self.buffers = {name: alike(buffer, buffer.detach().clone()) for name, buffer in buffers.items()}
        self._replica_group = replica_group

    @torch.no_grad()
    def begin(self, models: Sequence[Mapping[str, Tensor]]) -> Callable[[], None]:
        """Begin to average the buffers over all groups' models. All processes of the replica group call it.

        Args:
            models: buffers of each model of this group.

        Returns:
            A function that waits for the mean and stores it.

        Raises:
            ConfigurationError: a buffer has changed its shape, which another group may not have done.
        """
        sparse = [name for name, centre in self.buffers.items() if not is_strided(centre)]
        self.buffers |= {name: models[0][name].detach().clone() for name in sparse if not models[0][name].is_meta}
        here = {n: centre for n, centre in self.buffers.items() if n not in sparse and not centre.is_meta}
        sums = {name: self._sum(name, centre, models) for name, centre in here.items()}
        arrive = self._replica_group.begin_sum(list(sums.values()))
        count = len(models) * self._replica_group.count

        @torch.no_grad()
        def end() -> None:
            arrive()
            for name, centre in here.items():
                change = sums[name]
                if has_mean(centre):
                    change = torch.where(change == 0, centre, centre + change / count)
                self.buffers[name] = alike(centre, change.to(centre.dtype))

        return end

    def _sum(self, name: str, centre: Tensor, models: Sequence[Mapping[str, Tensor]]) -> Tensor:
        for model in models:
            if model[name].shape != centre.shape:
                raise ConfigurationError(
                    f"buffer '{name}' had the shape {tuple(centre.shape)} and has {tuple(model[name].shape)} now, but "
                    "groups of processes average buffers; use one group (num_stages as many as devices), or a buffer "
                    "of a fixed shape"
                )
        if not has_mean(centre):  # group 0's value: the other groups add zero
            found = models[0][name].to(torch.int64)
            return found if self._replica_group.number == 0 else torch.zeros_like(found)
        return sum((deviation(model[name], centre) for model in models), torch.zeros_like(*wide([centre])))


def deviation(tensor: Tensor, centre: Tensor) -> Tensor:
    """Return tensor - centre in at least single precision; 0 where they are equal, also where both are infinite."""
    tensor, centre = wide((tensor.detach(), centre.detach()))
    return torch.where(tensor == centre, torch.zeros_like(centre), tensor - centre)


def has_mean(buffer: Tensor) -> bool:
    """Return whether models average a buffer."""
    return is_strided(buffer) and (buffer.is_floating_point() or buffer.is_complex())
