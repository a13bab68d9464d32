"""Check that a step does not use tensors of a parallel model other than its own.

::

    module.layer._parameters["weight"]      the placed model's, whichever pipeline runs
    lambda x: x @ weight                    pipeline 0's for ever: a closure, a partial, a plain object, a global

A model is placed in the registers of modules, and in their plain attributes. Tensors that user code holds elsewhere
cannot be exchanged, and training would continue with wrong gradients and no error. So the first forward of each stage
and pipeline is inspected, before any optimizer step: the tensors that its operations take and, since compiled code and
C++ may hide these, the leaves to which its gradients would go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.names import listed
from lightning_avgpipe.utils.placeholder import has_memory
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.tensors import tensor_arguments
from lightning_avgpipe.utils.torch_compat import storage_id

# Maps the names of buffers that a step changes to the other models' parameters and such buffers, by name.
ForeignTensors = Callable[[Collection[str]], Mapping[str, Sequence[Tensor]]]


def nodes_of(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Yield autograd's nodes on which the outputs of a forward depend."""
    nodes = [tensor.grad_fn for tensor in outputs]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]


def leaves_of(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves to which the gradients of a forward's outputs go."""
    return (leaf for node in nodes_of(outputs) if (leaf := getattr(node, "variable", None)) is not None)


class Inspection(TorchDispatchMode):
    """A context that finds operations which take tensors of other models.

    Args:
        foreign_tensors: tensors of other models, by name. Memory is compared, so views and aliases are found too.
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
        """Return True, so that compiled code runs as usual."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensor_arguments(args, kwargs):
            self._look(tensor, source_line)
        return func(*args, **kwargs)

    def follow_gradients(self, outputs: Iterable[Tensor]) -> None:
        """Look at the leaves to which the gradients of a forward's outputs go."""
        for leaf in leaves_of(outputs):
            self._look(leaf, lambda: "compiled code or a library")

    def check(self, pipeline: int) -> None:
        """Check that nothing was found.

        Raises:
            ConfigurationError: something was; the message names parameters or buffers, and where they were used.
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
