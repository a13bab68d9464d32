"""Variables outside of modules that the user's code names."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe.state.outside import outside_variables


class Missing:
    """Stands for a package that is not installed, and says so to whoever asks it for anything."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"{name} of a package that is not installed")


OPTIONAL, CALLS = Missing(), {"steps": 0}


@functools.lru_cache
def counted() -> int:
    CALLS["steps"] += 1
    return CALLS["steps"]


class Net(nn.Module):
    other = Missing()

    def forward(self, x: Tensor) -> Tensor:
        return x * counted() if self.training else OPTIONAL.fast(x)


def test_objects_that_answer_no_question_are_variables_like_others() -> None:
    found = {name.removeprefix(f"global {__name__}.") for name in outside_variables(Net())}
    assert {"OPTIONAL", "CALLS"} <= found


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "mine"])
def test_packages_are_installed_wherever_their_folder_is(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"strange_{folder.replace('-', '_')}"
    place = tmp_path / "lib" / folder
    place.mkdir(parents=True)
    (place / f"{name}.py").write_text("CALLS = []\n\n\ndef note(x):\n    CALLS.append(1)\n    return x\n")
    monkeypatch.syspath_prepend(place)
    note = importlib.import_module(name).note

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return note(x)

    assert (f"global {name}.CALLS" in outside_variables(Noting())) == (folder == "mine")


def counting(function: Any) -> Any:
    """A decorator with two counters."""
    number = 0

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        nonlocal number
        number += 1
        wrapper.calls += 1
        return function(*args) * number

    wrapper.calls = 0
    return wrapper


class Numbered:
    """A decorator that is an object, with a counter."""

    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)
        self.function, self.calls = function, 0

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return functools.partial(self, obj)

    def __call__(self, *args: Any) -> Any:
        self.calls += CALLS["steps"]
        return self.function(*args)


def ticked(x: Tensor) -> Tensor:
    ticked.calls = getattr(ticked, "calls", 0) + 1  # type: ignore[attr-defined]
    return x


class Decorated(nn.Module):
    @counting
    def forward(self, x: Tensor) -> Tensor:
        return ticked(self.scaled(x))

    @Numbered
    def scaled(self, x: Tensor) -> Tensor:
        return x

    @torch.no_grad()
    def other(self, x: Tensor) -> Tensor:
        return x


def test_what_decorators_and_functions_count_is_a_variable() -> None:
    found = {name.replace(f" {__name__}.", " ") for name in outside_variables(Decorated())}
    assert found == {
        "enclosed Decorated.forward.number",
        "function Decorated.forward.calls",
        "function ticked.calls",
        "class Decorated.scaled",
        "global CALLS",
    }
