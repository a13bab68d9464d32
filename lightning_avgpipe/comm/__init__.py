"""Processes and what joins them: who hosts which stage, channels, collectives, the monitor. Knows nothing of models."""
