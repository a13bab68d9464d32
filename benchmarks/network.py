"""Limit the rate of links between processes of one machine, with network namespaces, which need root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Megabits", "Namespaces", "available", "namespaces"]

Megabits = int | Sequence[Sequence[int]]

_SMALL_PACKETS = ["u16", "0x0000", "0xff80", "at", "2"]  # total length below 128 bytes: acknowledgements


@dataclass(frozen=True)
class Namespaces:
    """One network namespace per rank; what a rank sends to another one has a link of its own, of a limited rate."""

    prefix: str
    world_size: int

    @property
    def master(self) -> str:
        """Address of rank 0."""
        return _address(0)

    def interface(self, rank: int) -> str:
        """The rank's network interface."""
        return f"{self.prefix}v{rank}"

    def command(self, rank: int) -> list[str]:
        """What to put before a command that runs as this rank."""
        return ["ip", "netns", "exec", f"{self.prefix}{rank}"]


def available() -> bool:
    """Whether this process may make namespaces, and finds the tools."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


@contextlib.contextmanager
def namespaces(world_size: int, megabits: Megabits) -> Iterator[Namespaces]:
    """Make namespaces on one bridge, and remove them afterwards.

    Two ranks are joined by two independent links, one per direction, as in the simulator. Acknowledgements are not
    limited, because on a link of their own they would wait behind the data of the other direction.

    Args:
        world_size: number of ranks.
        megabits: rate of every link, per second; or of those from each rank (row) to each other one.
    """
    network = Namespaces(f"avp{os.getpid() % 10000}x", world_size)
    bridge = f"{network.prefix}b"
    made = [bridge]
    try:
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for rank in range(world_size):
            name, inner, outer = f"{network.prefix}{rank}", network.interface(rank), f"{network.prefix}w{rank}"
            _run("ip", "netns", "add", name)
            made.append(name)
            _run("ip", "link", "add", inner, "netns", name, "type", "veth", "peer", "name", outer, "netns", bridge)
            _run("ip", "-n", bridge, "link", "set", outer, "master", "br0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", inner, "up")
            _run("ip", "-n", name, "addr", "add", f"{_address(rank)}/24", "dev", inner)
            _limit(network, rank, megabits)
        yield network
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _limit(network: Namespaces, rank: int, megabits: Megabits) -> None:
    inside, device = network.command(rank), network.interface(rank)
    # messages come in bursts with pauses between them, after which TCP would start slowly again
    _run(*inside, "sysctl", "-q", "-w", "net.ipv4.tcp_slow_start_after_idle=0")
    _run(*inside, "tc", "qdisc", "replace", "dev", device, "root", "handle", "1:", "htb", "default", "1")
    _run(*inside, *_class(device, "1:1", "20gbit", "1mb"))
    filters = ["tc", "filter", "add", "dev", device, "parent", "1:", "protocol", "ip"]
    _run(*inside, *filters, "prio", "1", "u32", "match", *_SMALL_PACKETS, "flowid", "1:1")
    for peer in range(network.world_size):
        if peer != rank:
            number, rate = f"1:{10 + peer}", megabits if isinstance(megabits, int) else megabits[rank][peer]
            _run(*inside, *_class(device, number, f"{rate}mbit", "32kb"))
            _run(*inside, *filters, "prio", "2", "u32", "match", "ip", "dst", f"{_address(peer)}/32", "flowid", number)


def _class(device: str, number: str, rate: str, burst: str) -> list[str]:
    limits = ["rate", rate, "ceil", rate, "burst", burst, "cburst", burst, "quantum", "60000"]
    return ["tc", "class", "add", "dev", device, "parent", "1:", "classid", number, "htb", *limits]


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
