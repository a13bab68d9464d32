"""The networks of darts, each with the options that it demands and otherwise at its defaults, on a few waves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import darts
import numpy as np
from darts import TimeSeries, models
from darts.models.forecasting.torch_forecasting_model import TorchForecastingModel

from benchmarks.coverage.case import Case, Example
from benchmarks.coverage.caught import caught

SAMPLES, PARTS, PAST, FUTURE = 8, 2, 16, 4
_GIVEN = {"input_chunk_length": PAST, "output_chunk_length": FUTURE, "training_length": PAST + FUTURE}


class Source:
    """darts."""

    name = "darts"
    version = darts.__version__

    def cases(self) -> Iterator[Case]:
        """All that are trained by gradients; those that fetch their weights do not train here."""
        for name in sorted(models.__all__):
            cls = getattr(models, name)  # which imports it
            if inspect.isclass(cls) and issubclass(cls, TorchForecastingModel):
                tries = [partial(made, cls, given) for given in ({}, {"add_relative_index": True})]
                yield Case(name, "time series", True, tries)


def made(cls: Any, given: dict[str, Any]) -> Example:
    """The module and the windows that the model would be trained with."""
    takes = inspect.signature(cls.__init__).parameters  # of the class its metaclass hides them
    values = np.sin(np.arange(3 * (PAST + FUTURE)) / 3) + np.random.default_rng(0).normal(0, 0.1, 3 * (PAST + FUTURE))
    model = cls(**{name: value for name, value in _GIVEN.items() if name in takes}, **given, random_state=1)
    return caught(lambda: model.fit(TimeSeries.from_values(values.astype(np.float32))), SAMPLES, PARTS)
