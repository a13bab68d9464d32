"""The executor: one loop over the lanes of a process.

Take the next action of a lane whose input has arrived, backwards first, then the lowest micro-batch, then the lowest
pipeline; wait only when no lane can run, so that what one pipeline waits for is time for another. Where lanes may be in
different iterations the oldest iteration comes first, then the lowest pipeline: so pipelines drain one after the other,
and each has the others' time. It knows nothing of schedules' names, of Lightning or of models.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lightning_avgpipe.comm.alone import alone
from lightning_avgpipe.comm.channel import Inbox
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.comm.transport import Ends
from lightning_avgpipe.comm.waits import Waits
from lightning_avgpipe.engine.observer import Observer, Work
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.errors import StageError
from lightning_avgpipe.schedule import Action
from lightning_avgpipe.schedule.rules import urgency


@dataclass
class Lane:
    """One stage of one pipeline in this process, with its ends of the channels.

    Attributes:
        stage: does the work.
        ends: of the hops before and after it.
        task: what the actions work on.
        place: puts the pipeline's model into the module.
        actions: what is left to do in this iteration.
        turns: whose turn it is among the stages of its pipeline here, by stage, which they share; None: whoever can.
        begins: micro-batches whose forwards begin here, although stages come before.
        relays: whether values go on to the next stage as they come.
        segments: in how many pieces its own values travel.
        takes: what is to be done with the first message of an iteration, which is none of values; None: there is none.
    """

    stage: Stage
    ends: Ends
    task: Task
    place: Callable[[], None] | None = None
    actions: deque[Action] = field(default_factory=deque)
    turns: deque[int] | None = None
    begins: frozenset[int] = frozenset()
    relays: bool = False
    segments: int = 1
    takes: Callable[[Message], None] | None = None

    def begin(self, row: Sequence[Action], observers: Sequence[Observer] = (), turns: deque[int] | None = None) -> None:
        """Take on one iteration's actions and post their receives."""
        self.actions, self.turns = deque(), turns
        if self.takes is not None and self.ends.values is not None:
            self.ends.values.expect(1)
        self.go_on(row, observers)

    def go_on(self, row: Sequence[Action], observers: Sequence[Observer] = ()) -> None:
        """Further actions follow."""
        self.actions.extend(row)
        for direction, inbox in (("forward", self.ends.values), ("backward", self.ends.gradients)):
            if inbox is not None:
                onwards = self.ends.to_next if self.relays and direction == "forward" else None
                inbox.expect(sum(self._consumes(action) == direction for action in row), observers, onwards)

    def ready(self) -> bool:
        """Whether the next action's input has arrived, and it is its turn."""
        if self.turns is not None and self.turns[0] != self.stage.program.stage:
            return False
        inbox = self._inbox()
        return inbox is None or inbox.ready()

    def urgency(self) -> tuple[tuple[int, int], int]:
        """That of the next action, then the lowest pipeline: the smallest is the most urgent."""
        return urgency(self.actions[0]), self.task.key.pipeline

    def seniority(self) -> tuple[int, int, tuple[int, int]]:
        """The oldest iteration, then the lowest pipeline, then the urgency of the action: the smallest goes first."""
        return self.task.key.iteration, self.task.key.pipeline, urgency(self.actions[0])

    def run_next(self, observers: Sequence[Observer] = ()) -> None:
        """Do the next action and send what it gives."""
        with self.stage.on_stream():
            self._run_next(observers)

    def _run_next(self, observers: Sequence[Observer]) -> None:
        if self.place is not None:
            self.place()
        inbox = self._inbox()
        if self.takes is not None and inbox is not None:
            takes, self.takes = self.takes, None
            takes(inbox.get())
            return
        action = self.actions.popleft()
        if self.turns is not None:
            self.turns.popleft()
        message = inbox.get() if inbox is not None else None
        work = Work(self.stage.program.stage, self.task.key.pipeline, action, message, self.stage.results)
        do: Callable[[], Message | None] = partial(self._do, action, message)
        for observer in reversed(observers):
            do = partial(observer.perform, work, do)
        output = do()
        outbox = self.ends.to_next if action.kind.produces == "forward" else self.ends.to_previous
        if output is not None and outbox is not None:
            wanted = self.segments if outbox is self.ends.to_next else 1
            outbox.put(output if wanted == 1 else replace(output, segments=wanted), observers)

    def drop(self, count: int, waits: Waits) -> None:
        """Receive so many values that nobody wants any more."""
        if (values := self.ends.values) is None:
            return
        values.expect(count)
        for _ in range(count):
            waits.until(values.ready, f"waits for what stage {self.stage.program.stage} is to drop")
            values.get()

    def _do(self, action: Action, message: Message | None) -> Message | None:
        with alone():
            return self.stage.perform(action, self.task, message)

    def _consumes(self, action: Action) -> str | None:
        """A forward that begins behind the frozen layers waits for nobody."""
        consumes = action.kind.consumes
        return None if consumes == "forward" and action.micro_batch in self.begins else consumes

    def _inbox(self) -> Inbox | None:
        consumes = self._consumes(self.actions[0])
        return None if consumes is None else self.ends.values if consumes == "forward" else self.ends.gradients


