"""Units: the submodules that are never split, and how they are refined."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

from torch import nn

from lightning_avgpipe.errors import PartitionError

__all__ = ["divisible", "initial_units", "is_container", "refine", "split_units"]

# Containers are not called by users (or only pass on what they hold), so they are opened from the start.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# These read the parameters of their children without calling them.
_ATOMS = (nn.MultiheadAttention, nn.RNNBase)


def initial_units(root: nn.Module, ignore: Collection[nn.Module] = ()) -> tuple[str, ...]:
    """Paths of the coarsest units: the children of ``root``, with containers opened.

    Args:
        ignore: modules that only observe (metrics); they and what they hold are no units.
    """
    return tuple(_open(root, "", ignore))


def refine(
    root: nn.Module, units: Sequence[str], chosen: Collection[str], ignore: Collection[nn.Module] = ()
) -> tuple[str, ...]:
    """The same units with the chosen ones replaced by their children; a unit without children stays."""
    refined: list[str] = []
    for path in units:
        parts = list(_open(root.get_submodule(path), path, ignore)) if path in chosen else []
        refined.extend(parts if parts and _divisible(root.get_submodule(path)) else [path])
    return tuple(dict.fromkeys(refined))


def divisible(root: nn.Module, path: str) -> bool:
    """Whether a unit has children that it could be replaced by."""
    module = root.get_submodule(path)
    return _divisible(module) and any(True for _ in module.children())


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds or passes on to its children, so that it is never a unit."""
    return isinstance(module, _CONTAINERS) and type(module).forward in _PASS_ON


def split_units(
    root: nn.Module, units: Sequence[str], split_points: Sequence[str], ignore: Collection[nn.Module] = ()
) -> tuple[str, ...]:
    """Refine until a unit begins at every split point.

    Raises:
        PartitionError: a split point names no submodule; says which names come close.
    """
    names = {name for name, _ in root.named_modules() if name}
    for point in split_points:
        if point not in names:
            close = difflib.get_close_matches(point, names, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(repr(c) for c in close)}?" if close else "use a name of named_modules()."
            raise PartitionError(f"split point {point!r} is no submodule of {type(root).__name__}; {hint}")
        while True:
            above = [unit for unit in units if point.startswith(f"{unit}.")]
            if not above or not divisible(root, above[0]):
                break
            units = refine(root, units, above, ignore)
    return tuple(units)


def _open(module: nn.Module, path: str, ignore: Collection[nn.Module]) -> Iterable[str]:
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        if any(child is other for other in ignore):
            continue
        if is_container(child):
            yield from _open(child, full, ignore)
        else:
            yield full


_PASS_ON = (nn.ModuleList.forward, nn.ModuleDict.forward, nn.Sequential.forward)


def _divisible(module: nn.Module) -> bool:
    return not isinstance(module, _ATOMS)
