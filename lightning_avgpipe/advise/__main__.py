"""Advise on a training script: ``python -m lightning_avgpipe advise --devices 2 4 8 train.py fit --config x.yaml``.

With ``--meta`` the advice is the memory of each device, for a model that fits no device at hand.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from lightning_avgpipe.utils.script import add_script, at_least_one, before_script, report_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script until its first batch has trained, with ``--meta`` until it has been read, and print the advice.

    Returns:
        0 if there is advice, otherwise 1.
    """
    options = _parser().parse_args(before_script(sys.argv[1:] if arguments is None else arguments))
    asked = {"devices": options.devices, "megabits": options.megabits, "meta": options.meta}
    advice, code = report_of(options, "advise", **asked)
    if advice is not None:
        print(advice)
        return 0
    if code:
        print(f"no advice: the script ended with exit status {code}; its error is above", file=sys.stderr)
    else:
        measured = "" if options.meta else " and costs='measured', the default"
        print(
            "no advice: the script ended without a plan to advise on; it needs 'avgpipe', num_stages above 1"
            f"{measured}",
            file=sys.stderr,
        )
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_avgpipe advise",
        description="Run a training script until its first batch has trained, and predict from the measured costs of "
        "its units what a batch takes with ddp, one pipeline and parallel models, on more devices like this one.",
    )
    parser.add_argument("--devices", type=at_least_one, nargs="+", default=[2, 4, 8], help="how many (default: 2 4 8)")
    parser.add_argument(
        "--megabits", type=_rate, nargs="+", default=[100, 1000, 10000],
        help="per second, of each link between two of them (default: 100 1000 10000)",
    )  # fmt: skip
    parser.add_argument(
        "--meta", action="store_true",
        help="train nothing, and predict the memory of each device; of a model on the meta device no weights are made",
    )  # fmt: skip
    add_script(parser, "AvgPipeStrategy or strategy='avgpipe', on several stages")
    return parser


def _rate(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError("must be above 0, and finite")
    return number


if __name__ == "__main__":
    sys.exit(main())
