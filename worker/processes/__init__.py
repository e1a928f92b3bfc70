"""Processes of a worker: forking, sockets between them, their trees, and what they report about a host."""
