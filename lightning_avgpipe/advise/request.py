"""The request of the command ``advise`` to the training process, which is passed in an environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

_NAME = "AVGPIPE_ADVISE"


@dataclass(frozen=True)
class Request:
    """A request to predict after the first batch, and then to end.

    Attributes:
        devices: numbers of devices to predict for.
        megabits: rates of the links between devices, in megabits per second.
        report: path of the file that the table is written to.
    """

    devices: tuple[int, ...]
    megabits: tuple[float, ...]
    report: str

    @classmethod
    def found(cls) -> Request | None:
        """Return the request to this process; None if there is none."""
        text = os.environ.get(_NAME)
        return None if text is None else cls(**json.loads(text))

    def environment(self) -> Mapping[str, str]:
        """Return the environment variables for a process that gets this request."""
        return {**os.environ, _NAME: json.dumps(asdict(self))}
