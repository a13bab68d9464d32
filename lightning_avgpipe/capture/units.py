"""Units: the submodules that are never split, and how they are refined."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.utils.names import around, close_to, joined

# Containers are not called by users (or only pass on what they hold), so they are opened from the start.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# These use their children where nobody sees it, or all of their parameters at once.
_ATOMS: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: "is one operation",
    nn.RNNBase: "is one operation for all of its layers; chain several with num_layers=1",
    torch.jit.ScriptModule: "is a TorchScript module, in which nobody can follow; script its parts one by one",
}


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
        opens = path in chosen and divisible(root, path, ignore)
        refined.extend(_open(root.get_submodule(path), path, ignore) if opens else [path])
    return tuple(dict.fromkeys(refined))


def divisible(root: nn.Module, path: str, ignore: Collection[nn.Module] = ()) -> bool:
    """Whether a unit has children that it could be replaced by."""
    return why_whole(root, path, ignore) is None


def why_whole(root: nn.Module, path: str, ignore: Collection[nn.Module] = ()) -> str | None:
    """Why a unit cannot be opened; None if it can."""
    module = root.get_submodule(path)
    if not any(True for _ in _open(module, path, ignore)) and not isinstance(module, nn.RNNBase):
        return "has no submodules"
    return next((reason for kind, reason in _ATOMS.items() if isinstance(module, kind)), None)


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
            what = f"split point {point!r} is no submodule of {type(root).__name__}"
            raise PartitionError(f"{what}; {close_to(point, names)}")
        while above := [unit for unit in units if point.startswith(f"{unit}.") and divisible(root, unit, ignore)]:
            units = refine(root, units, above, ignore)
        if not any(f"{unit}.".startswith(f"{point}.") or point.startswith(f"{unit}.") for unit in units):
            units = (*units, point)  # none of the units that an earlier step called
    return tuple(units)


class Units:
    """Which module is a unit when it is called: those that are given, and what else is called outside of them.

    ::

        given     model                  the step calls self.model.features(x), or model.forward(x), never model(x)
        called    model.blocks.0  model.blocks.1  model.head           become units
        given     model.blocks.0.linear  ...                           model.blocks.0 is followed, whoever calls it

    Args:
        root: the module whose step is followed.
        given: paths of units to start from; modules that hold one are followed.
        ignore: modules that only observe; they and what they hold are no units.
    """

    def __init__(self, root: nn.Module, given: Sequence[str], ignore: Collection[nn.Module] = ()) -> None:
        self._paths = {id(m): path for path, m in root.named_modules()}
        self._given = tuple(given)
        self._units = {id(root.get_submodule(path)): path for path in given}
        self._called: dict[str, None] = {}
        above = {"", *(above for path in given for above in around(path))}
        self._followed = {id(root.get_submodule(path)) for path in above}
        self._followed.update(id(m) for m in root.modules() if is_container(m))
        self._followed.update(id(inner) for observer in ignore for inner in observer.modules())

    def path(self, module: nn.Module) -> str | None:
        """Where the unit lies that is called now; None if the module is followed, or none of the root's."""
        path = self._units.get(id(module))
        if path is None and id(module) in self._paths and id(module) not in self._followed:
            path = self._units[id(module)] = self._paths[id(module)]
        if path is not None:
            self._called[path] = None
        return path

    def found(self) -> tuple[str, ...]:
        """All units so far: the given ones, unless only parts of them were called, and those parts."""
        partly = {above for path in self._called for above in around(path)} - self._called.keys()
        return tuple(dict.fromkeys((*(path for path in self._given if path not in partly), *self._called)))


def _open(module: nn.Module, path: str, ignore: Collection[nn.Module]) -> Iterable[str]:
    for name, child in module.named_children():
        full = joined(path, name)
        if any(child is other for other in ignore):
            continue
        if is_container(child):
            yield from _open(child, full, ignore)
        else:
            yield full


_PASS_ON = (nn.ModuleList.forward, nn.ModuleDict.forward, nn.Sequential.forward)
