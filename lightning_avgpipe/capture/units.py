"""Decide which modules are units, the submodules that are never split, and find their tensors and neighbours."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor, nn

from lightning_avgpipe.utils.names import around, joined

# Containers are not called by users, or only call their children, so they are followed from the start.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PASS_ON = tuple(container.forward for container in _CONTAINERS)


def is_container(module: nn.Module) -> bool:
    """Return whether a module only holds its children or calls them in turn, so that it is never a unit."""
    return isinstance(module, _CONTAINERS) and type(module).forward in _PASS_ON


class Units:
    """The units of a module: the given ones, and modules that are called outside of these.

    ::

        given     model                  the step calls self.model.features(x), or model.forward(x), never model(x)
        called    model.blocks.0  model.blocks.1  model.head           become units
        given     model.blocks.0.linear  ...                           model.blocks.0 is followed, whoever calls it

    Args:
        root: module whose step is followed.
        given: paths of units to start from; modules that hold one are followed.
        ignore: modules that only observe; they and their submodules are no units.
    """

    def __init__(self, root: nn.Module, given: Sequence[str], ignore: Collection[nn.Module]) -> None:
        self._paths = {id(m): path for path, m in root.named_modules()}
        self._given = tuple(given)
        self._units = {id(root.get_submodule(path)): path for path in given}
        self._called: dict[str, None] = {}
        above = {"", *(above for path in given for above in around(path))}
        self._followed = {id(root.get_submodule(path)) for path in above}
        self._followed.update(id(m) for m in root.modules() if is_container(m))
        self._followed.update(id(inner) for observer in ignore for inner in observer.modules())

    def path(self, module: nn.Module) -> str | None:
        """Return the path of the unit that is being called; None for any other module."""
        path = self._units.get(id(module))
        if path is None and id(module) in self._paths and id(module) not in self._followed:
            path = self._units[id(module)] = self._paths[id(module)]
        if path is not None:
            self._called[path] = None
        return path

    def found(self) -> tuple[str, ...]:
        """Return all units so far: the given and the called ones, without those of which only parts were called."""
        partly = {above for path in self._called for above in around(path)} - self._called.keys()
        return tuple(dict.fromkeys((*(path for path in self._given if path not in partly), *self._called)))


def neighbours(root: nn.Module, called: Collection[str], used: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the full names of uncalled modules, and of their parameters, each with the path of a called neighbour.

    ::

        inputs = ModuleDict(image=..., text=...)     the first batch has images: text lies beside image
        layers = ModuleList(0, 1, 2, 3)              2 is left out: it lies beside 1

    Only children of lists, dicts and sequences have neighbours: the last called child before them, or else the first
    one after.

    Args:
        root: module whose submodules are looked at.
        called: paths of the modules that were called.
        used: full names of the parameters that operations between units used.
    """
    for above, container in root.named_modules():
        if isinstance(container, (nn.ParameterList, nn.ParameterDict)):
            names = [joined(above, name) for name, _ in container.named_parameters(recurse=False)]
            beside = next((name for name in names if name in used), None)
            if beside is not None:
                yield from ((name, beside) for name in names if name not in used)
    alive = {".".join(parts[:n]) for parts in (path.split(".") for path in called) for n in range(1, len(parts) + 1)}
    for above, container in root.named_modules():
        names = [joined(above, name) for name, _ in container.named_children()] if is_container(container) else []
        here = [name in alive for name in names]
        for i, name in enumerate(names):
            if here[i] or True not in here:
                continue
            before = [other for other, lives in zip(names[:i], here, strict=False) if lives]
            beside = before[-1] if before else names[here.index(True)]
            inner = root.get_submodule(name)
            for part in (*(path for path, _ in inner.named_modules()), *(path for path, _ in inner.named_parameters())):
                yield f"{name}.{part}".rstrip("."), beside


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]
