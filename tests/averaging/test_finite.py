"""A gradient that is NaN does not reach the reference model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_avgpipe import Averaging
from lightning_avgpipe.averaging.integrity import first_nonfinite, has_nonfinite
from lightning_avgpipe.errors import NonFiniteError
from tests.averaging.models import train
from tests.comparing import assert_close
from tests.models import MLP

CPU = torch.device("cpu")
INFINITE, NAN = float("inf"), float("nan")


class Poisoned(MLP):
    """The samples of one batch make its loss infinite, and its gradients no numbers; normalised on the way."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layers(x))


def data(poisoned: int | None, batches: int = 8) -> Any:
    """The same batches, of which one may have an infinite value."""
    torch.manual_seed(7)
    found = [MLP.example(8) for _ in range(batches)]
    if poisoned is not None:
        found[poisoned][0][3, 3] = INFINITE
    return torch.utils.data.DataLoader(found, batch_size=None)


def trained(poisoned: int | None, optimizer: str = "sgd", num_stages: int = 2, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Poisoned(optimizer)
    models = train(model, data(poisoned), num_stages, **options)
    return model.state_dict(), models


@pytest.mark.parametrize("value", [INFINITE, -INFINITE, NAN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_number_among_many_is_found(value: float, dtype: torch.dtype) -> None:
    huge = torch.tensor(-1e300, dtype=torch.float64)  # its square is infinite, and so is the norm of the next
    complexes = torch.full((2,), complex(3e38, 3e38), dtype=torch.complex64)
    sound = [torch.ones(100, 3, dtype=dtype), torch.zeros(0), torch.full((4,), 60000.0, dtype=dtype), huge, complexes]
    assert not has_nonfinite(sound, CPU)
    assert not has_nonfinite([], CPU)
    ill = torch.ones(50, 7, dtype=dtype)
    ill[20, 3] = value
    sparse = torch.sparse_coo_tensor([[1]], [value], (4,), check_invariants=True)
    for among in ([*sound, ill], [sparse]):
        assert has_nonfinite(among, CPU) == 1
    assert first_nonfinite({"a": huge, "b": ill, "c": ill}) == "b"


def test_by_default_parallel_models_stop_before_any_has_stepped() -> None:
    message = r"pipeline 1, batch_idx 1: the gradient of 'layers\.0\.weight' is infinite or NaN.* as it was"
    with pytest.raises(NonFiniteError, match=message):
        trained(3)


def test_a_single_model_goes_on_by_default_as_with_any_strategy_and_stops_if_that_is_wanted() -> None:
    weights, _ = trained(3, num_pipelines=1)
    assert all(torch.isnan(w).all() for name, w in weights.items() if name.endswith("weight"))
    with pytest.raises(NonFiniteError, match=r"^batch_idx 3: the gradient of 'layers\.0\.weight'"):
        trained(3, num_pipelines=1, averaging=Averaging(on_nonfinite="raise"))


@pytest.mark.parametrize(("optimizer", "poisoned"), [("sgd", 2), ("adamw", 3)])
def test_a_model_that_is_skipped_is_left_out_of_the_mean_and_trains_again(optimizer: str, poisoned: int) -> None:
    logger = CSVLogger(".", version=0)
    with pytest.warns(UserWarning, match=f"batch_idx 1: pipeline {poisoned % 2} had a gradient that is infinite"):
        weights, models = trained(
            poisoned,
            optimizer,
            averaging=Averaging(on_nonfinite="skip"),
            trainer={"logger": logger, "log_every_n_steps": 1},
        )
    assert all(torch.isfinite(w).all() for w in weights.values())
    assert models.trainer.strategy.skipped_models == 1
    assert "avgpipe/skipped_models" in Path("lightning_logs/version_0/metrics.csv").read_text()


def test_the_reference_goes_on_with_the_mean_of_the_others() -> None:
    def reference(after: int, poisoned: int | None, **options: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def keep(trainer: Any, module: Any, *_: Any) -> None:
            with trainer.strategy.reference():
                if trainer.global_step == after:
                    found.update({name: p.detach().clone() for name, p in module.named_parameters()})

        trained(poisoned, trainer={"callbacks": [LambdaCallback(on_train_batch_end=keep)]}, **options)
        return found

    # one step: of three models the last one's batch is poisoned, and the reference moves as the two others do
    left_out = reference(1, 2, num_pipelines=3, averaging=Averaging(alpha=1.0, outer_lr=1.0, on_nonfinite="skip"))
    others = reference(1, None, num_pipelines=2, averaging=Averaging(alpha=1.0, outer_lr=1.0))
    assert_close(left_out, others, rtol=1.3e-6)
