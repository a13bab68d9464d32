"""Prediction of the memory that each stage needs at a setting, from a profile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_avgpipe.tuning.profile import Profile
from lightning_avgpipe.tuning.setting import Setting


@dataclass(frozen=True)
class Needed:
    """The bytes that one stage needs at its peak.

    Attributes:
        fixed: bytes of the context of the device, the reference model and its accumulator.
        models: bytes of parameters, gradients and optimizer states of all pipelines.
        stash: bytes that all micro-batches in flight keep for their backwards.
        working: bytes of transient tensors and message buffers of one micro-batch of each pipeline.
    """

    fixed: int
    models: int
    stash: int
    working: int

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.fixed + self.models + self.stash + self.working


def memory_at(profile: Profile, setting: Setting) -> tuple[Needed, ...]:
    """Return the memory that each stage needs, shape ``(K,)``.

    ``F_k = context + reference + N model + N S_k A / M + N (Q + I) / M``, with S_k stashed micro-batches, and the
    activations A, transients Q and message buffers I of a full batch. With one parallel model there is no reference.
    All N pipelines may be at their peak at once. Rolling iterations need N + 1 further copies of the reference: the
    start values of each model, and the reference before the iteration.
    """
    n, m = setting.num_pipelines, setting.num_microbatches
    needed = []
    references = (1 + (n + 1) * setting.rolling) if profile.averages(n) else 0
    for stage, stashed in zip(profile.stages, setting.stash(profile.num_stages), strict=True):
        memory = stage.memory
        needed.append(
            Needed(
                fixed=memory.context + references * memory.reference,
                models=n * memory.model,
                stash=math.ceil(n * stashed * memory.activations / m),
                working=math.ceil(n * (memory.transient + memory.boundary) / m),
            )
        )
    return tuple(needed)
