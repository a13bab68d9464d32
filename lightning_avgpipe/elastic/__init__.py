"""Elastic averaging: parallel models of one module, and the reference model that holds them together."""
