"""Measure messages between two processes of one host: through shared memory, over the network, and as torch sends them.

- Latency: half of the round trip of a message, and the CPU time of both processes for a message.
- 1F1B with short actions, compared with torch.distributed.pipelining's, which uses gloo. All take turns in the same
  processes, round by round, and a ratio is the median of the ratios of the rounds. An action computes small matrix
  products for the given time.

One pair of processes uses shared memory (mailboxes), and another one the network (lines). Torch is measured in both,
with one thread per process.

    python benchmarks/same_host.py                       # a minute
    python benchmarks/same_host.py --forward-ms 5
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import connected, launch, parser, table, timed, write
from benchmarks.models import TwoLayers
from benchmarks.one_pipeline import OnePipeline, TorchPipeline
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import Edge
from lightning_avgpipe.schedule import build

MICROBATCHES, ROUNDS = 16, 41
_SIZES = (8, 64 * 1024)
_ROWS, _WIDTH = 16, 1024  # of a micro-batch's values: 64 kB in float32
_TRIPS = 500
_WARM_UP = 20


class Lines(ProcessGroups):
    """A network without mailboxes."""

    def __init__(self, rank: int, device: torch.device, timeout: timedelta) -> None:
        super().__init__(rank, device, timeout, shared_memory=False)


NETWORKS: dict[str, type[ProcessGroups]] = {"mailbox": ProcessGroups, "line": Lines}

# -- latency -----------------------------------------------------------------------------------------------------------


def latencies(cluster: Cluster) -> dict[str, Any]:
    """Microseconds one way, and of CPU of this process for a message, by side and bytes."""
    first = cluster.rank == 0
    there, back = Edge(0, 0, "backward"), Edge(0, 0, "forward")  # the last stage is on rank 0
    outbox = cluster.transport.outbox(there if first else back)
    inbox = cluster.transport.inbox(back if first else there)

    def send(payload: Tensor) -> None:
        outbox.put(Message(0, (payload,)))

    def receive(payload: Tensor) -> None:
        inbox.expect(1)
        cluster.waits.until(inbox.ready, "waits")
        inbox.get()

    sides: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], object]]] = {
        "ours": (send, receive),
        "torch": (lambda payload: dist.send(payload, 1 - cluster.rank), lambda payload: dist.recv(payload)),
    }
    found: dict[str, Any] = {}
    for size in _SIZES:
        payload = torch.zeros(size // 4)
        for name, (gives, takes) in sides.items():
            cluster.group.barrier()
            seconds = []
            for i in range(_WARM_UP + _TRIPS):
                if i == _WARM_UP:
                    cpu = time.process_time()
                before = time.perf_counter()
                for step in (gives, takes) if first else (takes, gives):
                    step(payload)
                seconds.append(time.perf_counter() - before)
            cpu_us = (time.process_time() - cpu) / _TRIPS / 2 * 1e6
            found[f"{name}, {size} bytes"] = statistics.median(seconds[_WARM_UP:]) / 2 * 1e6, cpu_us
    return found


# -- 1F1B --------------------------------------------------------------------------------------------------------------


class Work(torch.autograd.Function):
    """Takes a while in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        layer.work()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.layer.work()
        return gradients[0], None


class Layer(nn.Module):
    """A stage's work."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(_WIDTH))
        self.matrix = [torch.randn(48, 48)]  # no parameter

    def work(self) -> None:
        end, (matrix,) = time.perf_counter() + self.seconds, self.matrix
        while time.perf_counter() < end:
            torch.mm(matrix, matrix)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Work.apply(x * self.weight, self)
        return result


def iterations(cluster: Cluster, action_s: float) -> dict[str, list[float]]:
    """Seconds of an iteration in each round, by side."""
    torch.manual_seed(0)
    mine, theirs = (TwoLayers(Layer(0.0), Layer(0.0)) for _ in range(2))
    parts = [(torch.randn(_ROWS, _WIDTH), 0) for _ in range(MICROBATCHES)]
    ours = OnePipeline(cluster, mine, ["second"], parts)
    own = {cluster.rank: theirs.second if cluster.rank else theirs.first}  # torch's stage; ours is the other one
    peer = TorchPipeline(cluster, Schedule1F1B, own, MICROBATCHES, lambda y, target: y.square().mean())
    for layer in (mine.first, mine.second, theirs.first, theirs.second):
        layer.seconds = action_s
    batch, schedule = torch.cat([x for x, _ in parts]), build("1f1b", 2, MICROBATCHES)

    def run_ours() -> None:
        mine.zero_grad()
        ours.run(schedule)

    def run_torchs() -> None:
        theirs.zero_grad()
        peer.run(batch, torch.zeros(len(batch)))

    return timed(cluster, {"ours": run_ours, "torch": run_torchs}, ROUNDS, torchs=["torch"])


def measure(network: type[ProcessGroups], action_s: float) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """In each process: both parts."""
    with connected(network) as cluster:
        return latencies(cluster), iterations(cluster, action_s)


# -- the parent --------------------------------------------------------------------------------------------------------


def of_both(ranks: list[Any]) -> dict[str, Any]:
    """Put together what both processes have measured."""
    (one, seconds), (other, _) = ranks
    return {"latency": {name: (us, cpu + other[name][1]) for name, (us, cpu) in one.items()}, "seconds": seconds}


def tables(found: dict[str, Any]) -> str:
    """Latencies, then iterations."""
    messages, rows = [], []
    for network in NETWORKS:
        for name, (us, cpu) in found[network]["latency"].items():
            messages.append((f"{network}: {name}", f"{us:.0f} us", f"{cpu:.0f} us"))
        ours, torchs = (found[network]["seconds"][name] for name in ("ours", "torch"))
        ratio = statistics.median(b / a for a, b in zip(ours, torchs, strict=True))
        medians = (f"{statistics.median(seconds) * 1e3:.1f} ms" for seconds in (ours, torchs))
        rows.append((network, *medians, f"{ratio:.2f}x"))
    return "\n\n".join(
        (
            table(["message", "one way", "CPU, both ends"], messages),
            table(["1F1B, median of an iteration", "ours", "torch", "as fast as torch's"], rows),
        )
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--forward-ms", type=float, default=1.0, help="of a forward, and of a backward")
    options = arguments.parse_args()
    given = options.forward_ms / 1e3
    found = {name: of_both(launch(measure, (network, given), 2)) for name, network in NETWORKS.items()}
    print(f"{options.forward_ms:g} ms of an action\n\n{tables(found)}")
    write(options, found)


if __name__ == "__main__":
    main()
