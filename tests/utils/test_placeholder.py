"""What travels besides tensors: constants keep their type, and hidden tensors are missed loudly."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_avgpipe.errors import AbsentValueError
from lightning_avgpipe.utils.placeholder import Absent, Constant, Elsewhere, TensorMeta


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("value", [0.5, Box(1), [1]])
def test_what_may_change_unseen_is_not_remembered(value: Any) -> None:
    with pytest.raises(TypeError, match="must be sent every time"):
        hash(Constant(value))


def test_a_tensor_that_hides_in_an_object_arrives_as_absent() -> None:
    hidden = torch.randn(2, 3, requires_grad=True) * 2
    arrived = pickle.loads(pickle.dumps(Constant(Box(hidden)))).value.value
    assert arrived.shape == (2, 3)
    with pytest.raises(AbsentValueError, match="an object that hides tensors"):
        arrived + 1


def test_an_absent_value_can_be_pickled_as_a_part_of_what_a_hook_saves() -> None:
    absent = Absent(TensorMeta.of(torch.ones(2, 3)), torch.device("cpu"), "labels")
    arrived = pickle.loads(pickle.dumps({"batch": [absent]}))["batch"][0]
    assert repr(arrived) == repr(absent) and type(arrived) is Absent


def test_an_absent_value_answers_as_the_tensor_does_when_it_is_received() -> None:
    turned = torch.randn(3, 2, requires_grad=True).t() * 2
    absent = Absent(TensorMeta.of(turned), torch.device("cpu"), "encoder")
    assert absent.stride() == turned.stride() == (1, 2) and not absent.is_contiguous() and not absent.is_leaf
    assert absent.t().is_contiguous()
    with pytest.raises(AbsentValueError, match=r"grad_fn at .* asks for the history of 'encoder'"):
        absent.grad_fn  # noqa: B018


def test_what_nobody_needs_is_computed_from_an_absent_value_without_numbers() -> None:
    absent = Absent(TensorMeta((2, 3), torch.float32, True, False), torch.device("cpu"), "encoder")
    with Absent.flowing():
        average = 0.9 * absent.mean(0) + torch.cat([absent, torch.ones(2, 3)]).sum(0)
        assert isinstance(average, Absent) and average.shape == (3,)
        for use in (lambda: average.sum().item(), lambda: torch.zeros(3).copy_(average)):
            with pytest.raises(AbsentValueError, match="needs the value of 'encoder'"):
                use()


# -- a value that another stage has: whatever is done with it is an error that names it ------------------------------


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
    with pytest.raises(AbsentValueError, match=r"test_placeholder.py:\d+ .*uses 'net.means', which stage 1 has"):
        use(VALUE)
