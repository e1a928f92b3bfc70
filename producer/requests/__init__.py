"""Client side of requests: from a caller's arguments into the queue, and their outputs back to the caller."""
