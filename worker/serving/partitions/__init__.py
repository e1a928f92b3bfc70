"""The partitions of a model that a worker process serves."""
