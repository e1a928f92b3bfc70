"""What a client may know and do beside requests: engines, queues, models, text calls."""
