"""Communicators of simulated devices, with the streams of NCCL's: each has one, on which sends and receives meet.

::

    send on rank 0      |-- waits for the receive --|-- data -->|      what is behind it on the stream waits
    receive on rank 1                 |-- waits ----|--> data --|

The host goes on at once. Data travels over a group of the host, such as gloo's, or one between threads. What waits when
a communicator is aborted ends without its data, and the stream goes on.

Those between processes start as NCCL's do: at the first transfer, for which the host waits until all members begin
theirs. No two threads may use one at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.simulated import device

NAME = "simccl"
# how torch calls a gather into one tensor, which has changed
_GATHERS = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
_FIRST_TAG = 1000  # others are of transfers on the host


class _Work(dist._Work):
    def __init__(self, event: Any, place: torch.device) -> None:
        super().__init__()
        self._event = event
        self._place = place

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream(self._place).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())


class Communicator(dist.ProcessGroup):
    """Among processes, or threads that stand for them.

    Args:
        host: connects them on the host; asked from threads, with a tag for each transfer.
        rank: of this one.
        size: how many there are.
        beside: connects them once more, for collectives of devices: those of a group meet in the order of their calls,
            and a thread's calls come at any time among the host's. By default the same.
        meet: waits on the host until all members have called it, at the first transfer; None: there is no wait.
    """

    def __init__(
        self, host: Any, rank: int, size: int, beside: Any = None, meet: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(rank, size)
        self._host = host
        self._beside = host if beside is None else beside
        self._rank = rank
        self._name = ""
        self._stream: Any = None
        self._counts: Counter[tuple[int, int]] = Counter()  # of transfers from one rank to another
        self._lock = threading.Lock()
        self._waiting: list[Any] = []  # transfers
        self._meet = meet
        self._user: str | None = None  # the thread that begins a transfer now

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        if tensor.is_cpu:
            return self._host.send(tensors, dst, tag)
        tag = self._tag(self._rank, dst)

        def exchange(data: Tensor) -> None:
            self._host.recv([torch.empty(1, dtype=torch.uint8)], dst, tag).wait()  # it receives
            self._host.send([data.clone()], dst, tag).wait()

        return self._put("send", tensor, exchange, reads=True)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        if tensor.is_cpu:
            return self._host.recv(tensors, src, tag)
        tag = self._tag(src, self._rank)

        def exchange(data: Tensor) -> None:
            self._host.send([torch.zeros(1, dtype=torch.uint8)], src, tag).wait()
            self._host.recv([data], src, tag).wait()

        return self._put("recv", tensor, exchange, writes=True)

    def broadcast(self, tensors: Tensor | Sequence[Tensor], root: Any) -> Any:
        (tensor,) = [tensors] if isinstance(tensors, Tensor) else tensors
        source = root if isinstance(root, int) else root.rootRank
        if tensor.is_cpu:
            return self._host.broadcast(tensor, source)
        mine = source == self._rank
        exchange = lambda data: self._beside.broadcast(data, source).wait()  # noqa: E731
        return self._put("broadcast", tensor, exchange, reads=mine, writes=not mine)

    def allreduce(self, tensors: Sequence[Tensor], *opts: Any) -> Any:
        (tensor,) = tensors
        if tensor.is_cpu:
            return self._host.allreduce(tensors, *opts)
        exchange = lambda data: self._beside.allreduce([data.view(tensor.dtype)], *opts).wait()  # noqa: E731
        return self._put("allreduce", tensor, exchange, reads=True, writes=True)

    def allgather(self, outputs: Any, inputs: Any, *opts: Any) -> Any:
        """On a device: into outputs that lie one after the other."""
        (rows,), (tensor,) = outputs, inputs
        if tensor.is_cpu:
            return self._host.allgather(outputs, inputs, *opts)
        assert all(after.data_ptr() - row.data_ptr() == row.nbytes for row, after in itertools.pairwise(rows))
        return self.all_gather_single(rows[0].as_strided((len(rows) * tensor.numel(),), (1,)), tensor)

    def all_gather_single(self, output: Tensor, tensor: Tensor, *opts: Any) -> Any:
        if tensor.is_cpu:
            return getattr(self._host, _GATHERS)(output, tensor, *opts)
        parts = output.view(self._host.size(), -1)
        parts[self._rank].copy_(tensor.flatten())

        def exchange(data: Tensor) -> None:
            rows = list(data.view(self._host.size(), -1))
            gathered = [torch.empty_like(row) for row in rows]
            self._beside.allgather([gathered], [rows[self._rank].clone()]).wait()
            for row, found in zip(rows, gathered, strict=True):
                row.copy_(found)

        return self._put("allgather", output, exchange, reads=True, writes=True)

    _allgather_base = all_gather_single  # as older versions of torch call it

    def barrier(self, opts: Any) -> Any:
        return self._host.barrier(opts)

    def abort(self) -> None:
        """Let nobody wait any longer for what is under way; as a backend of torch.distributed is asked for it."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for transfer in waiting:
            transfer.finish()

    def _get_backend(self, device: torch.device) -> Communicator:
        return self

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """By which torch.distributed knows it."""
        return self._name

    def _tag(self, source: int, target: int) -> int:
        self._counts[source, target] += 1
        return _FIRST_TAG + self._counts[source, target]

    def _put(
        self, what: str, tensor: Tensor, exchange: Callable[[Tensor], None], reads: bool = False, writes: bool = False
    ) -> _Work:
        assert tensor.is_contiguous()
        with self._alone():
            return self._begin(what, tensor, exchange, reads, writes)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        thread = threading.current_thread().name
        with self._lock:
            other, self._user = self._user, self._user or thread
        if other is not None:
            raise RuntimeError(f"threads '{other}' and '{thread}' use one communicator at the same time")
        try:
            if self._meet is not None:
                self._meet()
                self._meet = None
            yield
        finally:
            self._user = None

    def _begin(self, what: str, tensor: Tensor, exchange: Callable[[Tensor], None], reads: bool, writes: bool) -> _Work:
        current = torch.accelerator.current_stream(tensor.device)
        if self._stream is None:
            self._stream = torch.Stream(device=tensor.device)
        self._stream.wait_event(current.record_event())
        transfer = device.backend.put_transfer(
            tensor.device.index, self._stream.stream_id, what, [tensor] * reads, [tensor] * writes
        )
        # only its address: whoever puts something on a stream keeps it until the stream is done
        memory, nbytes = tensor.data_ptr(), tensor.nbytes

        with self._lock:
            self._waiting.append(transfer)

        def end(error: str = "") -> None:
            with self._lock:
                if transfer not in self._waiting:
                    return  # it was aborted
                self._waiting.remove(transfer)
            transfer.finish(error)

        def work() -> None:
            try:
                transfer.wait_for_turn()
                data = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(memory), dtype=torch.uint8)
                exchange(data)
                end()
            except Exception as error:  # for those who wait for it
                end(f"{type(error).__name__}: {error}")

        threading.Thread(target=work, name=f"simulated {what}", daemon=True).start()
        return _Work(self._stream.record_event(), tensor.device)


def register() -> None:
    """Make it a backend of torch.distributed, for all simulated devices."""

    def made(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Communicator:
        names = NAME, f"{NAME} beside"
        groups = (dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout) for name in names)
        on_host, beside = groups
        return Communicator(on_host, rank, size, beside, lambda: beside.barrier().wait())

    dist.Backend.register_backend(NAME, made, devices=[device.NAME])
