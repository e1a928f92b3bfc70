"""Engines whose ranks share experts and step together: when they step, and when they are idle (decision 0088)."""
