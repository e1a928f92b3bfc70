"""Commands on engines, and on what they serve."""
