"""The layers of a model in the order in which they are frozen, and how many of them are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import nn

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.names import fitting, is_within, joined

_FEWEST_BLOCKS = 3
_FINEST = 10_000  # largest denominator to which alpha is rounded, so that a third of 12 layers is 4, not 5


@dataclass(frozen=True)
class FreezingOrder:
    """The modules and parameters of a model in the order in which they are frozen.

    Attributes:
        before: paths of modules and parameters that are frozen with the first layer.
        layers: paths of the layers.
    """

    before: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: nn.Module, layers: Sequence[str] | None, before: Sequence[str] | None) -> FreezingOrder:
        """Return the order for a module: by names and patterns, or by its repeated blocks and what comes before them.

        Raises:
            ConfigurationError: there are no layers, or nothing would stay trained.
        """
        what = type(module).__name__
        paths = _found(module, layers, "layers") if layers else repeated_blocks(module)
        if not paths:
            raise ConfigurationError(
                f"AdaptiveFreezing: {what} has no row of {_FEWEST_BLOCKS} or more neighbouring "
                "submodules of one type; name its layers, for example layers=['encoder.layer.*']"
            )
        order = cls(_found(module, before, "before") if before else _registered_before(paths[0], module), paths)
        last = _parameters(module, (*order.before, *paths))
        if not any(p.requires_grad and name not in last for name, p in module.named_parameters()):
            raise ConfigurationError(
                f"AdaptiveFreezing: with {paths[-1]!r} and all before it frozen nothing of {what} would be trained; "
                "leave the last layers out of layers=[...]"
            )
        return order

    def freeze(self, module: nn.Module, number: int) -> None:
        """Freeze the first layers and what is before them, and put their normalisation and dropout into eval mode."""
        if not number:
            return
        frozen = (*self.before, *self.layers[:number])
        found = _parameters(module, frozen)
        for name, parameter in module.named_parameters():
            if name in found:
                parameter.requires_grad_(False)
        for inner in _inside(module.named_modules(remove_duplicate=False), frozen).values():
            inner.training = False

    def norms(self, module: nn.Module, squares: Mapping[str, float]) -> list[float]:
        """Return the norm of each layer's gradient, given the squared norm of each parameter's gradient by name."""
        inside = [_parameters(module, [path]) for path in self.layers]
        return [
            math.sqrt(sum(squares.get(n, 0.0) for n, _ in module.named_parameters() if n in layer)) for layer in inside
        ]


def mean_squares(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the mean, over all parallel models, of the squared norm of each parameter's gradient.

    The models are similar, and each trains on a batch of its own. So the mean is what one model with one batch would
    have, whatever the number of models, and whether they are pipelines or groups of processes. Replicas, and the stages
    that share a tied parameter, have equal gradients after these have been summed, and do not change the mean.

    Args:
        parts: for each process, name of a parameter -> one number for each model that has a gradient.
    """
    found: dict[str, list[float]] = {}
    for part in parts:
        for name, squares in part.items():
            found.setdefault(name, []).extend(squares)
    return {name: math.fsum(squares) / len(squares) for name, squares in found.items()}


def by_schedule(layers: int, alpha: float, step: int) -> int:
    """Return how many of the layers are frozen at a step: ``ceil(L (1 - (1 - alpha)^T))``.

    Source: PipeTransformer, He et al., ICML 2021, section 3.1.
    """
    return math.ceil(layers * (1 - (1 - _fraction(alpha)) ** step))


def by_gradient_norms(frozen: int, alpha: float, norms: Sequence[float]) -> int:
    """Return how many of the layers are frozen next, if small gradients mean that layers have converged.

    The number is ``min(ceil(F + alpha (L - F)), l)``, with F the number of frozen layers, and l the number, counted
    from 1, of the layer that has the smallest gradient of all layers that are not frozen.

    Args:
        frozen: F, the number of frozen layers.
        alpha: share of the other layers that may be frozen at once.
        norms: norms of the layers' gradients, shape ``(L,)``.
    Source: PipeTransformer, He et al., ICML 2021, section 3.1.
    """
    if frozen == len(norms):
        return frozen
    most = math.ceil(frozen + _fraction(alpha) * (len(norms) - frozen))
    return min(most, 1 + min(range(frozen, len(norms)), key=lambda layer: norms[layer]))


def _fraction(alpha: float) -> Fraction:
    return Fraction(alpha).limit_denominator(_FINEST)


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of three or more neighbouring submodules of one type; of several such rows the largest.

    The size of a row is its number of parameters.
    """
    best: tuple[int, tuple[str, ...]] = 0, ()
    for path, parent in module.named_modules():
        for _, row in itertools.groupby(parent.named_children(), key=lambda child: type(child[1])):
            children = [(name, child) for name, child in row if any(True for _ in child.parameters())]
            size = sum(p.numel() for _, child in children for p in child.parameters())
            if len(children) >= _FEWEST_BLOCKS and size > best[0]:
                best = size, tuple(joined(path, name) for name, _ in children)
    return best[1]


def _found(module: nn.Module, patterns: Sequence[str], option: str) -> tuple[str, ...]:
    """Return the outermost paths that match the patterns, in the order of the module."""
    known = [name for name, _ in module.named_modules() if name]
    if option == "before":
        known += [name for name, _ in module.named_parameters()]
    chosen = set(fitting(patterns, known, f"AdaptiveFreezing: {option}", module))
    return tuple(name for name in known if name in chosen)


def _registered_before(path: str, module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the submodules that come before this one, at each level of the module."""
    found: list[str] = []
    parts = path.split(".")
    for depth, part in enumerate(parts):
        parent = module.get_submodule(".".join(parts[:depth]))
        siblings = [name for name, _ in parent.named_children()]
        found += [".".join([*parts[:depth], name]) for name in siblings[: siblings.index(part)]]
    return tuple(found)


def _parameters(module: nn.Module, paths: Sequence[str]) -> frozenset[str]:
    """Return the names of the parameters all of whose names are below these paths; of a tied one the first name."""
    inside = _inside(module.named_parameters(remove_duplicate=False), paths)
    return frozenset(name for name, p in module.named_parameters() if id(p) in inside)


def _inside(named: Iterable[tuple[str, Any]], paths: Sequence[str]) -> dict[int, Any]:
    """Return, keyed by id, the modules or parameters whose names are all below these paths."""
    found, outside = {}, set()
    for name, thing in named:
        found[id(thing)] = thing
        if not any(is_within(name, path) for path in paths):
            outside.add(id(thing))
    return {key: thing for key, thing in found.items() if key not in outside}
