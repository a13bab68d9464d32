"""Weight versions: which weights a forward and a backward use when the pipeline does not drain between updates.

The order is that of 1F1B. On each stage a batch ends with its last backward; forwards of later batches run within it::

    stage 0 | F0 F1 F2 F3 B0 B1 u | F4 B2 F5 B3 u | ..        M = 2, u: the stage's weights are updated
    stage 3 | F0 B0 F1 B1 u | F2 B2 F3 B3 u | ..

Micro-batch i counts from the last drain, and belongs to batch ``b = i // M``. An update follows each batch, and version
v of a stage's weights is the result of v updates. In 1F1B a stage runs ``w = K-1-k`` forwards ahead of its backwards.
So a forward meets version ``max(0, i - w) // M`` and its backward version b. Their difference is the staleness s::

    K = 4, M = 1     stage 0 | F0 F1 F2 F3 B0 F4 B1 F5 B2 ..      F4 meets version 1, B4 version 4: s = 3
                     stage 3 | F0 B0 F1 B1 F2 B2 ..               s = 0

==================  =====================================  =============================  ==============================
policy              forward                                backward                       weights held, with M = 1
==================  =====================================  =============================  ==============================
flush               b, after a drain                       the same                       1
stash               as met                                 the same                       K-k
2bw                 max(b-1, 0)                            the same                       2; needs M >= K
spectrain           as met, and k//2 + w updates ahead     b, and k//2 updates ahead      2
spectrain_stashed   as met, and w updates ahead            the same                       K-k+1 (last stage 1)
pipeoptim           as met, and s updates ahead            b                              2 (last stage 1)
none                as met                                 b                              1
==================  =====================================  =============================  ==============================

Weights after future updates are predicted, see ``store.py``. If the backward uses other weights than the forward did,
the forward is repeated with them. Numbers of updates that papers state for M = 1 are divided by M.

Source: PipeDream, Narayanan et al., SOSP 2019 (stash); PipeDream-2BW, Narayanan et al., ICML 2021; SpecTrain, Chen et
al., arXiv:1809.02839; PipeOptim, Guan et al., arXiv:2312.00839.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from lightning_avgpipe.errors import ScheduleError
from lightning_avgpipe.schedule.actions import Action
from lightning_avgpipe.schedule.costs import StageCosts
from lightning_avgpipe.schedule.kinds import BACKWARD, FORWARD
from lightning_avgpipe.schedule.policies import WeightPolicy
from lightning_avgpipe.schedule.recipes import build
from lightning_avgpipe.schedule.simulator import simulate
from lightning_avgpipe.schedule.timeline import Timeline
from lightning_avgpipe.utils.allowed import check, choice, flag, has_options


class Use(NamedTuple):
    """The weights that an action uses.

    Attributes:
        version: number of updates since the last drain that these weights include.
        ahead: number of further updates that are predicted.
    """

    version: int
    ahead: int = 0


@dataclass(frozen=True)
class Place:
    """The position of a stage in a pipeline that does not drain between updates.

    Attributes:
        stage: k, number of the stage.
        num_stages: K, number of stages.
        num_microbatches: M, number of micro-batches of an update.
    """

    stage: int
    num_stages: int
    num_microbatches: int = 1

    @property
    def warm_up(self) -> int:
        """The number w of micro-batches by which forwards are ahead of backwards."""
        return self.num_stages - 1 - self.stage

    def batch(self, micro_batch: int) -> int:
        """Return the batch b of a micro-batch, which is also the version that its backward meets."""
        return micro_batch // self.num_microbatches

    def forward_version(self, micro_batch: int) -> int:
        """Return the version that the forward of a micro-batch meets."""
        return max(0, micro_batch - self.warm_up) // self.num_microbatches

    def staleness(self, micro_batch: int) -> int:
        """Return the staleness s of a micro-batch: the number of updates between its forward and its backward."""
        return self.batch(micro_batch) - self.forward_version(micro_batch)

    def updates(self, micro_batches: int) -> int:
        """Return the largest number of updates within ``micro_batches`` consecutive micro-batches."""
        return -(-micro_batches // self.num_microbatches)

    @property
    def batches_ahead(self) -> int:
        """The number of batches by which forwards may be ahead of the last update."""
        return self.updates(self.warm_up)


_Rule = Callable[[Place, int], Use]


def _current(place: Place, micro_batch: int) -> Use:
    return Use(place.batch(micro_batch))


@dataclass(frozen=True)
class VersionPolicy(WeightPolicy):
    """A weight policy of a pipeline that does not drain: it says which weights actions use.

    Attributes:
        forward: function of place and micro-batch that returns the weights of the forward.
        backward: function of place and micro-batch that returns the weights of the backward; None: as the forward.
        delta: basis of predictions: the optimizer's ``"state"``, or the last ``"increment"`` of the weights.
    """

    drains: bool = False
    forward: _Rule = _current
    backward: _Rule | None = None
    delta: Literal["state", "increment"] = "state"

    @property
    def repeats(self) -> bool:
        """Whether backwards use other weights than their forwards did, so that stages repeat forwards for them."""
        return self.backward is not None

    def uses(self, place: Place, micro_batch: int) -> tuple[Use, Use]:
        """Return the weights of the forward and of the backward of a micro-batch."""
        forward = self.forward(place, micro_batch)
        return forward, forward if self.backward is None else self.backward(place, micro_batch)

    def check(self, num_stages: int, num_microbatches: int) -> None:
        """Check that a batch has enough micro-batches for the policy; raise ScheduleError otherwise."""
        if self.name == "2bw" and num_microbatches < num_stages:
            raise ScheduleError(
                f"weight_policy='2bw' with {num_microbatches} micro-batches and {num_stages} stages: two "
                f"versions are enough only if a batch has at least as many micro-batches as there are stages; use "
                f"num_microbatches={num_stages} or more, or weight_policy='stash'"
            )

    def copies(self, num_stages: int, num_microbatches: int) -> list[int]:
        """Return how many copies of its weights each stage holds at most; one if there is a single stage."""
        if num_stages == 1:
            return [1]
        return [self.held(Place(k, num_stages, num_microbatches)) for k in range(num_stages)]

    def held(self, place: Place) -> int:
        """Return the largest number of copies of a stage's weights at a time, including the current weights.

        A copy lives from its first use to its last. Predictions that only one action uses share one buffer.
        """
        count = 4 * (place.warm_up + place.num_microbatches)  # enough micro-batches for a steady state
        last: dict[Use, int] = {}
        uses: list[tuple[int, Use]] = []  # time, as the number of backwards before it, and the weights used then
        for i in range(count):
            forward, backward = self.uses(place, i)
            uses += [(max(0, i - place.warm_up), forward), (i, backward)]
        for time, use in uses:
            last[use] = max(time, last.get(use, 0))
        most = 0
        for now in range(count - place.warm_up):
            current = Use(place.batch(now))
            alive = {use for time, use in uses if time <= now <= last[use]} - {current}
            kept = {use for use in alive if self.backward is None or use.version < current.version}
            buffer = self.backward is not None and bool(alive - kept)
            most = max(most, 1 + len(kept) + buffer)
        return most + (self.delta == "increment")

    def simulate(self, costs: StageCosts, num_microbatches: int, iterations: int, repeats: bool = True) -> Timeline:
        """Predict when each action runs, see :meth:`WeightPolicy.simulate`.

        A backward that uses other weights than its forward did repeats the forward, except on the last stage, where
        each backward immediately follows its forward.
        """
        self.check(costs.num_stages, num_microbatches)
        if iterations < 2:
            return super().simulate(costs, num_microbatches, iterations)
        if repeats and self.repeats:
            again = (*costs.forward_s[:-1], 0.0)
            costs = replace(costs, backward_s=tuple(b + f for b, f in zip(costs.backward_s, again, strict=True)))
        timeline = simulate(build("1f1b", costs.num_stages, iterations * num_microbatches), costs)
        spans = []
        for span in timeline.spans:
            t, i = divmod(span.action.micro_batch, num_microbatches)
            spans.append(replace(span, action=Action(span.action.kind, i), iteration=t))
        transfers = []
        for transfer in timeline.transfers:
            t, i = divmod(transfer.micro_batch, num_microbatches)
            transfers.append(replace(transfer, micro_batch=i, iteration=t))
        return replace(timeline, spans=tuple(spans), transfers=tuple(transfers))

    def store(self, module: Any, optimizers: Callable[[], Sequence[Any]]) -> Any:
        """Return the versions of the weights of a module, see :meth:`WeightPolicy.store`."""
        from lightning_avgpipe.systems.asynchronous.store import WeightStore  # which imports this module

        return WeightStore(module, self, optimizers)

    def order(self, loop: Any) -> Any:
        """Return the order in which the iterations of a training loop run."""
        from lightning_avgpipe.systems.asynchronous.iterations import AsynchronousOrder  # needs the options

        return AsynchronousOrder(loop)


def _met(place: Place, micro_batch: int) -> Use:
    return Use(place.forward_version(micro_batch))


def _previous(place: Place, micro_batch: int) -> Use:
    return Use(max(place.batch(micro_batch) - 1, 0))


def _ahead_of_all(place: Place, micro_batch: int) -> Use:
    return Use(place.forward_version(micro_batch), place.updates(place.stage // 2 + place.warm_up))


def _ahead_of_backward(place: Place, micro_batch: int) -> Use:
    return Use(place.batch(micro_batch), place.updates(place.stage // 2))


def _by_warm_up(place: Place, micro_batch: int) -> Use:
    return Use(place.forward_version(micro_batch), place.updates(place.warm_up))


def _by_staleness(place: Place, micro_batch: int) -> Use:
    return Use(place.forward_version(micro_batch), place.staleness(micro_batch))


_CHOICES = {"delta": choice("state", "increment"), "staleness": choice("exact", "constant"), "exact_backward": flag()}


@has_options(_CHOICES)
@dataclass(frozen=True)
class PipeOptim:
    """The options of PipeOptim, in which forwards predict the weights that their backwards will meet.

    Attributes:
        delta: basis of predictions. ``"state"``, as in the paper, uses the state of the optimizer, which must keep a
            momentum. ``"increment"`` uses the last increment of the weights. It works with any optimizer, and needs the
            memory of one more copy of the weights. Only the increment includes decoupled weight decay, as in AdamW.
        staleness: ``"exact"``, or ``"constant"``: the paper's w, which predicts too far after each drain.
        exact_backward: whether a backward uses the weights that it meets; its forward is repeated with them. Otherwise
            it uses the weights that its forward predicted: nothing is repeated, and each prediction in flight is kept.
            (Autograd cannot compute the paper's variant, new weights on old activations, for all operations.)
    Raises:
        ConfigurationError: a value is not allowed.
    """

    delta: Literal["state", "increment"] = "state"
    staleness: Literal["exact", "constant"] = "exact"
    exact_backward: bool = True

    def __post_init__(self) -> None:
        check(_CHOICES, vars(self), "PipeOptim")

    @property
    def policy(self) -> VersionPolicy:
        """The weight policy with these options."""
        forward = _by_staleness if self.staleness == "exact" else _by_warm_up
        backward = _current if self.exact_backward else None
        return VersionPolicy("pipeoptim", forward=forward, backward=backward, delta=self.delta)


POLICIES: dict[str, VersionPolicy] = {
    policy.name: policy
    for policy in (
        VersionPolicy("stash", forward=_met),
        VersionPolicy("2bw", forward=_previous),
        VersionPolicy("spectrain", forward=_ahead_of_all, backward=_ahead_of_backward),
        VersionPolicy("spectrain_stashed", forward=_by_warm_up),
        PipeOptim().policy,
        VersionPolicy("none", forward=_met, backward=_current),
    )
}


def forwards_by(place: Place, batch: int, known: int) -> int:
    """Return how many forwards a stage has run when a batch ends on it, if ``known`` batches since the drain exist."""
    return min((batch + 1) * place.num_microbatches + place.warm_up, known * place.num_microbatches)


def row_of_batch(place: Place, batch: int, known: int) -> tuple[Action, ...]:
    """Return the actions of a stage from the end of the batch before to the end of this one.

    Args:
        place: stage and sizes of the pipeline.
        batch: number of the batch since the drain.
        known: number of batches since the drain that are available: as many as forwards run ahead, or all until the
            next drain.
    """
    row: list[Action] = []
    done = forwards_by(place, batch - 1, known) if batch else 0
    for i in range(batch * place.num_microbatches, (batch + 1) * place.num_microbatches):
        until = max(done, min(i + 1 + place.warm_up, known * place.num_microbatches))
        row += [Action(FORWARD, j) for j in range(done, until)]
        row.append(Action(BACKWARD, i))
        done = until
    return tuple(row)
