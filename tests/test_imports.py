"""Data flows one way, and so do imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_avgpipe.packages import LIGHTNING, SHARED

PACKAGE = Path(__file__).parents[1] / "lightning_avgpipe"

# Each part may import the parts named with it, and itself.
ALLOWED = {
    "errors": set(),
    "versions": set(),
    "packages": {"errors"},
    "attempt": set(),
    "allowed": {"errors"},
    "durations": {"allowed"},
    "counts": {"durations"},
    "starter": {"errors"},
    "tree": set(),
    "source": set(),
    "replaced": set(),
    "absent": {"errors", "tree", "source"},
    "opaque": set(),
    "objects": {"opaque", "packages"},
    "parcel": {"tree", "absent", "objects"},
    "capture": {"errors", "packages", "tree", "source", "absent", "objects", "parcel"},
    "partition": {"errors", "capture"},
    "schedule": {"errors"},
    "planning": {"errors", "schedule"},
    "runtime": {
        "errors",
        "packages",
        "tree",
        "source",
        "replaced",
        "absent",
        "objects",
        "parcel",
        "capture",
        "partition",
        "schedule",
    },
    "elastic": {"errors", "tree", "runtime"},
    "tuning": {"errors", "partition", "schedule"},
}
LIGHTNING_SIDE = {
    "__init__", "strategy", "adaptation", "division", "loop", "checkpoint", "checks", "metrics", "data", "callbacks",
    "advancing", "interrupts", "launch", "stateful", "stepping", "storage", "parallel", "grouping", "shares",
    "profiler", "rehearsal", "options", "connected", "bars", "whole", "verify", "weight_averages",
    "pytorch_lightning", "aftermath",
}  # fmt: skip


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
def test_imports_flow_one_way(path: Path) -> None:
    here = part(path)
    if here in LIGHTNING_SIDE:
        return
    for name in imports(path):
        root, _, rest = name.partition(".")
        assert root not in (*LIGHTNING, "torchmetrics"), f"{here} must not know Lightning"
        if root == "lightning_avgpipe":
            there = rest.split(".")[0]
            assert there == here or there in ALLOWED[here], f"{here} must not import {there}"


@pytest.mark.parametrize("name", ["schedule", "partition", "planning", "tuning", "errors"])
def test_schedules_partition_and_tuning_need_no_torch(name: str) -> None:
    for path in modules():
        if part(path) == name:
            assert not any(module.split(".")[0] == "torch" for module in imports(path)), path


def test_pictures_are_an_extra_that_nothing_needs_to_be_imported() -> None:
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "matplotlib" for name in names), path


def test_what_knows_lightning_is_loaded_for_each_of_its_packages() -> None:
    assert ALLOWED.keys() == SHARED


def test_every_part_has_its_rules() -> None:
    assert {part(path) for path in modules()} <= ALLOWED.keys() | LIGHTNING_SIDE
