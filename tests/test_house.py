"""The package's house rules: data flows one way, one word has one idea, and tensors live where the code says."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

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


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


@cache
def imports(path: Path) -> list[str]:
    found: list[str] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


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


def public_classes() -> dict[str, list[str]]:
    """Name of a public class -> the files that define it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    return found


def test_public_classes_have_names_of_their_own() -> None:
    twice = {name: files for name, files in public_classes().items() if len(files) > 1}
    assert not twice, f"{twice}: give one of each another name"


def unsaid(path: Path, makers: set[str]) -> list[str]:
    """Where a module has torch make a tensor, and does not say on which device."""
    calls = [node for node in nodes(path) if isinstance(node, ast.Call)]
    return [
        f"{path.relative_to(PACKAGE)}:{call.lineno}: {ast.unparse(call)}"
        for call in calls
        if ast.unparse(call.func) in makers and not {"device", None} & {keyword.arg for keyword in call.keywords}
    ]


def test_every_tensor_that_the_package_makes_says_its_device() -> None:
    makers = {f"torch.{function.__name__}" for function in _device_constructors()}
    assert [place for path in modules() for place in unsaid(path, makers)] == []
