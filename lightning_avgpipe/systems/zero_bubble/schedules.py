"""Schedules that split backwards in two, so that the gradients of weights fill idle time.

::

    I  input gradient   the half of a backward that others wait for: as B, but frees nothing yet
    W  weight gradient  the other half: own I; sends nothing, so it may run at any time after I; frees it

In ZB-H1 and ZB-H2 the weight gradients follow ``v`` micro-batches behind the input gradients::

    w = 2, v = 1     F0 F1 | F2 I0  F3 I1 W0  F4 I2 W1 | I3 W2 I4 W3 | W4

ZB-V and DualPipeV have two stages on each process, placed as a V: the process of the first stage also has the last one.
So the first backward runs on the same process as the first forward, and all processes stash the same amount::

    D = 3 processes     0: stages 0, 5     1: stages 1, 4     2: stages 2, 3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.builders import from_warm_up, staircase
from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.kinds import BACKWARD, FORWARD, Kind
from lightning_avgpipe.schedule.recipes import Recipe, of_devices

# Without measured times each half takes half of a backward, as for layers that multiply by matrices.
INPUT_GRADIENT = Kind(
    "I", "input gradient", lambda costs, k: costs.backward_s[k] / 2, "backward", "backward", (FORWARD,), 0, 0, "#3f9c93"
)
WEIGHT_GRADIENT = Kind(
    "W", "weight gradient", lambda costs, k: costs.backward_s[k] - costs.seconds(INPUT_GRADIENT, k), None, None,
    (INPUT_GRADIENT,), -1, 2, "#a3b53f",
)  # fmt: skip


def halved(costs: StageCosts, input_s: Sequence[float]) -> StageCosts:
    """Return costs in which the input gradients of the stages take these seconds, shape ``(K,)``."""
    return replace(costs, of_kinds={**costs.of_kinds, INPUT_GRADIENT.name: input_s})


def zb_h(name: str, step: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Build ZB-H1 or ZB-H2.

    With K equal stages, forwards f, halves of backwards i and w, links that take no time and enough micro-batches, the
    first stage is idle for the time in the first column, and stashes as many micro-batches as the second column says::

        1F1B     (K-1)(f+i+w)     K      of which the last stage stashes 1
        ZB-H1    (K-1)(f+i-w)     K      and on all others, where k of them wait for their weight gradients only
        ZB-H2    (K-1)(f+i-2w)    2K-1   and on all others, where 2k of them do

    This holds for w <= i, and negative idle times are 0; with f = i = w no stage of ZB-H2 is ever idle.

    Args:
        name: name of the schedule.
        step: by how many forwards a stage is ahead of the next, and by how many weight gradients behind the one before.
        num_stages: K.
        num_microbatches: M.
    Source: Zero Bubble Pipeline Parallelism, Qi et al., ICLR 2024, section 2.
    """
    ahead = staircase(num_stages, num_microbatches, step)
    whole = from_warm_up(ahead, num_microbatches, name)
    rows = (tuple(_split(row, behind)) for row, behind in zip(whole.rows, ahead[::-1], strict=True))
    return replace(whole, rows=tuple(rows))


def _split(row: Sequence[Action], behind: int) -> Iterator[Action]:
    """Split the backwards of a row; weight gradients follow ``behind`` micro-batches later, and the last at the end."""
    late: list[Action] = []
    for kind, i in row:
        yield Action(INPUT_GRADIENT if kind is BACKWARD else kind, i)
        if kind is BACKWARD:
            late.append(Action(WEIGHT_GRADIENT, i))
            if len(late) > behind:
                yield late.pop(0)
    yield from late


