"""A training script that a command runs, to read what it reports."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path


def add_script(parser: argparse.ArgumentParser, trains: str) -> None:
    """Arguments that name a script, and those of it.

    Args:
        parser: of the command.
        trains: what the script does.
    """
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help=f"that trains with {trains}")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def report_of(options: argparse.Namespace, environment: Callable[[str], Mapping[str, str]]) -> tuple[str | None, int]:
    """Run the script to its end.

    Args:
        options: as of :func:`add_script`.
        environment: of the script, for the path that its report is to have.
    Returns:
        The report, None if there is none; and the exit status.
    """
    command = ["-m", options.script] if options.module else [options.script]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.txt"
        code = subprocess.call([sys.executable, *command, *options.arguments], env=environment(str(report)))
        return report.read_text() if report.exists() else None, code


def at_least_one(text: str) -> int:
    """A whole number of an argument."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
