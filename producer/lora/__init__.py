"""Adapters on this side of the queue: what is in a folder, and which adapter a caller means."""
