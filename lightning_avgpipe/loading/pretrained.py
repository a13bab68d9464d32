"""Pretrained models of transformers, of which each process reads only its own stages.

transformers builds every model on meta. Its loader then renames, converts, quantizes and places the tensors of files.
Here the loader runs twice, each time for one group of tensors after another (usually one tensor, or all that make up a
parameter)::

    in from_pretrained      with tensors without contents: it finds missing, unexpected and misshapen ones, and leaves
                            parameters on meta in their final form, each with a note of the tensors it is made from
    when a plan is known    with the tensors in the notes of this process's stages, into a skeleton of the model

So a model is loaded as transformers loads it, and this module needs no knowledge of particular models.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.loading.adapters import keep_adapters, refuse_resizing
from lightning_avgpipe.loading.files import Files, noise
from lightning_avgpipe.utils.names import is_within, listed
from lightning_avgpipe.utils.patching import after_import, replaced
from lightning_avgpipe.weights.initialisation import leave_note

_READ_BYTES = 1024**2  # smaller tensors are always read, even for examples

# Options of transformers that decide where the model goes, or that leave no files to read later.
_REFUSED = (
    "device_map", "max_memory", "tp_plan", "tp_size", "distributed_config", "device_mesh", "state_dict", "gguf_file",
)  # fmt: skip


def from_pretrained(kind: Any, path: str, *args: Any, initialised: Sequence[str] = (), **kwargs: Any) -> Any:
    """Build a model of transformers without its weights, so that each process later reads only those of its stages.

    Call it in ``configure_model``, in place of ``kind.from_pretrained(path, ...)``. The parameters are on the meta
    device until the strategy has a plan. Then each process reads its own parameters from the files, one at a time,
    converted and quantized as by transformers.

    Args:
        kind: a class with ``from_pretrained``, such as ``AutoModelForCausalLM``.
        path: folder with safetensors files, or a name by which transformers finds such files.
        args: further arguments of ``kind.from_pretrained``.
        initialised: names of parameters or modules that need not be in the files, such as a new head; transformers
            initialises them, on the host.
        kwargs: keyword arguments of ``kind.from_pretrained``: ``dtype``, ``quantization_config``,
            ``attn_implementation``.
    Returns:
        The model, in evaluation mode, as transformers returns it.
    Raises:
        ConfigurationError: an option decides where the model goes; a parameter is in no file, or has another shape
            there; a file is damaged, or is not a safetensors file.
    """
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if refused:
        raise ConfigurationError(
            f"{', '.join(refused)}: the strategy decides which process holds what, and reads it from safetensors "
            f"files; leave {'it' if len(refused) == 1 else 'them'} out"
        )
    after_import("peft.peft_model", keep_adapters)
    after_import("transformers.modeling_utils", refuse_resizing)
    made: list[StoredModel] = []
    with _loader_replaced(made):
        model, found = kind.from_pretrained(path, *args, output_loading_info=True, **kwargs)
    if not made:
        raise ConfigurationError(f"{kind.__name__} does not load files as models of transformers do; give one of those")
    missing = sorted(name for name in found["missing_keys"] if not any(is_within(name, new) for new in initialised))
    if missing:
        raise ConfigurationError(
            f"{listed([*map(repr, missing)])} of {type(model).__name__}: in no file of {path}; get the files again, or "
            "name what is new, such as a head, in initialised=[...]"
        )
    return model


@dataclass(frozen=True)
class _Group:
    """A set of tensors in files that the loader reads together, and the parameters that it makes from them."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]


# Makes transformers load tensors into a model, on a device, and returns its report.
_Load = Callable[[nn.Module, Mapping[str, Any], torch.device], Any]


