"""Versions that this package works with: others are refused when it is imported, not in the middle of a training."""

from __future__ import annotations

import sys
import warnings
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

RANGES = {"torch": ">=2.6,<2.16", "lightning": ">=2.5,<2.7"}
SECOND = "pytorch-lightning"  # has the versions of lightning
PYTHON = ">=3.11"
TESTED_PYTHON = ((3, 11), (3, 12), (3, 13))


def check_versions() -> None:
    """Compare what is installed with what is needed.

    Raises:
        ImportError: another version, or none; names the one found and the range.
    """
    python = ".".join(map(str, sys.version_info[:3]))
    if not SpecifierSet(PYTHON).contains(python, prereleases=True):
        raise ImportError(f"lightning_avgpipe needs Python {PYTHON}, and this is {python}")
    for name, wanted in RANGES.items():
        # where there is no package of the first name, the second will do
        other = name == "lightning" and _version(name) is None and _version(SECOND) is not None
        _check(SECOND if other else name, wanted)
    if sys.version_info[:2] not in TESTED_PYTHON:
        tested = ", ".join(".".join(map(str, version)) for version in TESTED_PYTHON)
        warnings.warn(f"lightning_avgpipe is tested with Python {tested}, and this is {python}", stacklevel=2)


def check_second() -> None:
    """The same for the second package of Lightning, which need not be of the same version as the first.

    Raises:
        ImportError: another version, or none; names the one found and the range.
    """
    _check(SECOND, RANGES["lightning"])


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check(name: str, wanted: str) -> None:
    found = _version(name)
    if found is None:
        raise ImportError(f"lightning_avgpipe needs {name}{wanted}, which is not installed")
    # a development version is as the release that it will be
    if not SpecifierSet(wanted).contains(Version(found).base_version):
        raise ImportError(
            f"lightning_avgpipe needs {name}{wanted}, and {found} is installed; pip install '{name}{wanted}'"
        )
