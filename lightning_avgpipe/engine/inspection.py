"""Inspection: whether a step reaches tensors of a parallel model that is not its own.

::

    module.layer._parameters["weight"]      the placed model's, whichever pipeline runs
    lambda x: x @ weight                    pipeline 0's for ever: a closure, a partial, a plain object, a global

A model is placed in the registers of modules, and in their plain attributes. What user code holds elsewhere cannot be
exchanged, and training would go on with wrong gradients and no error. So a stage's first forward of a pipeline is
looked at once, before anything has stepped: which tensors its operations take, and, since compiled code and what is
written in C++ may hide them, where its gradients would go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_avgpipe.capture.tracer import tensor_arguments
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.names import listed
from lightning_avgpipe.utils.placeholder import has_memory
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.torch_compat import storage_id

# From names of buffers that a step changes to what other models have, by name: parameters, and these buffers.
ForeignTensors = Callable[[Collection[str]], Mapping[str, Sequence[Tensor]]]


def nodes_of(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Autograd's nodes on which the outputs of a forward depend."""
    nodes = [tensor.grad_fn for tensor in outputs]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]


def leaves_of(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Where the gradients of a forward's outputs go."""
    return (leaf for node in nodes_of(outputs) if (leaf := getattr(node, "variable", None)) is not None)


class Inspection(TorchDispatchMode):
    """Within this context operations are looked at that take tensors of other models.

    Args:
        foreign_tensors: what other models have, by name. Memory counts, so a view or an alias of it is found as well.
    """

    def __init__(self, foreign_tensors: Mapping[str, Sequence[Tensor]]) -> None:
        super().__init__()
        self._names = {
            storage_id(tensor): name
            for name, tensors in foreign_tensors.items()
            for tensor in tensors
            if has_memory(tensor)
        }
        self._found: dict[str, str] = {}  # name -> where

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code runs as ever."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensor_arguments(args, kwargs):
            self._look(tensor, source_line)
        return func(*args, **kwargs)

    def follow_gradients(self, outputs: Iterable[Tensor]) -> None:
        """Look where the gradients of a forward's outputs go."""
        for leaf in leaves_of(outputs):
            self._look(leaf, lambda: "compiled code or a library")

    def check(self, pipeline: int) -> None:
        """Raise if something was found.

        Raises:
            ConfigurationError: names the parameters or buffers, and where they were used.
        """
        if not self._found:
            return
        places = listed([f"'{name}' (at {place})" for name, place in self._found.items()])
        raise ConfigurationError(
            f"while pipeline {pipeline} ran, training_step used {places} of another parallel model. Each has "
            "parameters and buffers of its own, which are put where modules register them, and into their attributes, "
            "lists, tuples and dicts; a closure, a functools.partial, a global, an optimizer or an object that is no "
            "nn.Module keeps those of one model. Get them from the module whenever they are used (self.layer.weight), "
            "or use num_pipelines=1"
        )

    def _look(self, tensor: Tensor, place: Callable[[], str]) -> None:
        if has_memory(tensor):
            name = self._names.get(storage_id(tensor))
            if name is not None and name not in self._found:
                self._found[name] = place()
