"""The ways of computing a transformers model over the paged KV cache, but the lean one; which of them serves."""
