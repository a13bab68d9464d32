"""Write models a shard at a time, of which each process holds a part, or parts of which no process has read.

transformers (or peft) writes the files, and everything that belongs to them. It gets stand-ins on the meta device, and
it is traced from which weights each tensor is made::

    stand-ins of all weights  ->  renamed, fused and divided into shards  ->  contents of one shard are fetched,
                                  by transformers                             converted, written and dropped
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_avgpipe.comm.collectives import Collectives
from lightning_avgpipe.errors import AvgPipeError, ConfigurationError, PeerError, described
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import is_within
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.weights.initialisation import note_of
from lightning_avgpipe.weights.ownership import nothing_to_save
from lightning_avgpipe.weights.relocation import Lending

# Options that decide which process writes what; this is decided here.
_REFUSED = ("state_dict", "is_main_process", "distributed_checkpoint", "safe_serialization")

# Returns the contents of some weights on the host, by name.
_Fetch = Callable[[Collection[str]], dict[str, Tensor]]


def save(
    model: Any,
    folder: str | Path,
    processes: Collectives | None = None,
    elsewhere: Callable[[Tensor], bool] | None = None,
    merge: bool = False,
    **options: Any,
) -> None:
    """Write a model on rank 0, to which the other processes lend their parts. All processes call it.

    Args:
        model: model with ``save_pretrained``.
        folder: folder to write.
        processes: processes that hold the model together; None: only this one.
        elsewhere: returns whether another process answers for a tensor that this one also has.
        merge: whether adapters of peft are merged into the weights.
        options: further options of ``model.save_pretrained``.
    Raises:
        ConfigurationError: the model cannot be written, or an option decides which process writes what.
        AvgPipeError: rank 0 could not write the files.
    """
    _check(model, merge, options)
    tensors = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    here = {name for name, t in tensors.items() if not (t.is_meta or (elsewhere is not None and elsewhere(t)))}
    if processes is None or processes.world_size == 1:
        _write(model, folder, lambda names: _fetched(tensors, names), merge, options)
        return
    lending = Lending(processes, tensors, here)

    def fetch(names: Collection[str]) -> dict[str, Tensor]:
        rest = _fetched(tensors, [name for name in names if name not in lending.held])
        lent = lending.fetch([name for name in names if name in lending.held])
        return {name: tensor.cpu() for name, tensor in lent.items()} | rest

    def write() -> BaseException | None:
        try:
            _write(model, folder, fetch, merge, options)
        except PeerError:  # the other processes know the failure already
            raise
        except BaseException as error:
            return error
        return None

    failure = lending.run(write)
    reason = processes.broadcast(None if failure is None else described(failure))
    if failure is not None:
        raise failure
    if reason is not None:
        raise AvgPipeError(f"rank 0 could not write the model: {reason}")


def _check(model: Any, merge: bool, options: Mapping[str, Any]) -> None:
    transformers: Any = sys.modules.get("transformers")
    if not (_of_peft(model) or (transformers is not None and isinstance(model, transformers.PreTrainedModel))):
        raise ConfigurationError(
            f"{type(model).__name__} is not a model of transformers or peft; give the one in an attribute of your "
            "LightningModule, or save a checkpoint"
        )
    if refused := [name for name in _REFUSED if name in options]:
        raise ConfigurationError(f"{', '.join(refused)}: rank 0 writes safetensors files of all weights; leave it out")
    if merge and not (_of_peft(model) and hasattr(model, "merge_and_unload")):
        raise ConfigurationError(
            f"merge=True with {type(model).__name__}, which has no adapters to merge; give the model that "
            "peft.get_peft_model returned, or leave merge out"
        )
    quantized = [name for name, p in model.named_parameters() if hasattr(p, "quant_state")]
    if quantized and (merge or not _of_peft(model)):
        raise ConfigurationError(
            f"'{quantized[0]}' has 4 bits, but files of whole models hold unquantized weights. Save the adapters (the "
            "PeftModel, without merge); then read the model without quantization_config, add the adapters with "
            "PeftModel.from_pretrained, and save that with merge=True"
        )


def _of_peft(model: Any) -> bool:
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


# -- contents, wherever they are ---------------------------------------------------------------------------------------


def _fetched(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Return contents of weights that this process has, or that are still in the files of the model.

    Raises:
        ConfigurationError: no process has contents for a weight.
    """
    found = {}
    for name in names:
        tensor, note = tensors[name], note_of(tensors[name])  # type: ignore[arg-type]
        if note is not None:
            tensor = note.stored.read(note.key, tensor, torch.device("cpu"))  # type: ignore[arg-type]
        elif tensor.is_meta:
            raise nothing_to_save(name)
        found[name] = tensor.detach().cpu()
    return found


