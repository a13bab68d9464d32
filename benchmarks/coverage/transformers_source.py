"""Every architecture of transformers with a head that has a loss, made small by rule.

A configuration is the default one with smaller numbers: heads, sizes of heads, and widths keep their ratios, so that
products which must agree still do; there are four layers (two and two of encoder and decoder), short vocabularies and
small images, and no dropout. All else, ``use_cache=True`` included, is as it comes. Models of images and text whose
images have no such shape are given text alone.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import configuration_auto, modeling_auto

from benchmarks.coverage.case import Case, Example, Source, example

BATCH, LENGTH, VOCABULARY, LABELS, IMAGE, SECONDS = 4, 16, 128, 3, 32, 4000

KINDS = {
    "causal language model": "CAUSAL_LM",
    "masked language model": "MASKED_LM",
    "sequence to sequence": "SEQ_TO_SEQ_CAUSAL_LM",
    "sequence classification": "SEQUENCE_CLASSIFICATION",
    "token classification": "TOKEN_CLASSIFICATION",
    "question answering": "QUESTION_ANSWERING",
    "multiple choice": "MULTIPLE_CHOICE",
    "image classification": "IMAGE_CLASSIFICATION",
    "semantic segmentation": "SEMANTIC_SEGMENTATION",
    "audio classification": "AUDIO_CLASSIFICATION",
    "speech recognition": "CTC",
    "speech to text": "SPEECH_SEQ_2_SEQ",
    "image and text to text": "IMAGE_TEXT_TO_TEXT",
}


def _cases() -> Iterator[Case]:
    """All heads, each class once."""
    seen: set[str] = set()
    bodies: set[str] = set()
    for kind, key in KINDS.items():
        mapping = getattr(modeling_auto, f"MODEL_FOR_{key}_MAPPING_NAMES")
        for model_type, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                if name not in seen and model_type in configuration_auto.CONFIG_MAPPING_NAMES:
                    seen.add(name)
                    rules = [(rule, variant) for variant in (False, True) for rule in (scaled, fixed, shallow)]
                    first = model_type not in bodies
                    bodies.add(model_type)
                    yield Case(name, kind, first, [partial(made, name, kind, *rule) for rule in rules])


def made(name: str, kind: str, rule: Callable[[Any], None], variant: bool) -> Example:
    """A model and a batch for it; the variant has larger images, other axes of features, or text alone."""
    cls = getattr(transformers, name)
    config = cls.config_class()
    for part in parts_of(config):
        rule(part)
        common(part, has_decoder(config))
        if kind == "causal language model" and getattr(part, "is_decoder", None) is False:
            part.is_decoder = True
        if variant and type(getattr(part, "image_size", None)) is int:
            part.image_size = 2 * IMAGE
        for key, value in SPECIAL.get(part.model_type or type(part).__name__, {}).items():
            change(part, key, value)
    if getattr(config, "num_labels", None) is not None:
        config.num_labels = LABELS
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > 40e6:
        raise ValueError(f"the rule made a model of {size / 1e6:.0f} million parameters")
    model = cls(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return example(model, batch_for(model, kind, variant))


# What no rule finds, by type of configuration.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"num_hidden_layers": 4},
    "blt_global_transformer": {"hidden_size": 64, "head_dim": 16},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_local_encoder": {"hidden_size_global": 64},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "ernie4_5_moe": {"moe_k": 2},
    "esm": {"pad_token_id": 1, "mask_token_id": 3},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lilt": {"hidden_size": 48, "num_attention_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"n_groups": 1},
    "neomme": {"head_dim": 16},
    "perceiver": {
        "num_self_attends_per_block": 2,
        "d_latents": 64,
        "num_latents": 16,
        "max_position_embeddings": LENGTH,
    },
    "reformer": {"axial_pos_embds": False},
    "donut-swin": {"embed_dim": 24, "hidden_size": 192, "window_size": 2},
    "swin": {"embed_dim": 24, "hidden_size": 192, "window_size": 2},
    "xlstm": {"mode": "train", "chunk_size": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"hybrid_layer_ids": [1, 3]},
}


# -- small configurations --------------------------------------------------------------------------------------------


def parts_of(config: Any) -> Iterator[Any]:
    """The configuration and those inside of it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PretrainedConfig):
            yield from parts_of(value)


