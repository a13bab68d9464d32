"""A user's training script that freezes layers: ``script.py FOLDER JSON``."""

import json
import sys
from pathlib import Path

from lightning_avgpipe import AdaptiveFreezing
from tests.script import main
from tests.systems.freezing.test_callback import FineTuned

if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    further = [AdaptiveFreezing(**options.pop("freezing"))] if "freezing" in options else []
    main(Path(sys.argv[1]), models=(FineTuned,), further=further, **options)
