"""The results of a request that a caller receives, in vLLM's forms."""
