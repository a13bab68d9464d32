"""Classes, functions and files stay as small as a reader can hold in mind."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightning_avgpipe"

MOST_METHODS, MOST_ATTRIBUTES, MOST_LINES, MOST_OF_A_FUNCTION = 12, 10, 500, 40

# What is larger, as (public methods, attributes), and why. The table only shrinks: an entry that is not needed fails.
EXEMPT: dict[str, tuple[int, int, str]] = {
    "strategy/strategy.py:AvgPipeStrategy": (57, 14, "Lightning's hooks and properties, a line or two each"),
}
LONG_FUNCTIONS = {
    "strategy/strategy.py:__init__": "every option of the strategy",
}
LONG_FILES = {
    "strategy/strategy.py": "Lightning's hooks, a line or two each, and the docstring of every option",
}

# What records are made of, besides builtins and other records.
_PLAIN = {
    "Any", "Callable", "Collection", "Description", "Literal", "Mapping", "Path", "Sequence", "Tensor", "timedelta",
    "torch", *dir(builtins),
}  # fmt: skip


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Each class of the package, by ``file:name``."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield f"{path.relative_to(PACKAGE)}:{node.name}", node


def functions(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (f for f in node.body if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)))


def fields(node: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    """Of a dataclass or a named tuple."""
    if dataclass_of(node) or "NamedTuple" in map(ast.unparse, node.bases):
        yield from (
            f for f in node.body if isinstance(f, ast.AnnAssign) and "ClassVar" not in ast.unparse(f.annotation)
        )


def dataclass_of(node: ast.ClassDef) -> str:
    return next((text for text in map(ast.unparse, node.decorator_list) if text.startswith("dataclass")), "")


def methods(node: ast.ClassDef) -> set[str]:
    """Public methods and properties of the class body."""
    return {f.name for f in functions(node) if not f.name.startswith("_")}


def attributes(node: ast.ClassDef) -> set[str]:
    """Fields, and what methods assign to ``self``."""
    found = {f.target.id for f in fields(node) if isinstance(f.target, ast.Name)}
    for function in functions(node):
        first = function.args.args[:1]
        found |= {
            a.attr
            for a in ast.walk(function)
            if isinstance(a, ast.Attribute) and isinstance(a.ctx, ast.Store) and isinstance(a.value, ast.Name)
            and [a.value.id] == [argument.arg for argument in first]
        }  # fmt: skip
    return found


def names(annotation: ast.AST) -> set[str]:
    """What a value is made of; what a function takes and gives does not matter."""
    if isinstance(annotation, ast.Name):
        return {annotation.id}
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Callable":
        return {"Callable"}
    return set().union(*map(names, ast.iter_child_nodes(annotation)))


def records() -> set[str]:
    """Frozen classes of plain values: builtins, tensors, functions, collections of them, and other records.

    Their fields say what something is, as options do, and nothing in them changes: however many, they do not count.
    """
    made_of: dict[str, set[str]] = {}
    for _, node in classes():
        frozen = "frozen=True" in dataclass_of(node) or "NamedTuple" in map(ast.unparse, node.bases)
        parts = set().union(*(names(f.annotation) for f in fields(node))) if frozen else {"what changes"}
        made_of[node.name] = made_of.get(node.name, set()) | parts
    found = set(made_of)
    while bad := {name for name in found if made_of[name] - _PLAIN - aliases() - found}:
        found -= bad
    return found


@functools.cache
def aliases() -> set[str]:
    """Names of types that are made of plain ones: ``Matrix = Sequence[Sequence[float]]``."""
    return {
        target.id
        for path in PACKAGE.rglob("*.py")
        for line in ast.parse(path.read_text()).body
        if isinstance(line, ast.Assign)
        and isinstance(line.value, (ast.BinOp, ast.Subscript))
        and names(line.value) <= _PLAIN
        for target in line.targets
        if isinstance(target, ast.Name)
    }


def sizes() -> dict[str, tuple[int, int]]:
    """Public methods and attributes of each class."""
    values = records()
    return {
        place: (len(methods(node)), 0 if node.name in values else len(attributes(node))) for place, node in classes()
    }


def test_classes_have_few_methods_and_attributes() -> None:
    large = {place: size for place, size in sizes().items() if size[0] > MOST_METHODS or size[1] > MOST_ATTRIBUTES}
    allowed = {place: (most, attributes) for place, (most, attributes, _) in EXEMPT.items()}
    new = {
        place: size
        for place, size in large.items()
        if size[0] > max(MOST_METHODS, allowed.get(place, (0, 0))[0])
        or size[1] > max(MOST_ATTRIBUTES, allowed.get(place, (0, 0))[1])
    }
    assert not new, f"(public methods, attributes) are too many: {new}; find what is missing, and give it a name"
    assert set(allowed) <= set(large), f"no exemptions any more: {set(allowed) - set(large)}; delete their entries"


def test_functions_are_short() -> None:
    """Without docstrings."""
    lengths = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                text = len((ast.get_docstring(node, clean=False) or "").splitlines())
                lengths[f"{path.relative_to(PACKAGE)}:{node.name}"] = (node.end_lineno or 0) - node.lineno + 1 - text
    assert {name for name, length in lengths.items() if length > MOST_OF_A_FUNCTION} == set(LONG_FUNCTIONS)


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name for name, length in lengths.items() if length > MOST_LINES} == set(LONG_FILES)
