"""Advice for a training script: the predicted time of a batch with ddp, one pipeline and parallel models."""
