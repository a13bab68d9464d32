"""Requests for verification: by the option ``verify``, or the command ``python -m lightning_avgpipe.verify``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.lightning import _TunerExitException, rank_zero_info
from lightning_avgpipe.utils.patching import nothing
from lightning_avgpipe.verify.subject import Subject
from lightning_avgpipe.verify.verifier import Verifier

STEPS = "AVGPIPE_VERIFY"  # environment variable: number of optimizer steps, after which the run ends
REPORT = "AVGPIPE_VERIFY_REPORT"  # environment variable: the file that gets the verdict

_DEFAULT = 2

Verify = bool | int | Literal["auto"]


def verifier(subject: Subject, verify: Verify) -> Verifier | None:
    """Return a verifier for a run of the trainer that fits; None if no verification is wanted."""
    commanded = int(os.environ.get(STEPS, 0))
    asked = bool(commanded) or verify != "auto"
    steps = commanded or (int(verify) if isinstance(verify, int) and verify is not True else _DEFAULT)
    return Verifier(subject, steps, asked, _end(subject) if commanded else nothing) if steps else None


def nothing_to_verify(verify: Verify) -> None:
    """Report that a run with one stage and one micro-batch has nothing to compare."""
    if _asked(verify):
        text = (
            "verify: there is nothing to compare, since here steps run whole, in one process, as with strategy='auto'"
        )
        rank_zero_info(text)
        _report(text)


def refuse(verify: Verify, reason: str) -> None:
    """Raise if a verification is asked for that is not possible.

    Raises:
        ConfigurationError: verification is asked for.
    """
    if _asked(verify):
        raise ConfigurationError(f"verify compares micro-batches with plain ones, but {reason}; use verify=False")


def end_of_run(verifier: Verifier | None) -> None:
    """End the script after the run that the command has verified."""
    if STEPS in os.environ and verifier is not None and verifier.succeeded:
        raise SystemExit(0)


def _end(subject: Subject) -> Callable[[str], None]:
    def end(text: str) -> None:
        if subject.cluster.world.rank == 0:
            _report(text)
        subject.cluster.world.barrier("the end of verification")
        raise _TunerExitException  # in all processes: Lightning ends the run as if it were done

    return end


def _report(text: str) -> None:
    path = os.environ.get(REPORT)
    if path:
        Path(path).write_text(text)


def _asked(verify: Verify) -> bool:
    return STEPS in os.environ or bool(verify and verify != "auto")