@dataclass(frozen=True)
class IterationContext:
    """What an iteration runs in.

    Attributes:
        waits: of this process for others, with their limit.
        rank: of this process, for messages.
        observers: see the iteration, each within those before it.
        oldest_first: whether lanes may be in different iterations.
    """

    waits: Waits
    rank: int
    observers: tuple[Observer, ...] = ()
    oldest_first: bool = False


def execute(lanes: Sequence[Lane], context: IterationContext, until: Callable[[], bool] = bool) -> None:
    """Run the actions of all lanes.

    Args:
        lanes: with their actions.
        context: of the iteration.
        until: whether to stop before all are done; asked between two actions.
    Raises:
        Exception: of user code; a note names stage, rank and action.
        StageError: user code left an action by StopIteration.
        PeerError: nothing arrived in time, a channel broke, or another process has failed.
    """
    waits, monitor, rank = context.waits, context.waits.monitor, context.rank
    order: Callable[[Lane], Any] = Lane.seniority if context.oldest_first else Lane.urgency
    while not until() and (pending := [lane for lane in lanes if lane.actions]):
        runnable = [lane for lane in pending if lane.ready()]
        if not runnable:
            with contextlib.ExitStack() as waiting:
                for observer in context.observers:
                    waiting.enter_context(observer.waiting(_waits(pending)))
                waits.until(lambda: any(lane.ready() for lane in pending), lambda: _waits(pending))
            continue
        monitor.check()
        lane = min(runnable, key=order)
        action = lane.actions[0]
        monitor.activity.text = f"runs {action} of stage {_stage(lane)}"
        try:
            lane.run_next(context.observers)
        except StopIteration as error:  # which a loop around takes for the end of its data, in this process alone
            raise StageError(f"{_place(lane, rank)} failed in {action}: StopIteration: {error}") from error
        except Exception as error:
            error.add_note(f"{_place(lane, rank)} failed in {action}")
            raise
    monitor.activity.text = ""


def _place(lane: Lane, rank: int) -> str:
    return f"stage {lane.stage.program.stage} of {lane.stage.program.num_stages} (rank {rank}{_of(lane, ', ')})"


def _stage(lane: Lane) -> str:
    return f"{lane.stage.program.stage}{_of(lane, ' of ')}"


def _of(lane: Lane, before: str) -> str:
    pipeline = lane.task.key.pipeline
    return f"{before}pipeline {pipeline}" if pipeline else ""


def _waits(lanes: Sequence[Lane]) -> str:
    inputs = (f"the input of {lane.actions[0]} on stage {_stage(lane)}" for lane in lanes)
    return f"waits for {' or '.join(inputs)}"