def has_decoder(config: Any) -> bool:
    """Whether layers come twice."""
    return bool(getattr(config, "is_encoder_decoder", False))


_HEADS = re.compile(r"(^|_)(num|n)_.*head(s)?$|heads$|^n_head$|^num_heads$")
_HEAD_SIZE = re.compile(r"head_?(dim|size)|d_head|d_kv|kv_channels|attention_head_size|head_dim")
_LAYERS = re.compile(r"layers$|^n_layer$|^num_hidden_layers$|^depth$|num_blocks$|_depth$|^num_layers")
_WIDTH = re.compile(
    r"(hidden|embed|embedding|intermediate|model|inner|ffn|mlp|projection|conv|out|in|q|kv|state|lru|channels?|proj)"
    r".*(size|dim|dims|rank|width|channels?)$|^(d_model|d_ff|dim|n_embd|n_inner|d_inner|width|ffn_dim|filter_size)$"
    r"|_(dim|dims|rank|width)$|^dim_|hidden_sizes?$|hidden_channels$|^(mamba_)?d_ssm$|^encoder_ffn|^decoder_ffn"
)
_KEEP = re.compile(
    r"vocab|patch|image|position|kernel|stride|ratio|factor|num_labels|num_channels|in_channels|window|token|conv_dim$"
    r"|chunk|block_size|max_|axes|sections"
)


def numbers(part: Any) -> Iterator[tuple[str, int]]:
    """Its integers."""
    for name, value in list(vars(part).items()):
        if type(value) is int and not name.startswith("_"):
            yield name, value


def change(part: Any, name: str, value: Any) -> None:
    """Set an attribute, if the configuration lets it be set."""
    if name in part.attribute_map:
        name = part.attribute_map[name]
    setattr(part, name, value)


