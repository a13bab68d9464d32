"""Tuning: predict time and memory of settings from a profile, and search the best one within the memory limit."""

from lightning_avgpipe.tuning.predictors import PREDICTORS, Corrected, Paper, Prediction, Predictor, Simulator
from lightning_avgpipe.tuning.profile import (
    TUNED,
    Curve,
    Device,
    HopProfile,
    OtherSize,
    Profile,
    Setting,
    StageMemory,
    StageProfile,
    Trial,
)
from lightning_avgpipe.tuning.search import Candidate, Result, SamplesFactor, candidates, microbatch_counts, search

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
