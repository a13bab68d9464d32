"""Planners that decide from numbers alone: which units on which devices, with how many replicas."""
