"""What each of several micro-batches finds in attributes of modules: what itself has left there, if it has."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.utils.torch_compat import REGISTRIES

_MISSING = object()
Key = tuple[Any, ...]  # number of a module, name of the attribute, and a key if that holds a dict


class OwnVariables:
    """Attributes of modules, of which each micro-batch has those that it has assigned, and items of dicts there.

    Whole numbers, names and modes are for each as they were when the step began, so a counter counts steps; others are
    as the micro-batch before has left them until it assigns them, so all of them add to a sum.

    Args:
        module: with its submodules.
        count: M, of micro-batches.
        ignore: modules of which all have the same (metrics).
    """

    def __init__(self, module: nn.Module, count: int, ignore: Collection[nn.Module] = ()) -> None:
        ignored = {id(inner) for one in ignore for inner in one.modules()}
        self._modules = [(path, m) for path, m in module.named_modules() if id(m) not in ignored]
        begun = {key: value for key, value in self._held().items() if isinstance(value, (int, str, type(None)))}
        self._own = [dict(begun) for _ in range(count)]
        self._assigned: list[set[Key]] = [set() for _ in range(count)]

    @contextlib.contextmanager
    def placed(self, i: int) -> Iterator[None]:
        """Within this context micro-batch i runs.

        Raises:
            StepChangedError: it adds to a number to which it has added before, and others have meanwhile.
        """
        for key, value in self._own[i].items():
            self._put(key, value)
        before = self._held()
        try:
            yield
        finally:
            changed = self._changed(before)
            again = [key for key in changed.keys() & self._assigned[i] if _adds(changed[key])]
            self._own[i] |= changed
            self._assigned[i] |= changed.keys()
        if again and len(self._own) > 1:
            raise StepChangedError(
                f"training_step assigns '{self._name(again[0])}' once more after micro-batches have met, and it is not "
                "known whether it adds to it; use a local variable, a list or a metric, or num_microbatches=1"
            )

    @contextlib.contextmanager
    def common(self) -> Iterator[None]:
        """What is assigned within this context all micro-batches find."""
        before = self._held()
        try:
            yield
        finally:
            changed = self._changed(before)
            for own in self._own:
                own |= changed

    def _changed(self, before: dict[Key, Any]) -> dict[Key, Any]:
        now = self._held()
        values = ((key, now.get(key, _MISSING)) for key in before.keys() | now.keys())
        return {key: value for key, value in values if value is not before.get(key, _MISSING)}

    def _put(self, key: Key, value: Any) -> None:
        space: Any = vars(self._modules[key[0]][1])
        for name in key[1:-1]:
            space = space.get(name)
        if not isinstance(space, dict):
            return
        if value is not _MISSING:
            space[key[-1]] = value
        else:
            space.pop(key[-1], None)

    def _held(self) -> dict[Key, Any]:
        found: dict[Key, Any] = {}
        for n, (_, module) in enumerate(self._modules):
            for name, value in vars(module).items():
                if name in REGISTRIES:
                    continue
                found[n, name] = value
                if isinstance(value, dict) and not name.startswith("_"):
                    found |= {(n, name, key): item for key, item in value.items()}
        return found

    def _name(self, key: Key) -> str:
        return ".".join(str(part) for part in (self._modules[key[0]][0], *key[1:]) if part != "")


def _adds(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.ndim == 0)
