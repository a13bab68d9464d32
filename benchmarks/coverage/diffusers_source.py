"""Denoisers and autoencoders of diffusers, from tiny configurations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import diffusers
import torch
from torch import nn

from benchmarks.coverage.case import Case, Example, Source, WithLoss, example

BATCH, IMAGE, WIDTH = 4, 16, 32
_IMAGE, _TIME = ("sample", (4, IMAGE, IMAGE)), ("timestep", ())
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 4}
# configuration, and names and shapes of what goes in: a shape () is a timestep
TINY: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "UNet1DModel": (
        {"sample_size": 32, "in_channels": 4, "out_channels": 4, "extra_in_channels": 16,
         "block_out_channels": (32, 64),
         "down_block_types": ("DownBlock1D", "AttnDownBlock1D"), "up_block_types": ("AttnUpBlock1D", "UpBlock1D")},
        {"sample": (4, 32), "timestep": ()},
    ),
    "UNet2DModel": (
        {"sample_size": IMAGE, "in_channels": 4, "out_channels": 4, "block_out_channels": (32, 64),
         "layers_per_block": 1,
         "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        dict([_IMAGE, _TIME]),
    ),
    "UNet2DConditionModel": (
        {"sample_size": IMAGE, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": WIDTH,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 8,
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        dict([_IMAGE, _TIME, ("encoder_hidden_states", (7, WIDTH))]),
    ),
    "UNet3DConditionModel": (
        {"sample_size": IMAGE, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": WIDTH,
         "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "attention_head_dim": 8,
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
        {"sample": (4, 3, IMAGE, IMAGE), "timestep": (), "encoder_hidden_states": (7, WIDTH)},
    ),
    "UNetMotionModel": (
        {"sample_size": IMAGE, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": WIDTH,
         "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"), "num_attention_heads": 4,
         "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "motion_num_attention_heads": 4},
        {"sample": (4, 3, IMAGE, IMAGE), "timestep": (), "encoder_hidden_states": (7, WIDTH)},
    ),
    "DiTTransformer2DModel": (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "sample_size": 8, "num_embeds_ada_norm": 10},
        {"hidden_states": (4, 8, 8), "timestep": (), "class_labels": ()},
    ),
    "PixArtTransformer2DModel": (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "sample_size": 8, "cross_attention_dim": WIDTH,
         "caption_channels": WIDTH, "use_additional_conditions": False},
        {"hidden_states": (4, 8, 8), "timestep": (), "encoder_hidden_states": (7, WIDTH)},
    ),
    "SD3Transformer2DModel": (
        {**_HEADS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "joint_attention_dim": WIDTH,
         "caption_projection_dim": WIDTH, "pooled_projection_dim": 64},
        {"hidden_states": (4, 8, 8), "timestep": (), "encoder_hidden_states": (7, WIDTH), "pooled_projections": (64,)},
    ),
    "SanaTransformer2DModel": (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
         "cross_attention_dim": WIDTH, "caption_channels": WIDTH, "sample_size": 8},
        {"hidden_states": (4, 8, 8), "timestep": (), "encoder_hidden_states": (7, WIDTH)},
    ),
    "CogVideoXTransformer3DModel": (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": WIDTH, "sample_width": 8,
         "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 7},
        {"hidden_states": (2, 4, 8, 8), "timestep": (), "encoder_hidden_states": (7, WIDTH)},
    ),
    "WanTransformer3DModel": (
        {**_HEADS, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4, "text_dim": WIDTH, "freq_dim": 32,
         "ffn_dim": 64},
        {"hidden_states": (4, 2, 8, 8), "timestep": (), "encoder_hidden_states": (7, WIDTH)},
    ),
    "PriorTransformer": (
        {**_HEADS, "embedding_dim": WIDTH, "num_embeddings": 7},
        {"hidden_states": (WIDTH,), "timestep": (), "proj_embedding": (WIDTH,), "encoder_hidden_states": (7, WIDTH)},
    ),
    "AutoencoderKL": (
        {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": (3, IMAGE, IMAGE)},
    ),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (32, 32), "decoder_block_out_channels": (32, 32), "num_encoder_blocks": (1, 2),
         "num_decoder_blocks": (2, 1)},
        {"sample": (3, IMAGE, IMAGE)},
    ),
    "VQModel": (
        {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": (3, IMAGE, IMAGE)},
    ),
}  # fmt: skip


def _cases() -> Iterator[Case]:
    """All that have a configuration here."""
    for name in TINY:
        kind = "autoencoder" if name.startswith(("Auto", "VQ")) else "UNet" if "UNet" in name else "transformer"
        yield Case(name, kind, True, [partial(made, name)])


def denoised(net: nn.Module, noise: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """The loss of a model that finds the noise."""
    return nn.functional.mse_loss(net(**inputs)[0], noise)


def made(name: str) -> Example:
    """A model and noise for it."""
    configuration, shapes = TINY[name]
    model = getattr(diffusers, name)(**configuration)
    batch = {key: _input(key, shape) for key, shape in shapes.items()}
    with torch.no_grad():
        noise = torch.randn_like(model(**batch)[0])
    return example(WithLoss(model, denoised), {"noise": noise, **batch})


def _input(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    if shape == ():
        return torch.randint(10, (BATCH,))
    return torch.randn(BATCH, *shape)


def of_diffusers() -> Source:
    """All that is tried of diffusers."""
    return Source("diffusers", diffusers.__version__, _cases())
