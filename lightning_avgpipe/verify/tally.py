"""The tally: what has been compared, and is equal."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Tally:
    """Counts what has been compared.

    Attributes:
        losses: how many.
        names: kind, such as "gradients" -> names of the tensors.
        omitted: what is not compared.
    """

    losses: int = 0
    names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    omitted: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        numbers = {what: len(names) for what, names in self.names.items() if names}
        exact = [f"{self.losses} losses"]
        exact += [f"{numbers[what]} {what}" for what in ("gradients", "weights", "buffers") if what in numbers]
        rounded = [f"{numbers[what]} {what}" for what in ("logged values", "tied gradients") if what in numbers]
        text = f"{', '.join(exact)} equal bit for bit"
        text += f"; {' and '.join(rounded)} up to rounding" if rounded else ""
        return text + (f"; not compared: {', '.join(sorted(self.omitted))}" if self.omitted else "")
