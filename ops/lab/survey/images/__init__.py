"""Models that read images, made small, against transformers' ``generate``."""
