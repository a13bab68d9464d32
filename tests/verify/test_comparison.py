"""What rounding explains, and what it does not."""

from __future__ import annotations

import torch

from lightning_avgpipe.verify.comparison import first_difference, usual_size


def test_what_nearly_cancels_is_rounded_as_its_terms_were() -> None:
    first, second = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)) / 100
    gradients = {"weight": first, "bias": (first + second) - first - second}  # nothing but rounding
    other = {"weight": first, "bias": (second + first) - second - first}
    for scale, explained in ((0.0, False), (usual_size(gradients.values()), True)):
        found = first_difference("the gradient", gradients, other, lambda name: True, scale=scale)
        assert (found is None) == explained


def test_a_lost_part_is_no_rounding() -> None:
    first, second = torch.randn(2, 64) / 100
    found = first_difference("g", {"w": first + second}, {"w": first}, lambda name: True, scale=usual_size([first]))
    assert found is not None
