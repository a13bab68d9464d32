"""The zoo imports transformers: offline, and without its many objects in the way of the garbage collector."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def frozen_heap() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
