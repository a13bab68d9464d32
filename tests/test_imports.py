"""Data flows one way, and so do imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_avgpipe.utils.packages import LIGHTNING, SHARED

PACKAGE = Path(__file__).parents[1] / "lightning_avgpipe"

# The rooms from the ground up: each may import those before it, and itself.
ROOMS = (
    "errors", "utils", "schedule", "capture", "planning", "comm", "weights", "engine", "elastic", "tuning", "advise",
    "training", "verify", "strategy", "callbacks", "pytorch_lightning", "__init__",
)  # fmt: skip
# What knows Lightning.
UPPER = ("training", "verify", "strategy", "callbacks", "pytorch_lightning", "__init__")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    here, file = part(path), str(path.relative_to(PACKAGE))
    for name in imports(path):
        root, _, rest = name.partition(".")
        assert here in UPPER or root not in (*LIGHTNING, "torchmetrics"), f"{file} must not know Lightning"
        there = rest.split(".")[0]
        if root == "lightning_avgpipe" and there in ROOMS:
            assert ROOMS.index(there) <= ROOMS.index(here), f"{file} must not import {name}"


# Of the planning room what looks at modules.
LOOKS_AT_MODULES = {
    "planner.py", "divisible.py", "coarsening.py", "model_memory.py", "memory_limit.py", "recompute_policy.py",
}  # fmt: skip


@pytest.mark.parametrize("name", ["schedule", "planning", "tuning", "errors"])
def test_schedules_plans_and_tuning_need_no_torch(name: str) -> None:
    for path in modules():
        if part(path) == name and path.name not in LOOKS_AT_MODULES:
            assert not any(module.split(".")[0] == "torch" for module in imports(path)), path


def test_pictures_are_an_extra_that_nothing_needs_to_be_imported() -> None:
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "matplotlib" for name in names), path


def test_what_knows_lightning_is_loaded_for_each_of_its_packages() -> None:
    assert set(ROOMS) - set(UPPER) == SHARED


def test_every_part_is_a_room() -> None:
    assert {part(path) for path in modules()} == set(ROOMS)
