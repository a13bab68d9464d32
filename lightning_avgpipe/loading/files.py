"""Read safetensors files a tensor at a time, and notice if they change before they are read."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.errors import ConfigurationError

_COMPARED_BYTES = 64 * 1024**2  # bytes of each tensor that are compared at a time

# Random numbers are repeated, which is as fast as memory. The period is a large prime, so that rows differ.
_PERIOD, _SCALE = 65_521, 0.02

_META = torch.device("meta")

# What identifies the contents of a file: device, inode, size, and the time of the last change.
_State = tuple[int, int, int, int]


@dataclass(frozen=True)
class Unread:
    """A stand-in for a slice of a tensor in a file, without reading it: indexing it returns a tensor on meta.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        dtype_name: name of the dtype in safetensors.
        device: device of the tensor that indexing returns; on other devices than meta it has small random numbers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dtype_name: str
    device: torch.device = _META

    def __getitem__(self, _: object) -> Tensor:
        if self.device == _META:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return noise(self.shape, self.dtype, self.device)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the contents."""
        return math.prod(self.shape) * self.dtype.itemsize

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of safetensors does."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the name of the dtype, as a slice of safetensors does."""
        return self.dtype_name


def noise(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of small random numbers, which depend only on the number of elements."""
    flat = torch.empty(math.prod(shape), dtype=dtype, device=device)
    numbers = torch.Generator().manual_seed(flat.numel())
    block = torch.randn(_PERIOD, generator=numbers, device="cpu").mul_(_SCALE).to(device, dtype)
    whole = flat.numel() // _PERIOD * _PERIOD
    flat[:whole].view(-1, _PERIOD).copy_(block)
    flat[whole:].copy_(block[: flat.numel() - whole])
    return flat.view(*shape)


@dataclass(frozen=True)
class Files:
    """The tensors of some safetensors files.

    Attributes:
        file_of: key -> file that has the tensor.
        tensors: key -> shape and dtype of the tensor.
    """

    file_of: Mapping[str, Path]
    tensors: Mapping[str, Unread]
    _states: Mapping[Path, _State] = field(repr=False)

    @classmethod
    def of(cls, paths: Sequence[str]) -> Files:
        """Read the headers of the files, and no contents.

        Raises:
            ConfigurationError: a file is damaged, or is not a safetensors file.
        """
        file_of, tensors, states = {}, {}, {}
        dtypes: dict[str, torch.dtype] = {}  # by the names that safetensors gives them
        for path in map(Path, paths):
            if path.suffix != ".safetensors":
                raise ConfigurationError(
                    f"{path} is not a safetensors file, and other files cannot be read a tensor at a time; load the "
                    "model once on one process and write it again with model.save_pretrained()"
                )
            states[path] = _state(path)
            with _opened(path) as file:
                for key in file.keys():  # noqa: SIM118  no mapping
                    part = file.get_slice(key)
                    shape, name = tuple(part.get_shape()), part.get_dtype()
                    if name not in dtypes:
                        dtypes[name] = (part[:0] if shape else part[...]).dtype
                    file_of[key], tensors[key] = path, Unread(shape, dtypes[name], name)
        return cls(file_of, tensors, states)

    @contextlib.contextmanager
    def slices(self, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Within this context yield slices of safetensors, which read into new memory when they are indexed.

        Raises:
            ConfigurationError: a file is damaged, gone, or has changed.
        """
        with contextlib.ExitStack() as stack:
            open_files = {path: stack.enter_context(self._unchanged(path)) for path in {self.file_of[k] for k in keys}}
            yield {key: open_files[self.file_of[key]].get_slice(key) for key in keys}

    def equal(self, one: str, other: str) -> bool:
        """Return whether two tensors are equal bit for bit, reading a few rows at a time."""
        a, b = self.tensors[one], self.tensors[other]
        if (a.shape, a.dtype) != (b.shape, b.dtype) or not a.shape:
            return False
        rows = max(1, _COMPARED_BYTES // (max(1, math.prod(a.shape[1:])) * a.dtype.itemsize))
        with self.slices((one, other)) as slices:
            ends = ((i, min(i + rows, a.shape[0])) for i in range(0, a.shape[0], rows))
            return all(torch.equal(*(part[begin:end] for part in slices.values())) for begin, end in ends)

    @contextlib.contextmanager
    def _unchanged(self, path: Path) -> Iterator[Any]:
        self._check(path)
        with _opened(path) as file:
            yield file
        self._check(path)

    def _check(self, path: Path) -> None:
        if _state(path) != self._states[path]:
            raise ConfigurationError(
                f"{path} has changed since from_pretrained read its header; start again when it is completely written"
            )


def _state(path: Path) -> _State:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error.strerror}); it must stay until the strategy has a plan"
        ) from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    open_: Callable[..., Any] = safe_open
    try:
        file = open_(path, framework="pt", backend="pread")  # mapped memory would change with the file
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(
            f"{path} is damaged ({error}), perhaps because it was not copied or downloaded completely; get it again"
        ) from error
    with file as opened:
        yield opened
