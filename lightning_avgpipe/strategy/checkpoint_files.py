"""Checkpoints on disk: one file, or a folder of shards; replaced as a whole or not at all."""

from __future__ import annotations

import contextlib
import copy
import errno
import glob
import inspect
import os
import platform
import re
import shutil
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.utils import _pytree as pytree

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import CheckpointError, ConfigurationError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.lightning import CheckpointIO, TorchCheckpointIO, _WrappingCheckpointIO, get_filesystem

# Names that Lightning's own strategies use, so that its tools read these folders, and this package reads theirs.
_META = "meta.pt"
_WEIGHTS = "model"
_WEIGHTS_ELSEWHERE = "state_dict"
_OPTIMIZER = "optimizer_"

_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)  # another process has put something there

# Lightning before 2.6 has no argument weights_only, and loads files as trusted.
_HAS_WEIGHTS_ONLY = "weights_only" in inspect.signature(TorchCheckpointIO.load_checkpoint).parameters


class LocalCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint format, written atomically and read by memory mapping on local file systems.

    On other file systems this class behaves as Lightning's. A file is written under another name in the same folder,
    and then renamed in one step, so that an interruption leaves the old checkpoint intact. (Lightning writes to the
    folder for temporary files; if that is on another file system, the move copies over the old checkpoint.) A file is
    read by mapping it into memory, so processes that read the same file share it, and a process loads only what it
    uses.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; see Lightning's method."""
        target = _local(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with replacing(target) as new:
            _write_file(checkpoint, new, target)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; see Lightning's method. Weights and optimizer states are mapped: copy what you keep."""
        target = _present(path)
        if target is None or not zipfile.is_zipfile(target):
            asked = {"weights_only": weights_only} if _HAS_WEIGHTS_ONLY else {}
            return super().load_checkpoint(path, map_location, **asked)
        loaded = torch.load(target, map_location=map_location, mmap=True, weights_only=_weights_only(weights_only))
        if not isinstance(loaded, dict):
            return loaded  # type: ignore[no-any-return]
        # The rest is copied: a mapping must not outlive the loading, since another process may write to the file.
        kept = {key: value for key, value in loaded.items() if key not in ("state_dict", "optimizer_states")}
        return {**loaded, **pytree.tree_map_only(Tensor, Tensor.clone, kept)}


def _weights_only(asked: bool | None) -> bool | None:
    """Return ``weights_only`` for ``torch.load``, given Lightning's argument; its older versions trust files."""
    return asked if _HAS_WEIGHTS_ONLY or asked is not None else False


def choose_files(io: CheckpointIO | None, distributed: bool) -> CheckpointIO:
    """Return a CheckpointIO with :class:`LocalCheckpointIO` in place of Lightning's default; others stay as they are.

    Args:
        io: the user's CheckpointIO; None: there is none.
        distributed: whether checkpoints are folders of shards, to which all processes write.
    Raises:
        ConfigurationError: checkpoints are distributed, and would not use the CheckpointIO that the user has chosen.
    """
    chosen = LocalCheckpointIO() if io is None or type(io) is TorchCheckpointIO else io
    if isinstance(io, _WrappingCheckpointIO):
        io.checkpoint_io = LocalCheckpointIO()  # ignored if the wrapper was built around another one
    if distributed and type(chosen) is not LocalCheckpointIO:
        raise ConfigurationError(
            "save_distributed_checkpoint=True writes with torch.distributed.checkpoint and would not use "
            f"{type(chosen).__name__}; remove the plugin, or the option"
        )
    return chosen


# -- shards ----------------------------------------------------------------------------------------------------------


def is_sharded(path: Any) -> bool:
    """Return whether a path is a folder of shards."""
    folder = _present(path)
    return folder is not None and (folder / _META).is_file()


def save_shards(checkpoint: dict[str, Any], path: Any, cluster: Cluster | None, storage_options: Any) -> None:
    """Write a checkpoint as a folder, to which each process writes what it holds. Every process calls it.

    The folder appears under its name once it is complete. It has the layout of Lightning's FSDPStrategy.

    Args:
        checkpoint: the Trainer's checkpoint; ``state_dict`` and ``optimizer_states`` (keyed by parameter names) hold
            what this process owns. All other entries are those of rank 0.
        path: path of the folder. The path on rank 0 is used, and all processes must have access to it.
        cluster: the connected processes; None if they have never been connected. Only the first group writes, since the
            other groups have the same weights.
        storage_options: must be None.
    Raises:
        CheckpointError: a process could not write, or the path is not local.
        ConfigurationError: there are storage options, or no connected processes.
    """
    if storage_options is not None:
        raise ConfigurationError("storage_options are not supported with save_distributed_checkpoint=True")
    if cluster is None:
        raise ConfigurationError(
            "save_distributed_checkpoint=True, but no run has connected the processes yet; fit or validate first"
        )
    if cluster.group_number:
        return
    target = _local(path)
    if target is None:
        raise CheckpointError(
            f"save_distributed_checkpoint=True writes to local and shared file systems, not to {path}; "
            "use a local path, or save_distributed_checkpoint=False"
        )
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    shards: dict[str, Any] = {_WEIGHTS: _whole(checkpoint["state_dict"])}
    for number, state in enumerate(checkpoint.get("optimizer_states", [])):
        entries = {name: _whole(e) if isinstance(e, Mapping) else e for name, e in state["state"].items()}
        shards[f"{_OPTIMIZER}{number}"] = {"state": entries}
        any_state = any(cluster.group.gather_objects(bool(state["state"])))
        if cluster.rank == 0 and any_state:
            shards[f"{_OPTIMIZER}{number}"]["param_groups"] = state["param_groups"]
        elif cluster.rank == 0:
            rest[f"{_OPTIMIZER}{number}"] = state  # shards would drop an empty state
    with replacing(target) if cluster.rank == 0 else contextlib.nullcontext() as new:
        folder = cluster.group.broadcast(new)
        assert folder is not None
        _write(shards, folder, cluster)
        if cluster.rank == 0:
            _write_file(rest, folder / _META, target)


class _Whole:
    """A value that shards store as one object. Otherwise they would drop empty mappings and turn keys into strings."""

    def __init__(self, value: Any) -> None:
        self._value = tree.map_tensors(Tensor.cpu, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self._value,)  # so that it can be read without this package


def _whole(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries, with each value other than a tensor wrapped so that it is stored as one object."""
    return {name: value if isinstance(value, Tensor) else _Whole(value) for name, value in entries.items()}


def _write(shards: dict[str, Any], folder: Path, cluster: Cluster) -> None:
    failures: dict[int, BaseException] = {}

    def save() -> None:
        try:
            dcp.save(shards, checkpoint_id=folder, process_group=cluster.group.process_group)
        except dcp.CheckpointException as error:  # raised in all processes, with the failures of all
            failures.update((rank, failure) for rank, (failure, _) in error.failures.items())

    if cluster.group.world_size == 1:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended with one process
            save()
    else:
        cluster.group.together("saving a checkpoint", save)
    for rank, failure in failures.items():
        if not isinstance(failure, Exception):  # such as a KeyboardInterrupt
            raise failure
        raise CheckpointError(f"rank {rank} could not write the checkpoint {folder}: {failure}") from failure


def load_shards(path: Any, optimizers: bool, weights_only: bool | None) -> dict[str, Any]:
    """Read a folder of shards, written by this or another strategy of Lightning, as one checkpoint on the host.

    Args:
        path: path of the folder.
        optimizers: whether to read the optimizers' states, which are the largest part.
        weights_only: argument of ``torch.load`` for everything but weights and optimizer states.
    Raises:
        CheckpointError: the folder has no weights.
    """
    folder = _present(path)
    assert folder is not None
    reader = dcp.FileSystemReader(folder)
    names = reader.read_metadata().planner_data.values()
    wanted = {str(name[0]) for name in names if optimizers or not str(name[0]).startswith(_OPTIMIZER)}
    found: dict[str, Any] = {}
    _load_state_dict(found, reader, planner=_EmptyStateDictLoadPlanner(keys=wanted), no_dist=True)
    found |= torch.load(folder / _META, map_location="cpu", weights_only=_weights_only(weights_only))
    key = _WEIGHTS if _WEIGHTS in found else _WEIGHTS_ELSEWHERE
    if key not in found:
        raise CheckpointError(
            f"the folder {folder} is no whole checkpoint: it has neither '{_WEIGHTS}' nor '{_WEIGHTS_ELSEWHERE}', only "
            f"{', '.join(sorted(found)) or 'nothing'}; give the folder that the Trainer saved, with all of its files"
        )
    weights = found.pop(key)
    numbered = [f"{_OPTIMIZER}{number}" for number in range(len(found))]
    states = [found.pop(key) for key in numbered if key in found]
    return {**found, "state_dict": weights, **({"optimizer_states": states} if states else {})}


# -- writing -----------------------------------------------------------------------------------------------------------


def _write_file(content: Any, path: Path, target: Path) -> None:
    """Save an object to a file, and flush it to the disk.

    Raises:
        OSError: writing failed, for example on a full disk. The message has the reason, which that of torch.save may
            not give, and ``target``, the final path of the file.
    """
    handled = sys.exc_info()[1]  # a checkpoint may be saved because of an error, which is no reason why writing fails
    try:
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except Exception as raised:
        error: BaseException | None = raised
        while error is not None and not isinstance(error, OSError):
            # torch.save closes its archive after an error, which raises another one
            error = None if error.__context__ is handled else error.__context__
        if error is None:
            raise
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"cannot write the checkpoint: {reason}", str(target)) from raised


# -- replacing -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path to write to within this context; at its end this path replaces the target, unless there is an error.

    The path is in the target's folder. A file is replaced in one step. A folder is replaced in two; if the process ends
    between them, readers find the old folder under another name, see ``_present``. If several processes write to one
    target, the last one wins: each uses its own names for the new path and for the old one that it moves away. Whatever
    a killed process of this host has left in the folder is removed, or moved back.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    host, process = platform.node(), os.getpid()
    # hidden, so that no reader takes them for checkpoints
    new, previous = (target.with_name(f".{target.name}.{host}-{process}.{what}") for what in ("saving", "previous"))
    for left in target.parent.glob(".*.saving"):
        if left == new or _is_abandoned(left, host):
            _remove(left)
    for left in _moved_away(target):
        if left == previous or _is_abandoned(left, host):
            _remove(left) if target.exists() else os.rename(left, target)
    try:
        yield new
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            _remove(new)
        raise
    _put(new, target, previous)
    _remove(previous)


def _put(new: Path, target: Path, previous: Path) -> None:
    """Rename ``new`` to the target. Move what is there to ``previous`` first, if one of them is a folder."""
    while True:
        if target.is_dir() or new.is_dir():
            _remove(previous)
            with contextlib.suppress(FileNotFoundError):  # nothing is there, or another process has just moved it
                os.rename(target, previous)
        try:
            os.replace(new, target)
            return
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise


def _is_abandoned(path: Path, host: str) -> bool:
    """Return whether the process that wrote or moved a path was one of this host, and has ended."""
    found = re.search(rf"\.{re.escape(host)}-(\d+)\.(saving|previous)$", path.name)
    return found is not None and not _is_alive(int(found[1]))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # the process belongs to another user
        return True
    return True


def _present(path: Any) -> Path | None:
    """Return where a local checkpoint is, also if its replacement was interrupted; None for other file systems."""
    target = _local(path)
    if target is None or target.exists():
        return target
    return next(iter(_moved_away(target)), None)


def _moved_away(target: Path) -> list[Path]:
    """Return the paths to which processes have moved the target, and that still exist."""
    return sorted(target.parent.glob(f".{glob.escape(target.name)}.*.previous"))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(FileNotFoundError):  # another process removes it as well
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _local(path: Any) -> Path | None:
    """Return a path as one of the local file system; None if it is of another one."""
    file_system = get_filesystem(path)
    return Path(file_system._strip_protocol(str(path))) if isinstance(file_system, LocalFileSystem) else None