@dataclass(eq=False)
class StoredModel:
    """The weights of a model in files, by the names of its parameters; a store for notes.

    Attributes:
        files: files with the weights.
    """

    files: Files
    _groups: Mapping[str, _Group]
    _skeleton: nn.Module
    _load: _Load
    _quantized: dict[Any, nn.Parameter] = field(default_factory=dict)  # examples, by the shapes in the files

    @property
    def keys(self) -> Collection[str]:
        """The names of all parameters that are in the files."""
        return self._groups.keys()

    def read(self, key: str, parameter: nn.Parameter, device: torch.device, example: bool = False) -> Tensor:
        """Read the contents of a parameter in its present dtype, and set its quantization state if it has one.

        Args:
            key: name of the parameter in the model.
            parameter: parameter for which the contents are read.
            device: device of the contents.
            example: whether random numbers may replace large tensors in the files.
        Returns:
            The contents, with the shape of the parameter (packed if it is a 4-bit weight).
        Raises:
            ConfigurationError: a file is damaged, gone, or has changed.
        """
        group, quantized = self._groups[key], _is_quantized(parameter)
        if example and parameter.nbytes > _READ_BYTES and not quantized:
            return noise(parameter.shape, parameter.dtype, device)
        if not quantized:
            return self._loaded(group, key, device, example).detach().to(device, parameter.dtype)
        shapes = tuple(self.files.tensors[name].shape for name in group.sources)
        loaded = self._quantized.get(shapes) if example else None
        if loaded is None:
            loaded = self._loaded(group, key, device, example)
            if example:
                self._quantized[shapes] = loaded
        parameter.quant_state = loaded.quant_state  # type: ignore[attr-defined]
        return loaded.data

    def _loaded(self, group: _Group, key: str, device: torch.device, example: bool) -> nn.Parameter:
        """Return a parameter of a group, as loaded by transformers."""
        small = [name for name in group.sources if not example or self.files.tensors[name].nbytes <= _READ_BYTES]
        slices: dict[str, Any] = {name: replace(self.files.tensors[name], device=device) for name in group.sources}
        targets = {name: self._skeleton.get_parameter(name) for name in group.targets}
        try:
            with self.files.slices(small) as read, _alone(self._skeleton, targets):
                self._load(self._skeleton, slices | read, device)
            return self._skeleton.get_parameter(key)
        finally:
            for name, before in targets.items():
                _put(self._skeleton, name, before)

    def forget(self, parameter: nn.Parameter) -> None:
        """Remove the quantization state that reading an example has set in a parameter, and the kept examples."""
        self._quantized.clear()
        if _is_quantized(parameter):
            parameter.quant_state = None  # type: ignore[attr-defined]


@contextlib.contextmanager
def _loader_replaced(made: list[StoredModel]) -> Iterator[None]:
    """Within this context make transformers leave notes instead of loading weights.

    Args:
        made: list to which the stored weights of the model are appended.
    """
    try:
        import transformers
        from transformers import core_model_loading

        loading: Any = core_model_loading
        base: Any = transformers.PreTrainedModel
        vars(base)["_load_pretrained_model"]
    except (ImportError, KeyError) as error:
        raise ConfigurationError(
            f"from_pretrained needs transformers, of a version that it knows ({error}): "
            "pip install -e '.[large]' in the repository"
        ) from error

    def leave_notes(model: Any, _: None, paths: Sequence[str] | None, config: Any, *more: Any) -> tuple[Any, None]:
        if made:
            raise ConfigurationError(
                "There is an adapter in the folder: call from_pretrained with the model that it is for, and then "
                "PeftModel.from_pretrained(model, folder, is_trainable=True)"
            )
        files = Files.of(paths or ())

        def load(into: nn.Module, tensors: Mapping[str, Any], device: torch.device) -> Any:
            # without a progress bar and threads for each tensor
            quiet = replaced(loading, "tqdm", lambda items, **_: items)
            with quiet, replaced(loading, "is_env_variable_true", "HF_DEACTIVATE_ASYNC_LOAD".__eq__):
                return loading.convert_and_load_state_dict_in_model(
                    into, tensors, replace(config, device_map={"": device})
                )[0]

        _check_quantizer(config.hf_quantizer)
        stored, report = _noted(model, files, config, load)
        made.append(stored)
        return report, None

    with replaced(base, "_load_pretrained_model", staticmethod(leave_notes)):
        yield


