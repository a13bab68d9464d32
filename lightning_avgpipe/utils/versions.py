"""The supported versions of other packages, which are checked when this package is imported.

Attributes:
    PACKAGE: package of Lightning that this process works with, chosen when this package is imported. It is
        ``pytorch_lightning`` if only that was imported before, or only that is installed; otherwise
        ``lightning.pytorch``.
    OTHER: package of Lightning that this process does not work with.
"""

from __future__ import annotations

import sys
import warnings
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

RANGES = {"torch": ">=2.6,<2.16", "lightning": ">=2.5,<2.7,!=2.6.2,!=2.6.3"}
PYTHON = ">=3.11"
TESTED_PYTHON = ((3, 11), (3, 12), (3, 13))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


_FIRST, _SECOND = "lightning.pytorch", "pytorch_lightning"
_ALONE = _version("lightning") is None and _version("pytorch-lightning") is not None
PACKAGE = _SECOND if _ALONE or (_SECOND in sys.modules and _FIRST not in sys.modules) else _FIRST
OTHER = _FIRST if PACKAGE == _SECOND else _SECOND


def check_versions() -> None:
    """Check that the installed versions of Python, torch and Lightning are in the supported ranges.

    Raises:
        ImportError: a version is out of range, or a package is missing. The message gives the version and the range.
    """
    python = ".".join(map(str, sys.version_info[:3]))
    if not SpecifierSet(PYTHON).contains(python, prereleases=True):
        raise ImportError(f"lightning_avgpipe needs Python {PYTHON}, and this is {python}")
    for name, wanted in RANGES.items():
        _check("pytorch-lightning" if name == "lightning" and PACKAGE == _SECOND else name, wanted)
    if sys.version_info[:2] not in TESTED_PYTHON:
        tested = ", ".join(".".join(map(str, version)) for version in TESTED_PYTHON)
        warnings.warn(f"lightning_avgpipe is tested with Python {tested}, and this is {python}", stacklevel=2)


def _check(name: str, wanted: str) -> None:
    found = _version(name)
    if found is None:
        raise ImportError(f"lightning_avgpipe needs {name}{wanted}, which is not installed")
    # a development version counts as the release that it precedes
    if not SpecifierSet(wanted).contains(Version(found).base_version):
        raise ImportError(
            f"lightning_avgpipe needs {name}{wanted}, and {found} is installed; pip install '{name}{wanted}'"
        )
