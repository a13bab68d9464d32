"""Lines of user code that messages show."""

from __future__ import annotations

import pytest
import torch

from lightning_avgpipe.utils.source import traceback_of_user_code


def step() -> None:
    torch.nn.Linear(2, 2)(torch.ones(3))


def test_a_traceback_has_the_frames_of_user_code_and_what_was_raised() -> None:
    with pytest.raises(RuntimeError) as caught:
        step()
    shown = traceback_of_user_code(caught.value)
    assert "in step" in shown and "test_source.py" in shown and "RuntimeError: " in shown
    assert "in _call_impl" not in shown
