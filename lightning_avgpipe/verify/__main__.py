"""Verify a training script without changing it: ``python -m lightning_avgpipe verify train.py fit --config x.yaml``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_avgpipe.utils.script import add_script, at_least_one, report_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script, in which every AvgPipeStrategy verifies, until its first training is verified; print the verdict.

    Returns:
        0 if everything that was compared is equal; 1 if something differs, or if nothing was compared.
    """
    options = _parser().parse_args(arguments)
    verdict, code = report_of(options, "verify", steps=options.steps)
    if verdict is not None and code == 0:
        print(verdict)
        return 0
    if verdict is not None:
        print(f"{verdict}\nbut the script ended with exit status {code}", file=sys.stderr)
    elif code:
        print(f"not verified: the script ended with exit status {code}; its error is above", file=sys.stderr)
    else:
        print(
            "nothing was verified: the script ended without training with the strategy 'avgpipe', or before "
            f"{options.steps} optimizer steps",
            file=sys.stderr,
        )
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_avgpipe verify",
        description="Run a training script, repeat the batches of its first optimizer steps without a pipeline, in one "
        "process, compare losses, gradients, weights, buffers and logged values by name, and end.",
    )
    parser.add_argument(
        "--steps", type=at_least_one, default=2, metavar="N", help="optimizer steps to verify (default: 2)"
    )
    add_script(parser, "AvgPipeStrategy or strategy='avgpipe'")
    return parser


if __name__ == "__main__":
    sys.exit(main())
