"""Find a called neighbour for each module that a step did not call, in case a later batch calls it.

::

    inputs = ModuleDict(image=..., text=...)     the first batch has images: text lies beside image
    layers = ModuleList(0, 1, 2, 3)              2 is left out: it lies beside 1
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from lightning_avgpipe.capture.units import is_container


def neighbours(root: nn.Module, called: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the full names of uncalled modules, and of their parameters, each with the path of a called neighbour.

    Only children of lists, dicts and sequences have neighbours: the last called child before them, or else the first
    one after.

    Args:
        root: module whose submodules are looked at.
        called: paths of the modules that were called.
    """
    alive = {".".join(parts[:n]) for parts in (path.split(".") for path in called) for n in range(1, len(parts) + 1)}
    for above, container in root.named_modules():
        names = (
            [f"{above}.{name}".lstrip(".") for name, _ in container.named_children()] if is_container(container) else []
        )
        here = [name in alive for name in names]
        for i, name in enumerate(names):
            if here[i] or True not in here:
                continue
            before = [other for other, lives in zip(names[:i], here, strict=False) if lives]
            beside = before[-1] if before else names[here.index(True)]
            inner = root.get_submodule(name)
            for part in (*(path for path, _ in inner.named_modules()), *(path for path, _ in inner.named_parameters())):
                yield f"{name}.{part}".rstrip("."), beside
