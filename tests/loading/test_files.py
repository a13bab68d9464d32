"""Files of transformers: read as transformers reads them, written as it writes them, and refused by name."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_avgpipe import from_pretrained, save_pretrained
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.weights.initialisation import Origin
from tests.comparing import assert_equal
from tests.loading.languages import (
    Tuning,
    assert_same_files,
    contents,
    gpt2,
    llama,
    mixtral,
    needs,
    safetensors,
    saved,
    t5,
    tied_llama,
    transformers,
)

KEY = "model.layers.2.mlp.up_proj.weight"


def read(folder: Path, **options: Any) -> Any:
    return from_pretrained(transformers.LlamaForCausalLM, folder, **options)


# -- what transformers does while it loads ----------------------------------------------------------------------------


def assert_same_contents(model: Any, wanted: Any) -> None:
    """Dtypes and contents of all parameters and buffers, where nobody has read them before."""
    names = [name for name, _ in wanted.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    origin = Origin(model, 0, torch.device("cpu"))
    origin.fill_buffers()
    for name in names:
        parameter, value = model.get_parameter(name), wanted.get_parameter(name)
        found = origin.tensors([name])[name] if parameter.is_meta else parameter
        assert found.dtype == parameter.dtype == value.dtype and torch.equal(found, value), name
    for (name, found), other in zip(model.named_buffers(), wanted.buffers(), strict=True):
        assert torch.equal(found, other), name


def assert_read_as_transformers_reads(folder: Path, kind: Any, **options: Any) -> None:
    model = from_pretrained(kind, folder, **options)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert_same_contents(model, kind.from_pretrained(folder, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [mixtral, gpt2, t5])
def test_a_model_is_read_as_transformers_reads_it(make: Callable[[], Any], dtype: torch.dtype, tmp_path: Path) -> None:
    assert_read_as_transformers_reads(saved(tmp_path, make), type(make()), dtype=dtype)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_that_are_in_the_files_twice_are_tied_if_they_are_equal(equal: bool, tmp_path: Path) -> None:
    tensors = contents(saved(tmp_path, tied_llama))
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0.0 if equal else 1.0)
    safetensors.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert_read_as_transformers_reads(tmp_path, transformers.LlamaForCausalLM)


# -- files that do not fit the model -----------------------------------------------------------------------------------


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """The file that holds ``KEY``, with other contents."""
    path = next(path for path in folder.glob("*.safetensors") if KEY in safetensors.load_file(path))
    tensors = safetensors.load_file(path)
    change(tensors)
    safetensors.save_file(tensors, path, {"format": "pt"})
    return path


def truncated(folder: Path) -> Path:
    path = rewritten(folder, lambda tensors: None)
    path.write_bytes(path.read_bytes()[:-8])
    return path


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda folder: rewritten(folder, lambda tensors: tensors.pop(KEY)),
            rf"'{KEY}' of LlamaForCausalLM: in no file.*initialised",
        ),
        (
            lambda folder: rewritten(folder, lambda tensors: tensors.update({KEY: torch.zeros(3, 5)})),
            rf"'{KEY}'.*\(64, 32\).*FILE.*\(3, 5\)",
        ),
        (truncated, "FILE is damaged"),
    ],
    ids=["a tensor in no file", "another shape", "a truncated file"],
)
def test_what_is_wrong_with_files_is_named(damage: Callable[[Path], Path], says: str, tmp_path: Path) -> None:
    path = damage(saved(tmp_path))
    with pytest.raises(ConfigurationError, match=says.replace("FILE", path.name)):
        read(tmp_path)


@pytest.mark.parametrize("how", ["written", "removed"])
def test_a_file_that_changes_before_it_is_read_is_named(how: str, tmp_path: Path) -> None:
    model = read(saved(tmp_path))
    path = rewritten(tmp_path, lambda tensors: tensors[KEY].zero_())
    os.utime(path, (0, 0))
    if how == "removed":
        path.unlink()
    with pytest.raises(ConfigurationError, match=rf"{path.name} (has changed|cannot be read)"):
        Origin(model, 0, torch.device("cpu")).tensors([KEY])


def test_a_new_head_is_initialised_by_transformers(tmp_path: Path) -> None:
    saved(tmp_path)
    kind = transformers.AutoModelForSequenceClassification
    with pytest.raises(ConfigurationError, match=r"'score.weight'"):
        from_pretrained(kind, tmp_path)
    model = from_pretrained(kind, tmp_path, num_labels=3, initialised=["score"])
    assert not model.score.weight.is_meta and 0 < model.score.weight.std() < 1
    assert model.model.embed_tokens.weight.is_meta


def test_what_is_in_the_files_and_not_in_the_model_is_told(tmp_path: Path, caplog: Any) -> None:
    rewritten(saved(tmp_path), lambda tensors: tensors.update({"more.weight": torch.zeros(2)}))
    transformers.utils.logging.enable_propagation()
    try:
        read(tmp_path)
    finally:
        transformers.utils.logging.disable_propagation()
    assert "more.weight" in caplog.text and "UNEXPECTED" in caplog.text


def test_what_takes_the_place_of_a_parameter_in_files_is_not_initialised_silently(tmp_path: Path) -> None:
    model = read(saved(tmp_path))
    with torch.device("meta"):
        model.lm_head = torch.nn.Linear(32, 64, bias=False)
    with pytest.raises(ConfigurationError, match=r"'lm_head.weight' is on the meta device and in no file"):
        Origin(model, 0, torch.device("cpu"))


@pytest.mark.parametrize("option", [{"device_map": "auto"}, {"state_dict": {}}], ids=str)
def test_options_that_place_a_model_are_refused(option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(option))):
        read(saved(tmp_path), **option)


def peft_config(name: str, **options: Any) -> Any:
    """A configuration of peft's, for a language model."""
    peft = pytest.importorskip("peft")
    return getattr(peft, name)(task_type="CAUSAL_LM", **options)


