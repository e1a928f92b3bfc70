"""The blocks of the KV cache: which request holds which, which are shared, which is taken next."""
