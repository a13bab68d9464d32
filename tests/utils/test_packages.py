"""Trainers of ``lightning`` and of ``pytorch_lightning`` train with the same strategy, side by side, and the same."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import pytorch_lightning as other
import torch
from pytorch_lightning.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_avgpipe import AvgPipeStrategy, AvgPipeTuner, PipelineTimeline
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils import versions
from tests.commands import LIMIT_S, started

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 1,
}  # fmt: skip


def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
    self.log("loss", loss)
    return loss


def module(package: Any) -> Any:
    """The same module of either package."""
    kind = type("Net", (package.LightningModule,), {
        "training_step": training_step,
        "validation_step": training_step,
        "configure_optimizers": lambda self: torch.optim.Adam(self.parameters(), 0.01),
    })  # fmt: skip
    torch.manual_seed(0)
    made = kind()
    made.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return made


def loader() -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=8)


def trained(package: Any, strategy: Any, **options: Any) -> tuple[dict[str, Tensor], Any]:
    """The weights after an epoch with a Trainer of the package, and that Trainer."""
    model, data = module(package), loader()
    trainer = package.Trainer(strategy=strategy, **{**QUIET, **options})
    torch.manual_seed(2)
    trainer.fit(model, data, data)
    return model.state_dict(), trainer


def assert_same(these: dict[str, Tensor], those: dict[str, Tensor]) -> None:
    assert all(torch.equal(these[name], those[name]) for name in those)


@pytest.mark.parametrize("num_pipelines", [1, 2])
def test_both_packages_train_the_same(num_pipelines: int) -> None:
    options: dict[str, Any] = {"num_stages": 2, "num_pipelines": num_pipelines}
    expected, first = trained(L, AvgPipeStrategy(**options))
    found, second = trained(other, AvgPipeStrategy(**options))
    assert_same(found, expected)
    assert first.callback_metrics == second.callback_metrics
    assert second.strategy.plan is not None
    for trainer, package in ((first, L), (second, other)):
        assert isinstance(trainer.strategy, AvgPipeStrategy)
        assert {base.__module__.partition(".")[0] for base in type(trainer.strategy).__mro__} >= {package.__name__}


def test_callbacks_go_from_a_trainer_of_one_package_to_one_of_the_other(tmp_path: Path) -> None:
    folder = tmp_path / "timelines"
    timeline = PipelineTimeline(every_n_steps=2, dirpath=folder)
    for package in (L, other, L):
        trained(package, AvgPipeStrategy(num_stages=2), callbacks=[timeline])
        assert isinstance(timeline, package.Callback)
        for file in (files := list(folder.iterdir())):
            file.unlink()
        assert files
    tuner = AvgPipeTuner(max_num_pipelines=1, dirpath=tmp_path)
    trained(other, AvgPipeStrategy(num_stages=2), callbacks=[tuner])
    assert tuner.result is not None and isinstance(tuner, other.Callback)


def test_processes_train_with_the_other_package() -> None:
    expected, _ = trained(other, AvgPipeStrategy(num_stages=2, costs="flops"))
    found, _ = trained(other, "avgpipe_fork", devices=2)
    assert_same(found, expected)


_SCRIPT = """
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
import pytorch_lightning as package
import lightning_avgpipe
from tests.utils.test_packages import loader, module
torch.manual_seed(0)
model, data = module(package), loader()
saving = ModelCheckpoint(monitor="epoch", mode="max", save_top_k=2)
trainer = package.Trainer(
    strategy="avgpipe", accelerator="cpu", devices=2, max_epochs=2, logger=CSVLogger("."),
    callbacks=[saving, EarlyStopping("loss", patience=5)], gradient_clip_val=0.5, log_every_n_steps=1,
)
torch.manual_seed(2)
trainer.fit(model, data, data)
if trainer.is_global_zero:
    torch.save(torch.load(saving.best_model_path)["state_dict"], "weights.pt")
    print("trained by", type(trainer.strategy).__module__)
"""


def run(folder: Path, script: str) -> str:
    path = folder / "train.py"
    path.write_text(script)
    with started(([str(path)], {}), folder=folder) as (process,):
        printed, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    return printed


@pytest.mark.slow
def test_a_script_of_the_other_package_trains_in_two_processes(tmp_path: Path) -> None:
    printed = run(tmp_path, _SCRIPT)
    assert "trained by lightning_avgpipe.pytorch_lightning.strategy" in printed
    saved = torch.load(tmp_path / "weights.pt")
    expected, _ = trained(
        other, AvgPipeStrategy(num_stages=2, num_microbatches=8), max_epochs=2, gradient_clip_val=0.5,
    )  # fmt: skip
    assert_same(saved, expected)


@pytest.mark.slow
def test_where_lightning_is_not_installed_the_other_package_is_enough(tmp_path: Path) -> None:
    hidden = """
import sys
from importlib import metadata
sys.modules["lightning"] = None
version = metadata.version
def installed(name):
    if name == "lightning":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = installed
