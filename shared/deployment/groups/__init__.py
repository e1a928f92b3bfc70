"""The engines of a data-parallel group, by its generations: a hash in Redis (ops/decisions/data_parallel.md)."""
