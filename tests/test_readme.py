"""The README is true: its Python runs, and its commands are those of the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the first snippet prints, as a script that starts a second process."""
    script = tmp_path_factory.mktemp("snippet") / "snippet.py"
    script.write_text(SNIPPETS[0])
    return run(script.parent, script)


def execute(snippet: str) -> dict[str, Any]:
    """Run a snippet in this process; returns its names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(snippet, names)
    return names


@pytest.mark.parametrize("number", range(1, len(SNIPPETS)))
def test_snippets_run(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    execute(SNIPPETS[number])
    out = capsys.readouterr().out
    for expected in re.findall(r"^# (stage .*)$", SNIPPETS[number], re.MULTILINE):
        assert expected in out


def masked(plan: str) -> str:
    """What does not depend on the machine: everything but numbers, units and the widths of columns."""
    numbers = re.sub(r"\b\d+(\.\d+)?( (us|ms|s|B|KiB|MiB|K|M)\b)?", "#", plan)
    return re.sub(r"[ -]+", " ", numbers).strip()


def test_the_first_snippet_trains_in_two_processes_and_prints_the_plan(printed: str) -> None:
    plan = re.search(r"```\n(2 stages on .*?)```", README, re.DOTALL)
    assert plan is not None
    assert masked(plan.group(1)) in masked(printed)
    assert "`max_epochs=2` reached" in printed


def test_with_counted_costs_the_first_snippet_has_one_plan() -> None:
    counted = 'strategy=lightning_avgpipe.AvgPipeStrategy(num_stages=2, costs="flops")'
    snippet = SNIPPETS[0].replace("max_epochs=2", "max_steps=1").replace("devices=2", "devices=1")
    names = execute(snippet.replace('strategy="avgpipe"', counted))
    assert (
        "0      layers.0 .. layers.7 (8)   16.6 K      50%   1 value, 2.0 KiB a micro-batch\n"
        "1      layers.8 .. layers.16 (9)  16.7 K      50%   -\n"
    ) in f"{names['trainer'].strategy.plan}\n"


def test_files_that_the_readme_names_exist() -> None:
    for path in [*re.findall(r"\]\(([^)]+)\)", README), "examples/language_model.py"]:
        assert (ROOT / path).exists(), path


def test_ci_installs_and_tests_as_the_readme_says() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    install, test = re.findall(r"```bash\n(.*?) && (.*?)\n```", README)[1]
    assert install in ci
    assert re.search(rf"^step tests {test}$", ci, re.MULTILINE)
