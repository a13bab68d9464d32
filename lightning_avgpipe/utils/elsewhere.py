"""A placeholder for the value of an attribute that a submodule changes on another stage."""

from __future__ import annotations

from typing import Any

from lightning_avgpipe.errors import AbsentValueError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.source import source_line

_BINARY = "add and divmod floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_OTHERS = (
    "abs bool bytes call complex contains delitem enter eq exit float format ge getitem gt hash index int invert iter "
    "le len lt ne neg next pos round setitem str trunc"
)
_USES = (*_OTHERS.split(), *(f"{side}{name}" for name in _BINARY.split() for side in ("", "r", "i")))


class Elsewhere:
    """The value of an attribute that only the process or stage of its submodule has; using it is an error.

    Args:
        name: full name of the attribute.
        why: why the value is not available here, and what to do.
    """

    __slots__ = ("_name", "_why")

    def __init__(self, name: str, why: str) -> None:
        self._name, self._why = name, why

    def __repr__(self) -> str:
        return f"Elsewhere({self._name!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by tools, such as copy and inspect
            raise AttributeError(name)
        return self._used()

    def __reduce__(self) -> Any:
        return Elsewhere, (self._name, self._why)

    def _used(self, *_: Any) -> Any:
        raise AbsentValueError(f"{source_line()} uses '{self._name}', {self._why}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise the error for functions of torch too: parsing their arguments calls no other method of this class."""
        next(leaf for leaf in tree.leaves((args, kwargs)) if isinstance(leaf, cls))._used()

    @property
    def __array__(self) -> Any:
        return self._used()


for _use in _USES:
    setattr(Elsewhere, f"__{_use}__", Elsewhere._used)
