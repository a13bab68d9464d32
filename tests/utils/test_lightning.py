"""Packages: one of Lightning is chosen and the other is refused by name, and so are versions outside of the range."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import pytorch_lightning as other
import torch

from lightning_avgpipe import AdaptiveFreezing, AvgPipeStrategy, AvgPipeTuner, PipelineTimeline
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils import versions
from tests.commands import run
from tests.models import MLP, loader
from tests.trainers import trainer
from tests.utils import second_package

SCRIPT = second_package.__file__
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_epochs": 1,
}  # fmt: skip
REMEDY = (
    "but lightning_avgpipe was imported for lightning.pytorch: use that of lightning.pytorch, or import "
    "pytorch_lightning before lightning_avgpipe, and lightning.pytorch only after it"
)
SAID = rf"The Trainer is from pytorch_lightning, {REMEDY}"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of one process that accumulates micro-batches, of one sample each."""
    folder = tmp_path_factory.mktemp("plain")
    second_package.trained(str(folder), 1, devices=1, accumulate_grad_batches=second_package.BATCH)
    weights: dict[str, torch.Tensor] = torch.load(folder / "best.ckpt")["state_dict"]
    return weights


@pytest.mark.parametrize(
    "how", ["stages", *(pytest.param(name, marks=pytest.mark.slow) for name in ("avgpipe", "avgpipe_spawn"))]
)
def test_a_script_of_pytorch_lightning_trains_as_one_process_does(
    how: str, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run(tmp_path, SCRIPT, how)
    found = torch.load(tmp_path / "best.ckpt")["state_dict"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


_CHOICE = """
import sys
{imports}
from lightning_avgpipe.utils.lightning import pl
print("chosen:", pl.__name__, "pytorch_lightning" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "chosen"),
    [
        ("", "lightning.pytorch False"),
        ("import pytorch_lightning", "pytorch_lightning True"),
        ("import lightning, pytorch_lightning", "lightning.pytorch True"),
        ("import lightning_avgpipe, pytorch_lightning", "lightning.pytorch True"),
    ],
)
def test_pytorch_lightning_is_chosen_if_it_alone_is_imported_before(imports: str, chosen: str, tmp_path: Path) -> None:
    assert f"chosen: {chosen}\n" in run(tmp_path, "-c", _CHOICE.format(imports=imports))


_ALONE = """
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
"""


@pytest.mark.slow
def test_where_lightning_is_not_installed_pytorch_lightning_is_chosen(tmp_path: Path) -> None:
    printed = run(tmp_path, "-c", _CHOICE.format(imports=_ALONE))
    assert "chosen: pytorch_lightning True\n" in printed


_LATER = """
{first}
import lightning_avgpipe
{second} as package
for strategy in ("avgpipe", lightning_avgpipe.AvgPipeStrategy()):
    try:
        package.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    except ValueError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["lightning.pytorch", "pytorch_lightning"])
def test_a_trainer_of_a_package_that_is_imported_later_is_refused(chosen: str, tmp_path: Path) -> None:
    first, second = ("lightning.pytorch", "pytorch_lightning")[:: 1 if chosen == "lightning.pytorch" else -1]
    printed = run(tmp_path, "-c", _LATER.format(first=f"import {first}", second=f"import {second}"))
    said = f"ConfigurationError The Trainer is from {second}, but lightning_avgpipe was imported for {chosen}: use"
    assert printed.count(said) == 2
    assert printed.count(f"or import {second} before lightning_avgpipe") == 2


@pytest.mark.parametrize("how", ["by name", "by class", "derived"])
def test_a_trainer_of_the_other_package_is_refused_by_the_strategy(how: str) -> None:
    class Mine(AvgPipeStrategy):
        pass

    strategy = {"by name": "avgpipe", "by class": AvgPipeStrategy(num_stages=2), "derived": Mine()}[how]
    with pytest.raises(ConfigurationError, match=SAID):
        other.Trainer(strategy=strategy, **QUIET)


@pytest.mark.parametrize("kind", [AdaptiveFreezing, AvgPipeTuner, PipelineTimeline])
def test_a_trainer_of_the_other_package_is_refused_by_the_callbacks(kind: Any) -> None:
    running = other.Trainer(callbacks=[kind()], **QUIET)
    with pytest.raises(ConfigurationError, match=SAID):
        running.fit(second_package.Net(), second_package.loader(8))


def test_a_module_of_the_other_package_is_refused_in_lightnings_words() -> None:
    for module in (second_package.Net(), other.LightningModule()):
        with pytest.raises(TypeError, match=r"must be a `LightningModule`|Please switch to a single import style"):
            trainer(strategy=AvgPipeStrategy(num_stages=2)).fit(module, loader(MLP, 8, 8))  # type: ignore[arg-type]


def test_a_plugin_of_the_other_package_is_refused() -> None:
    strategy = AvgPipeStrategy(precision_plugin=other.plugins.MixedPrecision("bf16-mixed", "cpu"))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=f"precision_plugin is from pytorch_lightning, {REMEDY}"):
        trainer(strategy=strategy)


def test_a_callback_of_the_other_package_is_refused_if_lightning_must_know_it() -> None:
    averages = other.callbacks.StochasticWeightAveraging(0.1)
    options: dict[str, Any] = {"strategy": AvgPipeStrategy(num_stages=2, num_pipelines=2), "callbacks": [averages]}
    with pytest.raises(ConfigurationError, match=f"StochasticWeightAveraging is from pytorch_lightning, {REMEDY}"):
        trainer(**options).fit(MLP(), loader(MLP, 16, 8))

    class Counts(other.Callback):
        batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.batches += 1

    counts = Counts()
    options = {"strategy": AvgPipeStrategy(num_stages=2, num_pipelines=2), "callbacks": [counts]}
    L.Trainer(**QUIET, **options).fit(MLP(), loader(MLP, 16, 4))
    assert counts.batches == 2


# -- versions outside of the range are refused at import, with the one found and the range ---------------------------


PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_the_ranges_are_those_of_the_package() -> None:
    assert {f"{name}{wanted}" for name, wanted in versions.RANGES.items()} <= set(PROJECT["dependencies"])
    assert PROJECT["requires-python"] == versions.PYTHON
    claimed = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert claimed == {".".join(map(str, version)) for version in versions.TESTED_PYTHON}


@pytest.mark.parametrize(
    ("name", "found"),
    [("torch", "2.5.1+cu121"), ("torch", "2.16.0.dev20270101"), ("lightning", "2.4.0"), ("lightning", "2.7.0")],
)
def test_other_versions_are_refused_with_the_range(name: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version
    monkeypatch.setattr(versions.metadata, "version", lambda asked: found if asked == name else version(asked))
    with pytest.raises(ImportError) as raised:
        versions.check_versions()
    assert str(raised.value).startswith(
        f"lightning_avgpipe needs {name}{versions.RANGES[name]}, and {found} is installed"
    )


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"needs torch>=2\.6,<2\.16, which is not installed"):
        versions.check_versions()


def test_an_old_python_is_refused_and_a_new_one_is_said_to_be_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(ImportError, match=r"needs Python >=3\.11, and this is 3\.10\.13"):
        versions.check_versions()
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    with pytest.warns(UserWarning, match=r"tested with Python 3\.11, .*, and this is 3\.99\.0"):
        versions.check_versions()
