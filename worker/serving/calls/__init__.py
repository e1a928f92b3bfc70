"""Control calls that a worker process answers."""
