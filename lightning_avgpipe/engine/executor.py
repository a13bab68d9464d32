"""Run the lanes of a process in one loop.

The loop takes the next action of a lane whose input has arrived: backwards first, then the lowest micro-batch, then the
lowest pipeline. It waits only when no lane can run, so one pipeline uses the time in which another waits. If lanes may
be in different iterations, the oldest iteration comes first, then the lowest pipeline. So pipelines drain one after the
other, and each uses the idle time of the others. The executor knows neither Lightning, nor models, nor named schedules.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_avgpipe.capture.tracer import uncompiled
from lightning_avgpipe.capture.wire_format import Format
from lightning_avgpipe.comm.channel import Inbox
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.message import Message, compressed, decompressed
from lightning_avgpipe.comm.transport import Ends
from lightning_avgpipe.comm.waits import Waits
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.errors import StageError, UnsendableError
from lightning_avgpipe.schedule import Action
from lightning_avgpipe.schedule.rules import urgency
from lightning_avgpipe.utils.random_streams import host_kept


@dataclass
class Lane:
    """One stage of one pipeline in this process, with its ends of the channels.

    Attributes:
        stage: stage that does the work.
        ends: ends of the channels to the previous and the next stage.
        task: work of the iteration.
        place: puts the pipeline's model into the module; None: it is always there.
        actions: actions that are left in this iteration.
        turns: order in which stages of this pipeline run in this process, a queue that their lanes share; None: any
            stage whose input has arrived may run.
        starts_from_kept: micro-batches whose forwards begin on this stage, from kept outputs of earlier stages.
        relays: whether received values are relayed to the next stage as they arrive.
        segments: least number of pieces in which large tensors among the stage's own values are sent.
        first_message_handler: handler for an extra first message of an iteration, which holds no values; None: there is
            none.
        wire_formats: formats in which values are sent to the next stage, and gradients to the previous one; None:
            unchanged.
    """

    stage: Stage
    ends: Ends
    task: Task
    place: Callable[[], None] | None = None
    actions: deque[Action] = field(default_factory=deque)
    turns: deque[int] | None = None
    starts_from_kept: frozenset[int] = frozenset()
    relays: bool = False
    segments: int = 1
    first_message_handler: Callable[[Message], None] | None = None
    wire_formats: tuple[Format | None, Format | None] = (None, None)

    def begin(self, row: Sequence[Action], observers: Sequence[Observer] = (), turns: deque[int] | None = None) -> None:
        """Begin an iteration with these actions, and post their receives."""
        self.actions, self.turns = deque(), turns
        if self.first_message_handler is not None and self.ends.values is not None:
            self.ends.values.expect(1)
        self.go_on(row, observers)

    def go_on(self, row: Sequence[Action], observers: Sequence[Observer] = ()) -> None:
        """Append further actions, and post their receives."""
        self.actions.extend(row)
        for direction, inbox in (("forward", self.ends.values), ("backward", self.ends.gradients)):
            if inbox is not None:
                forward_to = self.ends.to_next if self.relays and direction == "forward" else None
                inbox.expect(sum(self._consumes(action) == direction for action in row), observers, forward_to)

    def ready(self) -> bool:
        """Return whether the next action's input has arrived, and it is this stage's turn."""
        if self.turns is not None and self.turns[0] != self.stage.program.stage:
            return False
        inbox = self._inbox()
        return inbox is None or inbox.ready()

    def urgency(self) -> tuple[tuple[int, int], int]:
        """Return the sort key of the next action, then the pipeline; the lane with the smallest runs first."""
        return urgency(self.actions[0]), self.task.key.pipeline

    def seniority(self) -> tuple[int, int, tuple[int, int]]:
        """Return a sort key of iteration, pipeline and urgency of the next action; the smallest runs first."""
        return self.task.key.iteration, self.task.key.pipeline, urgency(self.actions[0])

    def run_next(self, observers: Sequence[Observer] = ()) -> None:
        """Run the next action and send its output."""
        with self.stage.on_stream():
            if self.place is not None:
                self.place()
            inbox = self._inbox()
            if self.first_message_handler is not None and inbox is not None:
                handler, self.first_message_handler = self.first_message_handler, None
                handler(inbox.get())
                return
            action = self.actions.popleft()
            if self.turns is not None:
                self.turns.popleft()
            message = decompressed(inbox.get()) if inbox is not None else None
            do: Callable[[], Message | None] = partial(self.stage.perform, action, self.task, message)
            if observers:
                work = Work(self.stage.program.stage, self.task.key.pipeline, action, message, self.stage.results)
                for observer in reversed(observers):
                    do = partial(observer.perform, work, do)
            output = do()
            if output is not None:
                self._send(output, action.kind.produces == "forward", observers)

    def _send(self, message: Message, forward: bool, observers: Sequence[Observer]) -> None:
        outbox = self.ends.to_next if forward else self.ends.to_previous
        if outbox is None:
            return
        if forward and self.segments > 1:
            message = message._replace(segments=self.segments)
        wire = self.wire_formats[not forward]
        if wire is not None:
            name = f"wire/{'forward' if forward else 'backward'}/{self.stage.program.stage}"
            message = compressed(message, wire, self.task.key_of(message.micro_batch), name)
        try:
            outbox.put(message, observers)
        except UnsendableError as error:
            raise self.stage.unsendable(message, error) from error.__cause__

    def _consumes(self, action: Action) -> str | None:
        """Return the direction of the action's input; None if it has none, as a forward that uses kept outputs."""
        consumes = action.kind.consumes
        return None if consumes == "forward" and action.micro_batch in self.starts_from_kept else consumes

    def _inbox(self) -> Inbox | None:
        consumes = self._consumes(self.actions[0])
        return None if consumes is None else self.ends.values if consumes == "forward" else self.ends.gradients


