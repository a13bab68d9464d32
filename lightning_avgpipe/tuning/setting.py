"""Settings, which the tuner chooses, with their warm-up and stash."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_avgpipe.errors import TuningError
from lightning_avgpipe.schedule import builders

TUNED = ("advance_forward", "1f1b", "afab")  # schedules whose time and memory are predicted


@dataclass(frozen=True, order=True)
class Setting:
    """A setting: the number of micro-batches M, the number of pipelines N, and the schedule.

    Attributes:
        num_microbatches: M, per batch and pipeline.
        num_pipelines: N, number of parallel pipelines.
        advance: h of ``"advance_forward"``.
        schedule: ``"advance_forward"``, ``"1f1b"`` or ``"afab"``.
        rolling: whether each pipeline begins its next batch without waiting for the others.
    Raises:
        TuningError: M or N is below 1, the advance is negative, or the schedule is none of these.
    """

    num_microbatches: int
    num_pipelines: int = 1
    advance: int = 0
    schedule: str = "advance_forward"
    rolling: bool = False

    def __post_init__(self) -> None:
        if self.num_microbatches < 1 or self.num_pipelines < 1 or self.advance < 0:
            raise TuningError(f"{self}: M and N must be at least 1, the advance at least 0")
        if self.schedule not in TUNED:
            raise TuningError(f"{self}: tune {', '.join(map(repr, TUNED))}")

    def warm_up(self, num_stages: int) -> tuple[int, ...]:
        """Return the forwards of each stage before its first pair, shape ``(num_stages,)``.

        A warm-up of M is returned as M - 1, which gives the same rows.
        """
        ahead = builders.warm_up(self.schedule, num_stages, self.num_microbatches, self.advance)
        return tuple(min(w, self.num_microbatches - 1) for w in ahead)

    def stash(self, num_stages: int) -> tuple[int, ...]:
        """Return the largest number of stashed micro-batches of one pipeline on each stage, shape ``(num_stages,)``."""
        return tuple(w + 1 for w in self.warm_up(num_stages))

    def __str__(self) -> str:
        name = f"advance {self.advance}" if self.schedule == "advance_forward" else self.schedule
        pipelines = f"{self.num_pipelines} pipeline{'s' * (self.num_pipelines > 1)}"
        return f"{pipelines}, {self.num_microbatches} micro-batch{'es' * (self.num_microbatches > 1)}, {name}" + (
            ", rolling" * self.rolling
        )
