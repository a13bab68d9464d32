"""One word for one idea: a public class has a name that no other public class of the package has."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightning_avgpipe"


def public_classes() -> dict[str, list[str]]:
    """Name of a public class -> the files that define it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    return found


def test_public_classes_have_names_of_their_own() -> None:
    twice = {name: files for name, files in public_classes().items() if len(files) > 1}
    assert not twice, f"{twice}: give one of each another name"
