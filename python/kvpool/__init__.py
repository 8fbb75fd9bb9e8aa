"""A distributed pool for the KV cache of large language models."""

from kvpool._native import __version__

__all__ = ["__version__"]
