"""What the command asks of the process that trains, in its environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

_NAME = "AVGPIPE_ADVISE"


@dataclass(frozen=True)
class Request:
    """To predict after the first batch, and to end.

    Attributes:
        devices: numbers of devices to look at.
        megabits: per second, of the links between them.
        report: file that gets the table.
    """

    devices: tuple[int, ...]
    megabits: tuple[float, ...]
    report: str

    @classmethod
    def found(cls) -> Request | None:
        """That of this process; None if nobody asks."""
        text = os.environ.get(_NAME)
        return None if text is None else cls(**json.loads(text))

    def environment(self) -> Mapping[str, str]:
        """Of a process that is asked."""
        return {**os.environ, _NAME: json.dumps(asdict(self))}
