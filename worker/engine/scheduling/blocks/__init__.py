"""Blocks of the KV cache: which requests hold and share them, and which block is allocated next."""
