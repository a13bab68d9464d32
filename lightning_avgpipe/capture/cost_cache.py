"""Cache measured costs in small files, so that the next run of the same model on the same device need not measure."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_avgpipe.capture.costs import Costs
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.utils.device import port_of

_FORMAT = 1
_log = logging.getLogger(__name__)


def default_directory() -> Path | None:
    """Return ``lightning_avgpipe`` in ``$XDG_CACHE_HOME`` or ``~/.cache``; None without a home directory.

    Some users have no home directory, as in containers.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    if home and Path(home).is_absolute():
        return Path(home) / "lightning_avgpipe"
    try:
        return Path.home() / ".cache" / "lightning_avgpipe"
    except RuntimeError:
        return None


class CostCache:
    """A directory with one file of measured costs per fingerprint; files that cannot be read are ignored.

    Args:
        directory: directory of the files; it is made when the first file is written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._writable = True

    def load(self, key: str, num_nodes: int) -> Costs | None:
        """Return the costs with this fingerprint; None if no file with them can be read."""
        path = self._path(key)
        try:
            found = json.loads(path.read_text())
            if found["key"] != key:
                raise ValueError("it belongs to something else")
            forward, backward = (_numbers(found, name, num_nodes) for name in ("forward_s", "backward_s"))
            stash = tuple(map(int, _numbers(found, "stash_bytes", num_nodes)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            _log.info("ignoring the measured costs in %s: %s: %s", path, type(error).__name__, error)
            return None
        return Costs(forward, backward, stash, measured=True)

    def save(self, key: str, costs: Costs, about: dict[str, Any]) -> None:
        """Write costs atomically: a concurrent reader finds the old file or the new one.

        After a failure, nothing more is written.
        """
        if not self._writable:
            return
        content = {
            "key": key,
            "about": about,
            "forward_s": costs.forward,
            "backward_s": costs.backward,
            "stash_bytes": costs.stash_bytes,
        }
        path, temporary = self._path(key), None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.directory, suffix=".tmp", delete=False) as file:
                temporary = file.name
                json.dump(content, file)
            os.replace(temporary, path)
        except OSError as error:  # a full or read-only disk: the next run measures again
            self._writable = False
            _log.warning("cannot keep the measured costs for the next run in %s: %s", path, error)
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def _path(self, key: str) -> Path:
        return self.directory / f"costs-{key}.json"


def _numbers(found: dict[str, Any], name: str, count: int) -> tuple[float, ...]:
    """Return a list of finite, non-negative numbers, one for each node of the step."""
    numbers = found[name]
    if not isinstance(numbers, list) or len(numbers) != count:
        raise ValueError(f"{name} is not a list of {count} numbers")
    if not all(type(n) in (int, float) and n >= 0 and math.isfinite(n) for n in numbers):
        raise ValueError(f"{name} has entries that are not finite numbers of at least 0")
    return tuple(map(float, numbers))


def fingerprint(graph: CallGraph, module: nn.Module, device: torch.device) -> tuple[str, dict[str, Any]]:
    """Return a digest of everything that measured costs depend on, and the human-readable part of it.

    The graph determines operations, shapes, types, which values have gradients and what is saved for backwards, and
    thereby whether the step trains, in which precision and with which checkpoints. Source lines are left out: moving a
    function does not change its cost.
    """
    about = {
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "step": graph.step,
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    nodes = [
        (n.kind, n.name, n.inputs, n.outputs, n.writes, n.parameters, n.states, n.draws, n.flops, n.saved_bytes)
        for n in graph.nodes
    ]
    values = [(v.shape, v.dtype, v.requires_grad, v.storage, v.is_saved) for v in graph.values]
    units = [(path, repr(module.get_submodule(path))) for path in graph.units]
    weights = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    settings = (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.mkldnn.enabled,
    )
    everything = repr((_FORMAT, sorted(about.items()), nodes, values, sorted(graph.observed), units, weights, settings))
    return hashlib.sha256(everything.encode()).hexdigest()[:24], about


def _device_name(device: torch.device) -> str:
    port = port_of(device)
    if port.runs_ahead:
        return port.name
    return f"{device.type}: {port.name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
