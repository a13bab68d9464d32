"""The README is true: its Python runs, and its commands are those of the repository."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import pytest

from tests.commands import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@functools.cache
def output(snippet: str) -> str:
    """What a snippet prints."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "snippet.py"
        script.write_text(snippet)
        return run(Path(folder), script)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_run(number: int) -> None:
    printed = output(SNIPPETS[number])
    for expected in re.findall(r"^# (stage .*)$", SNIPPETS[number], re.MULTILINE):
        assert expected in printed


def masked(plan: str) -> str:
    """What does not depend on the machine: everything but numbers, units and the widths of columns."""
    numbers = re.sub(r"\b\d+(\.\d+)?( (us|ms|s|B|KiB|MiB|K|M)\b)?", "#", plan)
    return re.sub(r"[ -]+", " ", numbers).strip()


def test_the_plan_in_the_readme_is_what_the_first_snippet_prints() -> None:
    plan = re.search(r"```\n(2 stages on .*?)```", README, re.DOTALL)
    assert plan is not None
    assert masked(plan.group(1)) in masked(output(SNIPPETS[0]))


def test_with_counted_costs_the_first_snippet_has_one_plan() -> None:
    counted = 'strategy=lightning_avgpipe.AvgPipeStrategy(costs="flops")'
    printed = output(SNIPPETS[0].replace("max_epochs=2", "max_steps=1").replace('strategy="avgpipe"', counted))
    assert (
        "0      layers.0 .. layers.7 (8)   16.6 K      50%   1 value, 2.0 KiB a micro-batch\n"
        "1      layers.8 .. layers.16 (9)  16.7 K      50%   -\n"
    ) in printed


def test_files_that_the_readme_names_exist() -> None:
    for path in [*re.findall(r"\]\(([^)]+)\)", README), "examples/language_model.py"]:
        assert (ROOT / path).exists(), path


def test_ci_installs_and_tests_as_the_readme_says() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    install, test = re.findall(r"```bash\n(.*?) && (.*?)\n```", README)[1]
    assert install in ci
    assert re.search(rf"^step tests {test}$", ci, re.MULTILINE)
