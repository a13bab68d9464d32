"""The benchmark of the paper's workloads: its parts compute the same, and its report says what was measured."""

from __future__ import annotations

import random
import time
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from benchmarks.goal import reached
from benchmarks.paper import report
from benchmarks.paper.learning import algorithm_of
from benchmarks.paper.settings import fitting, memory_of
from benchmarks.paper.slowed import SlowDevice
from benchmarks.paper.stages import blocks, cut, tensors
from benchmarks.paper.workloads import WORKLOADS, awd_lstm, bert, gnmt
from benchmarks.pipedream import plan
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.costs import UnitCosts
from lightning_avgpipe.tuning.scaling import memory_at
from tests.profiles import random_profile

MODELS: dict[str, Any] = {
    "gnmt": lambda: gnmt.GNMT(vocabulary=40, width=8, layers=3),
    "bert": lambda: bert.SentencePairs(vocabulary=40, width=8, layers=2, heads=2),
    "awd_lstm": lambda: awd_lstm.AWDLSTM(vocabulary=40, streams=4, width=8, hidden=8),
}


def batch_of(name: str) -> Any:
    def words(length: int) -> torch.Tensor:
        return torch.randint(3, 40, (4, length))

    if name == "bert":
        return [words(6), torch.zeros(4, 6, dtype=torch.long), torch.tensor([0, 1, 1, 0])]
    if name == "gnmt":
        lengths = torch.tensor([5, 3, 5, 4])
        return {"source": words(5), "lengths": lengths, "target": words(7), "labels": words(7)}
    streams = torch.arange(4)
    return {"tokens": words(5), "targets": words(5), "streams": streams, "fresh": streams >= 0}


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("name", WORKLOADS)
def test_stages_written_by_hand_compute_the_loss_of_the_example(name: str, num_stages: int) -> None:
    model, batch = MODELS[name]().eval(), batch_of(name)
    model.log = lambda *args, **kwargs: None  # no trainer here
    given = tensors(name, batch)
    stages = cut(blocks(name, model), given, num_stages)
    values: Any = next(iter(given.values()))
    for stage in stages:
        values = stage(*(values if isinstance(values, tuple) else (values,)), **given)
    torch.testing.assert_close(values, model.training_step(batch, 0))
    assert {id(p) for part in stages for p in part.parameters()} == {id(p) for p in model.parameters()}


def test_epochs_to_a_target_are_interpolated() -> None:
    assert reached([(0.5, 4.0), (1.0, 2.0)], 3.0, falling=True) == 0.75
    assert reached([(0.5, 0.6), (1.0, 0.8)], 0.7, falling=False) == pytest.approx(0.75)
    assert reached([(0.5, 2.0)], 3.0, falling=True) == 0.5
    assert reached([(0.5, 4.0)], 3.0, falling=True) is None


def test_systems_that_compute_the_same_are_trained_once() -> None:
    systems = ("ddp", "torch 1f1b", "gpipe", "pipedream", "avgpipe M=4 N=1 h=1", "avgpipe M=4 N=2 h=0")
    assert [algorithm_of(s) for s in systems] == [*["synchronous"] * 3, "pipedream", "synchronous", "N=2"]
    assert algorithm_of("avgpipe M=4 N=2 h=0 rolling split") == "N=2 rolling split"


@pytest.mark.parametrize("bound", ["gpipe", "1f1b", "pipedream", "ddp"])
def test_avgpipe_stays_within_the_memory_of_what_it_is_compared_with(bound: str) -> None:
    profile, workload = random_profile(3), WORKLOADS["bert"]
    setting = fitting(bound, profile, workload, most=2)
    assert max(stage.total for stage in memory_at(profile, setting)) <= memory_of(bound, profile, workload)


def test_the_report_multiplies_time_and_epochs() -> None:
    slow, fast = [(1.0, 5.0), (2.0, 4.0), (3.0, 3.0)], [(1.0, 3.0)]
    curves = {
        "synchronous": [(1.0, 4.0), (2.0, 3.0), (3.0, 2.0)], "pipedream": slow,
        "N=2 rolling split": slow, "N=2 rolling split, outer_lr=1.41": fast,
    }  # fmt: skip
    records = [
        {"workload": "gnmt", "link": None, "system": name, "seed": 0, "curve": curve, "batches": 10, "epochs": 3}
        for name, curve in curves.items()
    ]
    for seed, batch_s in enumerate((0.1, 0.3, 0.2)):
        for name in ("ddp", "pipedream", "avgpipe M=4 N=2 h=0 rolling split"):
            found = {"batch_s": batch_s, "memory": [10.0, 20.0]}
            records.append({"workload": "gnmt", "link": 100, "system": name, "seed": seed, **found})
    ddp, pipedream, *divided = report.rows(records)
    assert (ddp.epoch_s, ddp.memory, ddp.epochs, ddp.target_s) == (2.0, 20.0, 2.0, 4.0)
    assert (pipedream.epochs, pipedream.target_s) == (3.0, 6.0)
    assert [(row.system.rpartition("split")[2], row.epochs) for row in divided] == [("", 3.0), (", outer_lr=1.41", 1.0)]


