"""What a stage may use, and what it holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.memory import Conditions, UpdateScheme, limit_of, memory_of, parse_limit, state_copies
from lightning_avgpipe.schedule import build


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, math.inf),
        ("10GB", 10e9),
        ("1.5 GiB", 1.5 * 2**30),
        ("512mib", 512 * 2**20),
        ("100B", 100),
        (4096, 4096),
        (0.8, 0.8),
    ],
)
def test_limits_are_sizes_bytes_or_fractions(limit: Any, expected: float) -> None:
    assert parse_limit(limit) == expected


@pytest.mark.parametrize("limit", ["10", "ten GB", "10 GB each", 0, -1, -0.5, "0GB", math.inf, math.nan, True, [1]])
def test_anything_else_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"must be a size such as '10GB' or '512MiB', a number of bytes"):
        parse_limit(limit)


def test_a_fraction_is_shared_by_the_stages_of_a_device() -> None:
    device = torch.device("cpu")
    assert limit_of(0.5, device, 2) == pytest.approx(limit_of(1.0, device, 1) / 4)
    assert limit_of("1GB", device, 2) == 1e9


def test_optimizers_tell_how_much_they_keep() -> None:
    weights = [nn.Parameter(torch.zeros(1))]
    assert state_copies([]) == 2
    assert state_copies([torch.optim.SGD(weights, lr=0.1)]) == 0
    assert state_copies([torch.optim.SGD(weights, lr=0.1, momentum=0.9)]) == 1
    assert state_copies([torch.optim.AdamW(weights)]) == 2
    assert state_copies([torch.optim.Adam(weights, amsgrad=True)]) == 3
    assert state_copies([torch.optim.Adagrad(weights)]) == 2  # not known: as Adam


@pytest.mark.parametrize("num_pipelines", [1, 4])
def test_each_model_has_what_it_trains_and_several_have_a_reference(num_pipelines: int) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module[0].weight.requires_grad_(False)
    conditions = Conditions(build("1f1b", 3, 8), state_copies=1, num_pipelines=num_pipelines)
    memory = memory_of(module, conditions, UpdateScheme(), 100.0)
    reference = 12 if num_pipelines > 1 else 0
    assert memory.in_flight == tuple(num_pipelines * flights for flights in (3, 2, 1)) and memory.num_microbatches == 8
    assert memory.weights["0.bias"] == 12
    assert memory.persistent["0.bias"] == num_pipelines * 36 + reference  # weight, gradient, momentum
    assert memory.persistent["0.weight"] == 24  # frozen: shared
    assert memory.persistent["1.running_mean"] == num_pipelines * 12 + reference


def test_an_evaluation_has_weights_only() -> None:
    memory = memory_of(nn.Linear(2, 3), Conditions(build("forward", 3, 8), state_copies=1), UpdateScheme(), 100.0)
    assert memory.in_flight == (1, 1, 1) and memory.persistent["bias"] == 12


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("num_pipelines", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "size", "summed"), [(torch.float32, 4, 4), (torch.bfloat16, 2, 4), (torch.float64, 8, 8)]
)
def test_groups_sum_up_in_at_least_single_precision_what_moves_their_reference_and_rolling_ones_once_more(
    dtype: torch.dtype, size: int, summed: int, num_pipelines: int, rolling: bool
) -> None:
    conditions = Conditions(build("1f1b", 3, 8), state_copies=1, num_pipelines=num_pipelines, num_groups=2)
    memory = memory_of(nn.Linear(2, 3).to(dtype), conditions, UpdateScheme(rolling=rolling), 100.0)
    trained, kept_to_roll = 3 * size * num_pipelines, size * (num_pipelines + 1) + summed
    assert memory.persistent["bias"] == 3 * (trained + size + summed + (kept_to_roll if rolling else 0))
