"""Explanations of a difference that verification has found: likely causes, and what to do."""

from __future__ import annotations

_STATE = (
    "the step reads or changes something outside of parameters, buffers and attributes (a global, a list or object "
    "that was made elsewhere)"
)
_CAUSES = {
    "the loss": f"{_STATE}, or draws random numbers in a way of its own; or a stage got another value than was made",
    "the gradient": "a gradient was lost, counted twice or weighted otherwise on its way through the stages; or a hook "
    "of a tensor did not run, or ran on another stage",
    "the clipped gradient": "the norm was not that of all stages, or gradients were changed after it was taken",
    "the weight after the optimizer step": "the optimizer looks at all parameters at once (a norm over the model), of "
    "which each process has a part; or something else changes weights",
    "the weight before any optimizer step": "the step itself changes weights, which only the stage sees that runs the "
    "line, or which happens on several",
    "the buffer": "code between submodules changes it on several stages or on none",
    "the attribute": "code between submodules changes it on several stages or on none; such code runs on every stage",
    "the logged value": "it was logged with another weight, or not by every micro-batch",
}
_WHAT_TO_DO = (
    "What to do: keep the submodule that is named, and what it works with, on one stage with split_points; make what "
    "changes a registered buffer of the submodule that changes it; or train with strategy='auto' meanwhile, and report "
    "this message. verify=False turns this check off."
)


_COMPILED = (
    "Something ran compiled by torch.compile, perhaps within a library: the pipeline runs it uncompiled where it is "
    "part of a module that was cut or draws random numbers, and the compiler rounds otherwise. If the difference is "
    "that small, verify again with TORCH_COMPILE_DISABLE=1 in the environment, where nothing is compiled. "
)


def advice(kind: str, compiled: bool = False) -> str:
    """Return the likely causes of a difference, and what to do.

    Args:
        kind: kind of the difference, such as "the gradient".
        compiled: whether anything ran compiled by torch.compile.
    """
    cause = _CAUSES.get(kind, f"{_STATE}, or capturing it was not put back whole")
    return f"Likely: {cause}. {_COMPILED if compiled else ''}{_WHAT_TO_DO}"
