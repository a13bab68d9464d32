"""What each of several micro-batches finds in attributes of modules: what itself has left there, if it has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_avgpipe.utils.torch_compat import REGISTRIES

_MISSING = object()
Key = tuple[int, str]  # number of a module, name of the attribute


class OwnVariables:
    """Attributes of modules, of which each micro-batch has those that it has assigned.

    One that it has not yet assigned is as the one before it has left it, so a counter counts micro-batches; but all of
    them begin in the same mode of training.

    Args:
        module: with its submodules.
        count: M, of micro-batches.
    """

    def __init__(self, module: nn.Module, count: int) -> None:
        self._modules = list(module.modules())
        modes: dict[Key, Any] = {(n, "training"): m.training for n, m in enumerate(self._modules)}
        self._own = [dict(modes) for _ in range(count)]

    @contextlib.contextmanager
    def placed(self, i: int) -> Iterator[None]:
        """Within this context micro-batch i runs."""
        own = self._own[i]
        for (n, name), value in own.items():
            held = vars(self._modules[n])
            if value is not _MISSING:
                held[name] = value
            else:
                held.pop(name, None)
        before = self._held()
        try:
            yield
        finally:
            now = self._held()
            for key in before.keys() | now.keys() | own.keys():
                value = now.get(key, _MISSING)
                if key in own or value is not before.get(key, _MISSING):
                    own[key] = value

    def _held(self) -> dict[Key, Any]:
        return {
            (n, name): value
            for n, module in enumerate(self._modules)
            for name, value in vars(module).items()
            if name not in REGISTRIES
        }