# -- files -------------------------------------------------------------------------------------------------------------


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class _Traced(TorchFunctionMode):
    """A mode that records from which weights each tensor is made, starting with stand-ins for the weights."""

    def __init__(self, stand_ins: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._known = {id(t): (t, frozenset({name})) for name, t in stand_ins.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        used = [self.sources(tensor) for tensor in tree.tensors((args, kwargs))]
        if names := frozenset().union(*used):
            for made in tree.tensors(result):
                self._known.setdefault(id(made), (made, names))
        return result

    def sources(self, tensor: Tensor) -> frozenset[str]:
        """Return the names of the weights from which a tensor was made."""
        return self._known[id(tensor)][1] if id(tensor) in self._known else frozenset()


def _write(model: Any, folder: str | Path, fetch: _Fetch, merge: bool, options: Mapping[str, Any]) -> None:
    """Make transformers or peft write all files of a model."""
    if merge:
        merging = _Merging(model)
        model, fetch = merging.model, merging.fetching(fetch)
    state = model.state_dict(keep_vars=True)
    state = {name: _stand_in(t) if isinstance(t, Tensor) else t for name, t in state.items()}
    traced = _Traced({name: t for name, t in state.items() if isinstance(t, Tensor)})
    writer: Any = sys.modules["peft.peft_model" if _of_peft(model) else "transformers.modeling_utils"]
    write, convert = writer.safe_save_file, getattr(writer, "revert_weight_conversion", None)
    converts: list[bool] = []

    def converting(*args: Any) -> Any:
        converts.append(True)
        # not views of one tensor: the size of the memory counts when shards are made
        return {key: torch.empty_like(t, memory_format=torch.contiguous_format) for key, t in convert(*args).items()}  # type: ignore[misc]

    def write_shard(shard: Mapping[str, Tensor], path: str, metadata: Any = None) -> None:
        sources = {key: traced.sources(t) for key, t in shard.items()}
        contents = fetch(sorted(frozenset().union(*sources.values())))
        if converts:
            contents = convert(model, contents)  # type: ignore[misc]
        else:
            contents = {key: contents[name] for key, (name, *more) in sources.items() if not more}
        for key, t in shard.items():
            if key not in contents or contents[key].shape != t.shape:
                raise AvgPipeError(
                    f"'{key}' of {type(model).__name__} is made from {sorted(sources[key])}, which cannot be done a "
                    "shard at a time" + ("; save with save_original_format=False" if converts else "")
                )
        write({key: contents[key].contiguous() for key in shard}, path, metadata=metadata)

    with traced, replaced(writer, "safe_save_file", write_shard):
        if convert is None:
            model.save_pretrained(folder, state_dict=state, **options)
            return
        with replaced(writer, "revert_weight_conversion", converting):
            model.save_pretrained(folder, state_dict=state, **options)


class _Merging:
    """A model with its adapters merged by peft, one layer at a time.

    Args:
        adapted: model of peft, which does not change.

    Attributes:
        model: the merged model, on the meta device.
    """

    def __init__(self, adapted: Any) -> None:
        tensors = dict([*adapted.named_parameters(), *adapted.named_buffers()])
        on_meta = {id(t): _like(t, _stand_in(t)) for t in tensors.values()}
        self._names = {id(on_meta[id(t)]): name for name, t in tensors.items()}
        self._layers = dict(_layers(adapted.get_base_model(), ""))
        prefix = next(name for name, module in adapted.named_modules() if module is adapted.get_base_model())
        self._of_layer = {
            path: {name: f"{prefix}.{path}.{name}" for name in layer.state_dict()}
            for path, layer in self._layers.items()
        }
        self._on_meta = on_meta  # kept alive, because other objects could get their ids
        self.model = copy.deepcopy(adapted, dict(on_meta)).merge_and_unload()
        ends = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if None not in ends and ends[0].weight is not ends[1].weight:
            self.model.config.tie_word_embeddings = False

    def fetching(self, fetch: _Fetch) -> _Fetch:
        """Return a function that fetches merged weights; ``fetch`` fetches weights of the adapted model."""

        def merged(names: Collection[str]) -> dict[str, Tensor]:
            plain = self.model.state_dict(keep_vars=True)
            layer_of = {name: path for name in names for path in self._layers if is_within(name, path)}
            alone = {name: self._names[id(plain[name])] for name in names if name not in layer_of}
            asked = {own for path in layer_of.values() for own in self._of_layer[path].values()}
            contents = fetch(sorted(asked.union(alone.values())))
            found = {name: contents[own] for name, own in alone.items()}
            for path in dict.fromkeys(layer_of.values()):
                own = {name: contents.pop(full) for name, full in self._of_layer[path].items()}
                layer = _merged(self._layers[path], own)
                whole = {f"{path}.{name}": t for name, t in layer.state_dict().items()}
                found |= {name: whole[name] for name in names if layer_of.get(name) == path}
            return found

        return merged


def _layers(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that peft replaces when it merges, with their paths."""
    if hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer"):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _layers(child, f"{path}.{name}".lstrip("."))


def _merged(layer: Any, contents: Mapping[str, Tensor]) -> nn.Module:
    """Return the layer with which peft replaces a layer when it merges, with new memory for its contents."""
    tensors = layer.state_dict(keep_vars=True)
    own = {id(t): _like(t, contents[name].clone()) for name, t in tensors.items() if isinstance(t, Tensor)}
    made = copy.deepcopy(layer, own)
    if hasattr(made, "unload_and_optionally_merge_module"):
        return made.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    made.merge()
    return made.get_base_layer()


def _like(tensor: Tensor, contents: Tensor) -> Tensor:
    """Return contents as a parameter, if the tensor is one."""
    return nn.Parameter(contents, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else contents
