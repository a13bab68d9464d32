"""Lines of user code that messages show."""

from __future__ import annotations

import pytest
import torch

from lightning_avgpipe.errors import PeerError
from lightning_avgpipe.utils.source import traceback_of_user_code


def step() -> None:
    torch.nn.Linear(2, 2)(torch.ones(3))


def test_a_traceback_has_the_frames_of_user_code_and_what_was_raised() -> None:
    with pytest.raises(RuntimeError) as caught:
        step()
    shown = traceback_of_user_code(caught.value)
    assert "in step" in shown and "test_source.py" in shown and "RuntimeError: " in shown
    assert "in _call_impl" not in shown


def test_an_error_that_no_user_code_has_seen_keeps_its_frames() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 2)(torch.ones(3))
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]
    assert "in forward" in traceback_of_user_code(caught.value)


def test_causes_are_shown_as_well() -> None:
    with pytest.raises(PeerError) as caught:
        try:
            step()
        except RuntimeError as error:
            raise PeerError("a peer has failed") from error
    shown = traceback_of_user_code(caught.value)
    assert shown.index("in step") < shown.index("direct cause") < shown.index("a peer has failed")
