"""Weights and where they are: owners, tied copies, versions, and weights that no process holds yet."""
