"""Verdicts: a record of the trainings that were compared with plain runs and found equal, and need not be again."""

from __future__ import annotations

import hashlib
import logging
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_avgpipe.utils.lightning import pl

_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_avgpipe", "torchmetrics", "builtins", "abc")
_log = logging.getLogger(__name__)


class Verdicts:
    """A directory with an empty file for each training that was found equal.

    Args:
        directory: made when the first file is written; None keeps nothing.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def known(self, key: str) -> bool:
        """Return whether a training with this key was found equal."""
        return self._directory is not None and self._path(key).exists()

    def keep(self, key: str) -> None:
        """Note that a training with this key is equal."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._path(key).touch()
        except OSError as error:  # a full or read-only disk: the next run compares again
            _log.info("cannot note that the first steps were equal to plain ones: %s", error)

    def _path(self, key: str) -> Path:
        assert self._directory is not None
        return self._directory / f"verified-{key}"


def key_of(module: nn.Module, options: Mapping[str, Any], processes: int) -> str:
    """Return a digest of what decides whether a pipeline trains as a plain run does.

    The digest covers the code of the module's classes outside of installed libraries, its structure, the strategy's
    options, the number of processes, and versions. Data and contents of weights are left out.
    """
    digest = hashlib.blake2b(digest_size=12)
    facts = torch.__version__, pl.__version__, processes, sorted((k, repr(v)) for k, v in options.items())
    digest.update(repr(facts).encode())
    digest.update(repr(module).encode())
    digest.update(repr([(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters()]).encode())
    kinds = dict.fromkeys(kind for m in module.modules() for kind in type(m).__mro__)
    for kind in kinds:
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            for code in _codes(kind):
                digest.update(code)
    return digest.hexdigest()


def _codes(kind: type) -> Iterator[bytes]:
    for name, member in vars(kind).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        function = getattr(function, "__wrapped__", function)
        if isinstance(function, types.FunctionType):
            yield name.encode()
            yield from _code(function.__code__)


def _code(code: types.CodeType) -> Iterator[bytes]:
    yield code.co_code + repr((code.co_names, code.co_varnames)).encode()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        else:
            yield repr(constant).encode()
