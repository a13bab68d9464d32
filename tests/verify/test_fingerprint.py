"""What fingerprints tell apart, and what rounding explains."""

from __future__ import annotations

import math

import torch

from lightning_avgpipe.verify.fingerprint import differences, fingerprint, how_different, usual_size


def test_what_nearly_cancels_is_rounded_as_its_terms_were() -> None:
    first, second = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)) / 100
    gradients = {"weight": fingerprint(first), "bias": fingerprint((first + second) - first - second)}  # only rounding
    other = {"weight": fingerprint(first), "bias": fingerprint((second + first) - second - first)}
    for scale, explained in ((0.0, False), (usual_size(gradients.values()), True)):
        found = list(differences("the gradient", gradients, other, lambda name: True, scale=scale))
        assert (not found) == explained


def test_a_lost_part_is_no_rounding() -> None:
    first, second = torch.randn(2, 64) / 100
    expected, found = fingerprint(first + second), fingerprint(first)
    assert how_different(expected, found, rounded=True, scale=usual_size([found])) is not None


def test_one_other_element_is_another_fingerprint_wherever_it_is() -> None:
    tensor = torch.randn(1 << 21)
    digests = {fingerprint(tensor).digest}
    for position in (0, 1, 1 << 20, (1 << 21) - 1):
        other = tensor.clone()
        other[position] = torch.nextafter(other[position], torch.tensor(math.inf))
        digests.add(fingerprint(other).digest)
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    assert len(digests | {fingerprint(swapped).digest}) == 6
