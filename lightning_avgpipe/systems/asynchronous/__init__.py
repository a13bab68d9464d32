"""Asynchronous pipelines: one pipeline goes from batch to batch without a drain, under a weight policy.

``versions`` says which weights actions use, ``store`` keeps and predicts them, ``stream`` runs batches on
the stages, and ``iterations`` fits that into Lightning's loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_avgpipe.schedule import policies
from lightning_avgpipe.strategy import combinations
from lightning_avgpipe.systems.asynchronous.versions import POLICIES, PipeOptim

if TYPE_CHECKING:
    from lightning_avgpipe.strategy.options import Options

__all__ = ["PipeOptim"]


def _without_drain(given: Options) -> None:
    """Refuse options that need stages to step together, or that change the order on which versions are based."""
    if given.policy.drains:
        return
    ordered = given.schedule in ("1f1b", "advance_forward") and given.advance in ("auto", 0)
    refused = {
        "num_pipelines": (given.num_pipelines > 1, "there is one pipeline, which needs no others to fill its time"),
        "replicas": (given.asks_for_replicas, "replicas would wait for each other at each step"),
        "averaging.rolling": (given.averaging.rolling is True, "it is for parallel pipelines"),
        "schedule": (given.schedule not in ("1f1b", "advance_forward"), "versions are those of the order of 1F1B"),
        "advance": (not ordered, "versions are those of the order of 1F1B"),
        "recompute": (
            not isinstance(given.recompute, bool) and given.policy.repeats,
            "its stages repeat forwards as a whole, to use other weights in backwards",
        ),
        "averaging.on_nonfinite": (given.averaging.on_nonfinite == "skip", "other stages may have stepped"),
        "verify": (given.verifies, "a plain step has no versions"),
        "links.reader": (given.links.reader == "first", "its process is the last to end a batch"),
    }
    asked, instead = f"weight_policy={given.weight_policy!r}", "leave it out, or use weight_policy='flush'"
    combinations.refuse(given, refused, lambda option, why: f"{asked} with {option}: {why}; {instead}")


policies.POLICIES.update(POLICIES)
policies.OPTION_TYPES[PipeOptim] = "PipeOptim(delta='increment')"
policies.OPTION_DOCS.append(
    '``"stash"`` (PipeDream): the weights at its forward, for its backward as well. ``"2bw"``: the weights before the '
    'last update, on every stage, with at least as many micro-batches as stages. ``"spectrain"`` and ``"pipeoptim"`` '
    "predict the weights at the backward from the optimizer's updates, and repeat forwards with the weights that are "
    'there then; a :class:`PipeOptim` has further options. ``"spectrain_stashed"`` repeats no forward. ``"none"`` uses '
    "whatever weights are there, for comparison."
)
combinations.RULES.append(_without_drain)
