"""The partitions of its model, as a worker process serves them."""
