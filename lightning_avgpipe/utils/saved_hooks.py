"""Our hooks on what autograd saves for backwards, which step aside where torch allows none.

``torch.func.grad``, ``jacrev`` and their kind refuse to work where such hooks are active. A model that uses them inside
of its modules has put none there, so ours leave while they compute, and see nothing of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch.autograd import graph


class _Active(threading.local):
    def __init__(self) -> None:
        self.hooks: list[SavedHooks] = []


_active = _Active()
disabling = graph.disable_saved_tensors_hooks


class SavedHooks(graph.saved_tensors_hooks):
    """As torch's, of the same arguments; where hooks are not allowed it does nothing."""

    def __enter__(self) -> None:
        self._acts = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        if self._acts:
            super().__enter__()
            _active.hooks.append(self)

    def __exit__(self, *error: object) -> None:
        if self._acts:
            _active.hooks.pop()
            super().__exit__(*error)


@contextlib.contextmanager
def disabling_others(error_message: str) -> Iterator[None]:
    """In the place of torch's: ours leave, and those of others are an error, as without us."""
    aside: list[SavedHooks] = []
    with contextlib.ExitStack() as back:
        while _active.hooks and _is_on_top(_active.hooks[-1]):
            aside.append(_active.hooks[-1])
            aside[-1].__exit__()
            back.callback(aside[-1].__enter__)
        with disabling(error_message):
            yield


def _is_on_top(hooks: SavedHooks) -> bool:
    newest = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.6 and 2.7 do not tell
    top = None if newest is None else newest(False)
    return top is not None and top[0] == hooks.pack_hook
