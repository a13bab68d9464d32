"""What a line does with an object that it has loaded: only adds to it, looks at one item, or at all of it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lightning_avgpipe.capture.expressions import ALL, uses

KNOWN = sys.version_info[:2] in ((3, 11), (3, 12), (3, 13))


class Watched:
    """Notes what code does with ``x`` after it has loaded it."""

    def __init__(self, x: Any) -> None:
        self.held = x
        self.keys: list[Any] = []

    @property
    def x(self) -> Any:
        frame = sys._getframe(1)
        self.keys += [
            use.key if use.held is self.held else "of another" for use in uses(frame.f_code, frame.f_lasti, self.held)
        ]
        return self.held


def keys_of(line: str, x: Any) -> list[Any]:
    """What a line of a method uses; f gives a number, whatever it is given."""
    space: dict[str, Any] = {"f": lambda *args, **kwargs: 3, "g": lambda *args, **kwargs: [3], "a": 2}
    exec(f"def method(self, b=1):\n    {line}\n", space)
    watched = Watched(x)
    space["method"](watched)
    return watched.keys


ONLY_ADD = [
    "self.x.append(f())", "self.x.append(f(a, k=b))", "self.x.extend([f(), b])",
    "self.x.insert(0, f())", "self.x.append((f(), a))", "self.x.append(f(a + b, f(b)))", "self.x.clear()",
]  # fmt: skip


@pytest.mark.parametrize("line", ONLY_ADD)
def test_adding_to_a_list_tells_nothing_of_it(line: str) -> None:
    assert keys_of(line, [5, 6]) == ([] if KNOWN else [ALL])


@pytest.mark.parametrize(
    "line", ["self.x['k'] = f()", "self.x[a] = f(b, k=a)", "self.x.update(j=f())", "self.x.update({'j': f()})"]
)
def test_setting_items_tells_nothing_of_the_others(line: str) -> None:
    keys = keys_of(line, {"k": 1})
    assert keys == [] or ALL in keys  # what is not understood counts
    if KNOWN and "{" not in line:
        assert keys == []


@pytest.mark.parametrize(
    "line",
    [
        "y = self.x", "return self.x", "f(self.x)", "f(k=self.x)", "f(a, *self.x)", "f(a, b, self.x)", "len(self.x)",
        "[*self.x]", "y = self.x + [f()]", "self.held2 = self.x", "f'{self.x}'", "y = self.x.pop()",
        "y = self.x.append(f())", "f(self.x.append(f()))", "y = self.x[b]", "y = self.x[0:1]", "del self.x[0]",
        "y = [v for v in self.x]", "y = (lambda v: v)(self.x)", "y = not self.x", "y = a in self.x",
        "y = self.x is None",
        "y = self.x or f()", "y = f() if self.x else a", "y, *z = self.x", "y = self.x, f()", "y = {'k': self.x}",
        "y = [self.x, a]", "return f(f(self.x))", "assert self.x", "for v in self.x: pass", "while not self.x: pass",
        "y = self.x == [a]", "y = self.x.__len__()", "y = self.x.index(5)", "g().append(self.x)", "y = g(self.x)[0]",
        "self.x.append(f()) or f()", "y = max(*self.x, a)", "y = self.x * 2", "y = a + len(self.x)", "y = -len(self.x)",
    ],
)  # fmt: skip
def test_everything_else_looks_at_it(line: str) -> None:
    assert keys_of(line, [5, 6])


@pytest.mark.parametrize(("line", "keys"), [("y = self.x['k']", ["k"]), ("f(self.x['k'], a)", ["k"])])
def test_one_item_is_looked_at(line: str, keys: list[Any]) -> None:
    found = keys_of(line, {"k": 1, "j": 2})
    assert found[:1] == (keys if KNOWN else [ALL])


@pytest.mark.parametrize("line", ["self.x.append(self.x[-1])", "self.x.append(len(self.x))", "self.x.extend(self.x)"])
def test_each_load_is_looked_at_by_itself(line: str) -> None:
    assert keys_of(line, [5, 6])
