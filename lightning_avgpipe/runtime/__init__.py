"""What runs: replay of stages, channels between them, the executor. Knows nothing of Lightning."""
