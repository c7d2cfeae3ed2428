"""Bounded caches of rows over the tiers below: index, policy, hot rows, front."""

from .chain import open_chain
from .front import Front
from .policy import POLICIES

__all__ = ["POLICIES", "Front", "open_chain"]
