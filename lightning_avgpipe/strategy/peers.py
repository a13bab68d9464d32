"""Data-parallel peers: the processes for ``self.all_gather``, ``strategy.reduce`` and ``self.log(sync_dist=True)``.

::

    group 0     rank 1     rank 0        trains on samples 0 2 4 ..
    group 1     rank 3     rank 2        trains on samples 1 3 5 ..
                peers      peers

Groups train parallel models, or are replicas. Processes of one group work on the same batch, so they are no peers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.topology import Party
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.lightning import _all_gather_ddp_if_available, _sync_ddp_if_available, pl
from lightning_avgpipe.utils.tensors import reduced, reduction_name


class Peers:
    """The processes with the same place in all groups; each trains on a part of the data.

    A process that has no peers gets its own values back, unchanged, as on one device. In evaluation no process has
    peers, since every group evaluates all data: a sum over groups would count each sample several times.

    All processes construct this object at the same time. Peers have a process group of their own, so that messages of
    user code cannot mix with the messages of training.

    Args:
        trainer: trainer of the run.
        cluster: the connected processes.
        in_step: returns whether a step runs now, and no hook.
    """

    def __init__(self, trainer: pl.Trainer, cluster: Cluster, in_step: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._in_step = in_step
        layout = cluster.stage_map.layout
        self._members = None
        if len(layout) > 1:
            self._members = cluster.connect([Party("peers", ranks) for ranks in zip(*layout, strict=True)], "peers")

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all peers, in the order of groups.

        Args:
            tensor: tensor of this process.
            group: a process group that user code has made, which is used instead; None, or that of all processes: the
                peers.
            sync_grads: whether gradients flow back; refused over peers, since a hook has no backward.
        Raises:
            ConfigurationError: a training step calls it, or wants gradients.
        """
        if _is_own(group):
            return _all_gather_ddp_if_available(tensor, group, sync_grads)
        if sync_grads and tensor.requires_grad and self._are_several("all_gather(sync_grads=True)"):
            raise ConfigurationError(
                "all_gather(sync_grads=True) over groups of processes: a hook has no backward that would pass it; "
                "use sync_grads=False"
            )
        gathered = self._gathered(tensor, "all_gather")
        return tensor if gathered is None else gathered

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce the tensors of all peers; what is no tensor stays as it is.

        Args:
            tensor: tensor of this process.
            group: see :meth:`all_gather`.
            reduce_op: a name, such as "mean" or "sum", or an operation of torch.distributed.
        Raises:
            ConfigurationError: a training step calls it, or there is no such operation.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        if _is_own(group):
            return _sync_ddp_if_available(tensor, group, reduce_op)
        gathered = self._gathered(tensor, "reduce")
        if gathered is None:
            return tensor
        result = reduced(gathered, reduction_name(reduce_op))
        if result is None:
            raise ConfigurationError(
                f"strategy.reduce(reduce_op={reduce_op!r}): must be 'mean', 'sum', 'min', 'max' or 'product'"
            )
        return result

    def _gathered(self, tensor: Tensor, what: str) -> Tensor | None:
        """Stack the tensors of all peers; None if there are no peers."""
        if self._members is None or not self._are_several(what):
            return None
        found = self._members.exchange_objects(tensor.detach().cpu())
        return torch.stack([one.to(tensor.device) for one in found])

    def _are_several(self, what: str) -> bool:
        """Return whether there are peers now; raise if a step asks for them."""
        if self._members is None or not self._trainer.training:
            return False
        if self._in_step():
            raise ConfigurationError(
                f"{type(self._trainer.lightning_module).__name__}.training_step calls {what}, and "
                f"{self._members.world_size} groups of processes train on data of their own: groups do not wait for "
                "each other in the midst of a pipeline, and a step sees a micro-batch. Gather in on_train_batch_end or "
                "on_train_epoch_end instead, or use self.log, which goes over all groups by itself"
            )
        return True


def _is_own(group: Any) -> bool:
    """Return whether a process group is one that user code has made."""
    return group is not None and group is not dist.group.WORLD
