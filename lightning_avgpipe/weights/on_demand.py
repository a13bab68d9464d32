"""Parameters that a process does not hold, fetched on demand for one operation at a time.

Rank 0 captures a step function of all stages, although it holds only its own. When an operation takes a parameter
without contents, these are fetched, used and dropped. They come from the process that holds them or, if none does yet,
from the origin (initialisation, a checkpoint). So the captured step computes with real numbers, and no process ever
holds more than the contents of one module in addition to its own.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from lightning_avgpipe.capture.tracer import DEVICE_METADATA, METADATA
from lightning_avgpipe.capture.zeros import LargeResultsAreZero
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import CaptureError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import joined
from lightning_avgpipe.utils.tensors import lent
from lightning_avgpipe.utils.torch_compat import SavedHooks, version_of
from lightning_avgpipe.weights.initialisation import Origin
from lightning_avgpipe.weights.ownership import fill_parameter, return_freed
from lightning_avgpipe.weights.relocation import Lending


class OnDemandGather:
    """A gatherer of parameters that other processes hold, or no process.

    Args:
        module: whole module.
        cluster: cluster with open channels.
        origin: source of parameters that no process holds; None if there are none.
    """

    def __init__(self, module: nn.Module, cluster: Cluster, origin: Origin | None) -> None:
        self._module = module
        self._cluster = cluster
        self._origin = origin

    def on_rank_zero(self, make: Callable[[], Any]) -> Any:
        """Run ``make`` on rank 0, to which the others lend their parameters, and return its result on every process.

        Every process calls it. Other groups than the first wait for the result, since all must have the same stages.
        """
        cluster, doing = self._cluster, "follows a step to divide it into stages"
        made = pickle.dumps(self.run_on_rank_zero(make, doing) if cluster.group_number == 0 else None)
        # rank 0 gets a copy too, because the result may refer to objects that the step changes later
        return pickle.loads(cluster.world.broadcast(made))

    def run_on_rank_zero(self, run: Callable[[], Any], what: str) -> Any:
        """Run a function on rank 0 of each group, to which the other processes lend their parameters while it runs.

        Every process calls it; rank 0 gets the function's result, and the others None.

        Args:
            run: function, which runs on rank 0 only.
            what: what rank 0 is doing, for messages.
        """
        cluster, parameters = self._cluster, dict(self._module.named_parameters())
        here = [name for name, parameter in parameters.items() if not parameter.is_meta]
        lending = Lending(cluster.group, parameters, here, cluster.device)

        def with_contents() -> Any:
            with cluster.watch.during(what):
                return self._with_contents(run, lending)

        return lending.run(with_contents)

    def _with_contents(self, run: Callable[[], Any], lending: Lending) -> Any:
        """Run a function in which the contents of parameters without contents are fetched when they are used."""
        absent = {id(p): name for name, p in self._module.named_parameters() if p.is_meta}
        if not absent:
            return run()
        lent = _Lent(absent, lambda name: self._fetch(name, lending), self._cluster.device)
        invented = self._origin is not None and self._origin.only_examples
        with SavedHooks(lent.forget, _refuse), lent, LargeResultsAreZero() if invented else nullcontext():
            result = run()
        lent.clear()
        if self._origin is not None:
            self._origin.forget_examples()
        gc.collect()  # reference cycles may keep fetched contents alive
        return_freed()
        return result

    def fill(self, wanted: Collection[str]) -> None:
        """Fill parameters of this process that have no contents, from the origin.

        Args:
            wanted: names of parameters that this process is to hold, and that no other process holds.
        """
        parameters = dict(self._module.named_parameters())
        for name, contents in self.contents(name for name in parameters if name in wanted):
            fill_parameter(self._module, name, parameters[name], contents)

    def contents(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the contents of parameters that have none on this process, from the origin, module by module."""
        modules: dict[str, list[str]] = {}
        for name in names:
            if self._module.get_parameter(name).is_meta:
                modules.setdefault(name.rpartition(".")[0], []).append(name)
        for together in modules.values():
            assert self._origin is not None
            yield from self._origin.tensors(together).items()

    def _fetch(self, name: str, lending: Lending) -> dict[str, Tensor]:
        if name in lending.held:
            return lending.fetch([name])
        assert self._origin is not None
        path = name.rpartition(".")[0]
        own = self._module.get_submodule(path)._parameters
        together = [joined(path, leaf) for leaf, parameter in own.items() if parameter is not None]
        return self._origin.tensors([n for n in together if n == name or n not in lending.held], example=True)


class _Lent(TorchFunctionMode):
    """A mode in which torch functions get a stand-in with contents for each parameter without contents.

    Args:
        absent: ``id -> name`` of the parameters without contents.
        fetch: returns the contents of the parameter of this name, and perhaps of others of its module, by name.
        device: device of the stand-ins.
    """

    def __init__(
        self, absent: Mapping[int, str], fetch: Callable[[str], dict[str, Tensor]], device: torch.device
    ) -> None:
        super().__init__()
        self._absent = absent
        self._fetch = fetch
        self._device = device
        self._last: dict[str, tuple[Tensor, int]] = {}  # contents that were fetched last, and their versions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DEVICE_METADATA and id(args[0]) in self._absent:
            return func(torch.empty(0, device=self._device))
        if func in METADATA:
            return func(*args, **kwargs)
        stands_for: dict[int, Tensor] = {}
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            func = Tensor.detach  # unlike .data it shares the version counter, so that a change is noticed

        def stand_in_for(tensor: Tensor) -> Tensor:
            name = self._absent.get(id(tensor))
            if name is None:
                return tensor
            if func == Tensor.data.__set__:  # type: ignore[attr-defined]
                raise _changed(name)
            stand_in = self._contents(name).requires_grad_(tensor.requires_grad)
            stands_for[id(stand_in)] = tensor
            return stand_in

        lent_args, lent_kwargs = tree.map_tensors(stand_in_for, (args, kwargs))
        result = func(*lent_args, **lent_kwargs)
        if not stands_for:
            return result
        return tree.map_tensors(lambda t: stands_for.get(id(t), t), result)

    def _contents(self, name: str) -> Tensor:
        if name not in self._last:
            self.clear()
            # fetching and initialisation are not part of the step
            with _disable_current_modes(), torch.inference_mode(False):
                self._last = {one: (tensor, version_of(tensor)) for one, tensor in self._fetch(name).items()}
        with _disable_current_modes():
            return lent(self._last[name][0].detach())

    def clear(self) -> None:
        """Drop the contents that were fetched last.

        Raises:
            CaptureError: the step has changed them.
        """
        last, self._last = self._last, {}
        for name, (tensor, version) in last.items():
            if version_of(tensor) != version:
                raise _changed(name)

    @staticmethod
    def forget(tensor: Tensor) -> None:
        """Pack a tensor that autograd saves as None: there is no backward, and it must not keep fetched contents."""


def _changed(name: str) -> CaptureError:
    return CaptureError(
        f"the step itself changes the parameter '{name}', which is on the meta device or on other stages while the "
        "step is captured. Build the module without torch.device('meta'), or change the parameter in on_train_batch_end"
    )


def _refuse(_: None) -> Tensor:
    raise CaptureError(
        "The step itself runs a backward (autograd.grad, gradient penalties), which needs all weights at once; some "
        "are on the meta device or on other stages. Build the module without torch.device('meta'), and use one stage"
    )
