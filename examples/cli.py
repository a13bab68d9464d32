"""The language model through LightningCLI: python examples/cli.py fit --config configs/language_model.yaml"""

from language_model import LanguageModel, PythonSources
from lightning.pytorch.cli import LightningCLI

import lightning_avgpipe  # noqa: F401  makes "strategy: avgpipe" known; class paths need no import

if __name__ == "__main__":
    LightningCLI(LanguageModel, PythonSources)
