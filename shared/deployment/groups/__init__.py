"""The engines of a data-parallel group, by its generations: a hash in Redis (decision 0088)."""
