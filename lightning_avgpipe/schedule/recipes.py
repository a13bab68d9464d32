"""The recipes: every schedule that has a name, the placement of stages that it needs, and its known costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Schedule
from lightning_avgpipe.schedule.bidirectional import chimera
from lightning_avgpipe.schedule.broadcast import Broadcast
from lightning_avgpipe.schedule.builders import breadth_first, check_sizes, formula, interleaved
from lightning_avgpipe.schedule.kinds import Placement
from lightning_avgpipe.schedule.vshaped import dualpipev, zbv


@dataclass(frozen=True)
class Recipe:
    """A named schedule: how it is built, and its costs with equal stages and links that take no time.

    Attributes:
        title: name in texts.
        build: function of K, M, D processes and an advance that returns the schedule.
        needs: stages on each process: any number, several in a loop, or two in the shape of a V.
        idle: by how many seconds an iteration is longer than the work of one process in it. f and b = i + w are the
            seconds of one micro-batch on a process, with all of its v = K/D stages. The values of ZB-V and DualPipeV
            are approximate, for f = i = w.
        stash: number of micro-batches that process d, or stage k, stashes at most; each stage of a process counts.
        source: paper that describes the schedule.
        where: condition under which ``idle`` holds; empty if there is none.
        lines: number of lines of stages, each with a copy of the model, see :attr:`Schedule.lines`.
        note: further remarks; empty if there are none.
    """

    title: str
    build: Callable[[int, int, int, int], Schedule]
    needs: Literal["any", "loop", "v"]
    idle: str
    stash: str
    source: str
    where: str = ""
    lines: int = 1
    note: str = ""

    @property
    def placement(self) -> Placement:
        """The placement of stages on processes."""
        return "v" if self.needs == "v" else "loop"


def _of_formula(name: str) -> Callable[[int, int, int, int], Schedule]:
    return lambda num_stages, num_microbatches, _, advance: formula(name, num_stages, num_microbatches, advance)


def _of_devices(make: Callable[[int, int, int], Schedule]) -> Callable[[int, int, int, int], Schedule]:
    return lambda num_stages, num_microbatches, num_devices, _: make(num_stages, num_microbatches, num_devices)


_ZERO_BUBBLE = "Zero Bubble Pipeline Parallelism, Qi et al., ICLR 2024"
RECIPES = {
    "advance_forward": Recipe(
        "Advance forward propagation", _of_formula("advance_forward"), "any", "(K-1) (f+b)", "1 + (K-1-k) (1+h)",
        "AvgPipe, Chen et al., PPoPP 2023, section 4",
    ),
    "1f1b": Recipe(
        "1F1B", _of_formula("1f1b"), "any", "(K-1) (f+b)", "K-k",
        "DAPPLE, Fan et al., PPoPP 2021; Narayanan et al., arXiv:2104.04473",
    ),
    "afab": Recipe(
        "All forwards, then all backwards", _of_formula("afab"), "any", "(K-1) (f+b)", "M",
        "GPipe, Huang et al., arXiv:1811.06965",
    ),
    "zb_h1": Recipe("ZB-H1", _of_formula("zb_h1"), "any", "(K-1) (f+i-w)", "K", f"{_ZERO_BUBBLE}, section 2"),
    "zb_h2": Recipe("ZB-H2", _of_formula("zb_h2"), "any", "(K-1) (f+i-w)", "2 K - 1", f"{_ZERO_BUBBLE}, section 2"),
    "interleaved": Recipe(
        "Interleaved 1F1B", _of_devices(interleaved), "loop", "(D-1) (f+b)/v", "(v+1) D - 2 d - 1",
        "Narayanan et al., arXiv:2104.04473, section 2.2",
    ),
    "bfs": Recipe(
        "Looped breadth-first", _of_devices(breadth_first), "loop", "(D-1) (f+b)/v", "v M",
        "Breadth-First Pipeline Parallelism, Lamy-Poirier, arXiv:2211.05953",
    ),
    "zbv": Recipe(
        "ZB-V", _of_devices(zbv), "v", "(D-1) f/2", "2 D",
        "Pipeline Parallelism with Controllable Memory, Qi et al., arXiv:2405.15362",
    ),
    "dualpipev": Recipe(
        "DualPipeV", _of_devices(dualpipev), "v", "D f/2", "2 D + 1",
        "DeepSeek-V3, arXiv:2412.19437: DualPipe, cut in half",
    ),
    "chimera": Recipe(
        "Chimera", _of_devices(chimera), "v", "(D-2) b", "D", "Chimera, Li and Hoefler, SC 2021, arXiv:2107.06925",
        "with M = D and b = 2 f", 2,
        "It has the model twice, half of the micro-batches for each; it is simulated only.",
    ),
    "broadcast": Recipe(
        "Broadcast forward", lambda num_stages, count, *_: Broadcast()(num_stages, count), "any",
        "(K-1) (f+b) + (M-1) f", "K-k", "as described in `schedule/broadcast.py`",
        note="Stages that build their graph late (`G`) stash one. On free links it loses; where a transfer takes as "
        "long as a forward, 12 stages are 1.07 times as fast as with 1F1B.",
    ),
}  # fmt: skip
TRAINING = tuple(name for name, recipe in RECIPES.items() if recipe.lines == 1)


def devices_of(name: str, num_stages: int, hosts: int | None = None) -> int:
    """Return for how many processes a schedule is built.

    Args:
        name: name of the schedule.
        num_stages: K, number of stages.
        hosts: number of processes that host the stages; None: as many as suit the schedule best. A single process runs
            the actions of several in turns.
    Raises:
        ScheduleError: the schedule cannot place so many stages on so many processes.
    """
    needs = RECIPES[name].needs if name in RECIPES else "any"
    if needs == "any":
        return hosts or num_stages
    fitting = num_stages // 2 if needs == "v" or hosts is None else hosts
    found = f"schedule={name!r} with num_stages={num_stages} on {hosts or fitting} process{'es' * ((hosts or 2) > 1)}"
    if needs == "v" and (num_stages % 2 or hosts not in (None, 1, fitting)):
        use = f"use num_stages={2 * hosts}" if hosts and hosts > 1 else "use an even number of stages"
        raise ScheduleError(f"{found}: it needs two stages on each process; {use}")
    if needs == "loop" and (num_stages % fitting or num_stages < 2 * fitting):
        use = f"use num_stages={2 * (hosts or 1)} or another multiple of it"
        raise ScheduleError(f"{found}: it needs the same number of stages on each process, and several; {use}")
    return fitting


def build(
    name: str, num_stages: int, num_microbatches: int, advance: int = 0, num_devices: int | None = None
) -> Schedule:
    """Build a schedule by name.

    Args:
        name: a name of ``RECIPES``, or ``"forward"`` (no backwards: evaluation).
        num_stages: K, at least 1.
        num_microbatches: M, at least 1.
        advance: h of ``"advance_forward"``; 0 is 1F1B, a large one AFAB on all stages but the last. The other names
            have none and ignore it.
        num_devices: number of processes, for schedules with several stages on each; None: two stages on each.
    Raises:
        ScheduleError: an invalid size, an unknown name, or a number of stages that does not fit the processes.
    """
    if name not in RECIPES:
        return formula(name, num_stages, num_microbatches, advance)
    check_sizes(num_stages, num_microbatches)
    devices = devices_of(name, num_stages, num_devices)
    return RECIPES[name].build(num_stages, num_microbatches, devices, advance)
