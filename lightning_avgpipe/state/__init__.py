"""Find the state that user code can see and change, and take snapshots that compare and restore it."""
