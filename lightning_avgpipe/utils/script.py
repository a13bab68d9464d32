"""Running of a training script by a command of this package, which reads the script's report."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_script(parser: argparse.ArgumentParser, trains: str) -> None:
    """Add the arguments for a script, and for the script's own arguments, to a parser.

    Args:
        parser: parser of the command.
        trains: strategy with which the script must train, for the help text.
    """
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help=f"that trains with {trains}")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def before_script(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments, with ``--`` inserted before the script if an option's numbers come before it."""
    for i, this in enumerate(arguments):
        if not this.startswith("-") and not _is_number(this):  # the script
            after_number = i > 0 and _is_number(arguments[i - 1])
            return [*arguments[:i], *(["--"] if after_number else []), *arguments[i:]]
    return [*arguments]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def report_of(options: argparse.Namespace, command: str, **asked: Any) -> tuple[str | None, int]:
    """Run the script and wait for its end. A SIGTERM for this process is forwarded to it.

    Args:
        options: parsed arguments of :func:`add_script`.
        command: name of the command.
        asked: requests of the command to the script, which must be serializable to JSON.
    Returns:
        The report, or None if there is none; and the exit status.
    """
    script = ["-m", options.script] if options.module else [options.script]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.txt"
        environment = {**os.environ, _variable(command): json.dumps({**asked, "report": str(report)})}
        with subprocess.Popen([sys.executable, *script, *options.arguments], env=environment) as running:
            before = signal.signal(signal.SIGTERM, lambda *_: running.terminate())
            try:
                code = running.wait()
            finally:
                signal.signal(signal.SIGTERM, before)
        return report.read_text() if report.exists() else None, code


def asked_by(command: str) -> dict[str, Any] | None:
    """Return the requests of a command to this process, and the path of the report; None if no command runs it."""
    text = os.environ.get(_variable(command))
    return None if text is None else json.loads(text)


def _variable(command: str) -> str:
    return f"AVGPIPE_{command.upper()}"


def at_least_one(text: str) -> int:
    """Parse an argument that is an integer of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
