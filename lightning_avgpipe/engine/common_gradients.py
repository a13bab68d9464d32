"""Common gradients: micro-batches add to the same ones, so who reads, clears or uses them may have to wait for all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.engine.abreast import Abreast
from lightning_avgpipe.utils.patching import nothing


class CommonGradients:
    """What micro-batches do to the gradients that they have in common.

    ::

        forward, zero_grad()     the first clears for all, and nobody waits with a graph
        backward, zero_grad()    they meet before
        backward, .grad          they meet before; then it is read until one of them changes it, before which they meet

    Args:
        abreast: where micro-batches meet.
        weights: what their losses count.
    """

    def __init__(self, abreast: Abreast, weights: Sequence[float]) -> None:
        self.abreast = abreast
        self._weights = weights
        self._adding: set[int] = set()  # micro-batches that have run a backward since all have met
        self._reading: set[int] = set()  # those that have read gradients since then
        self._within: set[int] = set()  # those within a backward, which may run others: those of checkpoints

    def meet(self, what: str, action: Callable[[], Any], given: Any = ()) -> Any:
        """As of :class:`Abreast`."""

        def act() -> Any:
            self._adding.clear()
            self._reading.clear()
            return action()

        return self.abreast.meet(what, act, given)

    def read(self, what: str, action: Callable[[], Any]) -> Any:
        """A micro-batch reads a gradient, which is that of the whole batch."""
        i = self.abreast.index
        if i is None:
            return action()
        if i in self._adding:
            self.meet(what, nothing)
        self._reading.add(i)
        with self.abreast.together():
            return action()

    def clear(self, what: str, action: Callable[[], Any]) -> None:
        """A micro-batch clears gradients."""
        i = self.abreast.index
        if i is None or i in self._adding or i in self._reading:
            self.meet(what, action)
        else:
            self.abreast.first(what, action)

    @contextlib.contextmanager
    def weighted(self) -> Iterator[None]:
        """Within this context backwards begin at losses times their weight."""
        own = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            i = self.abreast.index
            if i is None or i in self._within:
                own(tensors, *args, **kwargs)
                return
            if i in self._reading:
                self.meet("a backward after gradients were read", nothing)
            self._adding.add(i)
            weight = self._weights[i]
            if not weight:  # a mean over nothing is no number
                return
            if weight != 1.0:
                tensors = tensors * weight if isinstance(tensors, Tensor) else [t * weight for t in tensors]
            self._within.add(i)
            try:
                own(tensors, *args, **kwargs)
            finally:
                self._within.discard(i)

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = own
