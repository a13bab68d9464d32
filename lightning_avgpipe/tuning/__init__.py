"""Tuning: predict time and memory of settings from a profile, and search the best one within the memory limit."""

from lightning_avgpipe.tuning.predictors import PREDICTORS, Corrected, Paper, Prediction, Predictor, Simulator
from lightning_avgpipe.tuning.profile import (
    Curve,
    Device,
    HopProfile,
    OtherSize,
    Profile,
    StageMemory,
    StageProfile,
    Trial,
)
from lightning_avgpipe.tuning.samples import SamplesFactor
from lightning_avgpipe.tuning.search import Candidate, Result, candidates, microbatch_counts, search
from lightning_avgpipe.tuning.setting import TUNED, Setting

__all__ = [
    "PREDICTORS",
    "TUNED",
    "Candidate",
    "Corrected",
    "Curve",
    "Device",
    "HopProfile",
    "OtherSize",
    "Paper",
    "Prediction",
    "Predictor",
    "Profile",
    "Result",
    "SamplesFactor",
    "Setting",
    "Simulator",
    "StageMemory",
    "StageProfile",
    "Trial",
    "candidates",
    "microbatch_counts",
    "search",
]
