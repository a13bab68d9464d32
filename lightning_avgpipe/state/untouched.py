"""Run a step without lasting effects: random state, parameters, buffers, attributes and variables are restored."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lightning_avgpipe.state.objects import BASE_MODULE_ATTRIBUTES, Buffers, Variable
from lightning_avgpipe.state.outside import outside_variables
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.state.writes import put_back
from lightning_avgpipe.utils.device import all_generators
from lightning_avgpipe.utils.lightning import LIGHTNING
from lightning_avgpipe.utils.random_streams import HostState, restored
from lightning_avgpipe.utils.torch_compat import REGISTRIES, untraced

_HELD = BASE_MODULE_ATTRIBUTES.difference(REGISTRIES, ("_non_persistent_buffers_set",)) | {"_modules"}
_LIBRARIES = ("torch", *LIGHTNING, "torchmetrics", "builtins", "abc", "typing")


@contextlib.contextmanager
def random_state() -> Iterator[None]:
    """Restore the generators of torch (all devices), NumPy and Python after this context."""
    with restored(all_generators()), HostState.now():
        yield


class Untouched:
    """A record of everything that a step of a module may change, which can be restored after each of several runs.

    It has the buffers, the attributes of all submodules (counters, cached masks, lists of outputs, metric states), the
    hooks, the submodules themselves, which a step may replace, and random state. It also has attributes of the user's
    classes, and global and closure variables that their code refers to. Tensors and containers are restored in place.
    Parameters get back their memory, and those in ``changing`` also their contents.

    Args:
        module: module whose step runs.
        changing: full names of the parameters whose contents the step changes.
    """

    def __init__(self, module: nn.Module, changing: Collection[str] = ()) -> None:
        modules = list(module.modules())
        with untraced():  # reading the data must not fetch absent weights
            self._weights = [
                (p, p.detach(), p.detach().clone() if name in changing else None)
                for name, p in module.named_parameters()
            ]
        held = [Variable(vars(m), name) for m in modules for name in _HELD & vars(m).keys()]
        self._variables = Snapshot([*outside_variables(module).values(), *held], opaque=True)
        self._attributes = attributes([*modules, *_own_classes(modules)], contents=True)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore everything in the record after this context."""
        with random_state(), self._attributes.restored(), self._variables.restored():
            try:
                yield
            finally:
                for parameter, memory, contents in self._weights:
                    put_back(parameter, memory, contents)


def untouched(module: nn.Module) -> AbstractContextManager[None]:
    """Restore everything that a step of a module changes after this context; see :class:`Untouched`."""
    return Untouched(module).restored()


def attributes(owners: Sequence[Any], contents: bool = False) -> Snapshot:
    """Return a snapshot of the attributes of objects, classes and modules, and of modules' registered buffers.

    Args:
        owners: objects, classes and modules.
        contents: whether the values of tensors are kept, so that :meth:`Snapshot.restore` restores them in place.
    """
    buffers = [Buffers(owner) for owner in owners if isinstance(owner, nn.Module)]
    return Snapshot(buffers, owners, contents=contents, opaque=True)


def _own_classes(modules: Sequence[nn.Module]) -> list[type]:
    found = dict.fromkeys(kind for m in modules for kind in type(m).__mro__)
    return [kind for kind in found if kind.__module__.partition(".")[0] not in _LIBRARIES]


def unchanged(owner: Any) -> AbstractContextManager[None]:
    """Restore the attributes of any object after this context, and the contents of their tensors and containers."""
    return attributes([owner], contents=True).restored()
