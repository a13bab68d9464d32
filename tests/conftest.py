"""Every test runs on one thread, starts from the same seed, and must leave no thread or process behind."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from tests.simulated.process import NAME as SIMULATED

ENDING_S = 5.0


@pytest.fixture(autouse=True)
def same_start(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)  # loggers and checkpoints write here
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # and measured costs there
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set by seed_everything, and undone like this
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)  # set by a strategy of a process with another rank


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    for thread in (own := [thread for thread in threading.enumerate() if thread.name.startswith("avgpipe")]):
        thread.join(ENDING_S)  # one that was told to end may be about to
    left = [thread.name for thread in own if thread.is_alive()]
    assert not left, f"threads left behind: {left}"
    children = [child for child in multiprocessing.active_children() if child.name != SIMULATED]  # it serves them all
    assert not children, f"processes left behind: {children}"
