"""A claimed request on its way through the worker process: from its words to tokens, from tokens to deltas."""
