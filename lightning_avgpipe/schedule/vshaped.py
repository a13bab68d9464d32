"""Schedules with two stages on each process, placed as a V: the process of the first stage also has the last one.

::

    D = 3 processes     0: stages 0, 5     1: stages 1, 4     2: stages 2, 3

The first backward runs on the process of the first forward, so that all processes stash the same amount.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from lightning_avgpipe.schedule.actions import Action, Schedule
from lightning_avgpipe.schedule.kinds import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Kind


def zbv(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Build ZB-V: with equal forwards and halves of backwards no process is idle between its first and last action.

    Once a process has begun, it runs another action between the arrival of a message and the action that needs it, so
    that a message which is a little late costs little. Weight gradients fill idle time at the end. Every process
    stashes as much as the first stage of 1F1B. With fewer than K micro-batches processes are idle longer.

    Source: Pipeline Parallelism with Controllable Memory, Qi et al., arXiv:2405.15362, and Zero Bubble Pipeline
        Parallelism, Qi et al., ICLR 2024, section 6.
    """
    return _of("zbv", _zbv, num_microbatches, num_devices)


def dualpipev(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Build DualPipeV: pairs of a forward of one stage of a process and a backward of the other.

    Where nothing overlaps within a pair, as here, processes are idle a little. At the ends of an iteration backwards
    are split. With fewer than K micro-batches there are no pairs, and the order is that of ZB-V.

    Source: DeepSeek-V3, arXiv:2412.19437 (DualPipe), cut in half as Sea AI Lab proposed.
    """
    return _of("dualpipev", _zbv if num_microbatches < num_stages else _dualpipev, num_microbatches, num_devices)


class _Order:
    """The order of the actions of a process, as far as it has been built.

    Attributes:
        there: stage of the process on the way there.
        back: stage of the process on the way back.
        after: number of processes behind this one.
        places: actions so far, each with its stage.
    """

    def __init__(self, device: int, num_microbatches: int, num_devices: int) -> None:
        self.there, self.back, self.after = device, 2 * num_devices - 1 - device, num_devices - 1 - device
        self.places: list[tuple[int, Action]] = []
        self._count = num_microbatches
        self._done: Counter[tuple[int, Kind]] = Counter()

    def left(self, stage: int, kind: Kind) -> int:
        """Return how many actions of a kind a stage has still to run."""
        return self._count - self._done[stage, kind]

    def add(self, times: int, *places: tuple[int, Kind]) -> None:
        """Append an action of each kind with its next micro-batch, if there is one, and repeat this ``times`` times."""
        for stage, kind in places * times:
            of = (stage, INPUT_GRADIENT if kind is BACKWARD else kind)  # both compute the input gradient
            if self.left(*of):
                self.places.append((stage, Action(kind, self._done[of])))
                self._done[of] += 1
                if kind is BACKWARD:
                    self._done[stage, WEIGHT_GRADIENT] += 1

    def add_weights(self) -> None:
        """Append the next weight gradient that may run, if there is one; the stage on the way back goes first."""
        for stage in (self.back, self.there):
            if self.left(stage, WEIGHT_GRADIENT) > self.left(stage, INPUT_GRADIENT):
                return self.add(1, (stage, WEIGHT_GRADIENT))


def _of(name: str, make: Callable[[_Order, int], None], num_microbatches: int, num_devices: int) -> Schedule:
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
    while any(order.left(stage, WEIGHT_GRADIENT) for stage in (there, back)):
        order.add(1, (there if order.left(there, INPUT_GRADIENT) else back, INPUT_GRADIENT))
        order.add_weights()


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
    while any(order.left(stage, WEIGHT_GRADIENT) for stage in (there, back)):
        order.add_weights()
        order.add(1, (there if order.left(there, INPUT_GRADIENT) else back, INPUT_GRADIENT))
