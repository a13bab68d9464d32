"""Weights and where they are: owners, tied copies, weights that nobody holds yet."""
