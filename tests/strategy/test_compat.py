"""What the package relies on in Lightning, entry by entry."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_avgpipe.utils.lightning import pl
from tests.commands import run
from tests.private_names import LIGHTNING, TORCH, Private, expected, problem

PACKAGE = Path(__file__).parents[2] / "lightning_avgpipe"
UPPER = ("training", "verify", "strategy", "callbacks")  # the layers that know Lightning
# Private names that are Python's, or a file system's, or of values of an option.
OTHERS = {"_batch_sampler", "_strip_protocol", "_epoch_end", "_epoch", "_batch", "_val_check_time_interval"}


@pytest.mark.parametrize("entry", expected(LIGHTNING, pl.__version__), ids=lambda entry: entry.name)
def test_lightning_has_what_the_package_relies_on(entry: Private) -> None:
    assert problem(entry) is None
    assert entry.why


_SECOND = """
import pytorch_lightning
from lightning_avgpipe.utils.lightning import pl
from tests.private_names import LIGHTNING, expected, problem
assert [entry.name for entry in expected(LIGHTNING, pl.__version__) if problem(entry) is not None] == []
print(*sorted({entry.name.partition(".")[0] for entry in LIGHTNING}))
"""


@pytest.mark.slow
def test_pytorch_lightning_has_what_the_package_relies_on(tmp_path: Path) -> None:
    assert "lightning_fabric pytorch_lightning torchmetrics\n" in run(tmp_path, "-c", _SECOND)


def own(trees: dict[Path, ast.Module]) -> set[str]:
    """Names that the package itself defines."""
    found: set[str] = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
    return found


def private(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"_[a-z]\w*", node.value):
            yield node.value


def test_whatever_is_private_in_lightning_has_an_entry() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    known = {entry.name.rpartition(".")[2] for entry in (*LIGHTNING, *TORCH)} | OTHERS | own(trees)
    for path, tree in trees.items():
        if path.relative_to(PACKAGE).parts[0] in UPPER:
            names = {name for name in private(tree) if name.startswith("_") and not name.startswith("__")}
            assert names - known - {"_pytree", "_C"} == set(), path
