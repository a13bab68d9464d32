"""Compile the units of stages with ``torch.compile``, each as one function.

::

    training_step            follows the step, as ever: values travel, logs are collected
      blocks.3(x)            a unit: its forward is compiled, with all that it calls
      x + residual           glue runs as it is

Units of one class share compiled code, and so do parallel models, whose parameters are arguments of the code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.recompute_policy import Recompute
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.torch_compat import is_of_compiler, untraced

_SHOWN = 200  # characters of a compiler's message that are shown


class Compiler:
    """A cache of compiled units, which compiles each when it is first called.

    Args:
        options: keyword arguments of ``torch.compile``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._forwards: dict[int, Callable[..., Any]] = {}

    def compiled(self, name: str, module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that executes a unit with its forward compiled and its hooks as they are.

        Args:
            name: path of the unit.
            module: the unit.
            run: executes the unit; only its forward if it has forward hooks.
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
                    with untraced():  # else each function mode on the stack would cause another compilation
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
    """Options for the execution of units by stages.

    Attributes:
        recompute: stages or units whose forward is repeated for the backward.
        compiler: compiler for units; None: units run uncompiled.
        streams: whether each of several pipelines has a device stream of its own.
        static: whether micro-batches run a program that was written down while another one was followed: ``"auto"``:
            the first one of the same iteration, if the step leaves nothing behind; ``True``: also one of an earlier
            iteration; ``False``: never.
    """

    recompute: Recompute = Recompute()  # noqa: RUF009
    compiler: Compiler | None = None
    streams: bool = False
    static: bool | Literal["auto"] = "auto"
