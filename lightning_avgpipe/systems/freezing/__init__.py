"""Freezing: the callback ``AdaptiveFreezing`` freezes more of a model's first layers from epoch to epoch.

``callback`` has it, ``order`` says which layers are frozen next, ``kept_outputs`` caches the outputs of frozen layers,
and ``halving`` plans fewer stages with several processes each.

Source: PipeTransformer, He et al., ICML 2021.
"""
