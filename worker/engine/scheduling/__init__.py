"""Choose the tokens that the next step computes: requests, their order, KV-cache blocks, ends. Imports no torch."""
