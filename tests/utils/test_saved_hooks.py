"""Our hooks on saved tensors step aside for torch.func, and others stay an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_avgpipe.capture.tracer import intercepting
from lightning_avgpipe.utils.torch_compat import SavedHooks

WEIGHT = torch.tensor([0.5, 2.0], requires_grad=True)


def slope(x: Tensor) -> Tensor:
    return torch.func.grad(lambda v: (v * WEIGHT).tanh().sum())(x)


def same(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.skipif(not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="needs torch 2.8")
def test_derivatives_are_computed_within_our_hooks_which_see_what_comes_after() -> None:
    seen: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with intercepting(), SavedHooks(note, same), SavedHooks(note, same):
        found = slope(torch.ones(2))
        assert not seen
        WEIGHT.exp()
        assert len(seen) == 1
    assert torch.equal(found, slope(torch.ones(2)))
