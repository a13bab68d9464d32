"""Options are checked when they are given and when they change, and change all at once or not at all."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
import pickle
import re
import sys
from dataclasses import asdict, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import docstring_parser
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.cli import LightningCLI

import lightning_avgpipe
from lightning_avgpipe import AdaptiveFreezing, Averaging, AvgPipeStrategy, AvgPipeTuner, Links, PipelineTimeline
from lightning_avgpipe.averaging import options as averaging
from lightning_avgpipe.comm import options as links
from lightning_avgpipe.errors import AvgPipeError, ConfigurationError, PartitionError
from lightning_avgpipe.strategy.options import ALLOWED, Options
from lightning_avgpipe.utils.allowed import duration
from tests import processes
from tests.commands import run
from tests.models import MLP, loader
from tests.trainers import pipeline, trainer


def test_every_option_of_the_strategy_is_there_and_its_defaults_stand_in_one_place() -> None:
    fields = dataclasses.fields(Options)
    assert {field.name for field in fields} == inspect.signature(AvgPipeStrategy).parameters.keys() - LIGHTNINGS
    assert all(field.default is dataclasses.MISSING for field in fields)
    assert ALLOWED.keys() == {field.name for field in fields}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"num_pipelines": 2, "num_microbatches": 0}, "num_microbatches=0: must be 'auto' or an integer from 1"),
        ({"num_pipelines": 2.0}, r"num_pipelines=2\.0: must be an integer"),
        ({"num_microbatches": 8, "advance": 1}, "advance=1 has no meaning for schedule='1f1b'"),
    ],
)
def test_what_cannot_work_changes_nothing(wanted: dict[str, Any], message: str) -> None:
    strategy = AvgPipeStrategy(num_stages=2, num_microbatches=4, schedule="1f1b")
    with pytest.raises(ConfigurationError, match=message):
        strategy.reconfigure(**wanted)
    assert strategy.options.overrides == {"num_microbatches": 4}
    assert strategy.num_pipelines == 1


@pytest.mark.parametrize("again", [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))])
def test_a_copied_strategy_has_the_same_options(again: Any) -> None:
    strategy = AvgPipeStrategy(num_stages=3, averaging=Averaging(alpha=0.5, save_models=False, processes_per_device=2))
    strategy.reconfigure(num_pipelines=2)
    copied = again(strategy)
    assert (copied.num_stages, copied.num_pipelines) == (3, 2)
    assert copied.options == strategy.options
    assert copied.options.averaging.processes_per_device == 2 and not copied.options.averaging.save_models
    copied.reconfigure(num_pipelines=4)
    assert strategy.num_pipelines == 2


@pytest.mark.parametrize("kind", [AvgPipeStrategy, Averaging, Links, AvgPipeTuner, PipelineTimeline, AdaptiveFreezing])
def test_the_help_of_each_option_says_what_is_allowed(kind: Any) -> None:
    helps = {p.arg_name: p.description for p in docstring_parser.parse(kind.__doc__).params}
    own = inspect.signature(kind).parameters.keys() - LIGHTNINGS
    assert all(f"for example ``{name}=" in helps[name] and "Allowed: " in helps[name] for name in own)
    assert len([line for line in kind.__doc__.splitlines() if "Allowed: " in line]) == len(own)


def test_examples_of_options_are_allowed() -> None:
    known = {
        "functools": functools,
        "torch": torch,
        "my_split": lambda batch, count: [batch],
        **{name: getattr(lightning_avgpipe, name) for name in lightning_avgpipe.__all__},
    }
    tables = ALLOWED, averaging.ALLOWED, links.ALLOWED
    for name, allowed in [item for table in tables for item in table.items()]:
        example = eval(allowed.example, known)
        assert allowed.accepts(duration(example) if name == "timeout" else example), name


@pytest.mark.parametrize(("given", "seconds"), [(0.5, 0.5), ("30s", 30), ("1.5 h", 5400), ("0:02:00", 120)])
def test_a_timeout_may_be_a_number_of_seconds_or_a_string(given: Any, seconds: float) -> None:
    strategy = AvgPipeStrategy(num_stages=2, timeout=given)
    assert strategy.options.timeout == timedelta(seconds=seconds)


def test_models_are_shown_while_there_are_some() -> None:
    strategy = AvgPipeStrategy(num_stages=2, num_pipelines=2)
    with (
        pytest.raises(ConfigurationError, match=r"reference\(\): there is no model before trainer.fit"),
        strategy.reference(),
    ):
        pass
    with pytest.raises(ConfigurationError, match=r"parallel_model\(5\): there is no"), strategy.parallel_model(5):
        pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"averaging": Averaging(alpha=0.5, every=2, save_models=False)},
            "Averaging(alpha=0.5, every=2, save_models=False) without effect: there is one pipeline, and",
        ),
        (
            {"links": Links(shared_memory=False)},
            "Links(shared_memory=False) without effect: there is one process, and nothing travels",
        ),
        ({"num_stages": 1, "num_microbatches": 2, "advance": 1}, "advance=1 without effect: there is one stage, and"),
        (
            {"num_microbatches": 16},
            "num_microbatches=16 without effect: the first batch of the train data holds 4 samples, and makes 4 micro",
        ),
    ],
)
def test_options_without_effect_are_said_to_have_none(given: dict[str, Any], said: str) -> None:
    model = MLP()
    with pytest.warns(UserWarning) as found:
        pipeline(strategy=given, max_epochs=1).fit(model, loader(MLP, 8, 4))
    texts = [str(warning.message) for warning in found if "without effect" in str(warning.message)]
    assert len(texts) == 1 and texts[0].startswith(f"AvgPipeStrategy: {said}")


def test_a_small_number_for_memory_is_said_to_be_bytes() -> None:
    with (
        pytest.warns(UserWarning, match=r"memory_limit=2 is a number of bytes.* Use a size such as '10GB'"),
        pytest.raises(PartitionError, match="memory_limit=2 B"),
    ):
        pipeline(strategy={"memory_limit": 2}).fit(MLP(), loader(MLP, 8, 4))


def asking_alone(rank: int) -> str:
    def ask(trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            trainer.strategy.reconfigure(num_microbatches=2)

    with pytest.raises(AvgPipeError, match="num_microbatches is 2 on rank 0, but 4 on rank 1; give"):
        pipeline(2, 2, {"num_microbatches": 2 + 2 * rank}).fit(MLP(), loader(MLP, 32, 8))
    with pytest.raises(AvgPipeError) as raised:
        asks = LambdaCallback(on_train_batch_end=ask)
        pipeline(2, 2, {"timeout": 6}, callbacks=[asks]).fit(MLP(), loader(MLP, 32, 8))
    return f"{type(raised.value).__name__}: {raised.value}"


def test_what_one_rank_alone_asks_for_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = processes.each(2, asking_alone, folder=tmp_path)
    message = "reconfigure(num_microbatches=2) was called on rank 0 (stage 1), but not on rank 1 (stage 0) within 3 s"
    assert first.startswith(f"ConfigurationError: {message}; every rank must call it: in a hook of a callback")
    assert second.startswith("PeerError")
    assert message in second


@pytest.mark.parametrize(
    ("given", "replicas", "models"),
    [
        ({}, 1, 1),
        ({"num_stages": 2}, 2, 1),
        ({"num_stages": 2, "averaging": Averaging(groups=2)}, 1, 2),
        ({"num_stages": 1, "averaging": Averaging(groups=2)}, 2, 2),
        ({"replicas": 2}, 2, 1),
    ],
)
def test_fewer_stages_than_devices_are_replicas_unless_groups_are_asked_for(
    given: dict[str, Any], replicas: int, models: int
) -> None:
    strategy = trainer(strategy=AvgPipeStrategy(**given), devices=4).strategy
    assert (strategy.replicas, strategy.num_models) == (replicas, models)
    assert strategy.num_stages * replicas * models == 4


# -- on the command line, and in YAML: LightningCLI builds the strategy, and refuses what is wrong while parsing -----


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