def execute(
    lanes: Sequence[Lane],
    cluster: Cluster,
    observers: Sequence[Observer] = (),
    oldest_first: bool = False,
    until: Callable[[], bool] = bool,
) -> None:
    """Run the actions of all lanes.

    Args:
        lanes: lanes with their actions.
        cluster: cluster of the processes.
        observers: observers of the iteration; each is called within those before it.
        oldest_first: whether lanes may be in different iterations.
        until: returns whether to stop before all actions are done; called between two actions, and when anything
            arrives. Default: never.
    Raises:
        Exception: user code failed; a note names stage, rank and action.
        StageError: user code raised StopIteration in an action.
        PeerError: nothing arrived in time, a channel broke, or another process has failed.
    """
    waits, rank = cluster.waits, cluster.world.rank
    order: Callable[[Lane], Any] = Lane.seniority if oldest_first else Lane.urgency
    with host_kept(), contextlib.nullcontext() if any(lane.stage.compiled for lane in lanes) else uncompiled():
        while not until() and (pending := [lane for lane in lanes if lane.actions]):
            runnable = [lane for lane in pending if lane.ready()]
            if not runnable:
                _wait_for(pending, waits, observers, until)
                continue
            waits.watch.check()
            lane = min(runnable, key=order)
            action = lane.actions[0]
            waits.watch.doing = f"runs {action} of stage {_stage(lane)}"
            try:
                lane.run_next(observers)
            except StopIteration as error:  # a loop over a dataloader would take it for the end of the data
                raise StageError(f"{_place(lane, rank)} failed in {action}: StopIteration: {error}") from error
            except Exception as error:
                error.add_note(f"{_place(lane, rank)} failed in {action}")
                raise
        waits.watch.doing = ""


def _wait_for(lanes: Sequence[Lane], waits: Waits, observers: Sequence[Observer], until: Callable[[], bool]) -> None:
    with contextlib.ExitStack() as waiting:
        for observer in observers:
            waiting.enter_context(observer.waiting(_waits(lanes)))
        waits.until(lambda: any(lane.ready() for lane in lanes) or until(), lambda: _waits(lanes))


def _place(lane: Lane, rank: int) -> str:
    return (
        f"stage {lane.stage.program.stage} of {lane.stage.program.num_stages} (rank {rank}{_of_pipeline(lane, ', ')})"
    )


def _stage(lane: Lane) -> str:
    return f"{lane.stage.program.stage}{_of_pipeline(lane, ' of ')}"


def _of_pipeline(lane: Lane, before: str) -> str:
    pipeline = lane.task.key.pipeline
    return f"{before}pipeline {pipeline}" if pipeline else ""


def _waits(lanes: Sequence[Lane]) -> str:
    inputs = (f"the input of {lane.actions[0]} on stage {_stage(lane)}" for lane in lanes)
    return f"waits for {' or '.join(inputs)}"
