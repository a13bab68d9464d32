"""Weights, gradients and whatever a training gives: the same bit for bit, or to rounding."""

from __future__ import annotations

from collections.abc import Collection
from numbers import Real
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def state(module: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers as of now."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items() if isinstance(tensor, Tensor)}


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    """Compare trees of tensors and numbers by name, bit for bit; modules by their weights and buffers."""
    one, other = (_tree(one), _tree(other))
    if isinstance(one, Tensor):
        assert torch.equal(one, other), f"{where} differs"
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            assert_equal(value, other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_equal(mine, theirs, f"{where}.{i}")
    else:
        assert one == other, f"{where} differs"


def assert_close(found: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6, where: str = "") -> None:
    """Compare such trees to rounding."""
    found, expected = _tree(found), _tree(expected)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(found[key], value, rtol, atol, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_close(mine, theirs, rtol, atol, f"{where}.{i}")
    else:
        assert found == (pytest.approx(expected, rel=rtol, abs=atol) if isinstance(expected, Real) else expected), where


def _tree(whole: Any) -> Any:
    return {**state(whole), **dict(whole.named_buffers())} if isinstance(whole, nn.Module) else whole


def assert_same_parameters(one: nn.Module, other: nn.Module, exact: bool = True) -> None:
    """Compare by name; with ``exact`` bit for bit."""
    (assert_equal if exact else assert_close)(dict(one.named_parameters()), dict(other.named_parameters()))


def assert_same_gradients(one: nn.Module, other: nn.Module, summed: Collection[str] = ()) -> None:
    """Compare gradients by name, bit for bit; those that are summed over stages up to rounding."""
    others = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        if name in summed:
            assert_close(parameter.grad, others[name].grad, atol=1e-7, where=name)
        else:
            assert_equal(parameter.grad, others[name].grad, name)
