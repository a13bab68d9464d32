"""What every room uses and nobody of this subject invented: trees, patching, source lines."""
