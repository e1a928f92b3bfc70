"""Converts images into features that replace placeholder tokens of a prompt."""
