"""Adapters on the client's side of the queue: the contents of folders, and the adapters that callers name."""
