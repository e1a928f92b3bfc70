"""A gateway of several processes: a parent that owns the socket, and children that serve on it (decision 0067)."""

from .parent import serve_by_processes

__all__ = ["serve_by_processes"]
