"""Commands: ``python -m lightning_avgpipe advise | verify | schedule``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from lightning_avgpipe.advise.__main__ import main as advise
from lightning_avgpipe.schedule.__main__ import main as schedule
from lightning_avgpipe.verify.__main__ import main as verify

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"advise": advise, "verify": verify, "schedule": schedule}
_USAGE = """usage: python -m lightning_avgpipe COMMAND ...

  advise     predict what a batch of a training script takes with ddp, pipelines and parallel models on more devices
  verify     compare the first optimizer steps of a training script with plain ones
  schedule   print, simulate and draw a schedule, without a model

python -m lightning_avgpipe COMMAND --help explains each."""


def main(arguments: Sequence[str]) -> int:
    """Run a command; returns its exit status, 2 where there is no such command."""
    name, *rest = arguments or [""]
    if name in COMMANDS:
        return COMMANDS[name](rest)
    asks = name in ("-h", "--help")
    print(_USAGE, file=sys.stdout if asks else sys.stderr)
    return 0 if asks else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