def _grouped(model: Any, files: Files, config: Any) -> list[list[str]]:
    """Return the keys of tensors in files, grouped by the parameters that transformers' loader makes from them."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    state = model.state_dict()
    rename = partial(rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=state)
    mapping = config.weight_mapping or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for key in files.tensors:
        target, _ = rename(key, renamings, converters)
        if target not in state and key in state:  # as in transformers
            target, _ = rename(key, [], [])
        groups.setdefault(target, []).append(key)
    for tied, source in getattr(model, "all_tied_weights_keys", {}).items():
        pair = groups.get(tied), groups.get(source)
        if pair[0] and pair[1] and len(pair[0]) == len(pair[1]) == 1 and files.equal(pair[0][0], pair[1][0]):
            del groups[tied]  # transformers ties a parameter that is not loaded
    return list(groups.values())


def _noted(model: Any, files: Files, config: Any, load: _Load) -> tuple[StoredModel, Any]:
    """Leave a note at each parameter in the files, load buffers; return the stored model and transformers' report."""
    state, buffers, meta = model.state_dict(), dict(model.named_buffers()), torch.device("meta")
    groups: dict[str, _Group] = {}
    report: Any = load(model, {}, meta)
    for keys in _grouped(model, files, config):
        one = load(model, {key: files.tensors[key] for key in keys}, meta)
        group = _Group(tuple(keys), tuple(name for name in state if name not in one.missing_keys))
        wrong = {name: (shape, wanted) for name, shape, wanted in one.mismatched_keys}
        if wrong and not config.ignore_mismatched_sizes:
            raise _of_other_shape(model, files, group, wrong)
        if any(name in buffers for name in group.targets):  # buffers are small, and every process has them
            with files.slices(keys) as slices:
                load(model, slices, torch.device("cpu"))
        groups |= {name: group for name in group.targets if name not in buffers and name not in wrong}
        report.missing_keys &= one.missing_keys
        report.unexpected_keys |= one.unexpected_keys
        report.mismatched_keys |= one.mismatched_keys
        report.conversion_errors |= one.conversion_errors
    # 4-bit weights cannot be copied, so the copy shares them (the model gets packed ones); the user may convert others
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters() if _is_quantized(parameter)}
    stored = StoredModel(files, groups, copy.deepcopy(model, shared), load)
    for name in groups:
        parameter = _as_quantized(model.get_parameter(name))
        leave_note(parameter, stored, name)
        _put(model, name, parameter)
    return stored, report


def _of_other_shape(
    model: nn.Module, files: Files, group: _Group, wrong: Mapping[str, tuple[Sequence[int], Sequence[int]]]
) -> ConfigurationError:
    name, (shape, wanted) = next(iter(wrong.items()))
    sources, file = listed([*map(repr, group.sources)]), files.file_of[group.sources[0]]
    return ConfigurationError(
        f"'{name}' of {type(model).__name__} has the shape {tuple(wanted)}, but made from {sources} of {file} it has "
        f"the shape {tuple(shape)}; give the configuration that belongs to the files, or ignore_mismatched_sizes=True "
        "to initialise it"
    )


@contextlib.contextmanager
def _alone(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Within this context make a model list only these parameters, since listing all of them is slow."""
    with replaced(model, "state_dict", lambda: parameters), replaced(model, "named_buffers", lambda: ()):
        yield


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, parameter)


# -- 4-bit weights of bitsandbytes, which need a quantization state in addition to their contents ----------------------


def _check_quantizer(quantizer: Any) -> None:
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


def _is_quantized(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a 4-bit weight."""
    return hasattr(parameter, "quant_state")


def _as_quantized(parameter: Any) -> nn.Parameter:
    """Return the parameter or, for a 4-bit weight, one on meta with the shape that it will have when packed."""
    if not _is_quantized(parameter):
        return parameter
    words = -(-parameter.numel() // (2 * parameter.quant_storage.itemsize))
    storage = torch.empty(words, 1, dtype=parameter.quant_storage, device="meta")
    packed = type(parameter)(storage, **{**vars(parameter), "bnb_quantized": True})
    packed._is_hf_initialized = True
    return packed
