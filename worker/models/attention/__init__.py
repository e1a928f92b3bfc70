"""Attention over the paged KV cache: the call of the kernels, pages, and the caches."""
