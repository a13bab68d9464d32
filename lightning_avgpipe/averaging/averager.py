"""The averager: pulls parallel models towards their reference, all of them every few steps or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_avgpipe.averaging.averaging_step import AveragingStep
from lightning_avgpipe.averaging.models import Models
from lightning_avgpipe.averaging.options import Averaging
from lightning_avgpipe.averaging.staggered import StaggeredAveraging
from lightning_avgpipe.comm.collectives import TensorCollectives
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.patching import noop
from lightning_avgpipe.utils.random_streams import RandomKey


@dataclass
class Fragment:
    """A part of the parameters of all models, which is averaged by itself.

    Attributes:
        steps: number of steps since the last averaging.
        active: number of pipelines that have had a batch since then.
    """

    steps: int = 0
    active: int = 0


@dataclass
class LateAveraging:
    """An averaging that has begun and ends some steps later.

    Attributes:
        names: names of the parameters, including those of other processes.
        left: number of steps until it ends.
        buffers: whether buffers are averaged with it.
        arrive: waits for the sums, and returns the number of models of all groups that had a batch.
    """

    names: list[str]
    left: int
    buffers: bool
    arrive: Callable[[], int]


class Averager:
    """The schedule of averagings: counts steps, and averages when it is time. Sums over groups run in the background.

    ::

        every=6, fragments=2, delay=2      step      1  2  3  4  5  6  7  8  9 10 11 12
                                           0               >--->             >--->
                                           1         >                 >--->             >

    Each fragment is sent (>) every 6 steps, at different steps. Its averaging ends 2 steps later: when the next step
    begins, or earlier if somebody reads the models. The step is fixed, so results do not depend on the timing.

    Args:
        models: models to average.
        averaging: options of the averaging.
        averaging_group: processes of all groups that hold the same stages; None if there is one group.

    Attributes:
        fragments: the fragments of the parameters.
        fragment_of: number of the fragment of each parameter.
        late: averagings that end later, in the order in which they were started.
        count: number of averagings that were started.
        staggered: averaging of models one at a time; None while all are averaged together.
    """

    def __init__(self, models: Models, averaging: Averaging, averaging_group: TensorCollectives | None) -> None:
        self._models = models
        self._options = averaging
        self._averaging_group = averaging_group
        self.fragments = [Fragment() for _ in range(averaging.fragments)]
        self.fragment_of: dict[str, int] = {}
        self.late: list[LateAveraging] = []
        self.count = 0
        self._outer: Optimizer | None = None
        self._begun: AveragingStep | None = None
        self.staggered: StaggeredAveraging | None = None
        self._ended: list[dict[str, Tensor]] = []  # buffers of models that have ended their iteration, for the groups
        self._end_buffers: Callable[[], None] = noop

    def follow(self, names: Collection[str]) -> None:
        """Add new tensors of the reference to its optimizer, and each to the fragment that is the smallest so far."""
        reference = self._models.reference
        if self._options.outer_optimizer is not None:
            if self._outer is None:
                self._outer = self._options.outer_optimizer(list(reference.values()))
            else:
                self._outer.param_groups[0]["params"] += [reference[name] for name in names]
        sizes = [0] * len(self.fragments)
        for name, number in self.fragment_of.items():
            sizes[number] += reference[name].numel()
        for name in names:
            number = self.fragment_of[name] = sizes.index(min(sizes))
            sizes[number] += reference[name].numel()

    @property
    def outer(self) -> Optimizer | None:
        """The optimizer of the reference, over all its tensors; None if it has none."""
        self.finish()
        return self._outer

    def stepped(self, active: int) -> None:
        """Count a step of the optimizers, and start the averagings that are due.

        Args:
            active: number of pipelines whose models took part in the step.
        """
        if self.staggered is not None:
            self.end_staggered()
        self.finish()
        for late in self.late:
            late.left -= 1
        for fragment in self.fragments:
            fragment.steps += 1
            fragment.active = max(fragment.active, active)
        step, last = self.fragments[-1].steps, len(self.fragments) - 1
        for number in range(len(self.fragments)):
            at = self._options.every * (number + 1) // len(self.fragments)
            if step == at or (step > at and number == last):
                self._begin(number, self._options.delay)

    def _begin(self, number: int, delay: int = 0) -> None:
        """Start to average a fragment. Without other groups and without a delay, the averaging also ends here."""
        fragment, models = self.fragments[number], self._models
        names = [name for name in models.mine if self.fragment_of[name] == number]
        rounding = None if self._options.wire is None else (self._options.wire, RandomKey(0, self.count))
        has_buffers = models.shared is not None and number == len(self.fragments) - 1
        step = AveragingStep(
            *models.tensors(names), fragment.active, self._averaging_group, names, rounding, late=delay > 0
        )
        if delay:
            models.sums |= dict(zip(names, step.sums, strict=True))
            for model, tensors in zip(models.each, step.sent, strict=True):
                model.sent |= dict(zip(names, tensors, strict=True))
            everywhere = [name for name, fragment in self.fragment_of.items() if fragment == number]
            self.late.append(LateAveraging(everywhere, delay, has_buffers, step.arrive))
        else:
            self._begun = step
        if models.shared is not None and has_buffers:
            models.read_back()
            self._end_buffers()
            self._end_buffers = models.shared.begin([model.buffers for model in models.each])
        fragment.steps = fragment.active = 0
        self.count += 1
        if self._averaging_group is None:
            self.finish()

    def average_all_now(self) -> None:
        """Average all training that has not been averaged yet, without delay. All groups call it."""
        self.end_staggered()
        for late in self.late:
            late.left = 0
        self.finish()
        for number in [i for i, fragment in enumerate(self.fragments) if fragment.steps]:
            self._begin(number)
            self.finish()
        self.add_pending_sums()

    @property
    def is_under_way(self) -> bool:
        """Whether an averaging was started whose end is due."""
        return self._begun is not None or any(late.left <= 0 for late in self.late)

    def finish(self) -> None:
        """End the averagings that are due. It must be called before models are read or changed."""
        while self.late and self.late[0].left <= 0:
            self._end(self._arrived(self.late.pop(0)))
        if self._begun is not None:
            step, self._begun = self._begun, None
            self._end(step)
            self.add_pending_sums()

    def _arrived(self, late: LateAveraging) -> AveragingStep:
        """Wait for the sums of a late averaging, and return its step, to be ended."""
        active, models = late.arrive(), self._models
        if late.buffers:
            self.add_pending_sums()
        names = [name for name in late.names if name in models.sums]
        sums = [models.sums.pop(name) for name in names]
        sent = [[model.sent.pop(name) for name in names] for model in models.each]
        return AveragingStep.resumed(*models.tensors(names), sums, sent, models.total, active)

    def arrive(self) -> None:
        """Wait for the sums of all averagings in flight. The averagings still end at their own steps."""
        for late in self.late:
            late.arrive = partial(int, late.arrive())

    def state_dict(self) -> dict[str, Any]:
        """Return the state that decides when averagings begin and end, without tensors."""
        self.arrive()
        return {
            "steps": [fragment.steps for fragment in self.fragments],
            "active": [fragment.active for fragment in self.fragments],
            "fragment_of": dict(self.fragment_of),
            "averagings": self.count,
            "late": [{"names": late.names, "left": late.left, "active": late.arrive()} for late in self.late],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, in which ``active`` counts models of this group only.

        If the number of fragments differs, all fragments continue with the largest number of steps of any, and
        averagings in flight end at once.
        """
        steps, active, same = state["steps"], state["active"], len(state["steps"]) == len(self.fragments)
        for i, fragment in enumerate(self.fragments):
            fragment.steps, fragment.active = (steps[i], active[i]) if same else (max(steps), max(active))
        if same:
            self.fragment_of |= {n: fragment for n, fragment in state["fragment_of"].items() if n in self.fragment_of}
        self.count = state["averagings"]
        self.late = [
            LateAveraging(saved["names"], saved["left"] if same else 0, False, partial(int, saved["active"]))
            for saved in state["late"]
        ]

    def _end(self, step: AveragingStep) -> None:
        alpha = self._options.dilution(step.count)
        if self._outer is not None:
            reference, parameters = self._models.reference, self._models.own.parameters
            frozen = {id(reference[name]) for name, parameter in parameters.items() if not parameter.requires_grad}
            step.end_with(self._outer, alpha, frozen)
        else:
            step.end(alpha, self._options.rate(step.count, self._models.size))

    def abandon(self) -> None:
        """Drop all averagings in flight, without waiting for other groups, which have failed."""
        self._begun = self.staggered = None
        self.late.clear()
        self._end_buffers = noop

    # -- one model after the other -----------------------------------------------------------------------------------

    def begin_staggered(self) -> None:
        """Prepare to average models one at a time, unless that was done before.

        All models must have stepped equally often, and the reference must not be shown.
        """
        if self.staggered is None and self._models.mine:  # a process may have only frozen stages
            size, total, (_, reference) = self._models.size, self._models.total, self._models.tensors()
            # the parameters themselves, since user code may give them other memory
            models = [list(self._models.parameters(n).values()) for n in range(size)]
            alpha, rate = self._options.dilution(total), self._options.rate(total, size)
            self.staggered = StaggeredAveraging(models, reference, alpha, rate, self._averaging_group)

    def average_one(self, number: int) -> None:
        """Average model n with the reference, after its optimizers have stepped and before its next iteration."""
        if self.staggered is not None:
            self.staggered.end(number)
        if self._models.shared is None:
            return
        self._models.read_back()
        self._ended.append({name: b.detach().clone() for name, b in self._models.each[number].buffers.items()})
        if len(self._ended) == self._models.size:
            self._end_buffers()
            self._end_buffers, self._ended = self._models.shared.begin(self._ended), []

    def add_pending_sums(self) -> None:
        """Wait for the sums over groups of the last iteration, and add them to the reference and its buffers."""
        if self.staggered is not None:
            self.staggered.add_pending_sums()
        self._end_buffers()
        self._end_buffers = noop

    def reset(self) -> None:
        """Catch up, and continue as if training began with the current reference and models. All groups call it."""
        if self._models.shown is None:  # otherwise showing the reference has caught up
            self.add_pending_sums()
            if self.staggered is not None:
                self.staggered.reset()

    def end_staggered(self) -> None:
        """Catch up, and stop averaging models one at a time; :meth:`begin_staggered` starts from the current state.

        The reference must not be shown.
        """
        self.add_pending_sums()
        if self.staggered is not None:
            self.staggered.settle()
            self.staggered = None

    # -- what user code writes ---------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether an averaging has begun that counts from the reference as it is now."""
        return self.staggered is not None or bool(self.late)

    def take_over(self, changed: Collection[int]) -> None:
        """Take over what user code may have written into a model or the reference, which must not be shown.

        Args:
            changed: positions of the tensors of the reference that it has just changed, among those of this process.

        Raises:
            ConfigurationError: it has changed the reference while a late averaging is in flight.
        """
        mine, in_flight = self._models.mine, {name for late in self.late for name in late.names}
        name = next((mine[i] for i in changed if mine[i] in in_flight), None)
        if name is not None:
            raise ConfigurationError(
                f"with Averaging(delay={self._options.delay}) a hook has changed '{name}' of the reference while an "
                "averaging that began with its former contents is in flight. Change the parallel models instead, which "
                "the reference follows, or use delay=0"
            )
        if self.staggered is not None:
            self.staggered.take_over(changed)
