"""Parameters that a process does not hold, gathered on demand for one operation at a time.

Rank 0 follows a step function through all stages, though it holds at most one. Whenever an operation takes a parameter
without contents, they are fetched, used and dropped: from the process that holds them or, before anybody does, from
the origin (initialisation, a checkpoint). So the captured step computes with real numbers, and no process ever holds
more than the contents of one module besides its own.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from lightning_avgpipe.capture.tracer import DEVICE_QUESTIONS, METADATA
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import CaptureError
from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.torch_compat import version_of
from lightning_avgpipe.weights.initialisation import Origin
from lightning_avgpipe.weights.ownership import Owners, take_back
from lightning_avgpipe.weights.relocation import Relocation, holders


class OnDemandGather:
    """Knows which process holds what, and brings it to where it is needed.

    Args:
        module: the whole module.
        cluster: with open channels.
        origin: of what no process holds; None if that cannot be.
    """

    def __init__(self, module: nn.Module, cluster: Cluster, origin: Origin | None) -> None:
        self._module = module
        self._cluster = cluster
        self._origin = origin

    def on_rank_zero(self, make: Callable[[], Any]) -> Any:
        """Every process gets what rank 0 makes, while the others lend it their parameters. Every process calls it.

        Other groups than the first wait for it, since the same stages are to be the same everywhere.
        """
        cluster = self._cluster
        first, made = cluster.group_number == 0, tuple[Any, ...]()
        while not made:
            made = (self._on_rank_zero(make),) if first else ()
            if cluster.stage_map.num_groups > 1:
                made = cluster.world.broadcast(made)
                first = cluster.world.ranks[0] in cluster.group.ranks  # the first group may have left meanwhile
        return made[0]

    def _on_rank_zero(self, make: Callable[[], Any]) -> Any:
        cluster = self._cluster
        held = holders(cluster.group, [name for name, p in self._module.named_parameters() if not p.is_meta])
        if cluster.rank == 0:
            absent = {id(p): name for name, p in self._module.named_parameters() if p.is_meta}
            with cluster.channels.monitor.during("follows a step to divide it into stages"):
                made = pickle.dumps(self._make(make, absent, held) if absent else make())
            cluster.channels.control.publish((None, made))
            return pickle.loads(made)
        while True:
            news: Any = cluster.channels.control.publish()
            name, made = news
            if name is None:
                return pickle.loads(made)
            self._exchange(name, held)

    def _make(self, make: Callable[[], Any], absent: Mapping[int, str], held: Owners) -> Any:
        lent = _Lent(absent, lambda name: self._fetch(name, held), self._cluster.device)
        with saved_tensors_hooks(lent.forget, _refuse), lent:
            made = make()
        lent.clear()
        gc.collect()  # what was lent may wait in a cycle
        return made

    def fill(self, wanted: Collection[str]) -> None:
        """Give own parameters contents from the origin, if they have none.

        Args:
            wanted: names of parameters to be held here, which no process holds unless this one does.
        """
        modules: dict[str, list[str]] = {}
        for name, parameter in self._module.named_parameters():
            if parameter.is_meta and name in wanted:
                modules.setdefault(name.rpartition(".")[0], []).append(name)
        for names in modules.values():
            assert self._origin is not None
            take_back(self._module, self._origin.tensors(names))

    def _fetch(self, name: str, held: Owners) -> dict[str, Tensor]:
        if name in held:
            self._cluster.channels.control.publish((name, None))
            return {name: self._exchange(name, held)}
        assert self._origin is not None
        path = name.rpartition(".")[0]
        together = [joined(path, leaf) for leaf in self._module.get_submodule(path)._parameters]
        return self._origin.tensors([full for full in together if full == name or full not in held])

    def _exchange(self, name: str, held: Owners) -> Tensor:
        parameter = self._module.get_parameter(name).detach()
        arrived = Relocation({name: held[name]}, {name: (0,)}).carry_out(self._cluster.group, lambda _: parameter)
        return arrived[name].on(self._cluster.device) if arrived else parameter


class _Lent(TorchFunctionMode):
    """Torch functions that take a parameter without contents get a stand-in that has them.

    Args:
        absent: ``id -> name`` of the parameters without contents.
        fetch: name -> contents of this parameter, and perhaps of others of its module.
        device: where they are wanted.
    """

    def __init__(
        self, absent: Mapping[int, str], fetch: Callable[[str], dict[str, Tensor]], device: torch.device
    ) -> None:
        super().__init__()
        self._absent = absent
        self._fetch = fetch
        self._device = device
        self._last: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DEVICE_QUESTIONS and id(args[0]) in self._absent:
            return func(torch.empty(0, device=self._device))
        if func in METADATA:
            return func(*args, **kwargs)
        stands_for: dict[int, Tensor] = {}
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            func = Tensor.detach  # through which a change can be noticed

        def stand_in(tensor: Tensor) -> Tensor:
            name = self._absent.get(id(tensor))
            if name is None:
                return tensor
            if func == Tensor.data.__set__:  # type: ignore[attr-defined]
                raise _changed(name)
            lent = self._contents(name).requires_grad_(tensor.requires_grad)
            stands_for[id(lent)] = tensor
            return lent

        lent_args, lent_kwargs = pytree.tree_map_only(Tensor, stand_in, (args, kwargs))
        result = func(*lent_args, **lent_kwargs)
        if not stands_for:
            return result
        return pytree.tree_map_only(Tensor, lambda t: stands_for.get(id(t), t), result)

    def _contents(self, name: str) -> Tensor:
        if name not in self._last:
            self.clear()
            # what fetches, or initialises, is no part of the step
            with _disable_current_modes(), torch.inference_mode(False):
                self._last = self._fetch(name)
            self._versions = {name: version_of(tensor) for name, tensor in self._last.items()}
        return self._last[name].detach()

    def clear(self) -> None:
        """Drop what was fetched last.

        Raises:
            CaptureError: the step has changed it.
        """
        last, self._last = self._last, {}
        for name, tensor in last.items():
            if version_of(tensor) != self._versions[name]:
                raise _changed(name)

    @staticmethod
    def forget(tensor: Tensor) -> None:
        """Autograd keeps nothing: there is no backward, and it would keep what was lent."""


def _changed(name: str) -> CaptureError:
    return CaptureError(
        f"the step changes the parameter '{name}' itself, which is on the meta device or on other stages while the "
        "step is followed. Build the module without torch.device('meta'), or change the parameter in on_train_batch_end"
    )


def _refuse(_: None) -> Tensor:
    raise CaptureError(
        "The step runs a backward itself (autograd.grad, gradient penalties), which needs all weights at once; some "
        "are on the meta device or on other stages. Build the module without torch.device('meta'), and use one stage"
    )
