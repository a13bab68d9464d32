"""A value that another stage has: whatever is done with it is an error that names it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_avgpipe.errors import AbsentValueError
from lightning_avgpipe.utils.placeholder import Elsewhere

VALUE = Elsewhere("net.means", "which stage 1 has")


@pytest.mark.parametrize(
    "use",
    [
        lambda value: value + 1,
        lambda value: 1 + value,
        lambda value: value[0],
        lambda value: value.norm(),
        list,
        bool,
        np.asarray,
        lambda value: torch.zeros(2).add_(value, alpha=0.5),
        lambda value: torch.zeros(2).copy_(other=value),
        lambda value: torch.cat([torch.zeros(2), value]),
        lambda value: pickle.loads(pickle.dumps(value)) * 2,
    ],
)
def test_every_use_is_an_error_that_names_it(use: Callable[[Any], Any]) -> None:
    with pytest.raises(AbsentValueError, match=r"test_elsewhere.py:\d+ .*uses 'net.means', which stage 1 has"):
        use(VALUE)
