"""Reports of a worker process about its engine and requests: to Redis, supervisor, log and traces."""
