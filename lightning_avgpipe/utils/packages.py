"""The two packages of Lightning, ``lightning`` and ``pytorch_lightning``, and our modules for each of them.

Lightning makes ``pytorch_lightning`` out of ``lightning.pytorch``: it copies the files and replaces the names of
packages in their imports. Classes of one are unknown to the other, so there must be two of ours as well. They come from
the same files: as ``lightning_avgpipe.pytorch_lightning.X`` a module ``lightning_avgpipe.X`` is loaded once more, with
its imports replaced in the same way, when a Trainer of ``pytorch_lightning`` takes an object of ours. Where
``lightning`` is not installed nothing is loaded twice: ``lightning_avgpipe.X`` itself is for ``pytorch_lightning``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from lightning_avgpipe.errors import ConfigurationError

LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")  # where code is Lightning's, not the user's
OTHER = "pytorch_lightning"
# What the modules lightning_avgpipe.X are for.
FIRST = "lightning.pytorch" if importlib.util.find_spec("lightning") is not None else OTHER
# The parts of this package that know nothing of Lightning: they are loaded once.
SHARED = frozenset(
    {"errors", "utils", "schedule", "capture", "planning", "comm", "engine", "weights", "elastic", "tuning", "advise"}
)

_OURS = "lightning_avgpipe"
_SECOND = f"{_OURS}.{OTHER}"
_FOLDER = Path(__file__).parents[1]
_NAMES = {"lightning.pytorch": OTHER, "lightning.fabric": "lightning_fabric"}
_PACKAGES = {"lightning": "lightning.pytorch", "lightning_fabric": OTHER, OTHER: OTHER}


def install(arrived: Callable[[], None]) -> None:
    """Make our modules for ``pytorch_lightning`` importable.

    Args:
        arrived: called when somebody has imported ``pytorch_lightning``, if our modules are for ``lightning``.
    """
    sys.meta_path.insert(0, _Finder(arrived))


def adopt(item: Any, owner: object) -> bool:
    """Make an object of ours one for the package of Lightning that its owner is from; tells whether it was not.

    Raises:
        ConfigurationError: its class is derived from one of ours, so there is none like it for that package.
    """
    kind, package = type(item), _package(type(owner))
    if package in (None, _package(kind)):
        return False
    name = kind.__module__
    if not name.startswith(f"{_OURS}."):
        raise ConfigurationError(
            f"{kind.__qualname__} is derived from a class for {_package(kind)}, but {type(owner).__qualname__} is from "
            f"{package}; derive it from the class of the same name in {_SECOND if package == OTHER else _OURS}"
        )
    name = f"{_SECOND}{name.removeprefix(_OURS)}" if package == OTHER else name.replace(_SECOND, _OURS, 1)
    twin = getattr(importlib.import_module(name), kind.__name__)
    if package == OTHER and isinstance(kind, ABCMeta):
        kind.register(twin)  # so that a strategy stays an instance of the class that it was made from
    item.__class__ = twin
    return True


def adopted(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ours that a trainer, its first argument, calls before any other."""

    @functools.wraps(method)
    def run(self: Any, trainer: object, *args: Any, **kwargs: Any) -> Any:
        if adopt(self, trainer):
            return getattr(self, method.__name__)(trainer, *args, **kwargs)
        return method(self, trainer, *args, **kwargs)

    return run


def check_plugins(strategy: str, owner: object, plugins: Mapping[str, object]) -> None:
    """Check that what a strategy was given is from the package of Lightning that its trainer is from."""
    wanted = _package(type(owner))
    for name, plugin in plugins.items():
        found = _package(type(plugin))
        if found is not None and wanted is not None and found != wanted:
            raise ConfigurationError(
                f"{strategy} was given {name}={type(plugin).__qualname__}() from {found}, but the Trainer is from "
                f"{wanted}; import it from there"
            )


def check_callbacks(trainer: object, callbacks: Iterable[object]) -> None:
    """Check that Lightning's own callbacks, which others know by their class, are of the trainer's package."""
    wanted = _package(type(trainer))
    for callback in callbacks:
        of_lightning = [base for base in type(callback).__mro__ if base.__module__.partition(".")[0] in LIGHTNING]
        foreign = [base for base in of_lightning if _package(base) != wanted and base.__name__ != "Callback"]
        if foreign and wanted is not None:
            raise ConfigurationError(
                f"{foreign[0].__qualname__} is from {_package(foreign[0])}, but the Trainer is from {wanted}; import "
                "it from there"
            )


def _package(kind: type) -> str | None:
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((_PACKAGES[root] for root in roots if root in _PACKAGES), None)


class _Finder(MetaPathFinder):
    """Finds what is to be loaded with other imports than its file has, and notices ``pytorch_lightning``."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if FIRST == OTHER:
            ours = name.startswith(f"{_OURS}.") and name.split(".")[1] not in SHARED
            return _spec(name, name, second=False) if ours else None
        if name == OTHER:
            return self._noticed(name, path, target)
        if name == _SECOND or name.startswith(f"{_SECOND}."):
            return _spec(name, name.replace(f"{_SECOND}.", f"{_OURS}.", 1), second=True)
        return None

    def _noticed(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_tell(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == name:
                    self._arrived()

            spec.loader.exec_module = then_tell  # type: ignore[method-assign]
        return spec


def _spec(name: str, original: str, second: bool) -> ModuleSpec | None:
    place = _FOLDER.joinpath(*original.split(".")[1:])
    package = (place / "__init__.py").is_file()
    file = place / "__init__.py" if package else place.with_suffix(".py")
    if not file.is_file():
        return None
    loader = _Loader(name, str(file), second)
    within = [str(place)] if package else None
    return importlib.util.spec_from_file_location(name, file, loader=loader, submodule_search_locations=within)


class _Loader(SourceFileLoader):
    """Loads a file with other imports; without the file's bytecode, which is that of the imports that it has."""

    def __init__(self, name: str, path: str, second: bool) -> None:
        super().__init__(name, path)
        self._second = second

    def get_code(self, fullname: str) -> CodeType:
        tree = _Imports(self._second).visit(ast.parse(self.get_data(self.path), self.path))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


class _Imports(ast.NodeTransformer):
    """Replaces the names of packages in imports, also in those within functions."""

    def __init__(self, second: bool) -> None:
        self._second = second

    def visit_Import(self, node: ast.Import) -> ast.AST:
        return ast.copy_location(ast.Import([ast.alias(self._other(a.name), a.asname) for a in node.names]), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.AST]:
        # each name by itself: of what is imported from one package a part may be shared, and another not
        assert node.module is not None and not node.level, "a relative import"
        made = []
        for alias in node.names:
            full = self._other(f"{node.module}.{alias.name}")
            made.append(ast.ImportFrom(full.removesuffix(f".{alias.name}"), [alias], 0))
        return [ast.copy_location(one, node) for one in made]

    def _other(self, name: str) -> str:
        for before, after in _NAMES.items():
            if name == before or name.startswith(f"{before}."):
                return after + name.removeprefix(before)
        root, _, rest = name.partition(".")
        if self._second and root == _OURS and rest and rest.split(".")[0] not in SHARED:
            return f"{_SECOND}.{rest}"
        return name
