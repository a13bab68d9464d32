"""Data flows one way, and so do imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_avgpipe.utils.lightning import LIGHTNING

PACKAGE = Path(__file__).parents[1] / "lightning_avgpipe"

# The layers from the ground up: each may import those before it, and itself.
LAYERS = (
    "errors", "utils", "schedule", "state", "capture", "planning", "comm", "weights", "loading", "engine", "averaging",
    "tuning", "advise", "training", "verify", "strategy", "callbacks", "systems", "__init__", "__main__",
)  # fmt: skip
# What knows Lightning, and where it is imported for them.
UPPER = ("training", "verify", "strategy", "callbacks", "systems", "__init__")
FACADE = "lightning_avgpipe.utils.lightning"
ONLY_NAMES = {f"{FACADE}.LIGHTNING", f"{FACADE}.OF_EVERY_LIGHTNING_MODULE"}  # sets of strings


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


def test_imports_go_downwards() -> None:
    for here, file, name in (
        (part(path), str(path.relative_to(PACKAGE)), name) for path in modules() for name in imports(path)
    ):
        root, _, rest = name.partition(".")
        of_facade = name.startswith(f"{FACADE}.") and name not in ONLY_NAMES
        assert here in UPPER or not (of_facade or root == "torchmetrics"), f"{file} must not know Lightning"
        assert root not in LIGHTNING or file == "utils/lightning.py", f"{file} must import {name} from {FACADE}"
        there = rest.split(".")[0]
        if root == "lightning_avgpipe" and there in LAYERS:
            assert LAYERS.index(there) <= LAYERS.index(here), f"{file} must not import {name}"


# Of the planning layer what looks at modules.
LOOKS_AT_MODULES = {
    "planner.py", "divisible.py", "memory.py", "recompute_policy.py", "trained.py",
}  # fmt: skip


@pytest.mark.parametrize("name", ["schedule", "planning", "tuning", "errors"])
def test_schedules_plans_and_tuning_need_no_torch(name: str) -> None:
    for path in modules():
        if part(path) == name and path.name not in LOOKS_AT_MODULES:
            assert not any(module.split(".")[0] == "torch" for module in imports(path)), path


EXTRAS = {"matplotlib", "transformers", "peft", "bitsandbytes", "safetensors"}


def test_nothing_needs_an_extra_to_be_imported() -> None:
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] in EXTRAS for name in names), path


def test_every_part_is_a_layer() -> None:
    assert {part(path) for path in modules()} == set(LAYERS)
