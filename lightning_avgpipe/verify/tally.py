"""The tally: counts of what has been compared and found equal."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

_SHOWN = 5  # names in the text


@dataclass
class Tally:
    """Counts of what has been compared.

    Attributes:
        losses: number of losses.
        names: kind, such as "gradients" -> names of the tensors.
        omitted: kinds that are not compared.
        unknown: names of attributes with values that cannot be compared.
    """

    losses: int = 0
    names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    omitted: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        numbers = {what: len(names) for what, names in self.names.items() if names}
        exact = [f"{self.losses} losses"]
        exact += [f"{numbers[what]} {what}" for what in ("gradients", "weights", "buffers") if what in numbers]
        rounded = [
            f"{numbers[what]} {what}" for what in ("logged values", "tied gradients", "later losses") if what in numbers
        ]
        text = f"{', '.join(exact)} equal bit for bit"
        text += f"; {' and '.join(rounded)} up to rounding" if rounded else ""
        omitted = sorted(self.omitted)
        if self.unknown:
            names, more = sorted(self.unknown)[:_SHOWN], len(self.unknown) - _SHOWN
            shown = f"{', '.join(map(repr, names))}{f' and {more} more' if more > 0 else ''}"
            omitted.append(f"{len(self.unknown)} attributes ({shown})")
        return text + (f"; not compared: {', '.join(omitted)}" if omitted else "")
