"""Weights and where they are: owners, relocation, tied copies, and weights that no process holds yet."""
