"""Wire formats: how values and their gradients travel between processes, and how many bytes that takes.

========  ==========================================================  ==================
format    a row (the last dimension) of n numbers                     bytes of a row
========  ==========================================================  ==================
None      as it is                                                    n times the type's
"bf16"    rounded to bfloat16                                         2 n
"int8"    multiples of its largest magnitude / 127                    n + 4
========  ==========================================================  ==================

Only values that require a gradient, and their gradients, are compressed. So indices, masks, tables and the results of
frozen layers stay exact, and so do tensors of fewer than two dimensions: losses, norms, counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from lightning_avgpipe.capture.graph import Value

Format = Literal["bf16", "int8"]
Wire = Format | Literal["auto"] | None
FORMATS: tuple[Format, ...] = "bf16", "int8"

_ITEM_BYTES = {"torch.float64": 8, "torch.float32": 4, "torch.float16": 2, "torch.bfloat16": 2}
_SCALE_BYTES = 4


def is_compressed(shape: Sequence[int], dtype: str, wire: Format | None) -> bool:
    """Return whether a tensor that requires a gradient, or is one, is compressed: only if that makes it smaller.

    Args:
        shape: shape of the tensor.
        dtype: dtype of the tensor, as a string.
        wire: format of the hop; None: full precision.
    """
    before = _ITEM_BYTES.get(dtype, 0)
    if wire is None or len(shape) < 2 or 0 in shape:
        return False
    return _row_bytes(shape[-1], wire) < before * shape[-1]


def wire_bytes(value: Value, wire: Format | None) -> int:
    """Return the bytes that a value of the captured micro-batch takes on the link; its gradient takes as many."""
    if wire is None or not value.requires_grad or not is_compressed(value.shape, value.dtype, wire):
        return value.nbytes
    return compressed_bytes(value.shape, wire)


def compressed_bytes(shape: Sequence[int], wire: Format) -> int:
    """Return the bytes of a compressed tensor of this shape."""
    return math.prod(shape[:-1]) * _row_bytes(shape[-1], wire)


def mildest_hidden_format(values: Iterable[Value], per_byte: float, behind: float) -> Format | None:
    """Return the most precise format in which the transfer is hidden by computation, or else the smallest format.

    A link carries the values of one micro-batch while the slowest stage runs one forward and one backward. A transfer
    that takes less time than these costs nothing, so compressing it further gains nothing.

    Args:
        values: values of one micro-batch.
        per_byte: seconds for which a byte occupies the link.
        behind: seconds of a forward and a backward of the slowest stage, which hide the transfer.
    """
    values = tuple(values)
    formats: tuple[Format | None, ...] = (None, *FORMATS)
    size = {wire: sum(wire_bytes(value, wire) for value in values) for wire in formats}
    return next((wire for wire in formats if size[wire] * per_byte <= behind), min(formats, key=size.__getitem__))


def _row_bytes(length: int, wire: Format) -> int:
    return 2 * length if wire == "bf16" else length + _SCALE_BYTES
