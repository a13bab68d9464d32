"""Checkpoints on disk: one file, or a folder of shards; replaced as a whole or not at all."""

from __future__ import annotations

import contextlib
import inspect
import os
import platform
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.utils import _pytree as pytree

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import CheckpointError, ConfigurationError
from lightning_avgpipe.utils.patching import nothing

# What Lightning's own strategies call these things: its tools read our folders, and we read theirs.
_META = "meta.pt"
_WEIGHTS = "model"
_WEIGHTS_ELSEWHERE = "state_dict"
_OPTIMIZER = "optimizer_"

# Lightning before 2.6 did not ask, and trusted its files.
_ASKS = "weights_only" in inspect.signature(TorchCheckpointIO.load_checkpoint).parameters


class LocalCheckpointIO(TorchCheckpointIO):
    """Lightning's format on local file systems, with less memory and more safety; other file systems as ever.

    A file is written beside its place, then moved there in one step, so that an interruption harms nothing. (Lightning
    writes it into the folder for temporary files; if that is on another file system, the move is a copy over the
    checkpoint before.) It is read by mapping it into memory, so that processes which read the same file share it, and
    what a process does not use is never loaded.

    Args:
        confirm: called when a file is written, before it takes its place; raises if that is for somebody else now.
    """

    def __init__(self, confirm: Callable[[], None] = nothing) -> None:
        super().__init__()
        self._confirm = confirm

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; see Lightning's."""
        target = _local(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with replacing(target) as new:
            _write_file(checkpoint, new, target)
            self._confirm()

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; see Lightning's. Weights and optimizer states are mapped: copy what is to stay."""
        target = _present(path)
        if target is None or not zipfile.is_zipfile(target):
            asked = {"weights_only": weights_only} if _ASKS else {}
            return super().load_checkpoint(path, map_location, **asked)
        trusted = weights_only if _ASKS or weights_only is not None else False
        loaded = torch.load(target, map_location=map_location, mmap=True, weights_only=trusted)
        if not isinstance(loaded, dict):
            return loaded  # type: ignore[no-any-return]
        # A map must not outlive the loading, since somebody may write into the file.
        kept = {key: value for key, value in loaded.items() if key not in ("state_dict", "optimizer_states")}
        return {**loaded, **pytree.tree_map_only(Tensor, Tensor.clone, kept)}


def choose_files(io: CheckpointIO | None, distributed: bool, confirm: Callable[[], None] = nothing) -> CheckpointIO:
    """A CheckpointIO that uses ours where it would use Lightning's default; others stay as they are.

    Args:
        io: the user's; None: there is none.
        distributed: whether checkpoints are folders to which all processes add.
        confirm: see :class:`LocalCheckpointIO`.
    Raises:
        ConfigurationError: there is another, which checkpoints that are ``distributed`` would not use.
    """
    chosen = _with_local_files(io, confirm)
    if distributed and type(chosen) is not LocalCheckpointIO:
        raise ConfigurationError(
            "save_distributed_checkpoint=True writes with torch.distributed.checkpoint and would not use "
            f"{type(chosen).__name__}; remove the plugin, or the option"
        )
    return chosen


def _with_local_files(io: CheckpointIO | None, confirm: Callable[[], None]) -> CheckpointIO:
    if io is None or type(io) is TorchCheckpointIO:
        return LocalCheckpointIO(confirm)
    if isinstance(io, _WrappingCheckpointIO):
        io.checkpoint_io = LocalCheckpointIO(confirm)  # which it takes only if it was built without one
    return io


# -- shards ----------------------------------------------------------------------------------------------------------


def is_sharded(path: Any) -> bool:
    """Whether a path is a folder of shards."""
    folder = _present(path)
    return folder is not None and (folder / _META).is_file()


def save_shards(checkpoint: dict[str, Any], path: Any, cluster: Cluster | None, storage_options: Any = None) -> None:
    """Write a checkpoint as a folder to which each process adds what it holds. Every process calls it.

    The folder appears in its place when all of it is written. It has the layout of Lightning's FSDPStrategy.

    Args:
        checkpoint: of the Trainer; ``state_dict`` and ``optimizer_states`` (keyed by parameter names) hold what this
            process owns. The rest is taken from rank 0.
        path: rank 0's counts; all processes must see it.
        cluster: of the processes; None if they have never been connected. The first group writes, the others have
            the same.
        storage_options: None; there are none.
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
    shards: dict[str, Any] = {_WEIGHTS: checkpoint["state_dict"]}
    for number, state in enumerate(checkpoint.get("optimizer_states", [])):
        shards[f"{_OPTIMIZER}{number}"] = {"state": state["state"]}
        any_state = any(cluster.group.gather_objects(bool(state["state"])))
        if cluster.rank == 0 and any_state:
            shards[f"{_OPTIMIZER}{number}"]["param_groups"] = state["param_groups"]
        elif cluster.rank == 0:
            rest[f"{_OPTIMIZER}{number}"] = state  # shards leave out what is empty
    with replacing(target) if cluster.rank == 0 else contextlib.nullcontext() as new:
        folder = cluster.group.broadcast(new)
        assert folder is not None
        _write(shards, folder, cluster)
        if cluster.rank == 0:
            _write_file(rest, folder / _META, target)


def _write(shards: dict[str, Any], folder: Path, cluster: Cluster) -> None:
    failures: dict[int, BaseException] = {}

    def save() -> None:
        try:
            dcp.save(shards, checkpoint_id=folder, process_group=cluster.group.process_group)
        except dcp.CheckpointException as error:  # names the failures of all processes, to all of them
            failures.update((rank, failure) for rank, (failure, _) in error.failures.items())

    if cluster.group.world_size == 1:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what we want
            save()
    else:
        cluster.group.together("saving a checkpoint", save)
    for rank, failure in failures.items():
        if not isinstance(failure, Exception):  # such as a KeyboardInterrupt
            raise failure
        raise CheckpointError(f"rank {rank} could not write the checkpoint {folder}: {failure}") from failure


def load_shards(path: Any, optimizers: bool, weights_only: bool | None) -> dict[str, Any]:
    """Read a folder of shards, ours or that of another strategy of Lightning, as one checkpoint on the host.

    Args:
        optimizers: whether to read the optimizers' states, which is most of it.
        weights_only: of ``torch.load``, for what is neither weight nor optimizer state.
    """
    folder = _present(path)
    assert folder is not None
    reader = dcp.FileSystemReader(folder)
    names = reader.read_metadata().planner_data.values()
    wanted = {str(name[0]) for name in names if optimizers or not str(name[0]).startswith(_OPTIMIZER)}
    found: dict[str, Any] = {}
    _load_state_dict(found, reader, planner=_EmptyStateDictLoadPlanner(keys=wanted), no_dist=True)
    trusted = weights_only if _ASKS or weights_only is not None else False
    found |= torch.load(folder / _META, map_location="cpu", weights_only=trusted)
    weights = found.pop(_WEIGHTS) if _WEIGHTS in found else found.pop(_WEIGHTS_ELSEWHERE)
    numbered = sorted(key for key in found if key.startswith(_OPTIMIZER) and key.removeprefix(_OPTIMIZER).isdigit())
    states = [found.pop(key) for key in numbered]
    return {**found, "state_dict": weights, **({"optimizer_states": states} if states else {})}


# -- writing -----------------------------------------------------------------------------------------------------------


def _write_file(content: Any, path: Path, target: Path) -> None:
    """Save to a file, down to the disk.

    Raises:
        OSError: the disk is full, or such; says so of the target, where torch.save says that it is somewhere else than
            it should be.
    """
    failed: list[OSError] = []
    try:
        with path.open("wb") as file:
            torch.save(content, cast(IO[bytes], _Noting(file, failed)))
            file.flush()
            os.fsync(file.fileno())
    except Exception as raised:
        error = raised if isinstance(raised, OSError) else failed[0] if failed else None
        if error is None:
            raise
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"cannot write the checkpoint: {reason}", str(target)) from raised


class _Noting:
    """A file that notes why it could not be written, for a writer that does not pass it on."""

    def __init__(self, file: IO[bytes], failed: list[OSError]) -> None:
        self._file = file
        self._failed = failed

    def write(self, data: Any) -> int:
        with self._noting():
            return self._file.write(data)

    def flush(self) -> None:
        with self._noting():
            self._file.flush()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed.append(error)
            raise


# -- replacing -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give a path beside the target; what is written there takes the target's place if no error comes.

    Files are replaced in one step. A folder takes two; should the process end between them, readers find what was there
    before under its other name, see ``_present``. What a killed process left half-written in this folder is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    host, process = platform.node(), os.getpid()
    new, previous = _beside(target, f"{host}-{process}.saving"), _beside(target, "previous")
    for left in target.parent.glob(".*.saving"):
        if left.name.startswith(f".{target.name}.") or _is_abandoned(left, host):
            _remove(left)
    if target.exists():
        _remove(previous)
    elif previous.exists():
        os.rename(previous, target)
    try:
        yield new
    except BaseException:
        with contextlib.suppress(OSError):  # the other error says why
            _remove(new)
        raise
    if target.exists() and (target.is_dir() or new.is_dir()):
        os.rename(target, previous)
    os.replace(new, target)
    _remove(previous)


def _is_abandoned(path: Path, host: str) -> bool:
    """Whether a process of this host has begun to write it that is not there any more."""
    found = re.search(rf"\.{re.escape(host)}-(\d+)\.saving$", path.name)
    return found is not None and not _is_alive(int(found[1]))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it belongs to somebody else
        return True
    return True


def _present(path: Any) -> Path | None:
    """Where a local checkpoint is, also if its replacement was interrupted; None if it is not there or not local."""
    target = _local(path)
    if target is None or target.exists():
        return target
    previous = _beside(target, "previous")
    return previous if previous.exists() else None


def _beside(target: Path, what: str) -> Path:
    """Hidden, so that nobody takes it for a checkpoint."""
    return target.with_name(f".{target.name}.{what}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _local(path: Any) -> Path | None:
    """As a path of this machine; None for other file systems."""
    file_system = get_filesystem(path)
    return Path(file_system._strip_protocol(str(path))) if isinstance(file_system, LocalFileSystem) else None
