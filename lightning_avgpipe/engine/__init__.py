"""What runs: stages, their programs and replay, the executor. Knows nothing of Lightning."""
