"""The language model through LightningCLI: python examples/cli.py fit --config configs/language_model.yaml"""

from language_model import LanguageModel, PythonSources
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(LanguageModel, PythonSources)
