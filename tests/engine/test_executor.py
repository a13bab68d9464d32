"""The executor, on threads that stand for processes: order, failures, observers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.topology import DeviceLayout, StageMap, names
from lightning_avgpipe.engine.executor import Lane, execute
from lightning_avgpipe.engine.observer import MemoryGuard, Observer, Work
from lightning_avgpipe.engine.stage import check_runnable
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.errors import MemoryShortage, PeerError, ScheduleError
from lightning_avgpipe.schedule import Action, Kind, Schedule, build, in_turn, with_replicas
from lightning_avgpipe.schedule.kinds import FORWARD
from lightning_avgpipe.schedule.recipes import RECIPES, trainable
from lightning_avgpipe.schedule.rules import turns_of
from lightning_avgpipe.systems.zero_bubble import WEIGHT_GRADIENT
from lightning_avgpipe.utils.random_streams import RandomKey
from tests.threads import Blown, Injector, results, run

LAYOUTS = {
    "one process": StageMap(4),
    "two processes": StageMap.on(DeviceLayout(2), 4),
    "four": StageMap.on(DeviceLayout(4), 4),
}
SCHEDULE = build("1f1b", 4, 6)


class Adding:
    """A stage that adds one in both directions."""

    compiled = False

    def __init__(self, stage: int, num_stages: int) -> None:
        self.program = SimpleNamespace(stage=stage, num_stages=num_stages)
        self.results: dict[int, Any] = {}
        self.last: dict[int, torch.Tensor] = {}

    def on_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def perform(self, action: Action, task: Task, message: Message | None) -> Message | None:
        if action.kind is WEIGHT_GRADIENT:
            assert message is None and action.micro_batch in self.last
            return None
        return (self._forward if action.kind is FORWARD else self._backward)(action.micro_batch, message)

    def _forward(self, i: int, message: Message | None) -> Message | None:
        value = torch.tensor([float(100 * i)]) if message is None else message.tensors[0]
        assert value is not None and (message is None or message.micro_batch == i)
        if self.program.stage == self.program.num_stages - 1:
            self.results[i] = value + 1
            return None
        return Message(i, (value + 1,), (True,))

    def _backward(self, i: int, message: Message | None) -> Message | None:
        gradient = torch.zeros(1) if message is None else message.tensors[0]
        assert gradient is not None and (message is None or message.micro_batch == i)
        self.last[i] = gradient + 1
        return Message(i, (self.last[i],)) if self.program.stage else None


class Order(Observer):
    """Notes the actions of each stage and pipeline."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], list[str]] = {}

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        self.rows.setdefault((work.pipeline, work.stage), []).append(str(work.action))
        return do()


def iterate(cluster: Cluster, schedule: Schedule = SCHEDULE, pipelines: int = 1, observers: Any = ()) -> list[Lane]:
    """One iteration of this process; with the lanes of all pipelines."""
    cluster.transport.widen(pipelines)
    lanes = []
    for n in range(pipelines):
        turns = turns_of(schedule)
        for stage in cluster.stages:
            adding: Any = Adding(stage, schedule.num_stages)
            task = Task(lambda i: None, [], key=RandomKey(0, pipeline=n))
            lane = Lane(adding, cluster.transport.ends(n, stage), task)
            row = in_turn(schedule.rows[stage], *cluster.stage_map.share(stage, cluster.rank))
            lane.begin(row, observers, turns.get(stage))
            lanes.append(lane)
    execute(lanes, cluster, tuple(observers))
    return lanes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["1f1b", "afab", "advance_forward"])
def test_each_lane_follows_its_row_and_values_go_forth_and_back(name: str, layout: str) -> None:
    schedule = build(name, 4, 6, advance=1)

    def work(cluster: Cluster) -> Any:
        order = Order()
        lanes: list[Any] = iterate(cluster, schedule, 2, [order])
        return order.rows, {lane.stage.program.stage: lane.stage for lane in lanes}

    rows, stages = {}, {}
    for found, here in results(run(LAYOUTS[layout], work)):
        rows |= found
        stages |= here
    assert rows == {(n, k): [str(action) for action in schedule.rows[k]] for n in range(2) for k in range(4)}
    assert {i: float(value) for i, value in stages[3].results.items()} == {i: 100 * i + 4 for i in range(6)}
    assert {i: float(gradient) for i, gradient in stages[0].last.items()} == dict.fromkeys(range(6), 4.0)


@pytest.mark.parametrize("name", ["interleaved", "bfs", "zbv", "dualpipev"])
@pytest.mark.parametrize("processes", [1, 2])
def test_stages_of_a_process_act_in_the_order_of_the_schedule(name: str, processes: int) -> None:
    schedule = build(name, 4, 6)
    stage_map = StageMap.on(DeviceLayout(processes), 4, placement=RECIPES[name].placement)

    def work(cluster: Cluster) -> Any:
        order = Sequence()
        return iterate(cluster, schedule, 2, [order]) and order.found

    for rank, found in enumerate(results(run(stage_map, work))):
        for n in range(2):
            turns = [of for of in schedule.turns if stage_map.owner(of[0]) == rank]
            for of in turns:
                rows = {stage: iter(schedule[stage]) for stage in set(of)}
                expected = [(stage, str(next(rows[stage]))) for stage in of]
                assert [place for place in found[n] if place[0] in of] == expected


