"""Our hooks on saved tensors step aside for torch.func, and others stay an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

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


def test_hooks_of_others_are_refused_as_without_us() -> None:
    def refused() -> None:
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            slope(torch.ones(2))

    with intercepting():
        with saved_tensors_hooks(same, same):
            refused()
            with SavedHooks(same, same):
                refused()
        with SavedHooks(same, same), saved_tensors_hooks(same, same):
            refused()
        slope(torch.ones(2))


def test_within_derivatives_our_hooks_do_nothing() -> None:
    def cube(x: Tensor) -> Tensor:
        with SavedHooks(same, same):
            return x**3

    with intercepting():
        assert torch.func.grad(cube)(torch.tensor(2.0)) == 12
