"""Where rows live."""

from .ram import Ram

__all__ = ["Ram"]