class Sequence(Observer):
    """Notes what a process does, for each pipeline."""

    def __init__(self) -> None:
        self.found: dict[int, list[tuple[int, str]]] = {}

    def perform(self, work: Work, do: Callable[[], Message | None]) -> Message | None:
        self.found.setdefault(work.pipeline, []).append((work.stage, str(work.action)))
        return do()


@pytest.mark.parametrize("replicas", [(2, 3, 2, 1), (3, 1, 1, 1), (1, 4, 6, 1), (1, 2, 2, 3)])
@pytest.mark.parametrize("num_microbatches", [1, 7, 12])
def test_replicas_take_micro_batches_in_turns(replicas: tuple[int, ...], num_microbatches: int) -> None:
    layout = StageMap.on(DeviceLayout(sum(replicas), stage_replicas=replicas), 4)
    schedule = with_replicas(build("1f1b", 4, num_microbatches), replicas)

    def work(cluster: Cluster) -> Any:
        for _ in range(2):  # turns begin anew
            (lane,) = iterate(cluster, schedule)
        stage: Any = lane.stage
        return stage.program.stage, cluster.stage_map.share(stage.program.stage, cluster.rank), stage

    found, lasts = [], {}
    for k, (first, every), stage in results(run(layout, work)):
        assert sorted(stage.last) == list(range(first, num_microbatches, every))
        assert all(float(gradient) == 4 - k for gradient in stage.last.values())
        found.append((k, first))
        lasts |= stage.results
    assert sorted(found) == [(k, j) for k, count in enumerate(replicas) for j in range(count)]
    assert {i: float(value) for i, value in lasts.items()} == {i: 100 * i + 4 for i in range(num_microbatches)}


@pytest.mark.parametrize(
    ("layout", "rank", "action"),
    [("one process", 0, "F3"), ("two processes", 1, "F0"), ("two processes", 0, "B5"), ("four", 3, "B0"),
     ("four", 2, "F3"), ("four", 0, "F5")],
)  # fmt: skip
def test_an_error_in_an_action_is_named_on_all_processes(layout: str, rank: int, action: str) -> None:
    stage_map, injector = LAYOUTS[layout], Injector().fail_at(rank, action)

    def work(cluster: Cluster) -> None:
        iterate(cluster, observers=[injector.observer(cluster.rank)])
        cluster.group.barrier()

    outcomes = run(stage_map, work, injector)
    (note,) = outcomes[rank].__notes__
    assert isinstance(outcomes[rank], Blown)
    assert note in {f"stage {k} of 4 (rank {rank}) failed in {action}" for k in stage_map.stages(rank)}
    for other in set(range(stage_map.world_size)) - {rank}:
        assert isinstance(outcomes[other], PeerError)
        told = f"{names(stage_map)[rank]}, which runs {action} of stage "
        assert told in str(outcomes[other]) and "Blown: the fuse has blown" in str(outcomes[other])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("action", ["F1", "B2"])
def test_a_trial_without_memory_ends_on_all_processes_and_another_can_be_run(action: str, layout: str) -> None:
    injector = Injector().fail_at(0, action, MemoryError("no room"))

    def work(cluster: Cluster) -> str:
        guard = MemoryGuard()
        iterate(cluster, observers=[guard, injector.observer(cluster.rank)])
        with pytest.raises(MemoryShortage) as short:
            guard.agree(cluster.world)
        guard = MemoryGuard()
        iterate(cluster, observers=[guard])
        guard.agree(cluster.world)
        return str(short.value)

    accounts = set(results(run(LAYOUTS[layout], work, injector)))
    assert len(accounts) == 1
    assert f"in {action}: no room" in accounts.pop()


def test_stages_can_run_every_schedule_that_can_be_built() -> None:
    for name in trainable():
        check_runnable(build(name, 4, 4))


def test_lines_of_stages_are_simulated_only() -> None:
    with pytest.raises(ScheduleError, match=r"'chimera' has 2 lines of stages, .* can be simulated only"):
        check_runnable(build("chimera", 4, 4))


def test_a_schedule_with_another_kind_of_actions_is_refused() -> None:
    nap = Kind("N", "nap", lambda costs, k: 0.0, None, None, (), 0, 0, "#000000")
    with pytest.raises(ScheduleError, match=r"'naps' has actions that stages cannot run: nap \(N\); they can run for"):
        check_runnable(Schedule("naps", 1, 1, ((Action(nap, 0),),)))
