"""Weights that no process holds yet: parameters on the meta device, initialised or read from files part by part.

Each module is initialised by itself, by the usual conventions: its ``reset_parameters()``, then
``_init_weights(module)`` of the nearest module above it that has one (transformers, nanoGPT). Then its parent may
adjust the result (scaled residual projections; ``nn.MultiheadAttention``). Random numbers are seeded by (seed, path of
the module), so the weights depend neither on the number of stages nor on the process or the order.

Nothing is written into the module itself: it is initialised in a shadow, an object that shares everything else with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.zeros import zeros_like
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.names import around, joined
from lightning_avgpipe.utils.random_streams import RandomKey, stream
from lightning_avgpipe.utils.torch_compat import version_of


def on_meta(module: nn.Module) -> bool:
    """Return whether any parameter or buffer of a module has no contents on this process."""
    return any(t.is_meta for t in (*module.parameters(), *module.buffers()))


class Origin:
    """The source of parameters and buffers that no process holds yet: initialisation, or a checkpoint.

    Args:
        module: whole module.
        seed: seed of the run, the same on all ranks.
        device: device on which to initialise.
        loaded: entries of a checkpoint, which take precedence over initialisation; they may be mapped from a file.
        held: names of the parameters that some process holds.
        only_examples: whether no process will train with the contents, so that zeros suffice.
    Raises:
        ConfigurationError: a module with contents on meta has no method that initialises it.
    """

    def __init__(
        self,
        module: nn.Module,
        seed: int,
        device: torch.device,
        loaded: Mapping[str, Tensor] | None = None,
        held: Collection[str] = (),
        only_examples: bool = False,
    ) -> None:
        self._module = module
        self.only_examples = only_examples
        self._seed = seed
        self._device = device
        self._names = {id(p): name for name, p in module.named_parameters()}
        aliases = {name: self._names[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
        self._loaded = {aliases.get(name, name): tensor for name, tensor in (loaded or {}).items()}
        self._notes = {name: note for name, p in module.named_parameters() if (note := note_of(p)) is not None}
        self._known = frozenset((*self._loaded, *self._notes, *held))  # names of what need not be initialised
        self._check()
        self._check_unwritten()

    def tensors(self, names: Collection[str], example: bool = False) -> dict[str, Tensor]:
        """Return the contents of some parameters, on the device.

        Args:
            names: full names, as in ``named_parameters()``.
            example: whether other numbers may replace what is in files, because a step is only captured with them.
        """
        found: dict[str, Tensor] = {}
        for name in names:
            if name in found:
                continue
            parameter, path = self._module.get_parameter(name), name.rpartition(".")[0]
            if self.only_examples and type(parameter) is nn.Parameter:  # subclasses have more than contents
                found[name] = zeros_like(parameter, self._device)
            elif name in self._loaded:
                found[name] = self._read(name, parameter)
            elif (note := self._notes.get(name)) is not None:
                found[name] = note.stored.read(note.key, parameter, self._device, example)
            else:
                for leaf, tensor in self._initialised(path)._parameters.items():
                    full = joined(path, leaf)
                    if tensor is not None and full in names and full not in self._loaded and full not in self._notes:
                        found[full] = tensor.detach()
        return found

    def forget_examples(self) -> None:
        """Remove what reading examples has attached to parameters without contents."""
        for name, note in self._notes.items():
            if (parameter := self._module.get_parameter(name)).is_meta:
                note.stored.forget(parameter)

    def fill_buffers(self) -> None:
        """Fill all buffers without contents, on every process: any of them may compute what uses only the batch."""
        for path, module in self._module.named_modules():
            absent = {joined(path, leaf): leaf for leaf, b in module._buffers.items() if b is not None and b.is_meta}
            filled = module if absent.keys() <= self._loaded.keys() else self._initialised(path)
            for name, leaf in absent.items():
                loaded = self._read(name, module.get_buffer(leaf)) if name in self._loaded else None
                module._buffers[leaf] = filled._buffers[leaf] if loaded is None else loaded

    def _read(self, name: str, target: Tensor) -> Tensor:
        return self._loaded[name].detach().to(self._device, target.dtype, copy=True)

    # -- initialisation ----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        helpless = {}
        for path, module in self._module.named_modules():
            absent = [joined(path, leaf) for leaf in self._absent(path, module)]
            if absent:
                self._check_not_lost(absent[0])
                if not self._ways(path, module):
                    helpless[type(module).__name__] = absent[0]
        if helpless:
            found = "; ".join(f"{kind} (such as '{name}')" for kind, name in helpless.items())
            raise ConfigurationError(
                "These modules own parameters or buffers on the meta device, and cannot initialise them: "
                f"{found}. Define reset_parameters() in their classes, which initialises what they own directly, or "
                "_init_weights(module) in a module above; or load all weights with ckpt_path; or build them outside "
                "of torch.device('meta')"
            )

    def _absent(self, path: str, module: nn.Module) -> list[str]:
        """Return the names of tensors that a module owns directly, and that only initialisation can make."""
        absent = {joined(path, leaf): leaf for leaf, tensor in _own(module).items() if tensor.is_meta}
        return [leaf for name, leaf in absent.items() if name not in self._known]

    def _check_not_lost(self, name: str) -> None:
        """Raise ConfigurationError if a parameter to initialise may have replaced one that is in files."""
        used = {note.key for note in self._notes.values()}
        lost = next((key for note in self._notes.values() for key in note.stored.keys if key not in used), None)
        if lost is not None:
            raise ConfigurationError(
                f"'{name}' is on the meta device and in no file, while '{lost}' of the files is no longer in the "
                "module: replacing a parameter whose contents are not read yet (resize_token_embeddings) loses them. "
                "Change the model on one process first, and write it with save_pretrained; or build what is new "
                "outside of torch.device('meta')"
            )

    def _check_unwritten(self) -> None:
        """Raise ConfigurationError if a parameter was written into before the run, because that would be lost."""
        for name, note in self._notes.items():
            parameter = self._module.get_parameter(name)
            if note.version not in (None, version_of(parameter)) and name not in self._loaded:
                raise ConfigurationError(
                    f"'{name}' was written into (load_state_dict, torch.nn.init) before its contents are read from its "
                    "file, which happens when the stages are known: what was written would be lost. Give a checkpoint "
                    "to the trainer (ckpt_path=...), assign its tensors (load_state_dict(..., assign=True)), or change "
                    "the model on one process first, and write it with save_pretrained"
                )
            setattr(parameter, _NOTE, replace(note, version=None))  # from now on hooks may write into it

    def _ways(self, path: str, module: nn.Module) -> list[Callable[[Any], object]]:
        """Return the functions that initialise a module, in the order in which to call them."""
        ways: list[Callable[[Any], object]] = []
        if isinstance(module, nn.MultiheadAttention):
            ways.append(nn.MultiheadAttention._reset_parameters)
        elif callable(getattr(type(module), "reset_parameters", None)):
            ways.append(type(module).reset_parameters)  # type: ignore[attr-defined]
        # the module's own _init_weights counts too: models of transformers own parameters such as class tokens
        owners = (self._module.get_submodule(above) for above in (path, *around(path)))
        inits = (getattr(owner, "_init_weights", None) for owner in owners)
        return ways + [init for init in inits if callable(init)][:1]

    def _initialised(self, path: str) -> nn.Module:
        """Return a shadow of a module, with all tensors that the module owns directly initialised."""
        module = self._module.get_submodule(path)
        shadow = _shadow(module, lambda tensor: _blank(tensor, self._device))
        blank = {leaf: (tensor, version_of(tensor)) for leaf, tensor in _own(shadow).items()}
        # Initialisation may use the default device, and must not change the random numbers of other code.
        with torch.no_grad(), stream(RandomKey(self._seed).derive(f"init:{path}"), self._device), self._device:
            for way in self._ways(path, module):
                way(shadow)
            if path:
                self._let_parent_adjust(path, shadow)
        self._check_complete(path, shadow, {leaf: blank[leaf] for leaf in self._absent(path, module)})
        return shadow

    def _let_parent_adjust(self, path: str, child: nn.Module) -> None:
        above, _, leaf = path.rpartition(".")
        parent = self._module.get_submodule(above)
        shadow = _shadow(parent, _without_contents)
        shadow._modules = {  # other children are without contents, so that writes into them change nothing
            name: child if name == leaf else _empty(other) for name, other in parent._modules.items()
        }
        if isinstance(parent, nn.MultiheadAttention):
            parent_ways: list[Callable[[Any], object]] = [nn.MultiheadAttention._reset_parameters]
        else:  # by convention reset_parameters() of the parent initialises only its own tensors
            parent_ways = [w for w in self._ways(above, parent) if getattr(w, "__name__", "") == "_init_weights"]
        for way in parent_ways:
            way(shadow)

    def _check_complete(self, path: str, shadow: nn.Module, blank: Mapping[str, tuple[Tensor, int]]) -> None:
        """Raise ConfigurationError if initialisation has left elements unset.

        Args:
            path: path of the module.
            shadow: initialised shadow of the module.
            blank: tensors that had to be initialised, as they were before, with their versions.
        """
        for leaf, tensor in _own(shadow).items():
            if leaf not in blank or not tensor.numel():
                continue
            before, version = blank[leaf]
            # writes through .data leave the version as it is, so zeros are checked as well
            unwritten = tensor is before and version_of(tensor) == version and not tensor.any()
            if bool(tensor.isnan().any()) if tensor.is_floating_point() else unwritten:
                raise ConfigurationError(
                    f"Initialising {type(shadow).__name__} '{path}' left numbers in '{leaf}' unset: its "
                    "reset_parameters(), or _init_weights(module) of a module above, must initialise all that it owns "
                    "directly, or it must not be built on the meta device"
                )


def _shadow(module: nn.Module, own: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return an object like the module, whose own parameters and buffers are replaced by the results of ``own``."""
    shadow = object.__new__(type(module))
    vars(shadow).update(vars(module), _modules=dict(module._modules))
    for name in ("_parameters", "_buffers"):
        registry = getattr(module, name)
        vars(shadow)[name] = {leaf: tensor if tensor is None else own(tensor) for leaf, tensor in registry.items()}
    return shadow


