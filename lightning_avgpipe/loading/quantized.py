"""4-bit weights of bitsandbytes, whose parameters need a quantization state in addition to their contents."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_avgpipe.errors import ConfigurationError


def check_quantizer(quantizer: Any) -> None:
    """Check that the weights of a model can be quantized one at a time.

    Args:
        quantizer: quantizer of transformers; None if the model is not quantized.
    Raises:
        ConfigurationError: the quantizer is not bitsandbytes with 4 bits, or the files have quantized weights.
    """
    if quantizer is None:
        return
    config = quantizer.quantization_config
    if not getattr(config, "load_in_4bit", False):
        raise ConfigurationError(
            f"from_pretrained quantizes with bitsandbytes to 4 bits, not by {type(config).__name__} as given; use "
            "BitsAndBytesConfig(load_in_4bit=True)"
        )
    if quantizer.pre_quantized:
        raise ConfigurationError(
            "The files hold 4-bit weights already, which cannot be read a tensor at a time; give the files from which "
            "they were made: they are quantized while they are read"
        )


def is_quantized(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a 4-bit weight."""
    return hasattr(parameter, "quant_state")


def as_quantized(parameter: Any) -> nn.Parameter:
    """Return the parameter or, for a 4-bit weight, one on meta with the shape that it will have when packed."""
    if not is_quantized(parameter):
        return parameter
    words = -(-parameter.numel() // (2 * parameter.quant_storage.itemsize))
    storage = torch.empty(words, 1, dtype=parameter.quant_storage, device="meta")
    packed = type(parameter)(storage, **{**vars(parameter), "bnb_quantized": True})
    packed._is_hf_initialized = True
    return packed