LORA: dict[str, Any] = {"name": "LoraConfig", "r": 2, "target_modules": ["q_proj"]}
PROMPT: dict[str, Any] = {"name": "PromptTuningConfig", "num_virtual_tokens": 3}


@pytest.mark.parametrize(
    "options",
    [
        {**LORA, "init_lora_weights": "pissa"},
        {"name": "AdaptionPromptConfig", "adapter_len": 2, "adapter_layers": 2},
    ],
    ids=str,
)  # fmt: skip
def test_adapters_that_depend_on_absent_weights_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    peft, config = pytest.importorskip("peft"), peft_config(**options)
    with pytest.raises(ConfigurationError, match=r"has no numbers.*init_lora_weights=True"):
        peft.get_peft_model(read(saved(tmp_path)), config)


SAVES = {**LORA, "modules_to_save": ["lm_head"]}


@pytest.mark.parametrize(
    "options",
    [
        SAVES, PROMPT, {"name": "PrefixTuningConfig", "num_virtual_tokens": 3}, {"name": "LNTuningConfig"},
        {**LORA, "use_dora": True}, {**LORA, "trainable_token_indices": [3]},
        {**PROMPT, "prompt_tuning_init": "SAMPLE_VOCAB"},
    ],
    ids=str,
)  # fmt: skip
def test_adapters_are_those_of_a_model_that_has_been_read(options: dict[str, Any], tmp_path: Path) -> None:
    """Prompts too, copies of layers that are trained as a whole, and what is computed from weights."""
    peft = pytest.importorskip("peft")

    def adapted(model: Any) -> Any:
        torch.manual_seed(7)
        return peft.get_peft_model(model, peft_config(**options))

    folder = saved(tmp_path)
    assert_same_contents(adapted(read(folder)), adapted(transformers.LlamaForCausalLM.from_pretrained(folder)))


def test_layers_that_adapters_train_as_a_whole_are_read_with_the_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain = transformers.LlamaForCausalLM.from_pretrained(saved(tmp_path / "model"))
    plain = peft.get_peft_model(plain, peft_config(**SAVES))
    for parameter in plain.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    plain.save_pretrained(tmp_path / "adapters")
    model = peft.PeftModel.from_pretrained(read(tmp_path / "model"), tmp_path / "adapters")
    assert_same_contents(model, plain)
    with pytest.raises(ConfigurationError, match=r"PeftModel.from_pretrained"):
        read(tmp_path / "model").load_adapter(tmp_path / "adapters")


@pytest.mark.parametrize("options", [{}, {"mean_resizing": False}], ids=str)
def test_a_vocabulary_that_nobody_has_read_gets_no_other_size(options: dict[str, Any], tmp_path: Path) -> None:
    model = read(saved(tmp_path))
    embedding = model.resize_token_embeddings(model.config.vocab_size)  # as scripts do for safety
    assert embedding is model.resize_token_embeddings() is model.get_input_embeddings()
    with pytest.raises(ConfigurationError, match=r"resize_token_embeddings\(\).*first on one process"):
        model.resize_token_embeddings(model.config.vocab_size + 8, **options)


