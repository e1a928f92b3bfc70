"""A worker process whose engine is a rank of a data-parallel group: its place in Redis, and news of waves."""
