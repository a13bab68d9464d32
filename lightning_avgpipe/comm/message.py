"""Messages: what crosses a boundary between stages, or goes to another process for another reason.

Values and gradients may travel in a wire format, and the message says so::

    sender     x  --compressed-->  q (int8 or bfloat16, in the place of x), scales of int8 after all tensors
    receiver   q, scales  --decompressed-->  what the next stage computes with, in the type of x

The sender computes on with what it had. Whoever passes a message on sends it as it came, so that all stages decode the
same numbers. int8 rounds up or down at random, by how near the two multiples are: what arrives is right on average,
also of a gradient whose entries are smaller than its scale. Random numbers come from a stream of each tensor's own,
so they do not depend on timing, nor do the model's draws on them.

An error of rounding is not added to a later gradient (error feedback). Rounding errors of gradients of values are
multiplied by other samples' inputs, so they do not cancel; published work on pipelines rounds these gradients
directly as well (AQ-SGD, Wang et al., NeurIPS 2022).
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
        micro_batch: i; channels are FIFO, so this only checks the order.
        tensors: values in the order of the program, or one gradient for each value that requires one; None for a value
            on which the loss does not depend.
        requires_grad: for values, which of them require a gradient.
        entries: for values, what the nodes before the cut returned: fewer if the step has ended before. For gradients
            whether the step has skipped the micro-batch: there is no loss.
        abandoned: whether the sender has given up the iteration, and has nothing to send.
        forward_only: for values, how many stages, from the first, run forwards only, as the sender knows.
        attested: for values, what the step asked of the nodes before the cut.
        segments: least number of pieces in which large tensors travel, so that whoever passes them on need not wait.
        decoded: type to which each tensor of a compressed message is decoded; None for a tensor that is as it was.
            Scales come after these tensors. Empty: nothing is compressed.
    """

    micro_batch: int
    tensors: tuple[Tensor | None, ...]
    requires_grad: tuple[bool, ...] = ()
    entries: Any = ()
    abandoned: bool = False
    forward_only: int = 0
    attested: tuple[Any, ...] = ()
    segments: int = 1
    decoded: tuple[torch.dtype | None, ...] = ()

    def copied(self) -> Message:
        """Return a copy of the message with tensors in memory of their own."""
        return self._replace(tensors=tuple(None if tensor is None else tensor.clone() for tensor in self.tensors))


class _Strided:
    """A marker in the place of a strided tensor among the leaves; a sparse tensor leaves its sparseness there."""


def pack(item: Any) -> Message:
    """Return a message with any tree of tensors and picklable leaves.

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
    rest, spec = message.entries
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
        name: name of the direction and hop, which have streams of random numbers of their own.
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
    """Return a message as it was before it was compressed, but for rounding."""
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
    """Round each row to multiples of its largest magnitude / 127, up or down at random, without bias.

    Args:
        tensor: tensor of at least two dimensions; a row of it lies along the last one.
        seed: seed of the random numbers.
    Returns:
        The multiples, laid out in memory as the tensor is, and the scale of each row. A row with a number that is not
        finite in float32 has no finite scale, and arrives as NaN.
    """
    exact = tensor.detach().float()
    smallest = torch.finfo(torch.float32).tiny
    scale = exact.abs().amax(-1, keepdim=True).div_(_MOST).clamp_min_(smallest)
    generator = torch.Generator(tensor.device).manual_seed(seed)
    draws = torch.rand(exact.shape, generator=generator, device=tensor.device)
    return exact.div(scale).add_(draws).floor_().clamp_(-_MOST, _MOST).to(torch.int8), scale