@pytest.mark.parametrize("method", ["merge_and_unload", "merge_adapter"])
def test_adapters_are_not_merged_into_weights_that_nobody_has_read(method: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(read(saved(tmp_path)), peft_config(**LORA))
    with pytest.raises(ConfigurationError, match=r"Write the merged model first"):
        getattr(adapted, method)()


def test_a_copy_of_a_model_that_has_not_been_read_is_of_the_same_files(tmp_path: Path) -> None:
    model = read(saved(tmp_path))
    wanted = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert_same_contents(copy.deepcopy(model), wanted)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda model: torch.nn.init.zeros_(model.lm_head.weight),
        lambda model: model.load_state_dict({"lm_head.weight": torch.ones(64, 32)}, strict=False),
    ],
    ids=["init", "load_state_dict"],
)
@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_what_is_written_before_weights_are_read_is_not_lost_without_a_word(
    write: Callable[[Any], Any], copied: bool, tmp_path: Path
) -> None:
    model = read(saved(tmp_path))
    Origin(copy.deepcopy(model), 0, torch.device("cpu"))
    write(model)
    with pytest.raises(ConfigurationError, match=r"'lm_head.weight' was written into .*ckpt_path"):
        Origin(copy.deepcopy(model) if copied else model, 0, torch.device("cpu"))


def test_weights_that_are_assigned_before_others_are_read_stay(tmp_path: Path) -> None:
    model = read(saved(tmp_path))
    model.load_state_dict({"lm_head.weight": torch.ones(64, 32)}, strict=False, assign=True)
    wanted = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    torch.nn.init.ones_(wanted.lm_head.weight)
    assert_same_contents(model, wanted)


def test_another_dtype_begins_with_the_one_that_was_read(tmp_path: Path) -> None:
    model = read(saved(tmp_path), dtype=torch.bfloat16).float()
    wanted = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).float()
    assert_same_contents(model, wanted)


def test_a_quantizer_that_is_not_known_is_refused(tmp_path: Path) -> None:
    needs("qlora")
    with pytest.raises(ConfigurationError, match=r"load_in_4bit=True"):
        read(saved(tmp_path), quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True))


# -- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mixtral, gpt2])
def test_a_model_in_files_is_copied_as_it_was_written(make: Callable[[], Any], tmp_path: Path) -> None:
    """Also where transformers fuses weights when it reads them: those of Mixtral's experts."""
    model = from_pretrained(type(make()), saved(tmp_path / "old", make))
    save_pretrained(model, tmp_path / "new", max_shard_size="20KB")
    assert_same_files(tmp_path / "new", tmp_path / "old")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_adapters_in_files_are_merged_into_a_model_that_nobody_has_read(tmp_path: Path) -> None:
    needs("lora")
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    plain = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(saved(tmp_path / "model")), config)
    for name, parameter in plain.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter)
    plain.save_pretrained(tmp_path / "adapters")
    model = peft.PeftModel.from_pretrained(read(tmp_path / "model"), tmp_path / "adapters")
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
    save_pretrained(model, tmp_path / "merged", merge=True, max_shard_size="20KB")
    assert_equal({name: model.get_parameter(name) for name in before}, before)
    plain.merge_and_unload().save_pretrained(tmp_path / "plainly merged")
    assert_same_files(tmp_path / "merged", tmp_path / "plainly merged")


def test_what_has_no_contents_anywhere_is_named(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = llama()
    with pytest.raises(ConfigurationError, match=r"'lm_head.weight' is on the meta device"):
        save_pretrained(model, tmp_path)


def test_weights_in_four_bits_are_not_written(tmp_path: Path) -> None:
    needs("qlora")
    model = Tuning(saved(tmp_path), True, "qlora")
    model.configure_model()
    with pytest.raises(ConfigurationError, match=r"q_proj.*4 bits.*without quantization_config.*merge=True"):
        save_pretrained(model.model, tmp_path / "new", merge=True)


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (L.LightningModule, {}, "not a model of transformers"),
        (llama, {"merge": True}, "no adapters to merge"),
        (llama, {"state_dict": {}}, "state_dict: rank 0 writes"),
    ],
)
def test_what_cannot_be_written_is_refused(
    make: Callable[[], Any], options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        save_pretrained(make(), tmp_path, **options)
