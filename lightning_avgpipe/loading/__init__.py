"""Loading: models whose weights are in files, from which each process reads only its own stages."""

from lightning_avgpipe.loading.pretrained import from_pretrained

__all__ = ["from_pretrained"]
