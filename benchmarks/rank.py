"""The program of each process that ``harness.launch`` starts: it calls a function and stores the result."""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import be_quiet


def main(folder: Path, script: str) -> None:
    """Call the function of the file ``call``, as a process that torchrun has started; quiet, and with one thread.

    Args:
        folder: where the call is, and where the result goes, under the number of the rank.
        script: what the launching process runs, in which the function may be defined; "": nothing that can be loaded.
    """
    be_quiet()
    if script:
        multiprocessing.spawn.import_main_path(script)
    function, arguments = pickle.loads((folder / "call").read_bytes())
    result = function(*arguments)
    (folder / os.environ["RANK"]).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
