"""Elastic averaging: parallel models of one module, and the reference model that keeps them close to each other."""
