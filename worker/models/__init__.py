"""Loading transformers models and running them over the paged KV cache."""
