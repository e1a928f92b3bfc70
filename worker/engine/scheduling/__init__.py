"""Which tokens of which requests the next step computes: requests, their order, KV-cache blocks, ends. No torch."""
