"""Bytes: what a stage may use, what it holds, and what it sends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_avgpipe.capture.graph import CallGraph, Node, Value
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning import Costs, Link, Plan, cut_balanced, make_plan
from lightning_avgpipe.planning.memory import Conditions, UpdateScheme, limit_of, memory_of, parse_limit, state_copies
from lightning_avgpipe.planning.plan import stage_costs
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
    assert [flow.in_flight for flow in memory.flows] == [
        num_pipelines * flights for flights in (3, 2, 1)
    ] and memory.num_microbatches == 8
    assert memory.weights["0.bias"] == 12
    assert memory.persistent["0.bias"] == num_pipelines * 36 + reference  # weight, gradient, momentum
    assert memory.persistent["0.weight"] == 24  # frozen: shared
    assert memory.persistent["1.running_mean"] == num_pipelines * 12 + reference


def test_an_evaluation_has_weights_only() -> None:
    memory = memory_of(nn.Linear(2, 3), Conditions(build("forward", 3, 8), state_copies=1), UpdateScheme(), 100.0)
    assert [flow.in_flight for flow in memory.flows] == [1, 1, 1] and memory.persistent["bias"] == 12


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


# -- formats on the wire: what plans make of links and bytes ---------------------------------------------------------


ROW = 1024
SHAPES = ((32, ROW),) * 4
BYTES = 32 * ROW * 4


def chain(shapes: Any = SHAPES, dtype: str = "torch.float32", asks: bool = True) -> CallGraph:
    """Units one after the other, with their values."""
    nodes = tuple(
        Node(i, "call", f"u{i}", "line", (i - 1,) if i else (), (i,), parameters=(f"u{i}.w",))
        for i in range(len(shapes))
    )
    values = tuple(Value(i, f"u{i}", shape, dtype, 4 * shape[0] * shape[1], asks, i) for i, shape in enumerate(shapes))
    kept = frozenset({len(shapes) - 1})
    return CallGraph("training_step", nodes, values, kept, tuple(node.name for node in nodes), frozenset())


def costs(per_byte: float, wire: Any, measured: bool = True, count: int = 4) -> Costs:
    """A forward of a unit takes a second, a backward two."""
    stash = (0,) * count
    return Costs((1.0,) * count, (2.0,) * count, stash, (Link(per_byte, 0.1),), measured=measured, wire=wire)


def planned(given: Costs, graph: CallGraph | None = None) -> Plan:
    """Two stages of two units each."""
    sizes = {f"u{i}.w": ROW for i in range(4)}
    return make_plan(graph or chain(), [2], given, sizes)


@pytest.mark.parametrize(("wire", "nbytes"), [(None, BYTES), ("bf16", BYTES // 2), ("int8", BYTES // 4 + 32 * 4)])
def test_the_simulator_gets_the_bytes_on_the_wire(wire: Any, nbytes: int) -> None:
    plan = planned(costs(1e-6, wire))
    seconds = stage_costs(plan)
    assert plan.wire_formats == (wire,)
    assert seconds.send_forward_s == seconds.send_backward_s == pytest.approx([1e-6 * nbytes])
    assert plan.stages[0].boundary_bytes == BYTES


@pytest.mark.parametrize(
    ("seconds", "wire"),  # of a transfer in full precision; the stages take 6 s each
    [(5.9, None), (6.1, "bf16"), (11.9, "bf16"), (12.1, "int8"), (100.0, "int8")],
)
def test_auto_is_the_mildest_format_that_hides_behind_the_slowest_stage(seconds: float, wire: Any) -> None:
    assert planned(costs(seconds / BYTES, "auto")).wire_formats == (wire,)


def test_auto_compresses_nothing_without_measurements_or_within_a_process() -> None:
    assert planned(costs(1.0, "auto", measured=False)).wire_formats == (None,)
    within = replace(costs(1.0, "int8"), links=(Link(),))
    assert planned(within).wire_formats == (None,)


def test_what_asks_for_no_gradient_or_is_no_float_travels_in_full() -> None:
    for graph in (chain(asks=False), chain(dtype="torch.int64")):
        assert planned(costs(1.0, "int8"), graph).stages[0].wire_bytes == BYTES


def test_fewer_bytes_move_the_cut_to_where_the_work_is_even() -> None:
    graph = chain(((32, 64), (32, ROW), (32, ROW), (32, ROW)))
    found = [list(cut_balanced(graph, costs(10.0 / BYTES, wire), 2)) for wire in (None, "int8", "auto")]
    assert found == [[1], [2], [2]]


def test_the_plan_says_what_it_saves() -> None:
    text = str(planned(costs(20.0 / BYTES, "auto")))
    assert "1 value, 128.0 KiB a micro-batch, 32.1 KiB as int8" in text
    assert "int8 between stages 0 and 1: 10.04 s on the link instead of 40.00 s a micro-batch" in text
    assert "on the link" not in str(planned(costs(1e-9, "auto")))
