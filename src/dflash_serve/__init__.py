"""DFlash Serve: recipes, shapes, overlays, patches and proof for DFlash2 speculative decoding on vLLM."""

from dflash_serve.version import __version__

__all__ = ["__version__"]
