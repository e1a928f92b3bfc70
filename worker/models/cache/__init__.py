"""What layers keep for requests: keys and values in pages, numbers of eight bits, states."""
