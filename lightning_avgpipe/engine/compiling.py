"""Compiled units: stages run each of their units as one function of ``torch.compile``.

::

    training_step            follows the step, as ever: values travel, logs are collected
      blocks.3(x)            a unit: its forward is compiled, with all that it calls
      x + residual           glue runs as it is

Units of one class share what is compiled, and so do the parallel models, whose parameters are its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.recompute_policy import Recompute
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.torch_compat import is_of_compiler, untraced

_SHOWN = 200  # characters of what a compiler says, which may be pages


class Compiler:
    """Compiles units when they are first called.

    Args:
        options: arguments of ``torch.compile``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._forwards: dict[int, Callable[..., Any]] = {}

    def compiled(self, name: str, module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        """What executes a unit with its forward compiled. Its hooks run as they are.

        Args:
            name: of the unit.
            module: the unit.
            run: executes it; its forward alone, where it has forward hooks.
        """
        if isinstance(module, torch.jit.ScriptModule):
            return run
        if module._forward_hooks:
            return self._forward(name, module, run)
        forward = self._forward(name, module, module.forward)

        def call(*args: Any, **kwargs: Any) -> Any:
            with replaced(module, "forward", forward):
                return run(*args, **kwargs)

        return call

    def _forward(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        if id(module) not in self._forwards:
            compiled = torch.compile(forward, **self._options)

            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    with untraced():  # else it would be compiled anew for whoever watches functions
                        return compiled(*args, **kwargs)
                except Exception as error:
                    if not is_of_compiler(error):  # the user's own
                        raise
                    reason = " ".join(str(error).split())[:_SHOWN]
                    raise ConfigurationError(
                        f"the unit '{name}' cannot be compiled (compile={self._options or True!r}): {reason}. Use "
                        "another backend (compile={'backend': 'aot_eager'}), keep what it stumbles over from the "
                        "compiler with torch.compiler.disable, or use compile=False"
                    ) from error

            self._forwards[id(module)] = call
        return self._forwards[id(module)]


@dataclass(frozen=True)
class Execution:
    """How stages execute their units.

    Attributes:
        recompute: what is repeated before, or in, a backward.
        compiler: of units; None: they run as they are.
        streams: whether each of several pipelines has a stream of its own.
    """

    recompute: Recompute = Recompute()  # noqa: RUF009
    compiler: Compiler | None = None
    streams: bool = False
