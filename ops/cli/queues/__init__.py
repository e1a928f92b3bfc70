"""Commands on queues and requests."""
