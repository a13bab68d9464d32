"""Changes of a model whose weights have not been read yet: adapters of peft are supported, resizing is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_avgpipe.capture.tracer import METADATA
from lightning_avgpipe.errors import AvgPipeError, ConfigurationError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.torch_compat import version_of
from lightning_avgpipe.weights.initialisation import note_of
from lightning_avgpipe.weights.ownership import fill


def keep_adapters() -> None:
    """Patch peft to keep new adapters on the host: moved to their layer on meta, they would lose their contents."""
    from peft import peft_model
    from peft.tuners import tuners_utils
    from transformers.integrations.peft import PeftAdapterMixin

    base: Any = tuners_utils.BaseTuner
    model: Any = peft_model.PeftModel
    mixin: Any = PeftAdapterMixin
    if hasattr(base.inject_adapter, "__wrapped__"):
        return
    load = _kept(model.load_adapter)

    @functools.wraps(load)
    def load_adapter(adapted: Any, *args: Any, **kwargs: Any) -> Any:
        hook = adapted.register_load_state_dict_pre_hook(_take)
        try:
            return load(adapted, *args, **kwargs)
        finally:
            hook.remove()

    base.inject_adapter, model.__init__ = _kept(base.inject_adapter), _kept(model.__init__)
    model.add_adapter, model.load_adapter = _kept(model.add_adapter), load_adapter
    base.merge_adapter, base.merge_and_unload = _unmerged(base.merge_adapter), _unmerged(base.merge_and_unload)
    mixin.load_adapter = _kept(mixin.load_adapter)  # transformers' own method, which reads to the model's device


def refuse_resizing() -> None:
    """Patch transformers to refuse resizing an embedding that has not been read: the new one is made from the old."""
    from transformers import PreTrainedModel

    model: Any = PreTrainedModel
    if not hasattr(model.resize_token_embeddings, "__wrapped__"):
        model.resize_token_embeddings = _kept(model.resize_token_embeddings, _not_resized)


def _without_numbers(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what or 'the adapter'} has no numbers: the weights of the model are read when the stages are known, but "
        "peft changes them when it creates adapters (init_lora_weights='pissa'), computes with 4-bit weights "
        "(use_dora), or puts adapters on their device. Use init_lora_weights=True or 'gaussian', no use_dora with 4 "
        "bits, and leave low_cpu_mem_usage out; read adapters with PeftModel.from_pretrained(model, folder, "
        "is_trainable=True)"
    )


def _not_resized(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"resize_token_embeddings() makes {what or 'the new embedding'} from weights that are read only when the "
        "stages are known. Do this first on one process, with transformers: read the model, resize it, and write it "
        "with save_pretrained; then give that folder to lightning_avgpipe.from_pretrained"
    )


def _kept(
    method: Callable[..., Any], refusal: Callable[[str], ConfigurationError] = _without_numbers
) -> Callable[..., Any]:
    """Wrap a method so that tensors that it makes for a model whose weights have not been read stay on the host.

    Args:
        method: method of a model of peft or transformers.
        refusal: makes the error if a parameter cannot be made without those weights, from its name; "" if unknown.
    """

    @functools.wraps(method)
    def keep(owner: Any, *args: Any, **kwargs: Any) -> Any:
        model: nn.Module = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, nn.Module)), owner)
        if not any(note_of(parameter) for parameter in model.parameters()):
            return method(owner, *args, **kwargs)
        try:
            with _OnHost():
                result = method(owner, *args, **kwargs)
        except AvgPipeError:  # raised by a wrapped method within this one
            raise
        except RuntimeError as error:  # raised by torch, which cannot compute with tensors on meta
            raise refusal("") from error
        for name, parameter in owner.named_parameters():
            if parameter.is_meta and note_of(parameter) is None:
                raise refusal(f"'{name}'")
        return result

    return keep


def _unmerged(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of peft that merges adapters, to refuse a merge into weights that have not been read."""

    @functools.wraps(method)
    def merge(tuner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if any(note_of(parameter) for parameter in tuner.parameters()):
            raise ConfigurationError(
                f"{method.__name__}() writes into weights that are read only when the stages are known. Write the "
                "merged model first (lightning_avgpipe.save_pretrained(model, folder, merge=True)), and read that "
                "folder with from_pretrained"
            )
        return method(tuner, *args, **kwargs)

    return merge


def _take(model: nn.Module, state: Mapping[str, Tensor], prefix: str, *_: Any) -> None:
    """Fill weights that are trained as a whole (modules_to_save) and not read yet from a file of adapters."""
    for name, parameter in model.named_parameters():
        value = state.get(prefix + name)
        if note_of(parameter) and value is not None and value.shape == parameter.shape:
            fill(parameter, value.to("cpu", parameter.dtype, copy=True))


_HOST = torch.device("cpu")
_OF_FORM = METADATA | {
    Tensor.requires_grad_, Tensor.requires_grad.__set__, Tensor.data.__get__, Tensor.data.__set__,  # type: ignore[attr-defined]
}  # fmt: skip


class _OnHost(TorchFunctionMode):
    """A mode in which new tensors stay on the host.

    Tensors with contents stay there if they are moved to meta. Functions that compute with a weight that has not been
    read get the contents of its file for that call only, since peft computes with one layer after another.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and not args[0].is_meta:
            moved = func(*args, **kwargs)
            return args[0].to(moved.dtype) if moved.is_meta else moved
        if func in _OF_FORM or (func is Tensor.to and not _leaves_meta(*args[1:], **kwargs)):
            return func(*args, **kwargs)
        read: list[tuple[Tensor, int]] = []

        def contents(tensor: Tensor) -> Tensor:
            note = note_of(tensor)  # type: ignore[arg-type]
            if note is None:
                return tensor
            found = note.stored.read(note.key, tensor, _HOST)  # type: ignore[arg-type]
            read.append((found, version_of(found)))
            return found

        result = func(*tree.map_tensors(contents, args), **tree.map_tensors(contents, kwargs))
        if any(version_of(tensor) != version for tensor, version in read):
            raise _without_numbers("")  # the function wrote into a weight, which would be lost
        return result


def _leaves_meta(*args: Any, **kwargs: Any) -> bool:
    """Return whether ``Tensor.to`` with these arguments moves a tensor from meta to another device."""
    try:
        torch.empty(0, device="meta").to(*args, **kwargs)
    except NotImplementedError:  # torch cannot copy from meta
        return True
    return False
