"""Freezing: more of a model's first layers from epoch to epoch, while it is fine-tuned, with `AdaptiveFreezing`.

Source: PipeTransformer, He et al., ICML 2021.
"""