import lightning_avgpipe
from lightning_avgpipe.pytorch_lightning import AvgPipeStrategy
assert AvgPipeStrategy is lightning_avgpipe.AvgPipeStrategy
import pytorch_lightning as package
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(package.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

strategy = AvgPipeStrategy(num_stages=2)
trainer = package.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False)
trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=8))
lightnings = [name for name in sys.modules if name.startswith("lightning.")]
print(type(trainer.strategy).__module__, strategy.plan is not None, lightnings)
"""
    assert "lightning_avgpipe.strategy.strategy True []" in run(tmp_path, hidden)


@pytest.mark.slow
def test_the_other_package_is_not_imported_before_somebody_does(tmp_path: Path) -> None:
    ask = """
import sys
import lightning_avgpipe
print("before", "pytorch_lightning" in sys.modules)
import pytorch_lightning
print("loaded", [name for name in sys.modules if name.startswith("lightning_avgpipe.pytorch_lightning")])
print("known", "avgpipe_spawn" in pytorch_lightning.strategies.StrategyRegistry)
"""
    assert run(tmp_path, ask).splitlines()[-3:] == ["before False", "loaded []", "known True"]


def test_a_module_of_one_package_is_refused_by_a_trainer_of_the_other_in_lightnings_words() -> None:
    for package, wrong in ((L, other), (other, L)):
        with pytest.raises(TypeError, match="must be a `LightningModule`"):
            package.Trainer(strategy=AvgPipeStrategy(num_stages=2), **QUIET).fit(module(wrong), loader())
        with pytest.raises(TypeError, match="Please switch to a single import style"):
            package.Trainer(strategy=AvgPipeStrategy(num_stages=2), **QUIET).fit(wrong.LightningModule())


def test_a_plugin_of_one_package_is_refused_by_a_trainer_of_the_other() -> None:
    for package, wrong in ((L.pytorch, other), (other, L.pytorch)):
        strategy = AvgPipeStrategy(precision_plugin=wrong.plugins.MixedPrecision("bf16-mixed", "cpu"))
        with pytest.raises(ConfigurationError, match=rf"precision_plugin=MixedPrecision\(\) from {wrong.__name__}"):
            package.Trainer(strategy=strategy, **QUIET)


def test_a_callback_of_one_package_is_refused_by_a_trainer_of_the_other_if_lightning_must_know_it() -> None:
    strategy = AvgPipeStrategy(num_stages=2, num_pipelines=2)
    with pytest.raises(ConfigurationError, match="StochasticWeightAveraging is from pytorch_lightning"):
        trained(L, strategy, callbacks=[other.callbacks.StochasticWeightAveraging(0.1)])

    class Counts(other.Callback):
        batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.batches += 1

    counts = Counts()
    trained(L, AvgPipeStrategy(num_stages=2, num_pipelines=2), callbacks=[counts])
    assert counts.batches == 2


def test_a_class_derived_for_one_package_says_what_to_derive_from_for_the_other() -> None:
    class Mine(AvgPipeStrategy):
        pass

    with pytest.raises(ConfigurationError, match=r"of the same name in lightning_avgpipe\.pytorch_lightning"):
        other.Trainer(strategy=Mine(), **QUIET)
    from lightning_avgpipe.pytorch_lightning import AvgPipeStrategy as OfTheOther

    class Its(OfTheOther):
        pass

    assert other.Trainer(strategy=Its(), **QUIET).strategy.accelerator is not None


def test_a_strategy_for_the_other_package_can_be_pickled() -> None:
    strategy = AvgPipeStrategy(num_stages=2)
    other.Trainer(strategy=strategy, **QUIET)
    again = pickle.loads(pickle.dumps(strategy))
    assert type(again) is type(strategy) is not AvgPipeStrategy


@pytest.mark.parametrize("prefix", ["lightning_avgpipe", "lightning_avgpipe.pytorch_lightning"])
def test_the_other_cli_takes_the_strategy_by_name_and_by_class(prefix: str) -> None:
    options = {**QUIET, "strategy": {"class_path": f"{prefix}.AvgPipeStrategy", "init_args": {"num_stages": 2}}}
    options["callbacks"] = [{"class_path": "lightning_avgpipe.pytorch_lightning.AvgPipeTuner"}]
    cli = LightningCLI(type(module(other)), run=False, save_config_callback=None, args={"trainer": options})
    assert isinstance(cli.trainer.strategy, AvgPipeStrategy)
    named = {"trainer": {**QUIET, "strategy": "avgpipe"}}
    cli = LightningCLI(type(module(other)), run=False, save_config_callback=None, args=named)
    assert isinstance(cli.trainer.strategy, AvgPipeStrategy)


def test_another_version_of_the_other_package_is_refused_with_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    version = versions.metadata.version
    monkeypatch.setattr(versions.metadata, "version", lambda n: "2.4.0" if n == versions.SECOND else version(n))
    with pytest.raises(ImportError, match=r"needs pytorch-lightning>=2\.5,<2\.7, and 2\.4\.0 is installed"):
        versions.check_second()
    for name in [name for name in sys.modules if name.startswith("lightning_avgpipe.pytorch_lightning")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"2\.4\.0 is installed"):
        other.Trainer(strategy="avgpipe", **QUIET)