def _own(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that a module owns directly."""
    return {leaf: t for leaf, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}


def _empty(module: nn.Module | None) -> nn.Module | None:
    """Return a shadow of a module and its children on meta, so that writes into it have no effect."""
    if module is None:
        return None
    shadow = _shadow(module, _without_contents)
    shadow._modules = {name: _empty(child) for name, child in module._modules.items()}
    return shadow


def _without_contents(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _blank(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of this form, filled with NaN, so that elements that stay unset are found.

    Types without NaN are filled with zeros; for them it can only be found whether the tensor was written into at all.
    """
    blank = torch.empty_like(tensor, device=device, requires_grad=False)
    if blank.is_floating_point():
        blank.fill_(float("nan"))
    else:
        blank.zero_()
    return nn.Parameter(blank, requires_grad=False) if isinstance(tensor, nn.Parameter) else blank


# -- notes at parameters on meta: they say where the contents are, until it is known which process reads them ----------
# A note stays with the parameter object, whatever name or module the parameter gets later; a deep copy has it too.
_NOTE = "_avgpipe_note"


class Stored(Protocol):
    """A store of weights, each under a key."""

    @property
    def keys(self) -> Collection[str]:
        """The keys of all parameters that have a note."""

    def read(self, key: str, parameter: nn.Parameter, device: torch.device, example: bool = False) -> Tensor:
        """Read the contents of a parameter into new memory.

        Args:
            key: key in the note of the parameter.
            parameter: parameter with the note.
            device: device of the contents.
            example: whether other numbers suffice, because a step is only captured with them.
        """

    def forget(self, parameter: nn.Parameter) -> None:
        """Remove what reading an example has attached to a parameter without contents."""


@dataclass(frozen=True)
class Note:
    """A note that says where the contents of a parameter are.

    Attributes:
        stored: store that has the contents.
        key: key of the parameter in the store.
        version: version of the parameter when the note was left, to detect later writes; None once a run has begun.
    """

    stored: Stored
    key: str
    version: int | None = None


def leave_note(parameter: nn.Parameter, stored: Stored, key: str) -> None:
    """Leave a note at a parameter."""
    setattr(parameter, _NOTE, Note(stored, key, version_of(parameter)))
    _have_copies_noted(type(parameter))


@functools.cache
def _have_copies_noted(kind: Any) -> None:
    """Make deep copies of a class's parameters keep their notes; without them they would be initialised anew."""
    copy = kind.__deepcopy__

    @functools.wraps(copy)
    def noted(parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
        copied, note = copy(parameter, memo), note_of(parameter)
        if note is not None:
            version = note.version
            if version is not None:  # the copy must count as written into if the original does
                version += version_of(copied) - version_of(parameter)
            setattr(copied, _NOTE, replace(note, version=version))
        return copied

    kind.__deepcopy__ = noted


def note_of(parameter: nn.Parameter) -> Note | None:
    """Return the note at a parameter without contents, or None if it has none."""
    return getattr(parameter, _NOTE, None) if parameter.is_meta else None
