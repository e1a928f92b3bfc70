"""Which engines form a data-parallel group, and in which generation of it: a hash in Redis (decision 0088)."""
