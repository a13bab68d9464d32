"""Note the memory that the nodes of a step save for their backwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_avgpipe.utils.patching import itself
from lightning_avgpipe.utils.tensors import is_lent
from lightning_avgpipe.utils.torch_compat import SavedHooks, address, innermost_hooks


class SavedTensors:
    """The memory that nodes save in one run of a step, by the storages of the saved tensors.

    Args:
        resident: tensors that are in memory anyway, such as weights, buffers and the batch; they do not count.
    """

    def __init__(self, resident: Iterable[Tensor]) -> None:
        self._resident = {address(tensor) for tensor in resident}
        self._noted: list[Any] = []  # weak references, which keep the address of a freed storage from being reused

    @contextlib.contextmanager
    def recording(self, visitors: Iterable[Tensor] = ()) -> Iterator[dict[int, int]]:
        """Yield a dict that gets the storages which are saved within this context, ``address -> bytes``.

        The addresses are unique until a context is entered again.

        Args:
            visitors: resident tensors that are on another device within this context.
        """
        found: dict[int, int] = {}
        resident = self._resident.union(map(address, visitors))
        self._noted.clear()

        outer = innermost_hooks()  # hooks of ours around these, to which saved tensors are passed on

        def pack(tensor: Tensor) -> Any:
            if not is_lent(tensor) and (storage := address(tensor)) not in resident and storage not in found:
                found[storage] = _nbytes(tensor)
                self._noted.append(_weak_storage(tensor))
            return tensor if outer is None else outer.pack_hook(tensor)

        with SavedHooks(pack, itself if outer is None else outer.unpack_hook):
            yield found


def _weak_storage(tensor: Tensor) -> Any:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # sparse tensors and the like have none, and are known by identity
        return tensor


def _nbytes(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):
        return tensor.numel() * tensor.element_size()
