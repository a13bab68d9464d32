"""Draw in a plain step the random numbers that a pipeline promises to draw.

The promise is that of ``engine/randomness.py``: what a module draws is a function of (seed, iteration, pipeline,
micro-batch, module, occurrence). So a plain step, which runs whole, draws what the stages draw together. Seeds are
computed from these numbers here once more, so that a mistake in the stages' keys shows.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.tracer import watching
from lightning_avgpipe.engine.randomness import Draw, Drawing, Draws
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.random_streams import RandomKey, host_stream


@contextmanager
def drawing_as_promised(
    module: nn.Module, graph: CallGraph, key: tuple[int, int, int, int], device: torch.device
) -> Iterator[None]:
    """Let a step draw, within this context, the numbers that it draws in a pipeline.

    Args:
        module: root module.
        graph: call graph of the step.
        key: seed, iteration, number of the pipeline among all groups, micro-batch.
        device: device of the computation.
    """
    draws = _PlainDraws(module, graph, _Key(*key), device)
    with host_stream(draws.host_seed), draws.stream(), watching(draws), draws.functions("", ()):
        yield


class _Key(RandomKey):
    """A key whose seeds are computed by the rule of the promise, independently of those of the stages."""

    def derive(self, name: str, occurrence: int = 0, function: int = 0) -> int:
        parts = (self.seed, self.iteration, self.pipeline, self.micro_batch, name, occurrence, function)
        text = "/".join(map(str, parts))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class _PlainDraws(Draws):
    """The draws of a step that runs whole. Functions in a unit are watched if the stage of the unit watches them."""

    def __init__(self, module: nn.Module, graph: CallGraph, key: RandomKey, device: torch.device) -> None:
        super().__init__(Drawing.of(module, graph), key, device)
        self.host_seed = key.derive("host")
        self._watched: dict[str, list[bool]] = defaultdict(list)  # unit -> whether its functions are, by call
        for node in (node for node in graph.nodes if node.kind == "call"):
            self._watched[node.name].append(self._drawing.watches_functions(node))
        self._watches = True

    def enter(self, module: nn.Module) -> bool:
        begun = super().enter(module)
        call = self._drawing.calls.get(id(module))
        if call is not None and call.is_unit:
            scope, captured = self._scopes[-1], self._watched[call.path]
            watched = captured[scope.occurrence] if scope.occurrence < len(captured) else scope.seeds_functions
            scope.enter(replaced(self, "_watches", watched))
        return begun

    def drawing_function(self) -> Draw | None:
        return super().drawing_function() if self._watches else None
