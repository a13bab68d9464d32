"""Common tensors: those that outlive a step, so that all its micro-batches have the same ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.torch_compat import REGISTRIES, address


class CommonTensors:
    """Knows parameters and their gradients, buffers, and tensors in attributes, wherever they are seen again.

    Args:
        module: whose they are, as a step begins.
        ignore: modules to which each micro-batch adds what it sees (metrics).
    """

    def __init__(self, module: nn.Module, ignore: Collection[nn.Module] = ()) -> None:
        ignored = {id(inner) for one in ignore for inner in one.modules()}
        self.parameters = {id(p): (p, f"'{name}'") for name, p in module.named_parameters()}
        self._buffers = dict(module.named_buffers())
        self._attributes = [
            (f"'{path}.{name}'" if path else f"'{name}'", held)
            for path, part in module.named_modules()
            if id(part) not in ignored
            for name, held in vars(part).items()
            if name not in REGISTRIES
        ]
        self._kept: dict[int, str] | None = None  # place in memory -> name
        self._found = {address(p): name for p, name in self.parameters.values()}

    def moved(self) -> None:
        """Parameters may have other contents."""
        self._found = {address(p): name for p, name in self.parameters.values()}

    def name(self, tensors: Sequence[Tensor], parameters_only: bool) -> str | None:
        """Of the first one among these, or of what they are views of; None if none is known."""
        places = [address(tensor) for tensor in tensors]
        known = [self._found] if parameters_only or not places else [self._found, self._gradients(), self._others()]
        return next((names[place] for names in known for place in places if place in names), None)

    def _gradients(self) -> dict[int, str]:
        found = ((p.grad, name) for p, name in self.parameters.values())
        return {address(gradient): f"the gradient of {name}" for gradient, name in found if gradient is not None}

    def _others(self) -> dict[int, str]:
        if self._kept is None:
            held = ((name, tensor) for name, value in self._attributes for tensor in Objects((value,)).tensors)
            self._kept = {address(tensor): name for name, tensor in held}
        return self._kept | {address(buffer): f"'{name}'" for name, buffer in self._buffers.items()}
