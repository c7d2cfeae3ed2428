"""Bounded caches of rows over the tiers below: index, policy, hot rows, front."""
