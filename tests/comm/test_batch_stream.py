"""The batch stream: what comes is received before it is asked for, and nothing is left when it ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_avgpipe.comm.batches import BatchStream
from lightning_avgpipe.comm.channel import MemoryChannel, Traffic
from lightning_avgpipe.comm.control import ControlChannel
from tests.threads import alone

HOST = torch.device("cpu")


class Counted(MemoryChannel):
    """Counts the receives that are posted and not used."""

    posted = 0

    def expect(self, count: int, observers: Sequence[Traffic] = ()) -> None:
        self.posted += count

    def get(self):
        self.posted -= 1
        assert self.posted >= 0
        return super().get()


def test_batches_do_not_wait_until_they_are_asked_for_and_no_receive_is_left() -> None:
    channel, control = Counted(), ControlChannel(0, alone(1).waits)
    source, sink = BatchStream(control, HOST, {1: channel}), BatchStream(control, HOST, inbox=channel)
    for first, count in ((0, 5), (5, 1), (6, 0), (6, 9)):  # streams of several epochs
        streams = source.begin(), sink.begin()
        for i in range(first, first + count):
            source.pass_on(streams[0], {"i": i})
            assert sink.pass_on(streams[1]).item == {"i": i}
            assert channel.posted >= 2  # those of two pipelines may come
    source.close()
    sink.close()
    assert channel.posted == 0 and not channel.ready()
