"""Processes and what connects them: the stage map, channels, collectives, the monitor. Knows nothing of models."""