def scaled(part: Any) -> None:
    """Divide heads, head sizes and widths such that ratios stay."""
    found = dict(numbers(part))
    heads = next((v for n, v in found.items() if _HEADS.search(n) and "key_value" not in n and v > 0), 4)
    of_heads = heads // max(d for d in (4, 3, 2, 1) if heads % d == 0)
    sizes = [v for n, v in found.items() if _HEAD_SIZE.search(n) and v > 0]
    width = next((found[n] for n in ("hidden_size", "d_model", "n_embd", "dim", "embed_dim") if n in found), 0)
    size = sizes[0] if sizes else max(width // heads, 1)
    of_sizes = max(size // 8, 1)
    for name, value in found.items():
        if _HEADS.search(name):
            change(part, name, max(value // of_heads, 1))
        elif _HEAD_SIZE.search(name):
            change(part, name, max(value // of_sizes, 4) if value >= 4 else value)
        elif _WIDTH.search(name) and not _KEEP.search(name) and value > 16:
            change(part, name, max(value // (of_heads * of_sizes), 8))


def fixed(part: Any) -> None:
    """Give the same numbers to all."""
    found = dict(numbers(part))
    for name, value in found.items():
        if _HEADS.search(name):
            few = "key_value" in name and value < max(found.get("num_attention_heads", 0), 2)
            change(part, name, min(value, 2 if few else 4))
        elif _HEAD_SIZE.search(name):
            change(part, name, min(value, 8))
        elif _WIDTH.search(name) and not _KEEP.search(name) and value > 16:
            large = re.search(r"intermediate|ffn|inner|mlp|d_ff", name) is not None
            change(part, name, 64 if large else 32)


def shallow(part: Any) -> None:
    """Leave widths as they are."""


def common(part: Any, twice: bool) -> None:
    """Few layers, short vocabularies, small images, few experts, no chance."""
    layers = 2 if twice else 4
    before = next((v for n, v in numbers(part) if _LAYERS.search(n) and v > layers), 0)
    for name, value in numbers(part):
        if re.search(r"first_k_dense|num_shared_layers|kv_shared_layers", name):
            change(part, name, min(value, layers // 2))
        elif _LAYERS.search(name):
            change(part, name, min(value, layers))
        elif "vocab" in name:
            change(part, name, min(value, VOCABULARY))
        elif re.search(r"experts_per_tok|top_?k(_experts)?$|num_selected", name):
            change(part, name, min(value, 2))
        elif re.search(r"^(n_group|topk_group|num_expert_groups?)$", name):
            change(part, name, 1)
        elif re.search(r"experts$", name):
            change(part, name, min(value, 4))
        elif name == "image_size":
            change(part, name, min(value, IMAGE))
        elif name == "patch_size":
            change(part, name, min(value, 8))
        elif name in ("window_size", "sliding_window", "attention_window"):
            change(part, name, min(value, 4 if name == "window_size" else 8))
        elif re.search(r"max_.*positions?(_embeddings)?$|^n_positions$|^n_ctx$", name):
            change(part, name, min(value, 128))
    for name, value in list(vars(part).items()):
        if isinstance(value, list) and value and before and len(value) == before:
            kinds = [v for v in dict.fromkeys(value) if isinstance(v, str)] or value[-layers:]
            change(part, name, [kinds[i % len(kinds)] for i in range(layers)])
        elif name == "depths" and isinstance(value, list):
            change(part, name, [min(v, 2) for v in value])
        elif name == "image_size" and isinstance(value, (list, tuple)):
            change(part, name, type(value)(min(v, IMAGE) for v in value))
        elif isinstance(value, list) and before and re.search(r"indices|_idxs?$|_ids$|_layers$|indexes", name):
            kept = [v for v in value if isinstance(v, int) and v < layers]
            change(part, name, kept or value[:0] or [layers - 1])
        elif isinstance(value, float) and re.search(r"drop|jitter|noise|mask_.*prob", name):
            change(part, name, 0.0)
        elif name == "apply_spec_augment":
            change(part, name, False)
    if twice and getattr(part, "decoder_start_token_id", None) is None:
        part.decoder_start_token_id = 1
    missing(part)
    special_tokens(part)


def missing(part: Any) -> None:
    """Numbers that a default configuration leaves open."""
    found = dict(numbers(part))
    heads, width = found.get("num_attention_heads", 1), found.get("hidden_size", 1)
    usual = {"num_key_value_heads": heads, "head_dim": width // heads, "vocab_size": VOCABULARY}
    experts = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1}
    for name, value in {**usual, **experts}.items():
        if vars(part).get(name, 0) is None:  # asking the configuration may be an error, if it differs between layers
            change(part, name, value)


def special_tokens(part: Any) -> None:
    """Ids of special tokens lie in the vocabulary: usual ones at its beginning, others at its end."""
    end = getattr(part, "vocab_size", None)
    end = end if isinstance(end, int) else VOCABULARY
    usual = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
    for name, value in list(vars(part).items()):
        if re.search(r"token_(id|index)$", name) is None:
            continue
        if name in usual:
            change(part, name, usual[name])
        elif type(value) is int and value >= end - 16:
            end -= 1
            change(part, name, end)


# -- batches ---------------------------------------------------------------------------------------------------------


def batch_for(model: nn.Module, kind: str, variant: bool) -> dict[str, Any]:
    """One example input per kind."""
    config: Any = model.config
    takes = inspect.signature(model.forward).parameters
    batch: dict[str, Any] = inputs(model, kind, variant)
    if config.model_type == "git":  # which leaves out as many logits as an image would have, even without one
        batch["pixel_values"] = image_for(config)
    if config.model_type == "bros":
        batch["bbox"] = torch.rand(BATCH, LENGTH, 8)
    tokens = batch.get("input_ids")
    if kind in ("causal language model", "masked language model", "image and text to text"):
        assert tokens is not None, "no text goes in"
        labels: Tensor = tokens.clone()
    elif kind == "sequence to sequence" or (
        kind == "speech to text" and tokens is not None
    ):  # as many as go in: some of these models have no encoder
        labels = torch.randint(3, vocabulary(config) - 16, (BATCH, LENGTH))
    elif kind in ("speech recognition", "speech to text"):
        labels = torch.randint(3, vocabulary(config) - 16, (BATCH, 8))
    elif kind == "token classification":
        labels = torch.randint(0, LABELS, (BATCH, LENGTH))
    elif kind == "semantic segmentation":
        labels = torch.randint(0, LABELS, (BATCH, *batch["pixel_values"].shape[-2:]))
    elif kind == "question answering":
        batch["start_positions"] = torch.randint(0, LENGTH, (BATCH,))
        batch["end_positions"] = torch.randint(0, LENGTH, (BATCH,))
        return batch
    elif kind == "multiple choice":
        batch["input_ids"] = torch.randint(3, vocabulary(config) - 16, (BATCH, 2, LENGTH))
        labels = torch.randint(0, 2, (BATCH,))
    else:
        labels = torch.randint(0, LABELS, (BATCH,))
    if "labels" not in takes:
        raise ValueError("it takes no labels")
    return {**batch, "labels": labels}


def vocabulary(config: Any) -> int:
    """Of its text."""
    text = config.get_text_config(decoder=True)
    return int(getattr(text, "vocab_size", VOCABULARY))


def inputs(model: nn.Module, kind: str, variant: bool) -> dict[str, Any]:
    """What goes in besides labels."""
    config: Any = model.config
    main = model.main_input_name
    text = {"input_ids": torch.randint(3, max(vocabulary(config) - 16, 8), (BATCH, LENGTH))}
    if kind == "image and text to text" and not variant:
        return image_and_text(model, text["input_ids"])
    if main == "pixel_values" and kind != "image and text to text":
        return {"pixel_values": image_for(config, variant)}
    if main == "input_values":
        return {"input_values": torch.randn(BATCH, SECONDS)}
    if main == "input_features":
        features = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None) or 80
        frames = 2 * getattr(config, "max_source_positions", 50) if "whisper" in type(config).__name__.lower() else 100
        features_last = not isinstance(next((m for m in model.modules() if isinstance(m, nn.Conv1d)), None), nn.Conv1d)
        shape = (BATCH, frames, features) if features_last != variant else (BATCH, features, frames)
        return {"input_features": torch.randn(shape)}
    if main not in ("input_ids", "pixel_values", "inputs"):
        raise ValueError(f"there is no rule for {main}")
    return text


def image_for(config: Any, large: bool = False) -> Tensor:
    """Random pixels."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or (2 * IMAGE if large else IMAGE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(BATCH, getattr(vision, "num_channels", 3), height, width)


def image_and_text(model: Any, tokens: Tensor) -> dict[str, Any]:
    """As many placeholders in the text as the image has features."""
    config = model.config
    pixels = image_for(config)
    names = ("image_token_id", "image_token_index")
    token = next(found for found in (getattr(config, name, None) for name in names) if found is not None)
    with torch.no_grad():
        features = model.get_image_features(pixels)
    features = getattr(features, "pooler_output", features)
    if isinstance(features, (list, tuple)):
        features = torch.cat([f.reshape(-1, f.shape[-1]) for f in features])
    count = features.numel() // features.shape[-1] // BATCH
    images = torch.full((BATCH, count), token)
    return {"input_ids": torch.cat([tokens[:, :2], images, tokens[:, 2:]], dim=1), "pixel_values": pixels}


def of_transformers() -> Source:
    """All that is tried of transformers."""
    return Source("transformers", transformers.__version__, _cases())
