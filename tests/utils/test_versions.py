"""Versions outside of the range are refused at import, with the one found and the range."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from lightning_avgpipe.utils import versions

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_the_ranges_are_those_of_the_package() -> None:
    assert {f"{name}{wanted}" for name, wanted in versions.RANGES.items()} <= set(PROJECT["dependencies"])
    assert PROJECT["requires-python"] == versions.PYTHON
    claimed = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert claimed == {".".join(map(str, version)) for version in versions.TESTED_PYTHON}


@pytest.mark.parametrize(
    ("name", "found"),
    [("torch", "2.5.1+cu121"), ("torch", "2.16.0.dev20270101"), ("lightning", "2.4.0"), ("lightning", "2.7.0")],
)
def test_other_versions_are_refused_with_the_range(name: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version
    monkeypatch.setattr(versions.metadata, "version", lambda asked: found if asked == name else version(asked))
    with pytest.raises(ImportError) as raised:
        versions.check_versions()
    assert str(raised.value).startswith(
        f"lightning_avgpipe needs {name}{versions.RANGES[name]}, and {found} is installed"
    )


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"needs torch>=2\.6,<2\.16, which is not installed"):
        versions.check_versions()


def test_an_old_python_is_refused_and_a_new_one_is_said_to_be_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(ImportError, match=r"needs Python >=3\.11, and this is 3\.10\.13"):
        versions.check_versions()
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    with pytest.warns(UserWarning, match=r"tested with Python 3\.11, .*, and this is 3\.99\.0"):
        versions.check_versions()
