"""Send state that the code of a step changes, which the last stage has, to all processes before their hooks read it.

::

    training_step          self.losses.append(loss.item())     on rank 0, which has the last stage
    on_train_epoch_start   lr = 0.1 * self.losses[-1]          on every process: the list is sent before
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from torch import nn

from lightning_avgpipe.capture.reads import Key
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.state.outside import names_in, variable
from lightning_avgpipe.state.parcel import Packer
from lightning_avgpipe.strategy.hooks import RUN_BY_ALL_PROCESSES, WITH_RESULTS
from lightning_avgpipe.strategy.iteration import STEP
from lightning_avgpipe.strategy.rank_zero_hooks import LARGEST, accept, packed, unpacked
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.utils.lightning import pl


class StateOfSteps:
    """Sends attributes and variables that code between submodules changes to hooks whose code names them."""

    def __init__(self, trainer: pl.Trainer, cluster: Cluster, deployment: Deployment) -> None:
        self._trainer, self._cluster, self._deployment = trainer, cluster, deployment
        self._module: nn.Module = trainer.lightning_module
        # identity of the owner, and name of the hook -> functions that were searched, and names found in them
        self._named: dict[tuple[int, str], tuple[list[Callable[..., Any]], frozenset[str]]] = {}

    @cached_property
    def _packer(self) -> Packer:
        return Packer(self._module)

    def send_changes(self, owner: Any, name: str) -> None:
        """Send what a hook may read from rank 0 to the other processes. Every process calls it before the hook.

        Args:
            owner: the module or callback that has the hook.
            name: name of the hook.
        """
        # rank 0 alone runs the latter
        if name not in RUN_BY_ALL_PROCESSES or (owner is self._module and name in WITH_RESULTS):
            return
        keys = list(self._keys(owner, name)) if STEP in self._deployment.pipeline.steps else []
        if not keys:
            return
        sent: Any = self._cluster.control.broadcast(list(map(self._packed, keys)) if self._cluster.rank == 0 else None)
        for key, content in zip(keys, sent, strict=True) if self._cluster.rank else ():
            if content is None:
                continue
            accept(self._module, key, unpacked(self._packer, content, self._cluster.device))

    def _keys(self, owner: Any, name: str) -> Iterator[Key]:
        """Yield the attributes and variables that the step changes between submodules and the hook's code names."""
        graph = self._deployment.pipeline.graph(STEP)
        changed = graph.changed_between
        if changed:
            named = self._names(owner, name)
            yield from (key for key in changed if key[1].rpartition(".")[2] in named)

    def _names(self, owner: Any, name: str) -> frozenset[str]:
        """Return the names that a hook may read."""
        # a search for a learning rate puts other schedules and callbacks in the place of the user's for a while
        functions = self._functions(owner, name)
        known = self._named.get((id(owner), name))
        if known is None or known[0] != functions:
            known = functions, names_in(functions, (type(self._module), type(owner)))
            self._named[id(owner), name] = known
        return known[1]

    def _functions(self, owner: Any, name: str) -> list[Callable[..., Any]]:
        """Return the functions of a hook, and functions that it calls without naming them."""
        functions = [getattr(type(owner), name, None), vars(owner).get(name)]
        if name == "lr_scheduler_step":
            for config in self._trainer.lr_scheduler_configs:
                scheduler: Any = config.scheduler
                functions += [*getattr(scheduler, "lr_lambdas", ()), type(scheduler).step, type(scheduler).get_lr]
        if name == "optimizer_step":  # Lightning calls these hooks within it
            owners: list[Any] = [self._module, *self._trainer.callbacks]  # type: ignore[attr-defined]
            for inner in ("on_before_optimizer_step", "configure_gradient_clipping"):
                functions += [getattr(type(one), inner, None) for one in owners]
        return [function for function in functions if function is not None]

    def _packed(self, key: Key) -> Any:
        """Return a value in a form that can be sent; None if it is too large or cannot be pickled, and is not sent."""
        try:
            return packed(self._packer, variable(self._module, *key).state()["value"], LARGEST)
        except Exception:  # pickling runs code of the objects, which may raise any error
            return None
