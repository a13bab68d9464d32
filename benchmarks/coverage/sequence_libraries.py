"""Libraries of models for texts and time series: each function imports its library and returns its cases."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.coverage.case import STEPS, Case, Example, Source, WithLoss, example, loader_of

SAMPLES, PARTS, PAST, FUTURE = 8, 2, 16, 4  # of time series

# -- x-transformers ----------------------------------------------------------------------------------------------------


def of_x_transformers() -> Source:
    """Decoders and encoders of x-transformers, one for each option of its README that is switched on by a name."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper, XTransformer
    from x_transformers.x_transformers import AttentionLayers

    batch, length, vocabulary, width = 4, 16, 64, 32

    def made(switches: dict[str, Any]) -> Example:
        """A language model."""
        layers = Decoder(dim=width, depth=4, heads=4, attn_dim_head=8, **switches)
        net = TransformerWrapper(num_tokens=vocabulary, max_seq_len=length, attn_layers=layers)
        tokens = {"x": torch.randint(vocabulary, (batch, length))}
        return example(WithLoss(AutoregressiveWrapper(net), _own_loss), tokens)

    def translation() -> Example:
        """Encoder and decoder."""
        sizes = {"num_tokens": vocabulary, "depth": 2, "heads": 4, "max_seq_len": length}
        both = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in sizes.items()}
        model = XTransformer(dim=width, tie_token_emb=True, **both)
        tokens = {name: torch.randint(vocabulary, (batch, length)) for name in ("source", "target")}
        return example(WithLoss(model, _own_loss), tokens)

    def cases() -> Iterator[Case]:
        """Plain, encoder and decoder, and each switch of the layers that is off by default."""
        yield Case("XTransformer", "sequence to sequence", True, [translation])
        for name, takes in inspect.signature(AttentionLayers).parameters.items():
            if name == "heads":
                yield Case("Decoder", "causal language model", True, [partial(made, {})])
            if takes.default is False and name not in ("causal", "only_cross", "cross_attend"):
                yield Case(f"Decoder, {name}", "causal language model", False, [partial(made, {name: True})])

    return Source("x-transformers", importlib.metadata.version("x-transformers"), cases())


def _own_loss(net: nn.Module, **tokens: Tensor) -> Tensor:
    """The loss that the model returns."""
    loss: Tensor = net(*tokens.values())
    return loss


# -- Lightning ---------------------------------------------------------------------------------------------------------


def of_lightning() -> Source:
    """The LightningModules of Lightning's own demos."""
    from lightning.pytorch.demos import LightningLSTM, LightningTransformer, boring_classes

    batch, vocabulary, length = 8, 1000, 12

    def made(cls: Any, samples: list[Any], parts: int) -> Example:
        """A module and its data, in the place of what it would fetch."""
        module = cls()
        module.prepare_data = lambda: None
        return Example(module, loader_of(samples), batch, parts)

    def cases() -> Iterator[Case]:
        words = [(torch.randint(vocabulary, (length,)), torch.randint(vocabulary, (length,))) for _ in range(batch)]
        for cls in (LightningTransformer, LightningLSTM):
            yield Case(cls.__name__, "language model", True, [partial(made, partial(cls, vocabulary), words, 4)])
        vectors = [torch.randn(32) for _ in range(batch)]
        for name, parts in (("BoringModel", 4), ("ManualOptimBoringModel", 1), ("DemoModel", 4)):
            yield Case(name, "demo", True, [partial(made, getattr(boring_classes, name), vectors, parts)])

    return Source("lightning.pytorch.demos", L.__version__, cases())


# -- time series -------------------------------------------------------------------------------------------------------


def _waves(count: int) -> Any:
    """So many numbers of noisy waves."""
    return np.sin(np.arange(count) / 3) + np.random.default_rng(0).normal(0, 0.1, count)


