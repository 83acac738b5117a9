"""vLLM plugin of DFlash Serve. Importing the package imports nothing else; see `plugin.py` for the layout."""

__version__ = "0.1.0"
