"""The modes that compute a transformers model over the paged KV cache through its own code."""
