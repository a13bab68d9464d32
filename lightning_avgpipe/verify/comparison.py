"""The comparison of what the pipelines have computed with plain runs of the same micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lightning_avgpipe.errors import VerificationError
from lightning_avgpipe.utils.forked import ForkError
from lightning_avgpipe.utils.lightning import rank_zero_warn
from lightning_avgpipe.utils.names import listed
from lightning_avgpipe.utils.tensors import as_tensor
from lightning_avgpipe.verify.fingerprint import Difference, differences, fingerprint, usual_size
from lightning_avgpipe.verify.plain import OnePiece, Traces
from lightning_avgpipe.verify.report import Tally, advice
from lightning_avgpipe.verify.runs import KINDS, OF_USERS, Natural, differing, equal, without
from lightning_avgpipe.verify.state import aliases
from lightning_avgpipe.verify.subject import Subject

_NEAR = 1e-3  # tolerance of losses, after weights have been rounded differently
_SAME_LOSS = 1e-2  # relative tolerance between the loss of a batch in one piece and the mean over its micro-batches
_NO_LOSS = 1e-6  # losses below this are equal
_SAME_GRADIENT = 5e-2  # the same for gradients, which low precision rounds
_SHOWN = 5  # names in a warning


class UnclearDifference(Exception):
    """Raised to end the comparison, after a warning of a difference that user code outside of the step may explain."""


@dataclass(frozen=True)
class PipelineResults:
    """What a pipeline has computed in an iteration.

    Attributes:
        traces: its results.
        before: attributes of its model before the iteration.
        steps: whether optimizers step at its end.
        of_other_stages: attributes of other stages' submodules, as the last stage has them; see
            :meth:`Subject.changed_on_other_stages`.
    """

    traces: Traces
    before: dict[str, Any]
    steps: bool
    of_other_stages: dict[str, Any] = field(default_factory=dict)


class Comparison:
    """Compares iterations of pipelines with plain runs, and counts the equal results.

    Args:
        subject: run of training to verify.

    Attributes:
        steps: number of optimizer steps that have been compared.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._tally = Tally()
        self._natural: Natural = {}  # what differs between two plain runs, and is not compared
        self._compiled = False  # whether a plain run has compiled anything
        self._rounds = False  # whether results have differed where stages may round differently, see Subject.rounds
        self.steps = 0
        self.whole: OnePiece | None = None

    @property
    def covers_all_results(self) -> bool:
        """Whether only attributes and logged values, which may hold anything, were left out as different by nature."""
        return all(kind in OF_USERS for kind, _ in self._natural)

    def check(
        self, n: int, expected: Traces, found: PipelineResults, hooks_have_run: bool, repeated: Callable[[], Traces]
    ) -> None:
        """Compare the next iteration of a pipeline with a plain run, and if they differ, with a second one.

        What differs between the two plain runs is not compared from then on.

        Args:
            n: number of the pipeline.
            expected: results of the plain run.
            found: results of the pipeline.
            hooks_have_run: whether hooks have run between the steps.
            repeated: returns the results of the second plain run.
        Raises:
            TimeoutError: the results of the second run have not arrived in time. This method may be called again.
            VerificationError: both plain runs contradict the pipeline.
            UnclearDifference: both contradict it, but something outside of the step may be the reason.
        """
        self._compiled |= expected.compiled
        one, other = self._comparable(expected, found)
        difference = next(self._differences(n, one, other), None)
        if difference is not None and self._subject.rounds:
            self._rounds = True
            difference = next(self._differences(n, one, other), None)
        if difference is not None:
            for key, name in differing(expected, self._repeated(n, difference, repeated)).items():
                self._natural.setdefault(key, name)
            one, other = self._comparable(expected, found)
            self._tell(n, next(self._differences(n, one, other), None), hooks_have_run)
        if expected.whole is not None and one.losses == expected.losses:
            self.whole = expected.whole
            compare_whole(self.whole)
        self._count(one, other)
        self.steps += n == 0 and found.steps

    def _repeated(self, n: int, difference: Difference, repeated: Callable[[], Traces]) -> Traces:
        """Return the results of the second plain run; if it has failed, raise an error with the first difference."""
        try:
            return repeated()
        except TimeoutError:
            raise
        except Exception as error:
            raise ForkError(
                f"{self._message(n, difference)} It is not known whether this differs by nature, since the second "
                f"plain run has failed with {type(error).__name__}: {error}"
            ) from error

    def _comparable(self, expected: Traces, found: PipelineResults) -> tuple[Traces, PipelineResults]:
        """Return the results without those that differ by nature, such as times."""
        if not self._natural:
            return expected, found
        left: list[dict[str, Any]] = [
            {kind: without(self._natural, kind, getattr(traces, kind)) for kind in KINDS}
            for traces in (expected, found.traces)
        ]
        before = without(self._natural, "attributes", found.before)
        return replace(expected, **left[0]), replace(found, traces=replace(found.traces, **left[1]), before=before)

    @property
    def _is_rounded(self) -> bool:
        """Whether weights may differ by now: tied gradients were summed in another order, or stages have rounded."""
        plan = self._subject.plan
        return plan is not None and (bool(plan.copied) or self._rounds) and self.steps > 0

    def _differences(self, n: int, expected: Traces, iteration: PipelineResults) -> Iterator[Difference]:
        """Yield the differences between a plain run and the pipeline, the most telling first."""
        plan, subject, found, steps = self._subject.plan, self._subject, iteration.traces, iteration.steps
        alone = not subject.has_replicas  # otherwise gradients and steps are those of all replicas' batches
        assert plan is not None
        if self._is_rounded:
            for name, loss in expected.losses.items():
                if not math.isclose(loss, found.losses.get(name, math.nan), rel_tol=_NEAR, abs_tol=_NEAR):
                    yield Difference("the loss", name, f"{found.losses.get(name)}, and {loss} in the plain run")
            return
        tied, everywhere = plan.copied, [name for stage in reversed(plan.stages) for name in reversed(stage.parameters)]
        rounds = self._rounds
        yield from differences("the loss", expected.losses, found.losses, lambda name: rounds)
        if steps and alone:
            held = {name: g for name, g in expected.gradients.items() if name in found.gradients}
            size = usual_size(held.values())
            up_to_rounding = held if rounds else tied
            yield from differences("the gradient", held, found.gradients, up_to_rounding.__contains__, everywhere, size)
        yield from differences("the buffer", expected.buffers, found.buffers, lambda name: rounds)
        # not comparable if several models write to the same attributes, or after user code within a step (hooks) has
        # run, which sees its own process only
        if subject.num_models == 1 and not (self.steps and subject.has_hooks_in_step):
            behind, before = iteration.of_other_stages, iteration.before
            there = found.attributes | {k: v for k, v in behind.items() if equal(before, found.attributes, k)}
            there = self._shared(expected.attributes, there, before)
            one, other = _known(expected.attributes, there), _known(there, expected.attributes)
            # hooks may compute attributes from gradients of tied weights, which are rounded
            yield from differences("the attribute", one, other, lambda name: rounds or bool(tied))
        if alone and n == 0 and subject.num_models == 1:
            yield from _logged_differences(expected.logged, found.logged)
        if steps and alone and not (tied or rounds):
            held = {name: w for name, w in expected.weights.items() if name in found.weights}
            yield from differences("the weight after the optimizer step", held, found.weights)

    def _count(self, expected: Traces, iteration: PipelineResults) -> None:
        """Count the results that have been compared and are equal."""
        tally, plan, subject, found = self._tally, self._subject.plan, self._subject, iteration.traces
        assert plan is not None
        if self._is_rounded:
            tally.names["later losses"].update(expected.losses)
            return
        alone, tied = not subject.has_replicas, plan.copied
        tally.rounds = self._rounds
        tally.losses += len(expected.losses)
        tally.names["buffers"].update(expected.buffers)
        if subject.num_models == 1 and not (self.steps and subject.has_hooks_in_step):
            both = (*expected.attributes.items(), *found.attributes.items())
            tally.unknown.update(name for name, value in both if value is ...)
        if alone and subject.num_models == 1:
            tally.names["logged values"].update(name for name, v in expected.logged.items() if v is not None)
        if iteration.steps and alone:
            held = {name: g for name, g in expected.gradients.items() if name in found.gradients}
            tally.names["tied gradients"].update(name for name in held if name in tied)
            tally.names["gradients"].update(name for name, g in held.items() if g is not None and name not in tied)
            rounds = bool(tied) or self._rounds
            tally.names["weights"].update(w for w in expected.weights if w in found.weights and not rounds)

    def _shared(
        self, expected: Mapping[str, Any], found: Mapping[str, Any], before: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the attributes that were found, corrected for objects that modules on several processes share.

        Each process has its own copy of such an object, which is unchanged if the code that changes it ran elsewhere.
        An unchanged copy counts as equal if the copy of another module has the right value.
        """
        result = dict(found)
        for names in aliases(self._subject.module):
            right = {name for name in names if equal(expected, found, name)}
            for name in names if right else ():
                if name not in right and equal(before, found, name):
                    result.pop(name, None)
                    result.update({name: expected[name]} if name in expected else {})
        return result

    def _tell(self, n: int, difference: Difference | None, hooks_have_run: bool) -> None:
        """Report a difference.

        Raises:
            VerificationError: only the pipeline can be the reason.
            UnclearDifference: user code outside of the step may be the reason, so that this only warns.
        """
        if difference is None:
            return
        if not self._subject.has_replicas and not (hooks_have_run and self.steps):
            raise VerificationError(self._message(n, difference))
        why = "one of your hooks, which run between the steps, has changed what the step reads"
        if self._subject.has_replicas:
            why = "the step asks other replicas for values (all_gather), which a plain run does not have"
        rank_zero_warn(f"{self._message(n, difference)} Or {why}")
        raise UnclearDifference

    def _message(self, n: int, difference: Difference) -> str:
        subject = self._subject
        stages = subject.stages_of(difference.name) or (
            (subject.cluster.stage_map.num_stages - 1,) if "loss" in difference.kind else ()
        )
        where = [f"stage {', '.join(map(str, stages))}"] if stages else []
        if subject.num_models > 1:
            where.append(f"pipeline {n}")
        if (source := subject.source_of(difference.name)) is not None:
            where.append(f"used at {source}")
        place = f" ({', '.join(where)})" if where else ""
        return (
            f"optimizer step {self.steps + 1} is not what a plain run of the same micro-batches computes: "
            f"{difference}{place}. {advice(difference.kind, self._compiled)}"
        )

    def summary(self, wanted: int) -> str:
        """Return a text that says what was compared, and warn about what differs by nature.

        Args:
            wanted: number of optimizer steps that were to be compared.
        """
        if self._subject.num_models > 1:
            self._tally.omitted |= {"averaging", "logged values"}
        if self._subject.has_replicas:
            self._tally.omitted |= {"gradients", "weights", "logged values"}
        if self._natural:
            named = listed([f"{KINDS[kind]} of '{name}'" for (kind, _), name in self._natural.items()], _SHOWN)
            self._tally.omitted.add(f"what differs between two plain runs ({named})")
            rank_zero_warn(
                f"not compared with a plain run: {named}. Two plain runs of the same micro-batches differ in that, as "
                "times, dates, memory, process ids and random numbers without a seed do. Such values are harmless. "
                "If two runs should agree in it, look for something that the step reads and that is not seeded"
            )
        return f"verified {wanted} optimizer steps: {self._tally}"


def compare_whole(whole: OnePiece, when: str = "") -> None:
    """Warn if the loss of a batch in one piece, or its gradient, is not the mean over its micro-batches.

    Args:
        whole: the losses, and the distance of the gradients.
        when: words about when they were found, with which the warning begins.
    """
    if math.isclose(whole.loss, whole.mean, rel_tol=_SAME_LOSS, abs_tol=_NO_LOSS):
        if whole.distance <= _SAME_GRADIENT:
            return
        found = (
            f"the gradient of the first batch in one piece differs by {whole.distance:.0%} from the mean over its "
            f"{whole.number} micro-batches, though their losses are alike"
        )
    else:
        found = (
            f"the loss of the first batch is {whole.loss:.4g} in one piece, and {whole.mean:.4g} as the mean over its "
            f"{whole.number} micro-batches"
        )
    rank_zero_warn(
        f"{when}{found}: the step looks across the batch (batch normalisation, a contrastive loss), or its loss is a "
        "mean over something other than samples (a mask; then use the option loss_weight). Training goes on with "
        "micro-batches, as with accumulate_grad_batches"
    )


def _known(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``one`` that are placeholders on neither side."""
    return {name: v for name, v in one.items() if v is not ... and other.get(name) is not ...}


def _logged_differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Difference]:
    mine = {name: value for name, value in found.items() if _is_number(value)}
    for name, value in expected.items():
        if value is None:
            continue
        if name not in mine:
            yield Difference("the logged value", name, "it exists in the plain run only")
            continue
        number = as_tensor(mine[name]).detach()
        near = fingerprint(number).rounding
        if not math.isclose(float(number), value, rel_tol=near) and not (math.isnan(value) and math.isnan(number)):
            yield Difference("the logged value", name, f"{float(number)!r}, and {value!r} in the plain run")


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
