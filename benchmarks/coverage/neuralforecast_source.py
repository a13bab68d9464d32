"""The networks of neuralforecast, each with the options that it demands and otherwise at its defaults."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast, models

from benchmarks.coverage.case import Case, Example
from benchmarks.coverage.caught import caught

SAMPLES, PARTS, PAST, FUTURE = 8, 2, 16, 4


class Source:
    """neuralforecast."""

    name = "neuralforecast"
    version = importlib.metadata.version("neuralforecast")

    def cases(self) -> Iterator[Case]:
        """All."""
        for name, cls in sorted(vars(models).items()):
            if inspect.isclass(cls):
                yield Case(name, "time series", True, [partial(made, cls, parts) for parts in (PARTS, 1)])


def made(cls: Any, parts: int) -> Example:
    """The module and the series that it would be trained with; of several at once a batch cannot be split."""
    takes = inspect.signature(cls).parameters
    given = {"h": FUTURE, "input_size": PAST, "n_series": SAMPLES, "batch_size": SAMPLES}
    steps = 3 * (PAST + FUTURE)
    frame = pd.DataFrame(
        {
            "unique_id": np.repeat([str(i) for i in range(SAMPLES)], steps),
            "ds": np.tile(np.arange(steps), SAMPLES),
            "y": np.sin(np.arange(SAMPLES * steps) / 3) + np.random.default_rng(0).normal(0, 0.1, SAMPLES * steps),
        }
    )
    model = cls(**{name: value for name, value in given.items() if name in takes})
    return caught(lambda: NeuralForecast([model], freq=1).fit(frame), SAMPLES, parts)
