"""The strategy for Lightning, and its changes in a Trainer while a pipeline runs."""
