"""Utilities that do not depend on pipelining: trees, tensors, devices, random numbers, processes, other packages."""
