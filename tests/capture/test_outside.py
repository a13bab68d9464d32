"""Variables outside of modules that the user's code names."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from lightning_avgpipe.capture.outside import outside


class Missing:
    """Stands for a package that is not installed, and says so to whoever asks it for anything."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"{name} of a package that is not installed")


OPTIONAL, CALLS = Missing(), {"steps": 0}


@functools.lru_cache
def counted() -> int:
    CALLS["steps"] += 1
    return CALLS["steps"]


class Net(nn.Module):
    other = Missing()

    def forward(self, x: Tensor) -> Tensor:
        return x * counted() if self.training else OPTIONAL.fast(x)


def test_objects_that_answer_no_question_are_variables_like_others() -> None:
    found = {name.removeprefix(f"global {__name__}.") for name in outside(Net())}
    assert {"OPTIONAL", "CALLS"} <= found