def zbv(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Build ZB-V: with equal forwards and halves of backwards no process is idle between its first and last action.

    Once a process has begun, it runs another action between the arrival of a message and the action that needs it, so
    that a message which is a little late costs little. Weight gradients fill idle time at the end. Every process
    stashes as much as the first stage of 1F1B. With fewer than K micro-batches processes are idle longer.

    Source: Pipeline Parallelism with Controllable Memory, Qi et al., arXiv:2405.15362, and Zero Bubble Pipeline
        Parallelism, Qi et al., ICLR 2024, section 6.
    """
    return _built("zbv", _zbv, num_microbatches, num_devices)


def dualpipev(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Build DualPipeV: pairs of a forward of one stage of a process and a backward of the other.

    Here nothing overlaps within a pair, so processes are idle a little. At the start and end of an iteration, backwards
    are split. With fewer than K micro-batches there are no pairs, and the order is that of ZB-V.

    Source: DeepSeek-V3, arXiv:2412.19437 (DualPipe), cut in half as Sea AI Lab proposed.
    """
    return _built("dualpipev", _zbv if num_microbatches < num_stages else _dualpipev, num_microbatches, num_devices)


class _Order:
    """The order of the actions of a process, as far as it has been built.

    Attributes:
        there: the process's stage in the first half of all stages, on the way there along the V.
        back: its stage in the second half, on the way back.
        after: number of processes after this one.
        places: actions so far, each with its stage.
    """

    def __init__(self, device: int, num_microbatches: int, num_devices: int) -> None:
        self.there, self.back, self.after = device, 2 * num_devices - 1 - device, num_devices - 1 - device
        self.places: list[tuple[int, Action]] = []
        self._count = num_microbatches
        self._done: Counter[tuple[int, Kind]] = Counter()

    def left(self, stage: int, kind: Kind) -> int:
        """Return how many actions of a kind have still to be added for a stage."""
        return self._count - self._done[stage, kind]

    def add(self, times: int, *places: tuple[int, Kind]) -> None:
        """Append an action of each kind with its next micro-batch, if there is one, and repeat this ``times`` times."""
        for stage, kind in places * times:
            place = (stage, INPUT_GRADIENT if kind is BACKWARD else kind)  # both compute the input gradient
            if self.left(*place):
                self.places.append((stage, Action(kind, self._done[place])))
                self._done[place] += 1
                if kind is BACKWARD:
                    self._done[stage, WEIGHT_GRADIENT] += 1

    @property
    def is_complete(self) -> bool:
        """Whether all weight gradients, which come last, have been added."""
        return not any(self.left(stage, WEIGHT_GRADIENT) for stage in (self.there, self.back))

    def add_input_gradient(self) -> None:
        """Append the next input gradient, if there is one; the stage on the way there goes first."""
        self.add(1, (self.there if self.left(self.there, INPUT_GRADIENT) else self.back, INPUT_GRADIENT))

    def add_weight_gradient(self) -> None:
        """Append the next weight gradient that may run, if there is one; the stage on the way back goes first."""
        for stage in (self.back, self.there):
            if self.left(stage, WEIGHT_GRADIENT) > self.left(stage, INPUT_GRADIENT):
                return self.add(1, (stage, WEIGHT_GRADIENT))


def _built(name: str, make: Callable[[_Order, int], None], num_microbatches: int, num_devices: int) -> Schedule:
    orders = [_Order(device, num_microbatches, num_devices) for device in range(num_devices)]
    for device, order in enumerate(orders):
        make(order, device)
    return Schedule.of_orders(name, num_microbatches, [order.places for order in orders])


def _zbv(order: _Order, device: int) -> None:
    there, back, after = order.there, order.back, order.after
    halves = INPUT_GRADIENT, WEIGHT_GRADIENT
    whole_there, whole_back = ([(stage, kind) for kind in halves] for stage in (there, back))
    order.add(2 * after + 1, (there, FORWARD))
    order.add(device, (back, FORWARD), (there, FORWARD))
    order.add(after + 1, (back, FORWARD), *whole_back)
    while order.left(there, FORWARD):
        order.add(1, (there, FORWARD), *whole_there, (back, FORWARD), *whole_back)
    while order.left(back, FORWARD):
        order.add(1, *whole_there, (back, FORWARD), *whole_back)
    order.add(device, (there, INPUT_GRADIENT), (back, INPUT_GRADIENT))
    while not order.is_complete:
        order.add_input_gradient()
        order.add_weight_gradient()


def _dualpipev(order: _Order, device: int) -> None:
    there, back, after = order.there, order.back, order.after
    order.add(2 * after, (there, FORWARD))
    order.add(device + 1, (there, FORWARD), (back, FORWARD))
    order.add(after, (back, INPUT_GRADIENT), (back, WEIGHT_GRADIENT), (back, FORWARD))
    middle = order.left(there, FORWARD)
    order.add(middle, (there, FORWARD), (back, BACKWARD), (back, FORWARD), (there, BACKWARD))
    order.add(after, (back, BACKWARD), (back, FORWARD), (there, BACKWARD))
    pairs = device + 1
    order.add(pairs - pairs // 2, (back, BACKWARD), (there, BACKWARD))
    order.add(pairs // 2, (back, INPUT_GRADIENT), (there, INPUT_GRADIENT))
    while not order.is_complete:
        order.add_weight_gradient()
        order.add_input_gradient()


_OF_HALVES = (
    'Idle time is filled with weight gradients by ``"zb_h1"`` (idle for a third of the time of 1F1B, where both halves '
    'of a backward take as long as a forward) and ``"zb_h2"`` (hardly idle, with twice the micro-batches in flight). '
    "Weights are the same bit for bit. A stage that cannot split its backwards (``recompute``, checkpoints, compiled "
    "modules) runs them whole, and says so."
)
_OF_TWO = (
    'With exactly two stages on each process, of which the second ones are placed in reverse: ``"zbv"``, hardly idle '
    """with 1F1B's memory, or ``"dualpipev"``."""
)
RECIPES = {
    "zb_h1": Recipe(lambda k, m, *_: zb_h("zb_h1", 1, k, m), "any", rank=50, splits=True, about=_OF_HALVES),
    "zb_h2": Recipe(lambda k, m, *_: zb_h("zb_h2", 2, k, m), "any", rank=60, splits=True),
    "zbv": Recipe(of_devices(zbv), "v", rank=30, splits=True, about=_OF_TWO),
    "dualpipev": Recipe(of_devices(dualpipev), "v", rank=40, splits=True),
}
