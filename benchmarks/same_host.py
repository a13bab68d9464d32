"""Two processes of one host: messages through shared memory, over the network, and by torch's own send and receive.

- Latency: a message to and fro. Half of the round trip, and the CPU time of both processes for a message.
- 1F1B with short actions, beside torch.distributed.pipelining's, which is over gloo: all take turns in the same
  processes, round by round, and a ratio is the median of the ratios of the rounds. An action computes small matrix
  products for the given time.

A pair of processes has mailboxes, and another one lines; each has torch beside it. One thread per process.

    python benchmarks/same_host.py                       # a minute
    python benchmarks/same_host.py --forward-ms 5
    python benchmarks/same_host.py --rests               # actions sleep, so that the cores are free for the engine
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import add_options, connected, in_turns, launch, loaded, write
from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import Edge
from lightning_avgpipe.engine.pipeline import run_together
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.schedule import build
from lightning_avgpipe.utils.random_streams import RandomKey

STEP = "training_step"
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

    def __init__(self, rests: bool) -> None:
        super().__init__()
        self.rests, self.seconds = rests, 0.0
        self.weight = nn.Parameter(torch.ones(_WIDTH))
        self.matrix = [torch.randn(48, 48)]  # no parameter

    def work(self) -> None:
        if self.rests:
            time.sleep(self.seconds)
            return
        end, (matrix,) = time.perf_counter() + self.seconds, self.matrix
        while time.perf_counter() < end:
            torch.mm(matrix, matrix)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Work.apply(x * self.weight, self)
        return result


class Model(nn.Module):
    """A stage of one layer on each process."""

    def __init__(self, rests: bool) -> None:
        super().__init__()
        self.first, self.second = Layer(rests), Layer(rests)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.second(self.first(x)).square().mean()  # type: ignore[no-any-return]


def iterations(cluster: Cluster, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of an iteration in each round, by side."""
    torch.manual_seed(0)
    count, stage = options.microbatches, cluster.rank  # torch's stage; ours is the other one
    mine, theirs = Model(options.rests), Model(options.rests)
    parts = [(torch.randn(_ROWS, _WIDTH), i) for i in range(count)]
    pipeline, _ = loaded(cluster, mine, ["second"], parts[0])
    module = theirs.second if stage else theirs.first
    peer = Schedule1F1B(
        PipelineStage(module, stage, 2, cluster.device), count, loss_fn=lambda y, target: y.square().mean()
    )
    for layer in (mine.first, mine.second, theirs.first, theirs.second):
        layer.seconds = options.forward_ms / 1e3
    batch, schedule = torch.cat([x for x, _ in parts]), build("1f1b", 2, count)

    def ours(i: int) -> None:
        task = Task(
            lambda _, *args: mine.training_step(*args), parts, lambda _, loss: loss, RandomKey(0, i),
            around=lambda _: nullcontext(),
        )  # fmt: skip
        run_together([pipeline], STEP, [schedule], [task])

    def torchs(i: int) -> None:
        if stage:
            peer.step(target=torch.zeros(len(batch)), losses=[], return_outputs=False)
        else:
            peer.step(batch)

    sides: dict[str, Callable[[int], None]] = {"ours": ours, "torch": torchs}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i, name in enumerate(in_turns([*sides], 1 + options.rounds)):
        mine.zero_grad()
        theirs.zero_grad()
        with intercepting() if name == "ours" else nullcontext():
            cluster.group.barrier()
            before = time.perf_counter()
            sides[name](i)
            took = time.perf_counter() - before
        if i >= len(sides):  # the first round does not count
            seconds[name].append(took)
    return seconds


def measure(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any] | None:
    """Both parts, on rank 0."""
    found = cluster.group.gather_objects((latencies(cluster), iterations(cluster, options)))
    if cluster.rank:
        return None
    (one, seconds), (other, others) = found
    return {
        "latency": {name: (us, cpu + other[name][1]) for name, (us, cpu) in one.items()},
        "seconds": {name: [max(pair) for pair in zip(seconds[name], others[name], strict=True)] for name in seconds},
    }


# -- the parent --------------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    """Latencies, then iterations."""
    lines = ["message                            one way    CPU, both ends"]
    for network in NETWORKS:
        for name, (us, cpu) in found[network]["latency"].items():
            lines.append(f"{f'{network}: {name}':30s} {us:8.0f} us {cpu:14.0f} us")
    lines.append("1F1B, median of an iteration         ours       torch   as fast as torch's")
    for network in NETWORKS:
        ours, torchs = (found[network]["seconds"][name] for name in ("ours", "torch"))
        ratio = statistics.median(b / a for a, b in zip(ours, torchs, strict=True))
        medians = statistics.median(ours) * 1e3, statistics.median(torchs) * 1e3
        lines.append(f"{network:30s} {medians[0]:8.1f} ms {medians[1]:8.1f} ms {ratio:14.2f}x")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    result.add_argument("--forward-ms", type=float, default=1.0, help="of a forward, and of a backward")
    result.add_argument("--rests", action="store_true", help="actions sleep")
    result.add_argument("--microbatches", type=int, default=16)
    result.add_argument("--rounds", type=int, default=41)
    result.add_argument("--network", choices=[*NETWORKS], help=argparse.SUPPRESS)
    add_options(result, 300.0, "pair of processes")
    return result


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.result is not None:
        with connected(NETWORKS[options.network]) as cluster:
            found = measure(cluster, options)
        if found is not None:
            options.result.write_text(json.dumps(found))
        return
    all_found: dict[str, Any] = {
        network: launch(__file__, [*arguments, "--network", network], 2, None, options.limit_s) for network in NETWORKS
    }
    print(f"{options.forward_ms:g} ms of an action, {options.microbatches} micro-batches\n{table(all_found)}")
    write(options, all_found | {"cores": os.cpu_count(), "torch": torch.__version__})


if __name__ == "__main__":
    main(sys.argv[1:])
