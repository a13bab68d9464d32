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
from lightning_avgpipe.utils.names import close_to, fitting, is_within

_FEWEST_BLOCKS = 3
_FINEST = 10_000  # alpha is a fraction with such a denominator: of 1/3 of 12 layers nobody expects 5


@dataclass(frozen=True)
class FreezingOrder:
    """What is frozen one after the other.

    Attributes:
        before: paths of modules and parameters that are frozen with the first layer.
        layers: paths of the layers.
    """

    before: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: nn.Module, layers: Sequence[str] | None, before: Sequence[str] | None) -> FreezingOrder:
        """That of a module, by names and patterns, or by its repeated blocks and what is registered before them.

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
        """Train the first layers, with what is before them, no longer; normalisation and dropout are in eval mode."""
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
        """Of the layers' gradients, from the squares of those of the parameters, by name."""
        inside = [_parameters(module, [path]) for path in self.layers]
        return [math.sqrt(sum(squares[n] for n, _ in module.named_parameters() if n in layer)) for layer in inside]


def by_schedule(layers: int, alpha: float, step: int) -> int:
    """How many of the layers are frozen at a step: ``ceil(L (1 - (1 - alpha)^T))``.

    Source: PipeTransformer, He et al., ICML 2021, section 3.1.
    """
    return math.ceil(layers * (1 - (1 - _fraction(alpha)) ** step))


def by_gradient_norms(frozen: int, alpha: float, norms: Sequence[float]) -> int:
    """How many of the layers are frozen next, where those with the smallest gradients have converged.

    ``min(ceil(F + alpha (L - F)), l)`` with F the layers that are frozen, and l the number of the layer, counted from
    1, whose gradient is the smallest of those that are not.

    Args:
        frozen: F.
        alpha: share of the others that may be frozen at once.
        norms: of the layers' gradients, shape ``(L,)``.
    Source: PipeTransformer, He et al., ICML 2021, section 3.1.
    """
    if frozen == len(norms):
        return frozen
    most = math.ceil(frozen + _fraction(alpha) * (len(norms) - frozen))
    return min(most, 1 + min(range(frozen, len(norms)), key=lambda layer: norms[layer]))


def _fraction(alpha: float) -> Fraction:
    return Fraction(alpha).limit_denominator(_FINEST)


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Paths of neighbouring submodules of one type, at least three: of several such rows that with most parameters."""
    best: tuple[int, tuple[str, ...]] = 0, ()
    for path, parent in module.named_modules():
        for _, row in itertools.groupby(parent.named_children(), key=lambda child: type(child[1])):
            children = [(name, child) for name, child in row if any(True for _ in child.parameters())]
            size = sum(p.numel() for _, child in children for p in child.parameters())
            if len(children) >= _FEWEST_BLOCKS and size > best[0]:
                best = size, tuple(f"{path}.{name}" if path else name for name, _ in children)
    return best[1]


def _found(module: nn.Module, patterns: Sequence[str], option: str) -> tuple[str, ...]:
    """Paths that fit, the outermost ones, in the order of the module."""
    known = [name for name, _ in module.named_modules() if name]
    if option == "before":
        known += [name for name, _ in module.named_parameters()]
    for pattern in patterns:
        if not fitting([pattern], known):
            what = f"AdaptiveFreezing: {option}: {pattern!r} fits nothing in {type(module).__name__}"
            raise ConfigurationError(f"{what}; {close_to(pattern, known)}")
    chosen = set(fitting(patterns, known))
    return tuple(name for name in known if name in chosen)


def _registered_before(path: str, module: nn.Module) -> tuple[str, ...]:
    """Submodules that come before this one in a module that holds it, however deep."""
    found: list[str] = []
    parts = path.split(".")
    for depth, part in enumerate(parts):
        parent = module.get_submodule(".".join(parts[:depth]))
        siblings = [name for name, _ in parent.named_children()]
        found += [".".join([*parts[:depth], name]) for name in siblings[: siblings.index(part)]]
    return tuple(found)


def _parameters(module: nn.Module, paths: Sequence[str]) -> frozenset[str]:
    """Names of the parameters that are found under these paths only; of a tied one the first."""
    inside = _inside(module.named_parameters(remove_duplicate=False), paths)
    return frozenset(name for name, p in module.named_parameters() if id(p) in inside)


def _inside(named: Iterable[tuple[str, Any]], paths: Sequence[str]) -> dict[int, Any]:
    """By id, what has no other names than such below these paths."""
    found, outside = {}, set()
    for name, thing in named:
        found[id(thing)] = thing
        if not any(is_within(name, path) for path in paths):
            outside.add(id(thing))
    return {key: thing for key, thing in found.items() if key not in outside}
