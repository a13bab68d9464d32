"""The Lightning strategy, and the changes that it makes to a Trainer while a pipeline runs."""
