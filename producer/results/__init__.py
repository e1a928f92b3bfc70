"""What a caller gets of a request, in vLLM's shapes."""
