"""Utilities that do not depend on pipelining: trees, objects, tensors, devices, versions of other packages."""
