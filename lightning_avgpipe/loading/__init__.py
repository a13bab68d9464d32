"""Loading: models whose weights lie in files, of which each process reads its own stages only."""

from lightning_avgpipe.loading.pretrained import from_pretrained

__all__ = ["from_pretrained"]
