"""Memory: what each stage needs at a setting, predicted from a profile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_avgpipe.tuning.profile import Profile
from lightning_avgpipe.tuning.setting import Setting


@dataclass(frozen=True)
class Needed:
    """Bytes on one stage at its peak.

    Attributes:
        fixed: context of the device, reference model and accumulator.
        models: parameters, gradients and optimizer states of all pipelines.
        stash: what all micro-batches in flight keep.
        working: transients and message buffers of one micro-batch of each pipeline.
    """

    fixed: int
    models: int
    stash: int
    working: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.fixed + self.models + self.stash + self.working


def memory_at(profile: Profile, setting: Setting) -> tuple[Needed, ...]:
    """What each stage needs, shape ``(K,)``.

    ``F_k = context + reference + N model + N S_k A / M + N (Q + I) / M``, with S_k stashed micro-batches, and A, Q, I
    of a full batch. With one parallel model there is no reference. All N pipelines may be at their peak at once. With
    rolling iterations come N + 1 references: where each model began, and the reference before the iteration.
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
