"""Support for peft adapters around layers whose weights have not been read yet."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.weights.initialisation import note_of


def keep_adapters() -> None:
    """Keep new adapters of peft on the host: moved to a layer on meta, they would lose their numbers."""
    from peft.tuners import tuners_utils

    base: Any = tuners_utils.BaseTuner
    inject = base.inject_adapter
    if hasattr(inject, "__wrapped__"):
        return

    @functools.wraps(inject)
    def keep(tuner: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        if not any(note_of(parameter) for parameter in model.parameters()):
            return inject(tuner, model, adapter_name, *args, **kwargs)
        try:
            with _KeptOnHost():
                injected = inject(tuner, model, adapter_name, *args, **kwargs)
        except RuntimeError as error:  # of torch, which computes nothing with what is on meta
            raise _without_numbers(f"adapter '{adapter_name}'") from error
        for name, parameter in model.named_parameters():
            if parameter.is_meta and note_of(parameter) is None:
                raise _without_numbers(f"'{name}' of adapter '{adapter_name}'")
        return injected

    base.inject_adapter = keep


def _without_numbers(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} has no numbers: it is initialised by the weights of its layer, which are read when the stages are "
        "known, or not at all. Use an initialisation without them (init_lora_weights=True or 'gaussian'), and leave "
        "low_cpu_mem_usage out"
    )


class _KeptOnHost(TorchFunctionMode):
    """A mode in which tensors with contents stay where they are when they are moved to meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func is Tensor.to and result.is_meta and not args[0].is_meta:
            return args[0].to(result.dtype)
        return result
