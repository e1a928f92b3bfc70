"""A claimed request in the worker process: its prompt becomes tokens, and generated tokens become deltas."""
