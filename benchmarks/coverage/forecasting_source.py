"""The LightningModules of pytorch-forecasting, each on the data set of a few series that it asks for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytorch_forecasting as forecasting
import torch
from pytorch_forecasting import TimeSeriesDataSet, models
from pytorch_forecasting.metrics import MultivariateNormalDistributionLoss, NormalDistributionLoss
from pytorch_forecasting.models.base_model import BaseModel

from benchmarks.coverage.case import STEPS, Case, Example

SAMPLES, PARTS, PAST, FUTURE, SERIES = 8, 2, 16, 4, 4


class Source:
    """pytorch-forecasting."""

    name = "pytorch-forecasting"
    version = forecasting.__version__

    def cases(self) -> Iterator[Case]:
        """All networks that are made from a data set."""
        for name, cls in sorted(vars(models).items()):
            if inspect.isclass(cls) and issubclass(cls, BaseModel) and hasattr(cls, "from_dataset"):
                known = [partial(made, cls, covariates, {}) for covariates in (True, False)]
                losses = (NormalDistributionLoss, MultivariateNormalDistributionLoss)
                yield Case(
                    name, "time series", True, known + [partial(made, cls, False, {"loss": x()}) for x in losses]
                )


def series(covariates: bool) -> TimeSeriesDataSet:
    """Noisy waves."""
    steps = PAST + FUTURE + 12
    frame = pd.DataFrame(
        {
            "time": np.tile(np.arange(steps), SERIES),
            "series": np.repeat([str(i) for i in range(SERIES)], steps),
            "value": np.sin(np.arange(SERIES * steps) / 3) + np.random.default_rng(0).normal(0, 0.1, SERIES * steps),
        }
    )
    more: dict[str, Any] = (
        {"static_categoricals": ["series"], "time_varying_known_reals": ["time"]} if covariates else {}
    )
    return TimeSeriesDataSet(
        frame, time_idx="time", target="value", group_ids=["series"], max_encoder_length=PAST, min_encoder_length=PAST,
        max_prediction_length=FUTURE, min_prediction_length=FUTURE, time_varying_unknown_reals=["value"], **more,
    )  # fmt: skip


def made(cls: Any, covariates: bool, given: dict[str, Any]) -> Example:
    """A module and its data."""
    data = series(covariates)
    module = cls.from_dataset(data, learning_rate=0.01, **given)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    some = torch.utils.data.Subset(data, list(range(SAMPLES)) * STEPS)

    def loader(size: int) -> Any:
        return torch.utils.data.DataLoader(some, batch_size=size, collate_fn=data._collate_fn)

    return Example(module, loader, SAMPLES, PARTS)
