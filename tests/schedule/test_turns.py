"""Stages whose replicas take micro-batches in turns."""

from __future__ import annotations

import pytest

from lightning_avgpipe.schedule import build
from lightning_avgpipe.schedule.turns import SharedStages


def test_a_message_with_latency_comes_late_and_occupies_its_link_no_longer() -> None:
    free = [[float("inf")] * 2] * 2
    stages = SharedStages([1, 1], [1.0, 1.0], [0.0, 0.0], [0.0], [0.0], free, latency_s=5.0)
    # F0 to F3 of stage 0 end at 1, 2, 3, 4; stage 1 begins at 6 and goes on without a pause, since no message waits
    assert stages.ends_s(build("afab", 2, 4))[1] == pytest.approx(10.0)
