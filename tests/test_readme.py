"""README and documentation are true: their Python runs, and their commands are those of the repository."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_avgpipe import Averaging, AvgPipeStrategy, Links
from lightning_avgpipe.__main__ import main
from tests.commands import run

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
}
README = PAGES["README.md"]
SNIPPETS = {
    f"{name}:{number}": snippet
    for name, page in PAGES.items()
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
}
FIRST = "README.md:0"
COMMANDS = {
    command
    for page in PAGES.values()
    for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    for command in re.findall(r"^python (-m lightning_avgpipe .*|examples/cli.py .*)$", block, re.MULTILINE)
    if not command.endswith("\\")  # of large_models.md, which needs a folder with a model
}
LIGHTNINGS = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
SCHEDULES = sorted(command for command in COMMANDS if " schedule " in command)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the first snippet prints, as a script that starts a second process."""
    script = tmp_path_factory.mktemp("snippet") / "snippet.py"
    script.write_text(SNIPPETS[FIRST])
    return run(script.parent, script)


def execute(snippet: str) -> dict[str, Any]:
    """Run a snippet in this process; returns its names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(snippet, names)
    return names


@pytest.mark.parametrize("where", [where for where in SNIPPETS if where != FIRST])
def test_snippets_run(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    execute(SNIPPETS[where])
    out = capsys.readouterr().out
    for expected in re.findall(r"^# (stage .*)$", SNIPPETS[where], re.MULTILINE):
        assert expected in out


def masked(plan: str) -> str:
    """What does not depend on the machine: everything but units, numbers and the widths of columns."""
    units = re.sub(r"[\w.]+ \.\. [\w.]+ \(\d+\)", "UNITS", plan)
    numbers = re.sub(r"\b\d+(\.\d+)?( (us|ms|s|B|KiB|MiB|K|M|values?)\b)?", "#", units)
    return re.sub(r"[ -]+", " ", numbers).strip()


def test_the_first_snippet_trains_in_two_processes_and_prints_the_plan(printed: str) -> None:
    plan = re.search(r"```\n(2 stages on .*?)```", README, re.DOTALL)
    assert plan is not None
    assert masked(plan.group(1)) in masked(printed)
    assert "`max_epochs=1` reached" in printed


@pytest.mark.parametrize("command", SCHEDULES)
def test_schedules_are_drawn_as_printed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    words = command.split()[2:]
    assert main(words) == 0
    assert "stage 0 | F0 " in capsys.readouterr().out
    assert all(Path(path).stat().st_size for path in re.findall(r"--output (\S+)", command))


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(COMMANDS.difference(SCHEDULES)))
def test_commands_for_scripts_run_as_printed(command: str, tmp_path: Path) -> None:
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    config = tmp_path / "configs" / "language_model.yaml"
    config.write_text(config.read_text().replace("layers: 4", "layers: 2").replace("block_size: 64", "block_size: 8"))
    shutil.copy(config, tmp_path / "config.yaml")
    (tmp_path / "train.py").write_text((ROOT / "examples" / "cli.py").read_text())
    few = ("--trainer.max_steps", 2) if "cli.py" in command else ()
    out = run(tmp_path, *command.split(), *few, PYTHONPATH=f"{ROOT}:{tmp_path / 'examples'}")
    said = {"advise": "num_pipelines=2", "--meta": "memory of each device", "verify": "verified 2 optimizer steps"}
    assert any(text in out for word, text in said.items() if word in command) or "`max_steps=2` reached" in out


@pytest.mark.parametrize("name", PAGES)
def test_files_that_pages_name_exist(name: str) -> None:
    here = (ROOT / name).parent
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[name]):
        assert (here / link).exists(), link
    for command in re.findall(r"python ((?:examples|benchmarks|tests)/\w+\.py)", PAGES[name]):
        assert (ROOT / command).exists(), command


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_every_page_has_its_place() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    for name in PAGES.keys() - {"README.md"}:
        assert f": {Path(name).name}\n" in listed, name


def test_options_are_all_documented_and_have_an_anchor() -> None:
    page = PAGES["docs/options.md"]
    for kind, prefix in ((AvgPipeStrategy, ""), (Averaging, "averaging-"), (Links, "links-")):
        for name in inspect.signature(kind).parameters.keys() - {"kwargs", "averaging", "links", *LIGHTNINGS}:
            assert f'| <a id="{prefix}{name}"></a>`{name}` |' in page, f"{kind.__name__}: {name}"
    assert all(f"`{name}`" in page for name in LIGHTNINGS)


def test_ci_installs_and_tests_as_the_readme_says() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    install, test = re.findall(r"```bash\n(.*?) && (.*?)\n```", README)[1]
    assert install in ci
    assert re.search(rf"^step tests {test} ", ci, re.MULTILINE)
