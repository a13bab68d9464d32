"""LightningCLI builds the strategy from YAML and from the command line, and refuses what is wrong while parsing."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from dataclasses import asdict, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_avgpipe import AvgPipeStrategy, AvgPipeTuner
from tests.commands import run

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = Path(__file__).parents[2] / "configs"
STRATEGY = "--trainer.strategy.class_path=lightning_avgpipe.AvgPipeStrategy"
LIGHTNINGS = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs an example's command line in this process; unless named, the language model's."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def run(*arguments: str, name: str = "language_model") -> LightningCLI:
        monkeypatch.setattr(sys, "argv", ["cli.py", *arguments])
        example = importlib.import_module(name)
        model, data = {
            "awd_lstm": ("AWDLSTM", "Words"),
            "bert": ("SentencePairs", "Pairs"),
            "finetune": ("FineTuning", "Stripes"),
            "finetune_llm": ("FineTuning", "TextFile"),
            "gnmt": ("GNMT", "Sentences"),
            "language_model": ("LanguageModel", "PythonSources"),
        }[name]
        return getattr(example, "CLI", LightningCLI)(getattr(example, model), getattr(example, data))

    return run


def options() -> dict[str, inspect.Parameter]:
    """The strategy's own options."""
    parameters = inspect.signature(AvgPipeStrategy).parameters
    return {name: parameter for name, parameter in parameters.items() if name not in LIGHTNINGS}


def printed(example: Any, capsys: pytest.CaptureFixture[str], *arguments: str, **options: str) -> str:
    with pytest.raises(SystemExit) as ended:
        example("fit", *arguments, **options)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_print_config_shows_every_option_with_its_help(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(example, capsys, STRATEGY, "--print_config=comments")
    section = out.split("  strategy:\n")[1].split("\n  devices:")[0]
    helps: dict[str, str] = {}
    comment = ""
    for line in section.splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment += text
        elif text.endswith(":") or ": " in text:
            helps[text.split(":")[0]], comment = comment, ""
    for name in inspect.signature(AvgPipeStrategy).parameters:
        assert len(helps[name]) > 40, f"{name} has no help"


TUNER = ["--config", str(CONFIGS / "tuner.yaml")]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("strategy.num_microbatches=0", r'"num_microbatches".*does not conform to restriction v>0'),
        ("strategy.num_stages=two", r'"num_stages"'),
        ("strategy.schedule=2f2b", r'"schedule".*Literal\[.advance_forward., .1f1b., .afab., .*.auto.\]'),
        ("strategy.split_points=[1]", r'"split_points"'),
        ("strategy.split_batch=no.such.function", r'"split_batch"'),
        ("strategy.averaging.rolling=sometimes", r'"averaging.*rolling'),
        ("strategy.timeout=soon", r'"timeout"'),
        ("strategy.microbatches=8", r"'microbatches' is not accepted"),
        ("callbacks.max_num_pipelines=0", "max_num_pipelines"),
    ],
)
def test_wrong_values_are_refused_while_parsing(
    example: Any, argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        example("fit", *(TUNER if argument.startswith("callbacks") else [STRATEGY]), f"--trainer.{argument}")
    assert ended.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(message, error), error


def test_all_options_are_in_the_config_that_says_so_with_their_defaults(example: Any) -> None:
    written = yaml.safe_load((CONFIGS / "all_options.yaml").read_text())["trainer"]["strategy"]["init_args"]
    assert written.keys() == options().keys()
    for name, parameter in options().items():
        default = asdict(parameter.default) if is_dataclass(parameter.default) else parameter.default
        assert written[name] == (str(default) if isinstance(default, timedelta) else default), name


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_parses_and_is_commented(path: Path, example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example_of = path.stem.removesuffix("_4bit")
    own = {"name": example_of} if (EXAMPLES / f"{example_of}.py").exists() else {}
    assert "avgpipe" in printed(example, capsys, "--config", str(path), "--print_config", **own).lower()
    assert path.read_text().startswith("# ")
    assert f"--config configs/{path.name}" in path.read_text()


@pytest.mark.parametrize("weight", ["1.mask", "statistics.fmean"])
def test_a_written_config_holds_what_was_given(
    weight: str, example: Any, capsys: pytest.CaptureFixture[str]
) -> None:  # a name or a function
    given = f"--trainer.strategy.loss_weight={weight}"
    out = printed(example, capsys, STRATEGY, given, "--print_config")
    assert yaml.safe_load(out)["trainer"]["strategy"]["init_args"]["loss_weight"] == weight


SHORT = [
    "--trainer.devices=1", "--trainer.max_steps=2", "--trainer.enable_progress_bar=false", "--model.layers=2",
    "--model.width=16", "--model.heads=2", "--data.train_bytes=20000", "--data.val_bytes=4000",
]  # fmt: skip
VALIDATING = ["--trainer.val_check_interval=1", "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1"]


@pytest.mark.parametrize(
    ("config", "further"),
    [
        ("short", VALIDATING),  # a name, which takes no options
        ("all_options", [*VALIDATING, "--trainer.strategy.num_stages=2", "--trainer.strategy.num_microbatches=8"]),
        (
            "tuner",
            [
                "--trainer.strategy.num_stages=2", "--trainer.limit_val_batches=0",
                "--trainer.callbacks.profile_batches=4", "--trainer.callbacks.microbatch_candidates=[4,8]",
            ],
        ),
    ],
)  # fmt: skip
def test_a_fit_through_the_command_line(config: str, further: list[str], example: Any, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    trainer = example("fit", "--config", str(CONFIGS / f"{config}.yaml"), *SHORT, *further).trainer
    torch.set_num_threads(threads)
    assert trainer.global_step == 2
    assert type(trainer.strategy) is AvgPipeStrategy
    if config == "short":
        assert trainer.strategy.passthrough  # there is nothing to pipeline
    else:
        assert trainer.strategy.plan.num_stages == 2
    if config == "tuner":
        tuner = next(callback for callback in trainer.callbacks if isinstance(callback, AvgPipeTuner))
        assert tuner.result.choice.setting.num_microbatches in (4, 8)
    assert list(tmp_path.rglob("avgpipe_tuning.json" if config == "tuner" else "*.ckpt"))


@pytest.mark.slow
def test_the_name_needs_the_import_and_the_class_path_does_not(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "from lightning.pytorch.cli import LightningCLI\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "import sys\n"
        "for strategy in ('strategy=avgpipe', 'strategy.class_path=lightning_avgpipe.AvgPipeStrategy'):\n"
        "    args = ['--trainer.accelerator=cpu', '--trainer.devices=1', f'--trainer.{strategy}']\n"
        "    try:\n"
        "        cli = LightningCLI(BoringModel, run=False, args=args)\n"
        "        print('built', type(cli.trainer.strategy).__name__)\n"
        "    except ValueError as error:\n"
        "        print('refused', 'lightning_avgpipe' in sys.modules, error)\n"
    )
    first, second = (line for line in run(tmp_path, script).splitlines() if line.startswith(("built", "refused")))
    assert first.startswith("refused False")
    assert "strategy='avgpipe'" in first
    assert second == "built AvgPipeStrategy"


def test_all_arguments_of_the_tuner_are_in_its_config_with_their_defaults() -> None:
    written = yaml.safe_load((CONFIGS / "tuner.yaml").read_text())["trainer"]["callbacks"][0]["init_args"]
    defaults = {name: p.default for name, p in inspect.signature(AvgPipeTuner).parameters.items()}
    assert {**written, "max_num_pipelines": defaults["max_num_pipelines"]} == defaults