def of_forecasting() -> Source:
    """The LightningModules of pytorch-forecasting, each on the data set of a few series that it asks for."""
    import pandas as pd
    import pytorch_forecasting
    from pytorch_forecasting import TimeSeriesDataSet, models
    from pytorch_forecasting.metrics import MultivariateNormalDistributionLoss, NormalDistributionLoss
    from pytorch_forecasting.models.base_model import BaseModel

    count, steps = 4, PAST + FUTURE + 12  # of series, and of each of them

    def series(covariates: bool) -> TimeSeriesDataSet:
        """Noisy waves."""
        known = {"static_categoricals": ["series"], "time_varying_known_reals": ["time"]} if covariates else {}
        numbers = {"time": np.tile(np.arange(steps), count), "value": _waves(count * steps)}
        frame = pd.DataFrame({**numbers, "series": np.repeat([str(i) for i in range(count)], steps)})
        return TimeSeriesDataSet(
            frame, time_idx="time", target="value", group_ids=["series"], max_encoder_length=PAST,
            min_encoder_length=PAST, max_prediction_length=FUTURE, min_prediction_length=FUTURE,
            time_varying_unknown_reals=["value"], **known,
        )  # fmt: skip

    def made(cls: Any, covariates: bool, given: dict[str, Any]) -> Example:
        """A module and its data."""
        data = series(covariates)
        module = cls.from_dataset(data, learning_rate=0.01, **given)
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        some = torch.utils.data.Subset(data, list(range(SAMPLES)) * STEPS)

        def loader(size: int) -> Any:
            return torch.utils.data.DataLoader(some, batch_size=size, collate_fn=data._collate_fn)

        return Example(module, loader, SAMPLES, PARTS)

    def cases() -> Iterator[Case]:
        """All networks that are made from a data set."""
        losses = (NormalDistributionLoss, MultivariateNormalDistributionLoss)
        for name, cls in sorted(vars(models).items()):
            if inspect.isclass(cls) and issubclass(cls, BaseModel) and hasattr(cls, "from_dataset"):
                tries = [partial(made, cls, covariates, {}) for covariates in (True, False)]
                tries += [partial(made, cls, False, {"loss": loss()}) for loss in losses]
                yield Case(name, "time series", True, tries)

    return Source("pytorch-forecasting", pytorch_forecasting.__version__, cases())


def of_darts() -> Source:
    """The networks of darts, each with the options that it demands and otherwise at its defaults, on a few waves."""
    import darts
    from darts import TimeSeries, models
    from darts.models.forecasting.torch_forecasting_model import TorchForecastingModel

    from benchmarks.coverage.caught import caught

    options = {"input_chunk_length": PAST, "output_chunk_length": FUTURE, "training_length": PAST + FUTURE}

    def made(cls: Any, given: dict[str, Any]) -> Example:
        """The module and the windows that the model would be trained with."""
        takes = inspect.signature(cls.__init__).parameters  # of the class its metaclass hides them
        model = cls(**{name: value for name, value in options.items() if name in takes}, **given, random_state=1)
        values = _waves(3 * (PAST + FUTURE)).astype(np.float32)
        return caught(lambda: model.fit(TimeSeries.from_values(values)), SAMPLES, PARTS)

    def cases() -> Iterator[Case]:
        """All that are trained by gradients; those that fetch their weights do not train here."""
        for name in sorted(models.__all__):
            cls = getattr(models, name)  # which imports it
            if inspect.isclass(cls) and issubclass(cls, TorchForecastingModel):
                tries = [partial(made, cls, given) for given in ({}, {"add_relative_index": True})]
                yield Case(name, "time series", True, tries)

    return Source("darts", darts.__version__, cases())


def of_neuralforecast() -> Source:
    """The networks of neuralforecast, each with the options that it demands and otherwise at its defaults."""
    import pandas as pd
    from neuralforecast import NeuralForecast, models

    from benchmarks.coverage.caught import caught

    options = {"h": FUTURE, "input_size": PAST, "n_series": SAMPLES, "batch_size": SAMPLES}
    steps = 3 * (PAST + FUTURE)

    def made(cls: Any, parts: int) -> Example:
        """The module and the series that it would be trained with; of several at once a batch cannot be split."""
        takes = inspect.signature(cls).parameters
        names, times = np.repeat([str(i) for i in range(SAMPLES)], steps), np.tile(np.arange(steps), SAMPLES)
        frame = pd.DataFrame({"unique_id": names, "ds": times, "y": _waves(SAMPLES * steps)})
        model = cls(**{name: value for name, value in options.items() if name in takes})
        return caught(lambda: NeuralForecast([model], freq=1).fit(frame), SAMPLES, parts)

    cases = [
        Case(name, "time series", True, [partial(made, cls, parts) for parts in (PARTS, 1)])
        for name, cls in sorted(vars(models).items())
        if inspect.isclass(cls)
    ]
    return Source("neuralforecast", importlib.metadata.version("neuralforecast"), cases)
