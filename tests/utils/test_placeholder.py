"""What travels besides tensors: constants keep their type, and hidden tensors are missed loudly."""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from lightning_avgpipe.errors import AbsentValueError
from lightning_avgpipe.utils.placeholder import Absent, Constant, TensorMeta


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_equal_constants_of_different_types_are_different() -> None:
    assert Constant(1) == Constant(1)
    assert Constant(1) != Constant(True)
    assert len({Constant(0), Constant(False), Constant(None), Constant("0")}) == 4


@pytest.mark.parametrize("value", [0.5, Box(1), [1]])
def test_what_may_change_unseen_is_not_remembered(value: Any) -> None:
    with pytest.raises(TypeError, match="must be sent every time"):
        hash(Constant(value))


@pytest.mark.parametrize("value", [None, True, 3, "name", 0.5, torch.float16, torch.Size([2])])
def test_constants_travel(value: Any) -> None:
    travelled = pickle.loads(pickle.dumps(Constant(value))).value
    assert travelled == value and type(travelled) is type(value)


def test_a_tensor_that_hides_in_an_object_arrives_as_absent() -> None:
    hidden = torch.randn(2, 3, requires_grad=True) * 2
    arrived = pickle.loads(pickle.dumps(Constant(Box(hidden)))).value.value
    assert arrived.shape == (2, 3)
    with pytest.raises(AbsentValueError, match="an object that hides tensors"):
        arrived + 1


def test_an_absent_value_answers_for_its_description_only() -> None:
    absent = Absent(TensorMeta((2, 3), torch.float16, True, True), torch.device("cpu"), "encoder")
    assert absent.shape == (2, 3) and absent.dtype == torch.float16 and absent.requires_grad and len(absent) == 2
    assert repr(absent) == "Absent('encoder', shape=(2, 3))"
    for use in (lambda: absent + 1, lambda: absent[absent > 0], lambda: torch.nn.functional.relu(absent)):
        with pytest.raises(AbsentValueError, match="needs the value of 'encoder', which lives on an earlier stage"):
            use()


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


def test_views_of_an_absent_value_are_absent() -> None:
    absent = Absent.of_batch(TensorMeta((4, 6), torch.float32, True, False), torch.device("cpu"), "['image']")
    parts = torch.tensor_split(absent, 3)
    assert [tuple(part.shape) for part in parts] == [(2, 6), (1, 6), (1, 6)]
    for view in (absent.view(2, 12), absent[:, 1:], absent.flatten(), absent.half(), absent.to("cpu"), *parts):
        assert isinstance(view, Absent)
    assert absent.half().dtype == torch.float16
    with pytest.raises(AbsentValueError, match=r"of '\['image'\]', a tensor of the batch .*send_batch='all'"):
        absent.flatten().sum()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_an_absent_value_moves_like_any_tensor(mode: type[AbstractContextManager[None]]) -> None:
    absent = Absent(TensorMeta((2, 3), torch.float32, False, False), torch.device("cpu"), "x")
    with mode():
        there = [
            absent.to("meta"),
            absent.to(torch.device("meta"), non_blocking=True),
            absent.to(torch.empty(1, dtype=torch.float64, device="meta")),
            absent.to(torch.int64),
        ]
    assert [(type(t), tuple(t.shape), t.device.type, t.dtype) for t in there] == [
        (Absent, (2, 3), "meta", torch.float32),
        (Absent, (2, 3), "meta", torch.float32),
        (Absent, (2, 3), "meta", torch.float64),
        (Absent, (2, 3), "cpu", torch.int64),
    ]
