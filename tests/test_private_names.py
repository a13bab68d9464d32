"""What the package relies on in torch and Lightning, entry by entry."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad

from lightning_avgpipe.utils.lightning import pl
from lightning_avgpipe.utils.patching import replaced
from tests.commands import run
from tests.private_names import LIGHTNING, TORCH, Private, expected, problem
from tests.test_house import UPPER, modules, part

# Private names that are Python's, or a file system's, or of values of an option.
OTHERS = {
    "_exit", "_getframe", "_batch_sampler", "_strip_protocol", "_epoch_end", "_epoch", "_batch",
    "_val_check_time_interval",
}  # fmt: skip


@pytest.mark.parametrize(
    "entry",
    [*expected(LIGHTNING, pl.__version__), *expected(TORCH, torch.__version__)],
    ids=lambda entry: entry.name,
)
def test_torch_and_lightning_have_what_the_package_relies_on(entry: Private) -> None:
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
    trees = {path: ast.parse(path.read_text()) for path in modules()}
    known = {entry.name.rpartition(".")[2] for entry in (*LIGHTNING, *TORCH)} | OTHERS | own(trees)
    for path, tree in trees.items():
        if part(path) in UPPER:
            names = {name for name in private(tree) if name.startswith("_") and not name.startswith("__")}
            assert names - known - {"_pytree", "_C"} == set(), path


def test_each_name_has_one_entry() -> None:
    names = [entry.name for entry in TORCH]
    assert len(names) == len(set(names))


def torchs(path: Path) -> Iterator[str]:
    """Private names that a module reaches through names of torch's."""
    tree = ast.parse(path.read_text())
    roots = {"torch", "dist", "nn", "Tensor"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            if any(part.startswith("_") for part in node.module.split(".")):  # type: ignore[union-attr]
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_"))
            roots.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            text = ast.unparse(node)
            if text.split(".")[0].split("(")[0] in roots:
                yield text


def test_whatever_is_private_in_torch_has_an_entry() -> None:
    known = {part for entry in TORCH for part in entry.name.split(".")}
    known |= {"TreeSpec", "_pytree", "_C", "_autograd"}
    used = [(path, name) for path in modules() for name in torchs(path)]
    assert [f"{path}: {name}" for path, name in used if name.split(".")[-1] not in known] == [], "these need an entry"


class Upstream:
    """Another package's class."""

    declared: int

    def __init__(self) -> None:
        self._held = 0

    def _method(self, first: int, second: int = 0) -> None:
        self._later = first


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        (Private("_held", ""), None),
        (Private("_later", ""), None),
        (Private("declared", ""), None),
        (Private("_method", "", "first"), None),
        (Private("_method", "", "first second"), None),
        (Private("_method", "", "second"), "takes (self, first, second) instead of (second)"),
        (Private("_method", "", "first third"), "takes (self, first, second) instead of (first, third)"),
        (Private("_missing", ""), "does not exist"),
    ],
)
def test_an_entry_says_what_it_expects(entry: Private, found: str | None) -> None:
    assert problem(Private(f"{__name__}.Upstream.{entry.name}", "", entry.takes)) == found


def test_a_patch_of_what_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(clip_grad, "_get_total_norm")
    with pytest.raises(AttributeError, match="_get_total_norm"), replaced(clip_grad, "_get_total_norm", None):
        pass
    assert not hasattr(clip_grad, "_get_total_norm")
