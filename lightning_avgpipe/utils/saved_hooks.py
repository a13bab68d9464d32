"""This package's saved-tensor hooks, which are removed while torch allows no such hooks.

``torch.func.grad``, ``jacrev`` and similar functions refuse to work where saved-tensor hooks are active. A model that
uses them inside its modules has set no hooks there, so the hooks of this package are removed while these functions
compute.
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
    """Saved-tensor hooks with the arguments of torch's class, which do nothing where hooks are not allowed."""

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
    """Replace torch's ``disable_saved_tensors_hooks``: remove this package's hooks; other hooks stay an error."""
    aside: list[SavedHooks] = []
    with contextlib.ExitStack() as back:
        while _active.hooks and _is_on_top(_active.hooks[-1]):
            aside.append(_active.hooks[-1])
            aside[-1].__exit__()
            back.callback(aside[-1].__enter__)
        with disabling(error_message):
            yield


def _is_on_top(hooks: SavedHooks) -> bool:
    newest = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # missing in torch 2.6 and 2.7
    top = None if newest is None else newest(False)
    return top is not None and top[0] == hooks.pack_hook
