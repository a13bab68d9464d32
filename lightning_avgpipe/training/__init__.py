"""A training: its deployment on processes, its schedule, clipping, loss scale and state."""
