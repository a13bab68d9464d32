"""Send state that stages change to the other processes, before user code between steps reads it.

What submodules change is sent after a step, by the process of each::

    rank 1 (stage 0)   encoder: running_mean, self.calls    --+
    rank 0 (stage 1)   head: running_mean                   --+--> equal on both when hooks run

What the code of the step changes behind the last submodule is sent to the hooks that name it::

    training_step          self.losses.append(loss.item())     on rank 0, which has the last stage
    on_train_epoch_start   lr = 0.1 * self.losses[-1]          on every process: the list is sent before
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.capture.reads import Key
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.state.outside import names_in, variable
from lightning_avgpipe.state.parcel import Packer
from lightning_avgpipe.state.snapshot import assign
from lightning_avgpipe.strategy.hooks import RUN_BY_ALL_PROCESSES, WITH_RESULTS
from lightning_avgpipe.strategy.iteration import STEP
from lightning_avgpipe.training.deployment import Deployment, hosts_of
from lightning_avgpipe.utils.lightning import pl
from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.placeholder import Absent, Elsewhere
from lightning_avgpipe.utils.tensors import is_strided, tensor_bytes

LARGEST = 2**20  # bytes; larger values of attributes that a step reads on other processes are not sent

Packed = tuple[bytes, list[Tensor], list[bool]]  # a pickled value, its tensors, and whether each was on the host


class Gone:
    """A message in place of the value of an attribute that was deleted."""


class AttributePacker:
    """Packs values of attributes, buffers and variables, and puts in place those that other processes have sent.

    Args:
        module: the whole module.
        device: device of this process, on which tensors are put that were on the device of another process.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device, self._packer = module, device, Packer(module)

    def pack(self, value: Any, most: int = LARGEST) -> Packed:
        """Return a value in a form that can be sent: pickled without its tensors, and copies of these on the host.

        Raises:
            Exception: it cannot be pickled, holds tensors that cannot be sent, or has more than ``most`` bytes.
        """
        content, tensors = self._packer.pickled(value)
        if any(isinstance(t, (nn.Parameter, Absent)) or t.is_meta for t in tensors):
            raise pickle.PicklingError("it holds a parameter, or a tensor that another stage has")
        if not all(map(is_strided, tensors)):
            raise pickle.PicklingError("it holds a sparse or nested tensor")
        size = len(content) + sum(map(tensor_bytes, tensors))
        if size > most:
            raise pickle.PicklingError(f"it has {size} bytes, and {most} at most are sent")
        return content, [t.detach().clone().cpu() for t in tensors], [t.is_cpu for t in tensors]

    def unpack(self, content: Sequence[Any]) -> Any:
        """Return the value that another process has packed."""
        pickled, tensors, on_host = content
        here = [t if of_host else t.to(self._device) for t, of_host in zip(tensors, on_host, strict=True)]
        return self._packer.unpickled(pickled, here)

    def accept(self, key: Key, value: Any) -> None:
        """Set an attribute, a buffer, or a variable outside of modules to a value that another process has sent.

        For a parameter the value is its ``requires_grad``. Buffers and mutable objects are changed in place, if
        possible.
        """
        path, name = key
        module, held = self._module.get_submodule(path), variable(self._module, path, name)
        parameter, buffer = module._parameters.get(name), module._buffers.get(name)
        if isinstance(value, Gone):
            held.put({})
        elif parameter is not None:
            parameter.requires_grad_(value)
        elif isinstance(buffer, Tensor) and isinstance(value, Tensor) and buffer.shape == value.shape:
            with torch.no_grad():
                buffer.copy_(value)
        elif name in module._buffers:
            module._buffers[name] = value
        elif not assign(held.state().get("value"), value):
            held.put({"value": value})


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
        packer, rank = AttributePacker(self._module, self._cluster.device), self._cluster.rank
        buffers = {(path, name) for path, module in self._module.named_modules() for name in module._buffers}
        size = 1 if ensemble is None else ensemble.models.size
        # the reference's buffers, which rolling groups have averaged before
        shared = {} if ensemble is None or ensemble.models.shared is None else ensemble.models.shared.buffers

        def shown(n: int) -> AbstractContextManager[None]:
            return contextlib.nullcontext() if ensemble is None else ensemble.placed(n)

        own, mine = [key for key, owner in owners.items() if owner == rank], list[dict[Key, Any]]()
        for n in range(size):
            with shown(n):
                mine.append({key: self._packed(packer, key) for key in own if n == 0 or key in buffers})
        of_reference = {key: shared[name] for key in own if (name := joined(*key)) in shared}
        mine.append({key: self._packed(packer, key, buffer) for key, buffer in of_reference.items()})
        found = self._cluster.group.exchange_objects(mine, "what submodules have changed")
        others = [models for owner, models in enumerate(found) if owner != rank]
        for n in range(size):
            with shown(n):
                for key, value in (item for models in others for item in models[n].items()):
                    if isinstance(value, tuple):
                        packer.accept(key, packer.unpack(value))
                    elif not lenient:
                        packer.accept(key, value)
        for key, value in (item for models in others for item in models[size].items()):
            if isinstance(value, tuple):
                shared[joined(*key)] = packer.unpack(value)

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

    def _packed(self, packer: AttributePacker, key: Key, held: Any = None) -> Any:
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
            return packer.pack(held)
        except Exception as error:  # pickling runs code of the objects, which may raise any error
            return Elsewhere(
                joined(*key),
                f"which the submodule changes on rank {self._cluster.rank}, and which cannot be sent: {error}. Keep "
                "what hooks read in a buffer or a number, or return it from the submodule",
            )


class StateOfSteps:
    """Sends attributes and variables that code between submodules changes to hooks whose code names them."""

    def __init__(self, trainer: pl.Trainer, cluster: Cluster, deployment: Deployment) -> None:
        self._trainer, self._cluster, self._deployment = trainer, cluster, deployment
        self._module: nn.Module = trainer.lightning_module
        # identity of the owner, and name of the hook -> functions that were searched, and names found in them
        self._named: dict[tuple[int, str], tuple[list[Callable[..., Any]], frozenset[str]]] = {}

    @cached_property
    def _packer(self) -> AttributePacker:
        return AttributePacker(self._module, self._cluster.device)

    def send_changes(self, owner: Any, name: str) -> None:
        """Send what a hook may read from rank 0 to the other processes. Every process calls it before the hook.

        Args:
            owner: the module or callback that has the hook.
            name: name of the hook.
        """
        # rank 0 alone runs the latter
        if name not in RUN_BY_ALL_PROCESSES or (owner is self._module and name in WITH_RESULTS):
            return
        pipeline = self._deployment.pipeline
        changed = pipeline.graph(STEP).changed_between if STEP in pipeline.steps else ()
        named = self._names(owner, name) if changed else ()
        keys = [key for key in changed if key[1].rpartition(".")[2] in named]
        if not keys:
            return
        sent: Any = self._cluster.control.broadcast(list(map(self._packed, keys)) if self._cluster.rank == 0 else None)
        for key, content in zip(keys, sent, strict=True) if self._cluster.rank else ():
            if content is not None:
                self._packer.accept(key, self._packer.unpack(content))

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
            return self._packer.pack(variable(self._module, *key).state()["value"])
        except Exception:  # pickling runs code of the objects, which may raise any error
            return None
