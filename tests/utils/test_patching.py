"""Functions that wait for a module to be imported."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from lightning_avgpipe.utils.patching import after_import


def test_all_functions_that_await_a_module_are_called_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "awaited_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    called: list[int] = []
    for number in range(2):
        after_import("awaited_module", lambda number=number: called.append(number))  # type: ignore[misc]
    assert importlib.import_module("awaited_module").value == 1
    assert sorted(called) == [0, 1]
    after_import("awaited_module", lambda: called.append(2))
    assert called[-1] == 2
