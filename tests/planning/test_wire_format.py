"""Formats on the wire: what plans make of links and bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_avgpipe.capture.graph import CallGraph, Node, Value
from lightning_avgpipe.planning import Costs, Link, Plan, cut_balanced, make_plan
from lightning_avgpipe.planning.plan import stage_costs

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
