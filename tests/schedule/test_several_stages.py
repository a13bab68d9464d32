"""Schedules of several stages on each process: idleness and memory as their papers have them, at every size."""

from __future__ import annotations

import itertools

import pytest

from lightning_avgpipe.errors import DeadlockError, ScheduleError
from lightning_avgpipe.schedule import FORWARD, Action, Schedule, StageCosts, Timeline, build, check, simulate
from lightning_avgpipe.schedule.builders import of_function, parse
from lightning_avgpipe.schedule.recipes import RECIPES, devices_of

SEVERAL = ("interleaved", "bfs", "zbv", "dualpipev")
SIZES = list(itertools.product(range(1, 5), (2, 3, 4), range(1, 13)))  # processes, stages on each, micro-batches


def thirds(num_stages: int) -> StageCosts:
    return StageCosts.uniform(num_stages, 1, 2)


def stashed(schedule: Schedule) -> list[int]:
    """The most that each process stashes, of all its stages."""
    found = []
    for turns in schedule.turns:
        rows, held, peak = {k: iter(schedule[k]) for k in set(turns)}, 0, 0
        for stage in turns:
            held += next(rows[stage]).kind.stash
            peak = max(peak, held)
        found.append(peak)
    return found


def drawn(timeline: Timeline) -> list[str]:
    """A character for each second and process; those of the second half of the stages are small."""
    rows = []
    for device in timeline.rows:
        cells = ["."] * round(timeline.iteration_s)
        for span in (span for span in timeline.spans if span.stage in timeline.stages_of(device)):
            symbol = span.action.kind.symbol
            for second in range(round(span.begin_s), round(span.end_s)):
                cells[second] = symbol if span.stage < timeline.num_stages / 2 else symbol.lower()
        rows.append("".join(cells))
    return rows


@pytest.mark.parametrize("name", SEVERAL)
def test_every_size_is_complete_and_finishes(name: str) -> None:
    for devices, each, num_microbatches in SIZES:
        if RECIPES[name].needs == "v" and each != 2:
            continue
        schedule = build(name, devices * each, num_microbatches, 0, devices)
        check(schedule)
        for row in schedule:  # so that gradients are summed in the order of one process
            for kind in {action.kind for action in row}:
                of_kind = [action.micro_batch for action in row if action.kind is kind]
                assert of_kind == sorted(of_kind)


def test_a_process_follows_its_own_order_in_a_simulation() -> None:
    assert drawn(simulate(build("interleaved", 4, 4, 0, 2), thirds(4))) == [
        "FFffF.bbFbbfBBfBB.bb.bbBBBB",
        ".FFfbbfbbFBBFBBfbbfbbBBBB..",
    ]
    timeline = simulate(build("interleaved", 4, 4, 0, 2), thirds(4))
    for device, turns in enumerate(build("interleaved", 4, 4, 0, 2).turns):
        spans = sorted((s for s in timeline.spans if s.stage in timeline.stages_of(device)), key=lambda s: s.begin_s)
        assert tuple(span.stage for span in spans) == turns


@pytest.mark.parametrize(
    ("name", "num_stages", "hosts", "message"),
    [
        ("interleaved", 4, 4, "it needs the same number of stages on each process, and several; use num_stages=8"),
        ("bfs", 5, 2, "several; use num_stages=4"),
        ("zbv", 6, 2, "it needs two stages on each process; use num_stages=4"),
        ("dualpipev", 3, 1, "two stages on each process; use an even number of stages"),
    ],
)
def test_what_does_not_fit_the_processes_is_refused_by_name(
    name: str, num_stages: int, hosts: int, message: str
) -> None:
    with pytest.raises(ScheduleError, match=f"schedule='{name}' with num_stages={num_stages} on {hosts} .*{message}"):
        devices_of(name, num_stages, hosts)


def test_stages_of_one_process_take_the_turns_of_several() -> None:
    assert devices_of("zbv", 8, 1) == 4 and devices_of("interleaved", 8, 1) == 1 and devices_of("1f1b", 8, 1) == 1


F0, F1 = Action(FORWARD, 0), Action(FORWARD, 1)


def test_turns_are_checked() -> None:
    rows = ((F0, F1), (F0, F1))
    check(Schedule("fine", 2, 2, rows, turns=((0, 1, 0, 1),)))
    with pytest.raises(DeadlockError, match="stage 0 at F0, stage 1 at F0"):
        check(Schedule("stuck", 2, 2, rows, turns=((1, 0, 0, 1),)))
    with pytest.raises(ScheduleError, match="one entry for each action"):
        Schedule("short", 2, 2, rows, turns=((0, 1, 0),))
    with pytest.raises(ScheduleError, match="a stage on two processes"):
        Schedule("twice", 2, 2, rows, turns=((0, 1, 0), (1,)))


def eager(num_stages: int, num_microbatches: int) -> list[str]:
    return [" ".join(f"F{i} B{i}" for i in range(num_microbatches))] * num_stages


def test_a_function_may_give_rows_as_text() -> None:
    assert str(of_function(eager, 1, 2)) == "stage 0 | F0 B0 F1 B1"
    assert of_function(lambda k, m: build("zb_h2", k, m), 3, 4).name == "zb_h2"
    assert parse("F0 I12") == (F0, parse("I12")[0])


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda k, m: ["F0 B0", "B0 F0"], DeadlockError, "stage 0 at B0, stage 1 at B0"),
        (lambda k, m: ["F0", "F0"], ScheduleError, "has no backwards"),
        (lambda k, m: ["F0 B0"], ScheduleError, "1 rows for 2 stages"),
        (lambda k, m: ["F0 X0", "F0"], ScheduleError, "'X0' in the row 'F0 X0' is not an action"),
        (lambda k, m: "F0 B0", ScheduleError, "return a row for each stage"),
        (lambda k, m: build("1f1b", 3, 1), ScheduleError, "asked for 2 stages and 1 micro-batches"),
        (lambda k, m: ["F0 F0 B0", "F0 B0"], ScheduleError, "stage 0 has 3 actions and repeats F0"),
    ],
)
def test_what_a_function_gives_is_checked(function: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        of_function(function, 2, 1)  # type: ignore[arg-type]
