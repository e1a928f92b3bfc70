"""What a worker process tells of its engine and its requests: to Redis, supervisor, log and traces."""