def test_the_target_is_one_that_half_of_the_seeds_reach() -> None:
    def target(name: str, ends: list[float]) -> float | None:
        found = {"system": "synchronous", "link": None, "epochs": 3}
        return report.target_of(name, [{"workload": name, "curve": [(1.0, 0.0 if name == "bert" else 9.0), (2.0, end)],
                                        "seed": seed, **found} for seed, end in enumerate(ends)])  # fmt: skip

    assert target("gnmt", [3.0, 2.0]) == 3.0 and target("gnmt", [4.0, 3.0, 2.0]) == 3.0
    assert target("bert", [0.7, 0.8]) == 0.7 and target("bert", [0.7, 0.8, 0.9]) == 0.8


def test_a_slow_device_takes_its_factor_of_the_time_of_a_core() -> None:
    device, numbers = SlowDevice(20.0), torch.randn(400, 400)
    used: list[float] = []

    def work() -> None:
        begin = time.thread_time()
        for _ in range(5):
            numbers @ numbers
        used.append(time.thread_time() - begin)

    begin = time.perf_counter()
    device.slowed(work)()
    taken = time.perf_counter() - begin
    assert taken >= 20 * used[0] and device.busy_s == pytest.approx(taken, rel=0.1)


def test_forwards_and_backwards_within_an_optimizers_step_are_slowed_one_by_one() -> None:
    device, parameter = SlowDevice(2.0), torch.nn.Parameter(torch.ones(200_000))
    busy_s: list[float] = []

    def closure() -> torch.Tensor:
        for _ in range(2):
            with device.computing():
                loss = (parameter**2).sum()
                loss.backward()
            busy_s.append(device.busy_s)
        return loss

    handles = device.take_optimizers()
    try:
        torch.optim.SGD([parameter], 0.1).step(closure)
        before = device.busy_s
        torch.optim.SGD([parameter], 0.1).step()
    finally:
        for handle in handles:
            handle.remove()
    assert 0 < busy_s[0] < busy_s[1] < before < device.busy_s


# -- PipeDream's planner: against brute force on one level, and on two levels by hand ---------------------------------


def random_costs(seed: int) -> UnitCosts:
    draw = random.Random(seed)
    units = draw.randint(1, 6)
    sizes = (units, units, units - 1, units - 1, units)
    return UnitCosts(*(tuple(draw.uniform(0, 2) for _ in range(size)) for size in sizes))


def bottleneck_s(costs: UnitCosts, bandwidth: float, stages: tuple[tuple[int, int, int], ...]) -> float:
    found = []
    for first, last, r in stages:
        units = range(first, last + 1)
        work = sum(costs.forward_s[u] + costs.backward_s[u] for u in units)
        found.append(max(work, 2 * (r - 1) * sum(costs.parameter_bytes[u] for u in units) / bandwidth) / r)
    found += [(costs.bytes_forward[last] + costs.bytes_backward[last]) / bandwidth for _, last, _ in stages[:-1]]
    return max(found)


@pytest.mark.parametrize("seed", range(40))
def test_on_one_level_no_plan_has_a_smaller_bottleneck(seed: int) -> None:
    costs, devices, bandwidth = random_costs(seed), 1 + seed % 5, 0.5 + seed % 3
    found = plan(costs, [devices], [bandwidth])
    best = min(
        bottleneck_s(costs, bandwidth, tuple((a, b - 1, j - i) for (a, b), (i, j) in zip(ends, places, strict=True)))
        for s in range(1, min(costs.num_units, devices) + 1)
        for cuts in combinations(range(1, costs.num_units), s - 1)
        for splits in combinations(range(1, devices), s - 1)
        for ends, places in [(list(pairwise((0, *cuts, costs.num_units))), list(pairwise((0, *splits, devices))))]
    )
    assert found.bottleneck_s == pytest.approx(best)
    assert bottleneck_s(costs, bandwidth, found.stages) == pytest.approx(best)


def test_between_slow_nodes_it_pipelines_and_within_them_it_replicates() -> None:
    costs = UnitCosts((1,) * 4, (2,) * 4, (0.1,) * 3, (0.1,) * 3, (3,) * 4)
    found = plan(costs, widths=[2, 2], bandwidths=[100, 0.2])
    assert found.stages == ((0, 1, 2), (2, 3, 2))
    assert found.bottleneck_s == pytest.approx(3)


def test_levels_without_bandwidth_are_refused() -> None:
    with pytest.raises(PartitionError, match="one entry per level"):
        plan(UnitCosts((1,), (1,), (), (), (1,)), [2, 2], [1])
