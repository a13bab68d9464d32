"""Messages: what travels across a boundary between stages, or to another process for another reason.

Values and gradients may travel in a wire format, and the message says so::

    sender     x  --compressed-->  q (int8 or bfloat16, in the place of x), scales of int8 after all tensors
    receiver   q, scales  --decompressed-->  what the next stage computes with, in the type of x

The sender goes on with its exact values. A process that forwards a message does not decode it, so that all stages
decode the same numbers. int8 rounds stochastically, the nearer of two multiples being more likely, so the result is
unbiased, even for a gradient whose entries are smaller than its scale. Each tensor has its own stream of random
numbers, so rounding does not depend on timing, and does not change the random numbers that the model draws.

There is no error feedback, in which a rounding error is added to a later gradient. Rounding errors of activation
gradients are multiplied by the inputs of other samples, so they would not cancel; published work on pipelines also
rounds these gradients directly (AQ-SGD, Wang et al., NeurIPS 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_avgpipe.capture.wire_format import Format, is_compressed
from lightning_avgpipe.errors import AvgPipeError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.random_streams import RandomKey
from lightning_avgpipe.utils.tensors import INSTEAD_OF_NESTED, Sparseness, strided_parts

_MOST = 127  # the largest multiple of a scale in int8


class Message(NamedTuple):
    """Values of one micro-batch on their way to the next stage, or their gradients on the way back.

    Attributes:
        micro_batch: number i of the micro-batch; channels are FIFO, so it only serves to check the order.
        tensors: values in the order of the program, or one gradient for each value that requires one; None for a value
            on which the loss does not depend.
        requires_grad: for values, which of them require a gradient.
        descriptions: for values, what the nodes before the cut returned; fewer nodes if the step has ended before the
            cut. For gradients, whether the step skipped the micro-batch, so that there is no loss.
        abandoned: whether the sender has abandoned the iteration, and has nothing to send.
        forward_only: for values, how many stages, from the first, only run forwards, as far as the sender knows.
        requests: for values, the requests of the step for the nodes before the cut.
        segments: minimum number of pieces in which large tensors travel, so that each piece can be forwarded at once.
        decoded: type to which each tensor of a compressed message is decoded; None for a tensor that was not changed.
            Scales come after these tensors. Empty: nothing is compressed.
    """

    micro_batch: int
    tensors: tuple[Tensor | None, ...]
    requires_grad: tuple[bool, ...] = ()
    descriptions: Any = ()
    abandoned: bool = False
    forward_only: int = 0
    requests: tuple[Any, ...] = ()
    segments: int = 1
    decoded: tuple[torch.dtype | None, ...] = ()

    def copied(self) -> Message:
        """Return a copy of the message with tensors in memory of their own."""
        return self._replace(tensors=tuple(None if tensor is None else tensor.clone() for tensor in self.tensors))


class _Strided:
    """A marker in place of a strided tensor among the leaves; in place of a sparse one there is a Sparseness."""


def pack(item: Any) -> Message:
    """Pack a tree of tensors and picklable leaves into a message.

    Raises:
        AvgPipeError: the tree has a nested tensor.
    """
    leaves, spec = tree.flatten(item)
    tensors: list[Tensor] = []
    rest: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.is_nested:
                raise AvgPipeError(f"a nested tensor cannot go to another process; {INSTEAD_OF_NESTED}")
            tensors += strided_parts(leaf.detach())
            rest.append(Sparseness.of(leaf) or _Strided)
        else:
            rest.append(leaf)
    return Message(0, tuple(tensors), (), [rest, spec])


def unpack(message: Message) -> Any:
    """Return the tree that :func:`pack` put into a message."""
    rest, spec = message.descriptions
    tensors: Iterator[Any] = iter(message.tensors)
    leaves: list[Any] = []
    for leaf in rest:
        if leaf is _Strided:
            leaves.append(next(tensors))
        elif isinstance(leaf, Sparseness):
            leaves.append(leaf.tensor(list(islice(tensors, leaf.num_parts))))
        else:
            leaves.append(leaf)
    return tree.unflatten(leaves, spec)


# -- compression -------------------------------------------------------------------------------------------------------


def compressed(message: Message, wire: Format | None, key: RandomKey, name: str) -> Message:
    """Return a message as it travels.

    Args:
        message: values, of which those that require a gradient may be compressed, or gradients.
        wire: format in which they travel; None: full precision.
        key: random key of the micro-batch.
        name: name of the stream of random numbers, such as that of a direction and hop.
    """
    if wire is None:
        return message
    tensors: list[Tensor | None] = []
    scales: list[Tensor] = []
    decoded: list[torch.dtype | None] = []
    for number, tensor in enumerate(message.tensors):
        asks = not message.requires_grad or message.requires_grad[number]
        if tensor is None or not (asks and is_compressed(tensor.shape, str(tensor.dtype), wire)):
            tensors.append(tensor)
            decoded.append(None)
            continue
        decoded.append(tensor.dtype)
        if wire == "bf16":
            tensors.append(tensor.detach().to(torch.bfloat16))
        else:
            quantised, scale = quantise(tensor, key.derive(name, number))
            tensors.append(quantised)
            scales.append(scale)
    return message._replace(tensors=(*tensors, *scales), decoded=tuple(decoded))


def decompressed(message: Message) -> Message:
    """Undo :func:`compressed`, except for rounding."""
    if not message.decoded:
        return message
    tensors = message.tensors[: len(message.decoded)]
    scales: Iterator[Tensor | None] = iter(message.tensors[len(message.decoded) :])
    found: list[Tensor | None] = []
    for tensor, dtype in zip(tensors, message.decoded, strict=True):
        if tensor is not None and dtype is not None:
            if tensor.dtype == torch.int8:
                scale = next(scales)
                assert scale is not None
                tensor = tensor.float().mul_(scale)
            tensor = tensor.to(dtype)
        found.append(tensor)
    return message._replace(tensors=tuple(found), decoded=())


def quantise(tensor: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Round each row to multiples of its largest magnitude / 127, stochastically and without bias.

    Args:
        tensor: tensor of at least two dimensions; its rows lie along the last one.
        seed: seed of the random numbers.
    Returns:
        The multiples, with the memory layout of the tensor, and the scale of each row. A row with a number that is not
        finite in float32 has no finite scale, and is decoded as NaN.
    """
    exact = tensor.detach().float()
    smallest = torch.finfo(torch.float32).tiny
    scale = exact.abs().amax(-1, keepdim=True).div_(_MOST).clamp_min_(smallest)
    generator = torch.Generator(tensor.device).manual_seed(seed)
    draws = torch.rand(exact.shape, generator=generator, device=tensor.device)
    return exact.div(scale).add_(draws).floor_().clamp_(-_MOST, _MOST).to(torch.int8), scale
